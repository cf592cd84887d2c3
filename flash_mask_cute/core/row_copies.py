"""Keys and values of small pages, copied row by row by the threads of the load warp.

TMA cannot load pages with fewer keys than a swizzle atom of shared memory, or with a number of keys
that has no divisor of that size. Each lane looks up the places of some rows of a block. Then a few
lanes copy each row, 16 bytes at a time (cp.async), so that one address serves several copies. A row
behind the sequence's end is replaced by its last row: its probabilities are 0, and its values are
finite, regardless of the memory behind the end.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from flash_mask_cute.core.pages import Pages

WARP = 32
# elements of 16 bits of a copy
VECTOR = 8
# Lanes that copy a row, at most. A copy of the warp then reads 64 bytes of 8 rows: more lanes leave
# more addresses to compute, and fewer leave parts of cache lines to each copy.
LANES_OF_ROW = 4
# rows of a lane whose addresses are worked out together
UNROLL = 2


class BlockRows(NamedTuple):
    """The places of a block's rows lane, lane + 32, ...: the page, and the row in it."""

    pages: tuple
    rows: tuple


@dataclass(frozen=True)
class RowCopies:
    """tile_n: rows of a block."""

    pages: Pages
    tile_n: cutlass.Constexpr[int]

    @property
    def num_groups(self) -> int:
        """Rows of a lane."""
        return -(-self.tile_n // WARP)

    def nowhere(self) -> BlockRows:
        zeros = tuple(Int32(0) for _ in range(self.num_groups))
        return BlockRows(zeros, zeros)

    def look_up(self, batch_idx: Int32, block: Int32, seqlen_k: Int32) -> BlockRows:
        """The places of the rows of a block of a sequence."""
        pages, rows = [], []
        for group in range(self.num_groups):
            key = block * self.tile_n + group * WARP + cute.arch.lane_idx()
            key = cutlass.max(cutlass.min(key, seqlen_k - 1), 0)
            page = self.pages.number(batch_idx, key)
            pages.append(page)
            rows.append(self.pages.place(page, key, seqlen_k).row)
        return BlockRows(tuple(pages), tuple(rows))

    @cute.jit
    def copy(self, pool: cute.Tensor, head: Int32, at: BlockRows, smem: cute.Tensor) -> None:
        """Start copying the rows of a block into smem (rows, columns), with as many columns as the
        pool."""
        per_row = cute.size(smem, mode=[1]) // VECTOR
        lanes = math.gcd(per_row, LANES_OF_ROW)
        rows_at_once = WARP // lanes
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL),
            pool.element_type,
            num_bits_per_copy=VECTOR * pool.element_type.width,
        )
        row_of_lane, vector_of_lane = cute.arch.lane_idx() // lanes, cute.arch.lane_idx() % lanes
        for group in cutlass.range_constexpr(self.num_groups):
            num_rows = min(WARP, self.tile_n - group * WARP)
            for step in cutlass.range(num_rows // rows_at_once, unroll=UNROLL):
                row = step * rows_at_once + row_of_lane
                page = cute.arch.shuffle_sync(at.pages[group], row)
                source = pool[page, cute.arch.shuffle_sync(at.rows[group], row), head, None]
                target = smem[group * WARP + row, None]
                for vector in cutlass.range_constexpr(0, per_row, lanes):
                    number = vector + vector_of_lane
                    cute.copy(atom, _vector(source, number), _vector(target, number))


def _vector(row: cute.Tensor, number: Int32) -> cute.Tensor:
    return cute.local_tile(row, (VECTOR,), (number,))
