"""Masks and score modifiers by name: each as what a user passes and, independently, as torch.

A recipe for a callable gives the CuTe callable, its torch definition, and the aux tensor that both
read. As both callables of a call share `aux_tensors`, a mask_mod reads the first and a score_mod
the last of them. The CuTe texts import the compiler when they are traced, not before. Nothing here
uses the package's own masks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Extents(NamedTuple):
    """Of the problem that an aux tensor is made for; lengths are the longest."""

    batch: int
    heads_q: int
    seqlen_q: int
    seqlen_k: int


class MaskRecipe(NamedTuple):
    """cute is a mask_mod; dense(b, h, q (rows, 1), k (1, cols), aux) a bool broadcast of the same.

    per_head and per_batch: whether b or h matter.
    """

    cute: Callable[..., Any]
    dense: Callable[..., Tensor]
    aux: Callable[[Extents, torch.Generator], Tensor] | None = None
    per_batch: bool = False
    per_head: bool = False


class ScoreRecipe(NamedTuple):
    """cute is a score_mod; dense(score (rows, cols), b, h, q, k, aux) the same in score's dtype."""

    cute: Callable[..., Any]
    dense: Callable[..., Tensor]
    aux: Callable[[Extents, torch.Generator], Tensor] | None = None


def pick(generator: torch.Generator, *values: Any) -> Any:
    return values[int(torch.randint(len(values), (), generator=generator))]


# -- mask_mods ----------------------------------------------------------------------------------

CAUSAL_OFFSET = 30
CHECKS = 5
# every so many queries one sees nothing
BLIND = 7
# one query of so many sees all keys
SEES_ALL, EVERY = 350, 1000


