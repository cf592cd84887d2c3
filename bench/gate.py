"""The checks that results are the case's function, on the very input that is timed.

Of a forward on sampled rows (`reference`, `check`), of a backward on whole heads
(`gradient_reference`, `check_gradients`). A reference is computed once for a case and holds for all
peers: attention in float64, and in the dtype of the case, whose error is the unit of what is
allowed. It asks the definition of the mask, key by key, and never the intervals or tiles that
kernels are told, nor what the forward saved.

In the dtype of the case the reference of a backward keeps what every backward without P keeps, O
rounded to that dtype: sum(O dO) of a row is off by what that takes away. Autograd, which keeps P,
has no such error, and of a query that sees two or three keys it can be all there is: where a
document began two rows before a tile's end, dQ of a right kernel was at 0.3 to 1.4 times what
autograd alone allowed, from one draw of inputs to another.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.cases import BenchCase, CaseTensors
from bench.flops import TILE
from bench.mods import (
    mask_tables,
    score_definition,
    score_tables,
    torch_language,
    torch_mask_mod,
)
from bench.oracle import Attention, attend

# fp32 exponentials and logarithms by hardware approximation stay well under this.
LSE_FLOOR = 2e-4
# tanh.approx is good to 2^-11 of a score; 4 is about the largest score of normal inputs.
LSE_FLOOR_SOFTCAP = LSE_FLOOR + 4 * 2.0**-11
RULE = 2.0
# A peer's rounding is its own affair; this only catches a call that means another function.
PEER_RULE = 8.0
NAMES = ("dQ", "dK", "dV")
# Scores at a time: 1 GiB of float64.
SCORES = 2**27
# What the gradient of a sink may be off by, of the sum of the magnitudes of its terms: they are
# fp32, each of an exponential by hardware approximation, as are their sums.
SINK_SHARE = 5e-5


class Verdict(NamedTuple):
    ok: bool
    text: str


def _verdict(shares: dict[str, float]) -> Verdict:
    """shares: errors as parts of what is allowed."""
    text = ", ".join(f"{name} {value:.2f}" for name, value in shares.items())
    return Verdict(all(value <= 1.0 for value in shares.values()), f"of the allowed error: {text}")


class Definition:
    """What a case says of queries and keys, by its definition alone."""

    def __init__(self, case: BenchCase, device: torch.device) -> None:
        self.case, self.device = case, device
        self._score_tables = score_tables(case, device)

    @staticmethod
    def starts(lengths: Sequence[int]) -> list[int]:
        """The first row of each sequence."""
        return [0, *np.cumsum(lengths).tolist()]

    def hides(self, sequence: int) -> Callable[[Tensor, Tensor], Tensor]:
        """(queries, keys) of a sequence, broadcast against each other -> whether it is hidden."""
        mask = self.case.mask_of(self.case.lengths[sequence])
        sees = torch_mask_mod(mask, mask_tables(mask, self.device))
        return lambda queries, keys: ~sees(None, None, queries + self.case.first_query, keys)

    def attend(
        self,
        operands: Sequence[Tensor],
        sink: Tensor | None,
        hidden: Tensor,
        head: int,
        queries: Tensor,
        keys: Tensor,
    ) -> Attention:
        """Of q (rows, d), k and v of one head. Products are in the dtype of the arguments, the rest
        in fp32, or float64 for such arguments."""
        (q, k, v), case = operands, self.case
        scores = (q @ k.T) * case.d**-0.5
        scores = scores if scores.dtype == torch.float64 else scores.float()
        if case.softcap:
            scores = case.softcap * (scores / case.softcap).tanh()
        if case.score_mod:
            language = torch_language(self._score_tables, scores.dtype)
            at = torch.tensor(head, device=self.device)
            places = at, queries + case.first_query, keys
            scores = score_definition(case)(scores, *places, language)
        return attend(scores.masked_fill(hidden, -torch.inf), v, sink)


# -- a forward ------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One query: its sequence, its head, and its index inside the sequence."""

    sequence: int
    head: int
    query: int


class Reference(NamedTuple):
    """O (rows, d_v) and LSE (rows,), float64: of float64 and of eager same-dtype attention."""

    case: BenchCase
    rows: list[Row]
    out: Tensor
    lse: Tensor
    eager_out: Tensor
    eager_lse: Tensor


def sample_rows(case: BenchCase, seed: int, count: int = 64) -> list[Row]:
    """First, last and tile-edge rows of the outer sequences (varlen: of all); `count` random ones.

    With drawn documents also up to `count` first and last rows of questions and answers.
    """
    rng = random.Random(seed)
    lengths = case.lengths
    outer = range(case.batch) if case.varlen else sorted({0, case.batch - 1})
    places = []
    for sequence in outer:
        last = lengths[sequence] - 1
        edges = sorted({0, min(TILE - 1, last), min(TILE, last), last})
        places += [(sequence, query) for query in edges]
    if case.draw:
        ends = np.cumsum([part for doc in case.draw.documents for part in doc]).tolist()
        edges = [edge for end in ends[:-1] for edge in (end - 1, end)]
        chosen = rng.sample(edges, min(count, len(edges)))
        places += [(rng.randrange(case.batch), query) for query in chosen]
    for _ in range(count):
        sequence = rng.randrange(case.batch)
        places.append((sequence, rng.randrange(lengths[sequence])))
    return [Row(sequence, rng.randrange(case.heads), query) for sequence, query in places]


