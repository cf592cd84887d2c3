"""What a case is charged for: the operations of its visible 128x128 tiles.

operations = 2 * (d + d_v) * heads * 128 * 128 * (visible tiles of all sequences)

which is 4 * heads * d * ... where d == d_v: two products (scores, output), a multiply and an add
each. The backward has five and is charged 2.5 times as much, both together 3.5 times. A tile is
visible when it holds at least one visible (query, key) pair; it is charged whole, also where a
sequence ends inside it. Tiles are counted from each sequence's own start. The counting is interval
arithmetic on numpy arrays and shares nothing with the package that it measures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from bench.cases import BenchCase
from bench.masks import BoolArray, IntArray, Mask

TILE = 128


def touched(
    begins: IntArray,
    ends: IntArray,
    tile_m: int = TILE,
    tile_n: int = TILE,
    *,
    queries: int | None = None,
) -> BoolArray:
    """Which tiles (query blocks, key blocks) hold a row of the intervals of their keys.

    begins, ends: (n, intervals), the rows [begin, end) of each key, none where begin >= end.
    queries: how many rows there are, n where None. Time is that of the keys plus that of the tiles:
    block rows are counted by where intervals start and stop.
    """
    n, intervals = begins.shape
    blocks_m, blocks_n = -(-(n if queries is None else queries) // tile_m), -(-n // tile_n)
    some = begins < ends
    column = (np.arange(n) // tile_n).repeat(intervals).reshape(n, intervals)[some]
    shape = (blocks_n, blocks_m + 1)
    starts, stops = (
        np.bincount(column * shape[1] + row, minlength=shape[0] * shape[1]).reshape(shape)
        for row in (begins[some] // tile_m, (ends[some] - 1) // tile_m + 1)
    )
    return (np.cumsum(starts - stops, axis=1)[:, :-1] > 0).T


class BlockLists(NamedTuple):
    """For each query block (int32): how many key blocks, and which, first those in use, then 0."""

    partial_count: IntArray
    partial_index: IntArray
    full_count: IntArray
    full_index: IntArray


def block_lists(
    mask: Mask, tile_m: int = TILE, tile_n: int = TILE, *, by_key: bool = False
) -> BlockLists:
    """Key blocks of `mask` that hold something visible: partial, and full ones apart.

    by_key: query blocks of each key block instead.
    """
    visible = touched(*mask.visible_rows(), tile_m, tile_n)
    cut = touched(*mask.hidden_rows(), tile_m, tile_n)
    lists = []
    for marked in (visible & cut, visible & ~cut):
        chosen = marked.T if by_key else marked
        count = chosen.sum(axis=1)
        order = (~chosen).argsort(axis=1, kind="stable")
        index = np.where(np.arange(chosen.shape[1]) < count[:, None], order, 0)
        lists += [count.astype(np.int32), index.astype(np.int32)]
    return BlockLists(*lists)


@lru_cache(maxsize=256)
def _tiles(mask: Mask, first_query: int, queries: int, keys: int) -> tuple[int, int]:
    """(visible, all) tiles of one sequence, whose queries and keys are a part of the mask's."""
    begins, ends = (np.clip(side[:keys] - first_query, 0, queries) for side in mask.visible_rows())
    visible = touched(begins, ends, queries=queries)
    return int(visible.sum()), visible.size


def visible_tiles(mask: Mask) -> int:
    """Visible tiles of a sequence with as many queries as keys."""
    return _tiles(mask, 0, mask.n, mask.n)[0]


def tile_counts(case: BenchCase) -> tuple[int, int]:
    """(visible, all) 128x128 tiles of one head, summed over the sequences of the batch."""
    visible = total = 0
    for length, times in Counter(case.lengths).items():
        mask = case.mask_of(length)
        seen, every = _tiles(mask, case.first_query, length, case.n_k or length)
        visible += times * seen
        total += times * every
    return visible, total


def attention_flops(case: BenchCase) -> int:
    """Operations of one call: a forward pass, its backward alone, or both."""
    visible, _ = tile_counts(case)
    forward = 2 * (case.d + case.d_v) * case.heads * TILE * TILE * visible
    backward = forward * 5 // 2
    if case.is_backward:
        return backward
    return forward + backward if case.returns_gradients else forward


def sparsity(case: BenchCase) -> float:
    """Fraction of tiles that hold no visible pair; varlen: of the tiles inside documents."""
    visible, total = tile_counts(case)
    return 1.0 - visible / total


def tflops(case: BenchCase, milliseconds: float) -> float:
    """TFLOP/s of one call that took `milliseconds`."""
    return attention_flops(case) / milliseconds / 1e9


def listing(cases: Sequence[BenchCase]) -> str:
    """One line for each."""
    lines = []
    for case in cases:
        length = f"{case.n}/{case.n_k}" if case.n_k else str(case.n)
        shape = f"{case.kind:15} {case.mask:21} d {case.d:3}/{case.d_v:3} n {length:>10}"
        heads = f"batch {case.batch:3} heads {case.heads:2}/{case.heads_kv:2} {case.dtype}"
        lines.append(f"{case.name:40} {shape} {heads} {attention_flops(case) / 1e12:8.4f} TFLOP")
    return "\n".join(lines)
