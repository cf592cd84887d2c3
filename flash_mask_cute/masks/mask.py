"""Applying masks to score tiles held in registers.

A `ScoreFragment` knows where its scores lie; a mask knows the rule. The rule itself is `Band`
(causal, window and the end of the keys); which key blocks need it at all is `BlockInfo`'s.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_mask_cute.block_info import BlockInfo
from flash_mask_cute.masks.band import Band
from flash_mask_cute.seqlen_info import SeqlenInfoQK

# columns whose visibility is held in one word; the compiler turns tests of its bits into
# register-to-predicate moves
WORD = 16


class ScoreFragment(NamedTuple):
    """A thread's scores of one tile.

    These are the values (rows, cols), the query index of each row, and the key index of the first
    column. count_below(x) tells how many columns lie less than x keys from the first, up to any x
    (an architecture's column layout).
    """

    values: cute.Tensor
    q_idx: tuple
    first_k_idx: Int32
    count_below: Callable

    @cute.jit
    def hide_outside(self, r: cutlass.Constexpr, lo: Int32 | None, hi: Int32) -> None:
        """Row r keeps keys lo <= k < hi (lo None: from the start), the others become -inf."""
        num_cols = cute.size(self.values, mode=[1])
        end = self.count_below(hi - self.first_k_idx)
        start = None
        if const_expr(lo is not None):
            start = self.count_below(lo - self.first_k_idx)
        for first in cutlass.range_constexpr(0, num_cols, WORD):
            visible = _low_bits(end - first)
            if const_expr(lo is not None):
                visible = visible & (_low_bits(start - first) ^ -1)
            for c in cutlass.range_constexpr(first, min(first + WORD, num_cols)):
                keep = (visible & (1 << (c - first))) != 0
                self.values[r, c] = cutlass.select_(keep, self.values[r, c], -Float32.inf)


def _low_bits(count: Int32) -> Int32:
    """A word with its lowest `count` bits set, count clamped into 0..WORD."""
    return (Int32(1) << cutlass.min(cutlass.max(count, 0), WORD)) - 1


@dataclass(frozen=True)
class UnmaskedBlocks:
    """The key blocks lo <= n_block < hi of a work tile in which the band hides nothing.

    lo None: from the first. Without a right edge only the end of the keys masks anything on the
    right, hence only the last block.
    """

    lo: Int32 | None
    hi: Int32
    has_right_edge: bool

    @staticmethod
    def create(
        block_info: BlockInfo, seqlen: SeqlenInfoQK, m_block: Int32, n_block_min: Int32
    ) -> "UnmaskedBlocks":
        lo = None
        if const_expr(block_info.window_size_left is not None):
            lo = block_info.get_n_block_min_before_local_mask(seqlen, m_block, n_block_min)
        hi = block_info.get_n_block_min_causal_local_mask(seqlen, m_block, n_block_min)
        return UnmaskedBlocks(lo, hi, block_info.band(seqlen).window_right is not None)

    def descending_runs(self, n_block_min: Int32) -> list[tuple[bool, Int32]]:
        """Runs of equal treatment from the right end down to n_block_min.

        Each is (is masked, last block) and may be empty. The right end itself, where the keys stop,
        is not part of a run.
        """
        runs = []
        if self.has_right_edge:
            runs.append((True, cutlass.max(self.hi, n_block_min)))
        if self.lo is None:
            runs.append((False, n_block_min))
        else:
            runs.append((False, cutlass.max(self.lo, n_block_min)))
            runs.append((True, n_block_min))
        return runs

    def cuts(self, n_block: Int32) -> Boolean:
        """Whether some score of the block is hidden."""
        cut = n_block >= self.hi
        if const_expr(self.lo is not None):
            cut = cut | (n_block < self.lo)
        return cut


@cute.jit
def apply_band(band: Band, fragment: ScoreFragment) -> None:
    """Hide what lies outside a band, the end of the keys included."""
    for r in cutlass.range_constexpr(len(fragment.q_idx)):
        lo, hi = band.k_range(fragment.q_idx[r])
        bounded = const_expr(band.window_left is not None)
        fragment.hide_outside(r, lo if bounded else None, hi)