def reference(case: BenchCase, tensors: CaseTensors, seed: int, count: int = 64) -> Reference:
    """What `check` compares with, over `sample_rows(case, seed, count)`."""
    device = tensors.q.device
    definition = Definition(case, device)
    q, k, v = (t.reshape(-1, *t.shape[-2:]) for t in tensors[:3])
    starts, key_starts = map(Definition.starts, (case.lengths, case.key_lengths))
    rows = sample_rows(case, seed, count)
    hides = {sequence: definition.hides(sequence) for sequence in {row.sequence for row in rows}}
    exact, eager = [], []
    for sequence, head, query in rows:
        keys = torch.arange(case.key_lengths[sequence], device=device)
        queries = torch.tensor(query, device=device)
        head_kv = head // (case.heads // case.heads_kv)
        row = starts[sequence] + query
        part = slice(key_starts[sequence], key_starts[sequence + 1])
        operands = q[row : row + 1, head], k[part, head_kv], v[part, head_kv]
        sink = None if tensors.sink is None else tensors.sink[head]
        places = sink, hides[sequence](queries, keys)[None], head, queries, keys
        exact.append(definition.attend([t.double() for t in operands], *places))
        eager.append(definition.attend(operands, *places))
    columns = (torch.cat([x[i].double() for x in of]) for of in (exact, eager) for i in (0, 1))
    return Reference(case, rows, *columns)


def check(truth: Reference, out: Tensor, lse: Tensor | None, *, rule: float) -> Verdict:
    """Compare `out` and `lse` with float64 attention.

    A row passes when its largest error is at most `rule` times that of eager attention in the
    case's dtype on the same row, plus one unit in the last place; all rows together likewise by
    RMS. Every element of `out` and `lse` must be finite: no mask here has a row that sees nothing.
    """
    if not bool(out.isfinite().all()) or (lse is not None and not bool(lse.isfinite().all())):
        return Verdict(False, "out or lse is not finite, or was not written")
    case = truth.case
    starts = Definition.starts(case.lengths)
    flat = out.reshape(-1, *out.shape[-2:])
    got = torch.stack([flat[starts[s] + query, head] for s, head, query in truth.rows])
    ulp = torch.finfo(out.dtype).eps
    error, eager_error = got.double() - truth.out, truth.eager_out - truth.out
    allowed = rule * eager_error.abs().amax(1) + ulp * truth.out.abs().amax(1)
    share = (error.abs().amax(1) / allowed.clamp_min(1e-30)).amax()
    rms, eager_rms, truth_rms = (t.square().mean().sqrt() for t in (error, eager_error, truth.out))
    shares = {"O": float(share), "O rms": float(rms / (rule * eager_rms + ulp * truth_rms))}
    if lse is not None:
        values = [
            lse[head, starts[s] + query] if case.varlen else lse[s, head, query]
            for s, head, query in truth.rows
        ]
        capped = case.softcap or case.score_mod == "softcap"
        floor = LSE_FLOOR_SOFTCAP if capped else LSE_FLOOR
        allowed = rule * (truth.eager_lse - truth.lse).abs() + floor
        shares["LSE"] = float(((torch.stack(values).double() - truth.lse).abs() / allowed).amax())
    return _verdict(shares)


def poison(case: BenchCase, tensors: CaseTensors) -> None:
    """Leave NaN in the cached blocks that the next outputs of this size are cut from: O and LSE,
    or gradients, and sums of dQ."""
    q, k, v = tensors[:3]
    if case.returns_gradients:
        held = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        held.append(torch.full_like(q, torch.nan, dtype=torch.float32))
    else:
        held = [q.new_full((*q.shape[:-1], v.shape[-1]), torch.nan)]
        held.append(q.new_full(q.shape[:-1], torch.nan, dtype=torch.float32))
    del held


# -- a backward -----------------------------------------------------------------------------------


class Place(NamedTuple):
    """A sequence, and a KV head with its query heads."""

    sequence: int
    head_kv: int


# dQ (length, query heads of the KV head, d), dK (length, 1, d) and dV (length, 1, d_v), float64
Slice = tuple[Tensor, Tensor, Tensor]


class GradientReference(NamedTuple):
    """Gradients of each place: of float64 and of eager same-dtype attention.

    sink: those of all sinks, and the sums of the magnitudes of their terms, (heads,) each; None
    without sinks.
    """

    case: BenchCase
    places: list[Place]
    exact: list[Slice]
    eager: list[Slice]
    sink: tuple[Tensor, Tensor] | None = None


def _cut(case: BenchCase, place: Place, x: Tensor) -> Tensor:
    """(length, heads of the place, width) of a tensor laid out as q or as k."""
    lengths = case.lengths if case.varlen else (x.shape[1],) * case.batch
    starts, heads = Definition.starts(lengths), x.shape[-2] // case.heads_kv
    rows = slice(starts[place.sequence], starts[place.sequence + 1])
    return x.reshape(-1, *x.shape[-2:])[rows, place.head_kv * heads : (place.head_kv + 1) * heads]


