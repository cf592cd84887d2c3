"""The check that gradients are those of the case, on whole heads of the very input that is timed.

The reference is autograd through attention as `bench.gate` writes it down, in float64 and in the
dtype of the case, over as many query rows at a time as memory allows. It asks the definition of the
mask and never the intervals or tiles that kernels are told, nor what the forward saved.

In the dtype of the case it keeps what every backward without P keeps, O rounded to that dtype:
sum(O dO) of a row is off by what that takes away. Autograd, which keeps P, has no such error, and
of a query that sees two or three keys it can be all there is: where a document began two rows
before a tile's end, dQ of a right kernel was at 0.3 to 1.4 times what autograd alone allowed, from
one draw of inputs to another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bench.cases import BenchCase, CaseTensors
from bench.flops import TILE
from bench.gate import Verdict, masked_scores, with_sink
from bench.mods import (
    mask_tables,
    score_definition,
    score_tables,
    torch_language,
    torch_mask_mod,
)

if TYPE_CHECKING:
    import torch

NAMES = ("dQ", "dK", "dV")
# Scores at a time: 2 GiB of float64.
SCORES = 2**28
# What the gradient of a sink may be off by, of the sum of the magnitudes of its terms: they are
# fp32, each of an exponential by hardware approximation, as are their sums.
SINK_SHARE = 5e-5


class Place(NamedTuple):
    """A sequence, and a KV head with its query heads."""

    sequence: int
    head_kv: int


class Slice(NamedTuple):
    """dQ (length, query heads of the KV head, d), dK (length, 1, d) and dV (length, 1, d_v)."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


class Reference(NamedTuple):
    """Gradients in float64 for each place: of float64 and of eager same-dtype attention.

    sink: those of all sinks, and the sums of the magnitudes of their terms, (heads,) each; None
    without sinks.
    """

    case: BenchCase
    places: list[Place]
    exact: list[Slice]
    eager: list[Slice]
    sink: tuple[torch.Tensor, torch.Tensor] | None = None


def sample_places(case: BenchCase, seed: int) -> list[Place]:
    """A KV head of the first sequence and one of the last."""
    rng = random.Random(seed)
    return [Place(i, rng.randrange(case.heads_kv)) for i in sorted({0, case.batch - 1})]


def _cut(case: BenchCase, place: Place, x: torch.Tensor) -> torch.Tensor:
    """(length, heads of the place, width) of a tensor laid out as q or as k."""
    lengths = case.lengths if case.varlen else (x.shape[1],) * case.batch
    start = int(np.sum(lengths[: place.sequence], dtype=np.int64))
    heads = x.shape[-2] // case.heads_kv
    first = place.head_kv * heads
    rows = slice(start, start + lengths[place.sequence])
    return x.reshape(-1, *x.shape[-2:])[rows, first : first + heads]


