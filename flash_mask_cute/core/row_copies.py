"""Keys and values of small pages, copied row by row by the threads of the load warp.

TMA cannot load pages with fewer keys than a swizzle atom of shared memory, or with a number of keys
that has no divisor of that size. Each lane looks up the places of some rows of a block, and all
lanes copy 16 bytes at a time (cp.async). A row behind the sequence's end is replaced by its last
row: its probabilities are 0, and its values are finite, regardless of the memory behind the end.
"""

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
# copies of a lane whose addresses are worked out together
UNROLL = 4


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
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL),
            pool.element_type,
            num_bits_per_copy=VECTOR * pool.element_type.width,
        )
        for group in cutlass.range_constexpr(self.num_groups):
            num_rows = min(WARP, self.tile_n - group * WARP)
            pages, rows = at.pages[group], at.rows[group]
            for step in cutlass.range(num_rows * per_row // WARP, unroll=UNROLL):
                number = step * WARP + cute.arch.lane_idx()
                row, vector = number // per_row, number % per_row
                page = cute.arch.shuffle_sync(pages, row)
                source = pool[page, cute.arch.shuffle_sync(rows, row), head, None]
                target = smem[group * WARP + row, None]
                cute.copy(atom, _vector(source, vector), _vector(target, vector))


def _vector(row: cute.Tensor, number: Int32) -> cute.Tensor:
    return cute.local_tile(row, (VECTOR,), (number,))
