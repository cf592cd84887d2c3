"""The check that a result is the case's function, on sampled rows of the very input that is timed.

The reference is computed once for a case and holds for all peers. It asks `Mask.sees`, key by key,
and never the intervals or tiles that kernels are told.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bench.cases import BenchCase, CaseTensors
from bench.flops import TILE
from bench.mods import score_definition, score_tables, torch_language

if TYPE_CHECKING:
    import torch

# fp32 exponentials and logarithms by hardware approximation stay well under this.
LSE_FLOOR = 2e-4
# tanh.approx is good to 2^-11 of a score; 4 is about the largest score of normal inputs.
LSE_FLOOR_SOFTCAP = LSE_FLOOR + 4 * 2.0**-11
RULE = 2.0
# A peer's rounding is its own affair; this only catches a call that means another function.
PEER_RULE = 8.0


class Verdict(NamedTuple):
    ok: bool
    text: str


class Row(NamedTuple):
    """One query: its sequence, its head, and its index inside the sequence."""

    sequence: int
    head: int
    query: int


class Reference(NamedTuple):
    """O (rows, d_v) and LSE (rows,), float64: of float64 and of eager same-dtype attention."""

    case: BenchCase
    rows: list[Row]
    out: torch.Tensor
    lse: torch.Tensor
    eager_out: torch.Tensor
    eager_lse: torch.Tensor


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
        places += [
            (sequence, query) for query in sorted({0, min(TILE - 1, last), min(TILE, last), last})
        ]
    if case.draw:
        ends = np.cumsum([part for doc in case.draw.documents for part in doc]).tolist()
        edges = [edge for end in ends[:-1] for edge in (end - 1, end)]
        chosen = rng.sample(edges, min(count, len(edges)))
        places += [(rng.randrange(case.batch), query) for query in chosen]
    for _ in range(count):
        sequence = rng.randrange(case.batch)
        places.append((sequence, rng.randrange(lengths[sequence])))
    return [Row(sequence, rng.randrange(case.heads), query) for sequence, query in places]


def masked_scores(
    case: BenchCase, hidden: torch.Tensor, modify: Any, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    """Scores of one query (d,) or of several (rows, d), -inf where hidden.

    The product is in the dtype of the arguments, the rest in fp32, or float64 for such arguments.
    """
    scores = (q @ k.T) * case.d**-0.5
    scores = scores if scores.dtype.itemsize == 8 else scores.float()
    if case.softcap:
        scores = case.softcap * (scores / case.softcap).tanh()
    if modify:
        scores = modify(scores)
    return scores.masked_fill(hidden, -float("inf"))


def with_sink(scores: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Scores (.., keys) of one head, and its sink (), if there is one, as the last of (.., keys +
    1): a key without a value."""
    import torch

    if sink is None:
        return scores
    column = sink.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1)


def _attend(
    case: BenchCase,
    hidden: torch.Tensor,
    modify: Any,
    sink: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O (d_v,) and LSE () of one query: products in the dtype of the arguments, the rest wider."""
    logits = with_sink(masked_scores(case, hidden, modify, q, k), sink)
    probs = logits.softmax(0)[: len(k)]
    return probs.to(v.dtype) @ v, logits.double().logsumexp(0)


def reference(case: BenchCase, tensors: CaseTensors, seed: int, count: int = 64) -> Reference:
    """What `check` compares with, over `sample_rows(case, seed, count)`."""
    import torch

    device = tensors.q.device
    q, k, v = (t.reshape(-1, *t.shape[-2:]) for t in tensors[:3])
    starts, key_starts = (
        np.concatenate(([0], np.cumsum(lengths))) for lengths in (case.lengths, case.key_lengths)
    )
    tables = score_tables(case, device)
    rows = sample_rows(case, seed, count)
    exact, eager = [], []
    for sequence, head, query in rows:
        mask = case.mask_of(case.lengths[sequence])
        start, start_k = int(starts[sequence]), int(key_starts[sequence])
        keys = np.arange(case.key_lengths[sequence])
        seen = mask.sees(np.full_like(keys, query + case.first_query), keys)
        hidden = torch.from_numpy(~seen).to(device)
        head_kv = head // (case.heads // case.heads_kv)
        part = slice(start_k, start_k + len(keys))
        row = q[start + query, head], k[part, head_kv], v[part, head_kv]

        def modify(scores: torch.Tensor, head: int = head, query: int = query) -> torch.Tensor:
            at = partial(torch.tensor, device=device)
            language = torch_language(tables, scores.dtype)
            others = torch.arange(len(scores), device=device)
            result: torch.Tensor = score_definition(case)(
                scores, at(head), at(query), others, language
            )
            return result

        sink = None if tensors.sink is None else tensors.sink[head]
        attend = partial(_attend, case, hidden, modify if case.score_mod else None, sink)
        exact.append(attend(*(t.double() for t in row)))
        eager.append(attend(*row))
    columns = (torch.stack([x[i].double() for x in of]) for of in (exact, eager) for i in (0, 1))
    return Reference(case, rows, *columns)


def check(truth: Reference, out: torch.Tensor, lse: torch.Tensor | None, *, rule: float) -> Verdict:
    """Compare `out` and `lse` with float64 attention.

    A row passes when its largest error is at most `rule` times that of eager attention in the
    case's dtype on the same row, plus one unit in the last place; all rows together likewise by
    RMS. Every element of `out` and `lse` must be finite: no mask here has a row that sees nothing.
    """
    import torch

    if not bool(out.isfinite().all()) or (lse is not None and not bool(lse.isfinite().all())):
        return Verdict(False, "out or lse is not finite, or was not written")
    case = truth.case
    starts = np.concatenate(([0], np.cumsum(case.lengths)))
    flat = out.reshape(-1, *out.shape[-2:])
    got = torch.stack([flat[int(starts[s]) + query, head] for s, head, query in truth.rows])
    ulp = torch.finfo(out.dtype).eps
    error, eager_error = got.double() - truth.out, truth.eager_out - truth.out
    allowed = rule * eager_error.abs().amax(1) + ulp * truth.out.abs().amax(1)
    share = (error.abs().amax(1) / allowed.clamp_min(1e-30)).amax()
    rms, eager_rms, truth_rms = (t.square().mean().sqrt() for t in (error, eager_error, truth.out))
    shares = {"O": float(share), "O rms": float(rms / (rule * eager_rms + ulp * truth_rms))}
    if lse is not None:
        values = [
            lse[head, int(starts[s]) + query] if case.varlen else lse[s, head, query]
            for s, head, query in truth.rows
        ]
        capped = case.softcap or case.score_mod == "softcap"
        floor = LSE_FLOOR_SOFTCAP if capped else LSE_FLOOR
        allowed = rule * (truth.eager_lse - truth.lse).abs() + floor
        shares["LSE"] = float(((torch.stack(values).double() - truth.lse).abs() / allowed).amax())
    text = ", ".join(f"{name} {value:.2f}" for name, value in shares.items())
    return Verdict(all(value <= 1.0 for value in shares.values()), f"of the allowed error: {text}")


def poison(case: BenchCase, tensors: CaseTensors) -> None:
    """Leave NaN in the cached blocks that the next outputs of this size are cut from."""
    import torch

    q, _, v = tensors[:3]
    shape = (*q.shape[:-1], v.shape[-1])
    held = (
        torch.full(shape, torch.nan, dtype=q.dtype, device=q.device),
        torch.full(shape[:-1], torch.nan, dtype=torch.float32, device=q.device),
    )
    del held