def _causal_with_offset(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    from cutlass import Int32

    from flash_mask_cute.utils import scalar_to_ssa

    return k <= q + scalar_to_ssa(CAUSAL_OFFSET, Int32)


def _documents(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    ids = aux[0]
    return ids[b[0], q[0]] == ids[b[0], k[0]]


def _document_ids(extents: Extents, generator: torch.Generator) -> Tensor:
    """int32 (batch, longest), rising, documents of 50 tokens on average."""
    shape = extents.batch, max(extents.seqlen_q, extents.seqlen_k, 1)
    starts = torch.rand(shape, generator=generator) < 1 / 50
    return starts.cumsum(dim=1, dtype=torch.int32)


def _prefix_lm(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    from cutlass import Int32

    from flash_mask_cute.utils import scalar_to_ssa

    return (k <= q) | (k < scalar_to_ssa(aux[0][b[0]].to(Int32), Int32))


def _prefixes(extents: Extents, generator: torch.Generator) -> Tensor:
    """int64 (batch,)."""
    return torch.randint(0, max(extents.seqlen_k, 1), (extents.batch,), generator=generator)


def _eviction_steps(extents: Extents, generator: torch.Generator) -> Tensor:
    """int32 (batch, heads_q, seqlen_k), first query that a key is gone for; keys not innermost."""
    shape = extents.batch, extents.seqlen_k, extents.heads_q
    last = 2 * extents.seqlen_q + 2
    return torch.randint(0, last, shape, generator=generator, dtype=torch.int32).mT


MASK_MODS = {
    "causal_offset": MaskRecipe(
        _causal_with_offset, lambda b, h, q, k, aux: k <= q + CAUSAL_OFFSET
    ),
    "documents": MaskRecipe(
        _documents,
        lambda b, h, q, k, aux: aux[0][b][q] == aux[0][b][k],
        _document_ids,
        per_batch=True,
    ),
    "prefix_lm": MaskRecipe(
        _prefix_lm, lambda b, h, q, k, aux: (k <= q) | (k < aux[0][b]), _prefixes, per_batch=True
    ),
    "eviction": MaskRecipe(
        lambda b, h, q, k, aux: q[0] < aux[0][b[0], h[0], k[0]],
        lambda b, h, q, k, aux: q < aux[0][b, h][k],
        _eviction_steps,
        per_batch=True,
        per_head=True,
    ),
    "seeing_all": MaskRecipe(
        lambda b, h, q, k, aux: (k <= q) & (k > q - 60) | (q % EVERY == SEES_ALL),
        lambda b, h, q, k, aux: (k <= q) & (k > q - 60) | (q % EVERY == SEES_ALL),
    ),
    "checks": MaskRecipe(
        lambda b, h, q, k, aux: (q * 7 + k * 13) % CHECKS != 0,
        lambda b, h, q, k, aux: (q * 7 + k * 13) % CHECKS != 0,
    ),
    "blinding": MaskRecipe(
        lambda b, h, q, k, aux: (q % BLIND != 0) & (k < q + 100),
        lambda b, h, q, k, aux: (q % BLIND != 0) & (k < q + 100),
    ),
}


# -- score_mods ---------------------------------------------------------------------------------

T5_REACH = 16


def _cap(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    from cutlass.cute.math import tanh  # type: ignore[attr-defined]

    return 15.0 * tanh(score * (1.0 / 15.0), fastmath=True)


def _alibi(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    from cutlass import Float32
    from cutlass.cute.math import absi, exp2  # type: ignore[attr-defined]

    from flash_mask_cute.utils import scalar_to_ssa

    slope = exp2((h + 1).to(Float32) * scalar_to_ssa(-1.0, Float32))
    return score - slope * absi(q - k).to(Float32)


def _t5(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    import cutlass

    bucket = cutlass.min(cutlass.max(k[0] - q[0], -T5_REACH), T5_REACH) + T5_REACH
    return score + aux[-1][bucket, h[0]]


def _t5_table(extents: Extents, generator: torch.Generator) -> Tensor:
    """float32 (2 * T5_REACH + 1, heads_q)."""
    return torch.randn((2 * T5_REACH + 1, extents.heads_q), generator=generator)


def _row_biases(extents: Extents, generator: torch.Generator) -> Tensor:
    """float32 (seqlen_q,), -inf for some."""
    biases = torch.randn((extents.seqlen_q,), generator=generator)
    biases[::BLIND] = float("-inf")
    return biases


def _head_bias(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    from cutlass import Float32

    return score + aux[-1][h[0]].to(Float32)


def _head_biases(extents: Extents, generator: torch.Generator) -> Tensor:
    """bfloat16 (heads_q,)."""
    return torch.randn((extents.heads_q,), generator=generator).bfloat16()


SCORE_MODS = {
    "alibi": ScoreRecipe(
        _alibi, lambda score, b, h, q, k, aux: score - 2.0 ** -(h + 1) * (q - k).abs()
    ),
    "t5": ScoreRecipe(
        _t5,
        lambda score, b, h, q, k, aux: (
            score + aux[-1][(k - q).clamp(-T5_REACH, T5_REACH) + T5_REACH, h].to(score.dtype)
        ),
        _t5_table,
    ),
    "head_bias": ScoreRecipe(
        _head_bias, lambda score, b, h, q, k, aux: score + aux[-1][h].to(score.dtype), _head_biases
    ),
    "scale": ScoreRecipe(
        lambda score, b, h, q, k, aux: score * 1.1, lambda score, b, h, q, k, aux: score * 1.1
    ),
    "blinding": ScoreRecipe(
        lambda score, b, h, q, k, aux: score + aux[-1][q[0]],
        lambda score, b, h, q, k, aux: score + aux[-1][q.flatten()][:, None].to(score.dtype),
        _row_biases,
    ),
}
# in no table: what a test of functions, and of factors that the softmax takes over, adds
CAP = ScoreRecipe(_cap, lambda score, b, h, q, k, aux: 15.0 * (score / 15.0).tanh())
LARGEST_STRETCH = 1.1
"""By which a score_mod of this table may multiply a difference of scores."""


# -- column intervals ---------------------------------------------------------------------------
# A recipe gives the row numbers (seqlen_k, n) of one mask head; n = 1 only goes with causal. Values
# reach past the rows, intervals may be empty (start >= end) and may overlap.


def _random_columns(rng: random.Random, seqlen_q: int, seqlen_k: int, n: int) -> list[list[int]]:
    """Every edge of every key by itself, a third of the keys hiding nothing."""
    nothing = [seqlen_q] if n == 1 else [seqlen_q, 0] * (n // 2)
    return [
        nothing if rng.random() < 0.3 else [rng.randint(0, seqlen_q + 3) for _ in range(n)]
        for _ in range(seqlen_k)
    ]


def _stepped_columns(rng: random.Random, seqlen_q: int, seqlen_k: int, n: int) -> list[list[int]]:
    """Runs of equal keys, longer than a tile at times, whose intervals often hide whole tiles."""
    columns: list[list[int]] = []
    while len(columns) < seqlen_k:
        edges = sorted(rng.randint(0, seqlen_q) for _ in range(n))
        if n == 4 and rng.random() < 0.3:
            edges[2:] = edges[3], edges[2]
        columns += [edges] * rng.choice((3, 40, 130, 200))
    return columns[:seqlen_k]


def _document_columns(rng: random.Random, seqlen_q: int, seqlen_k: int, n: int) -> list[list[int]]:
    """Keys of one document after the other: hidden behind its last row and before its first."""
    columns: list[list[int]] = []
    while len(columns) < seqlen_k:
        start = len(columns)
        end = min(start + rng.choice((1, 17, 90, 150)), seqlen_k)
        edges = {1: [end], 2: [end, start], 4: [end, seqlen_q, 0, start]}[n]
        columns += [edges] * (end - start)
    return columns


def _blinding_columns(rng: random.Random, seqlen_q: int, seqlen_k: int, n: int) -> list[list[int]]:
    """All keys hide a run of rows (with n = 1: all rows from one on), so that these see nothing."""
    first = rng.randint(0, seqlen_q // 2)
    end = rng.randint(first, seqlen_q)
    columns = []
    for _ in range(seqlen_k):
        before, behind = rng.randint(0, first), rng.randint(end, seqlen_q)
        columns.append(
            {1: [before], 2: [before, behind], 4: [rng.randint(0, seqlen_q), 0, before, behind]}[n]
        )
    return columns


class ColumnRecipe(NamedTuple):
    make: Callable[[random.Random, int, int, int], list[list[int]]]
    num_vectors: int
    is_shared: bool
    """One batch entry for all, unless keys are packed."""


COLUMNS = {
    f"{name}{n}": ColumnRecipe(make, n, is_shared)
    for name, make, is_shared in (
        ("random", _random_columns, False),
        ("stepped", _stepped_columns, False),
        ("documents", _document_columns, False),
        ("blinding", _blinding_columns, True),
    )
    for n in (1, 2, 4)
}


def make_columns(
    recipe: ColumnRecipe, heads: int, seqlens_q: Sequence[int], seqlens_k: Sequence[int], seed: int
) -> list[Tensor]:
    """startend_row_indices int32 (heads, seqlen_k, n) for each sequence."""
    rng, n = random.Random(seed), recipe.num_vectors
    return [
        torch.tensor(
            [recipe.make(rng, seqlen_q, seqlen_k, n) for _ in range(heads)], dtype=torch.int32
        ).view(heads, seqlen_k, n)
        for seqlen_q, seqlen_k in zip(seqlens_q, seqlens_k, strict=True)
    ]


def hidden_by_columns(columns: Tensor, seqlen_q: int, causal: bool) -> Tensor:
    """Bool (seqlen_q, seqlen_k), of columns (seqlen_k, n), row by row from the definition."""
    n = columns.shape[1]
    row = torch.arange(seqlen_q, device=columns.device)[:, None]
    c = columns.T
    if n == 1:
        return row >= c[0]
    if n == 2 and causal:
        return (row >= c[0]) & (row < c[1])
    if n == 2:
        return (row >= c[0]) | (row < c[1])
    return ((row >= c[0]) & (row < c[1])) | ((row >= c[2]) & (row < c[3]))


# -- block lists --------------------------------------------------------------------------------

EMPTY, PARTIAL, FULL = range(3)


def states_of(dense: Tensor, block_size: tuple[int, int], rng: random.Random) -> Tensor:
    """State (num_q_blocks, num_k_blocks) of each block of a bool (seqlen_q, seqlen_k).

    Every eighth block gets a state at random instead, so that the lists decide something that the
    mask_mod would not.
    """
    rows = dense.split(block_size[0])
    states = [
        [
            FULL if block.all() else PARTIAL if block.any() else EMPTY
            for block in row.split(block_size[1], 1)
        ]
        for row in rows
    ]
    return torch.tensor(
        [[rng.randrange(3) if rng.random() < 0.125 else s for s in row] for row in states]
    ).view(len(rows), -1)


def lists_of(states: Tensor, state: int) -> tuple[Tensor, Tensor]:
    """(cnt, idx) int32 of the blocks in one state; entries behind the count point nowhere."""
    is_listed = states == state
    num_blocks = states.shape[-1]
    idx = (
        torch.arange(num_blocks, device=states.device)
        .expand_as(states)
        .masked_fill(~is_listed, num_blocks)
    )
    idx = idx.sort(dim=-1).values.masked_fill_(~is_listed.sort(-1, descending=True).values, -1)
    return is_listed.sum(-1, dtype=torch.int32), idx.int()