def _chunks(length: int, keys: int) -> Iterator[slice]:
    step = max(1, SCORES // keys)
    yield from (slice(begin, min(begin + step, length)) for begin in range(0, length, step))


def _differentiate(
    case: BenchCase, place: Place, tensors: CaseTensors, dtype: torch.dtype
) -> Slice:
    """Gradients of sum(out * dout), by as many query rows at a time as memory allows; the sum of a
    KV head over rows and query heads is rounded to `dtype` once."""
    assert tensors.saved is not None
    q, k, v, dout = (_cut(case, place, x).to(dtype) for x in (*tensors[:3], tensors.saved.dout))
    length, heads = q.shape[:2]
    definition = Definition(case, q.device)
    hides = definition.hides(place.sequence)
    index, keys = (torch.arange(len(x), device=q.device) for x in (q, k))
    dq = torch.zeros_like(q)
    dk, dv = torch.zeros_like(k, dtype=torch.float64), torch.zeros_like(v, dtype=torch.float64)
    for head in range(heads):
        number = place.head_kv * heads + head
        sink = None if tensors.sink is None else tensors.sink[number]
        for rows in _chunks(length, len(k)):
            queries = index[rows, None]
            leaves = [x.detach().requires_grad_() for x in (q[rows, head], k[:, 0], v[:, 0])]
            hidden = hides(queries, keys[None])
            found = definition.attend(leaves, sink, hidden, number, queries, keys[None])
            results, given = [found.out], [dout[rows, head]]
            if dtype != torch.float64:
                # the error of sum(O dO) acts as a gradient of the LSE does
                probs = found.probabilities.detach()
                rounding = found.out.detach() - probs @ leaves[2].detach().to(probs.dtype)
                results.append(found.lse)
                given.append(-(rounding * given[0]).sum(-1))
            by_q, by_k, by_v = torch.autograd.grad(results, leaves, given)
            dq[rows, head] = by_q
            dk[:, 0] += by_k
            dv[:, 0] += by_v
    return dq.double(), dk.to(dtype).double(), dv.to(dtype).double()


def _sink_gradients(tensors: CaseTensors) -> tuple[Tensor, Tensor] | None:
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


def gradient_reference(case: BenchCase, tensors: CaseTensors, seed: int) -> GradientReference:
    """What `check_gradients` compares with: a KV head of the first sequence and one of the last,
    and all sinks."""
    rng = random.Random(seed)
    places = [Place(i, rng.randrange(case.heads_kv)) for i in sorted({0, case.batch - 1})]
    exact, eager = (
        [_differentiate(case, place, tensors, dtype) for place in places]
        for dtype in (torch.float64, tensors.q.dtype)
    )
    return GradientReference(case, places, exact, eager, _sink_gradients(tensors))


def _by_tile(x: Tensor) -> Tensor:
    """(tiles, values) of 128 rows each; zeros fill the last, in all that is compared alike."""
    padded = torch.nn.functional.pad(x.flatten(1), (0, 0, 0, -len(x) % TILE))
    return padded.reshape(-1, TILE * padded.shape[1])


def check_gradients(
    truth: GradientReference, gradients: Sequence[Tensor], *, rule: float
) -> Verdict:
    """Compare (dq, dk, dv), and with sinks (dq, dk, dv, dsink), with float64 autograd.

    Each 128 rows of a head pass when their largest error is at most `rule` times that of eager
    attention in the case's dtype, plus one unit in the last place of their largest value; by RMS
    likewise. Every element of the gradients must be finite, also those of other heads.
    """
    if len(gradients) != len(NAMES) + (truth.sink is not None):
        return Verdict(False, f"{len(gradients)} gradients")
    if not all(bool(x.isfinite().all()) for x in gradients):
        return Verdict(False, "a gradient is not finite, or was not written")
    shares: dict[str, Any] = dict.fromkeys((*NAMES, *(f"{name} rms" for name in NAMES)), 0.0)
    measures = {"": lambda x: x.abs().amax(1), " rms": lambda x: x.square().mean(1).sqrt()}
    for place, *slices in zip(truth.places, truth.exact, truth.eager, strict=True):
        for name, x, exact, eager in zip(NAMES, gradients[:3], *slices, strict=True):
            got, ulp = _cut(truth.case, place, x).double(), torch.finfo(x.dtype).eps
            parts = [_by_tile(part) for part in (got - exact, eager - exact, exact)]
            for kind, measure in measures.items():
                error, allowed, size = map(measure, parts)
                share = error / (rule * allowed + ulp * size).clamp_min(1e-30)
                shares[name + kind] = max(shares[name + kind], float(share.amax()))
    if truth.sink is not None:
        sums, size = truth.sink
        share = (gradients[3].double() - sums).abs() / (rule * SINK_SHARE * size).clamp_min(1e-30)
        shares["dSink"] = float(share.amax())
    return _verdict(shares)