def _chunks(length: int, keys: int) -> Iterator[slice]:
    step = max(1, SCORES // keys)
    yield from (slice(begin, min(begin + step, length)) for begin in range(0, length, step))


def _differentiate(
    case: BenchCase, place: Place, tensors: CaseTensors, dtype: torch.dtype
) -> Slice:
    """Gradients of sum(out * dout); the sum of a KV head over rows and query heads is rounded to
    `dtype` once."""
    import torch

    assert tensors.saved is not None
    q, k, v, dout = (_cut(case, place, x).to(dtype) for x in (*tensors[:3], tensors.saved.dout))
    device, length, heads = q.device, *q.shape[:2]
    mask = case.mask_of(length)
    sees = torch_mask_mod(mask, mask_tables(mask, device))
    language = torch_language(score_tables(case, device), torch.promote_types(dtype, torch.float32))
    index = torch.arange(length, device=device) + case.first_query
    keys = torch.arange(len(k), device=device)[None]
    dq = torch.zeros_like(q)
    dk, dv = torch.zeros_like(k, dtype=torch.float64), torch.zeros_like(v, dtype=torch.float64)
    for head in range(heads):
        number = place.head_kv * heads + head
        at = torch.tensor(number, device=device)
        sink = None if tensors.sink is None else tensors.sink[number]
        for rows in _chunks(length, len(k)):
            queries = index[rows, None]

            def modify(scores: torch.Tensor, at: Any = at, queries: Any = queries) -> Any:
                return score_definition(case)(scores, at, queries, keys, language)

            leaves = [x.detach().requires_grad_() for x in (q[rows, head], k[:, 0], v[:, 0])]
            hidden = ~sees(None, None, queries, keys)
            scores = masked_scores(case, hidden, modify if case.score_mod else None, *leaves[:2])
            logits = with_sink(scores, sink)
            probs = logits.softmax(-1)[:, : len(k)]
            results, given = [probs.to(dtype) @ leaves[2]], [dout[rows, head]]
            if dtype != torch.float64:
                # the error of sum(O dO) acts as a gradient of the LSE does
                wide = probs.detach() @ leaves[2].detach().to(probs.dtype)
                rounding = results[0].detach() - wide
                results.append(logits.logsumexp(-1))
                given.append(-(rounding * given[0]).sum(-1))
            by_q, by_k, by_v = torch.autograd.grad(results, leaves, given)
            dq[rows, head] = by_q
            dk[:, 0] += by_k
            dv[:, 0] += by_v
    return Slice(dq.double(), dk.to(dtype).double(), dv.to(dtype).double())


def _sink_gradients(tensors: CaseTensors) -> tuple[torch.Tensor, torch.Tensor] | None:
    """-sum(exp(sink - LSE) sum(O dO)) over all rows of each head, and its terms' magnitudes.

    Unlike those of q, k and v it is made of what the forward saved: it needs every row.
    """
    if tensors.sink is None:
        return None
    assert tensors.saved is not None
    out, lse, dout = tensors.saved
    products = (out.double() * dout.double()).sum(-1)
    # lse: (batch, heads, n), or (heads, tokens)
    shares = (tensors.sink.double()[:, None] - lse.double()).exp().transpose(-1, -2)
    terms = (products * shares).reshape(-1, len(tensors.sink))
    return -terms.sum(0), terms.abs().sum(0)


def reference(case: BenchCase, tensors: CaseTensors, seed: int) -> Reference:
    """What `check` compares with, over `sample_places(case, seed)`, and all sinks."""
    import torch

    places = sample_places(case, seed)
    exact, eager = (
        [_differentiate(case, place, tensors, dtype) for place in places]
        for dtype in (torch.float64, tensors.q.dtype)
    )
    return Reference(case, places, exact, eager, _sink_gradients(tensors))


def _by_tile(x: torch.Tensor) -> torch.Tensor:
    """(tiles, values) of 128 rows each; zeros fill the last, in all that is compared alike."""
    import torch

    padded = torch.nn.functional.pad(x.flatten(1), (0, 0, 0, -len(x) % TILE))
    return padded.reshape(-1, TILE * padded.shape[1])


def check(truth: Reference, gradients: Sequence[torch.Tensor], *, rule: float) -> Verdict:
    """Compare (dq, dk, dv), and with sinks (dq, dk, dv, dsink), with float64 autograd.

    Each 128 rows of a head pass when their largest error is at most `rule` times that of eager
    attention in the case's dtype, plus one unit in the last place of their largest value; by RMS
    likewise. Every element of the gradients must be finite, also those of other heads.
    """
    import torch

    if len(gradients) != len(NAMES) + (truth.sink is not None):
        return Verdict(False, f"{len(gradients)} gradients")
    if not all(bool(x.isfinite().all()) for x in gradients):
        return Verdict(False, "a gradient is not finite, or was not written")
    shares = dict.fromkeys((*NAMES, *(f"{name} rms" for name in NAMES)), 0.0)
    for place, *slices in zip(truth.places, truth.exact, truth.eager, strict=True):
        for name, x, exact, eager in zip(NAMES, gradients[:3], *slices, strict=True):
            got = _cut(truth.case, place, x).double()
            parts = [_by_tile(part) for part in (got - exact, eager - exact, exact)]
            ulp = torch.finfo(x.dtype).eps
            largest = [part.abs().amax(1) for part in parts]
            rms = [part.square().mean(1).sqrt() for part in parts]
            for key, (error, allowed, size) in ((name, largest), (f"{name} rms", rms)):
                share = error / (rule * allowed + ulp * size).clamp_min(1e-30)
                shares[key] = max(shares[key], float(share.amax()))
    if truth.sink is not None:
        sums, size = truth.sink
        share = (gradients[3].double() - sums).abs() / (rule * SINK_SHARE * size).clamp_min(1e-30)
        shares["dSink"] = float(share.amax())
    text = ", ".join(f"{name} {value:.2f}" for name, value in shares.items())
    return Verdict(all(value <= 1.0 for value in shares.values()), f"of the allowed error: {text}")


def poison(tensors: CaseTensors) -> None:
    """Leave NaN in the cached blocks that the next gradients, and sums of dQ, are cut from."""
    import torch

    q, k, v = tensors[:3]
    held = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    held.append(torch.full_like(q, torch.nan, dtype=torch.float32))
    del held
