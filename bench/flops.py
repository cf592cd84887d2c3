"""What a case is charged for: the operations of its visible 128x128 tiles.

operations = 2 * (d + d_v) * heads * 128 * 128 * (visible tiles of all sequences)

which is 4 * heads * d * ... where d == d_v: two products (scores, output), a multiply and an add
each. A tile is visible when it holds at least one visible (query, key) pair; it is charged whole,
also where a sequence ends inside it. Tiles are counted from each sequence's own start. The counting
is plain index arithmetic on numpy arrays and shares nothing with the package that it measures.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from bench.cases import CASES, BenchCase

TILE = 128
IntArray = npt.NDArray[np.int64]


def key_bounds(
    rows: IntArray, length: int, causal: bool, window: int | None
) -> tuple[IntArray, IntArray]:
    """First and last visible key of each query row of one sequence with as many keys as queries."""
    first = np.zeros_like(rows) if window is None else np.maximum(rows - window, 0)
    last = rows.copy() if causal else np.full_like(rows, length - 1)
    return first, last


@lru_cache(maxsize=256)
def _tiles(length: int, causal: bool, window: int | None) -> tuple[int, int]:
    """(visible, all) tiles of one sequence of `length` queries and keys."""
    blocks = -(-length // TILE)
    starts = np.arange(blocks, dtype=np.int64) * TILE
    ends = np.minimum(starts + TILE, length)
    visible = 0
    for start, end in zip(starts, ends, strict=True):
        first, last = key_bounds(np.arange(start, end), length, causal, window)
        touches = (first[:, None] < ends[None, :]) & (last[:, None] >= starts[None, :])
        visible += int(touches.any(axis=0).sum())
    return visible, blocks * blocks


def tile_counts(case: BenchCase) -> tuple[int, int]:
    """(visible, all) 128x128 tiles of one head, summed over the sequences of the batch."""
    visible = total = 0
    for length, times in Counter(case.lengths).items():
        seen, every = _tiles(length, case.causal, case.window)
        visible += times * seen
        total += times * every
    return visible, total


def attention_flops(case: BenchCase) -> int:
    """Operations of one forward pass."""
    visible, _ = tile_counts(case)
    return 2 * (case.d + case.d_v) * case.heads * TILE * TILE * visible


def sparsity(case: BenchCase) -> float:
    """Fraction of tiles that hold no visible pair; varlen: of the tiles inside documents."""
    visible, total = tile_counts(case)
    return 1.0 - visible / total


def tflops(case: BenchCase, milliseconds: float) -> float:
    """TFLOP/s of one forward pass that took `milliseconds`."""
    return attention_flops(case) / milliseconds / 1e9


def listing() -> str:
    """One line for each case."""
    lines = []
    for case in CASES.values():
        shape = f"{case.kind:9} {case.mask:14} d {case.d:3}/{case.d_v:3} n {case.n:5}"
        heads = f"batch {case.batch:3} heads {case.heads:2}/{case.heads_kv:2} {case.dtype}"
        lines.append(f"{case.name:28} {shape} {heads} {attention_flops(case) / 1e12:8.4f} TFLOP")
    return "\n".join(lines)
