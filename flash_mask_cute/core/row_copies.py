"""Keys and values of small pages, copied row by row by the threads of one warp or of several.

TMA cannot load pages with fewer keys than a swizzle atom of shared memory, or with a number of keys
that has no divisor of that size. Each lane looks up the places of some rows of a block. Then a few
lanes copy each row, 16 bytes at a time (cp.async), so that one address serves several copies. A row
after the sequence's end is replaced by its last row: its probabilities are 0, and its values are
finite. Columns of a tile after those of the heads become zeros, as TMA makes them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from flash_mask_cute.core.pages import Pages
from flash_mask_cute.core.warp_scan import WARP

# the key at a row of a block, or behind it
KeyOf: TypeAlias = Callable[[Int32, Int32], Int32]
# of a copy
VECTOR_BYTES = 16
# Lanes that copy a row, at most: 128 bytes side by side. With fewer lanes a copy of the warp takes
# parts of more cache lines, and with more it takes more addresses.
LANES_OF_ROW = 8
# neighbouring rows of a block that one of several warps copies
ROWS_OF_TURN = 4
# rows of a lane whose addresses are worked out together; in decoding all registers are free
UNROLL, UNROLL_OF_DECODING = 4, 8


@dataclass(frozen=True)
class CopyShare:
    """Which of `count` warps copies: they take turns at the rows of a block."""

    index: int | Int32 = 0
    count: cutlass.Constexpr[int] = 1


class BlockRows(NamedTuple):
    """The places of a warp's rows lane, lane + 32, ... of a block: the page, and the row in it."""

    pages: tuple
    rows: tuple


@dataclass(frozen=True)
class RowCopies:
    """tile_n: rows of a block. A warp counts its rows of a block from 0."""

    pages: Pages
    tile_n: cutlass.Constexpr[int]
    is_decoding: cutlass.Constexpr[bool]
    share: CopyShare

    @property
    def _rows(self) -> tuple[int, int]:
        """Rows of a block that each of the warps has, and those that one may have."""
        turns = self.tile_n // ROWS_OF_TURN
        least, most = turns // self.share.count, -(-turns // self.share.count)
        return least * ROWS_OF_TURN, most * ROWS_OF_TURN

    def _row(self, own: Int32) -> Int32:
        """Where a row of this warp lies in the block, or after it."""
        if self.share.count == 1:
            return own
        turn = own // ROWS_OF_TURN * self.share.count + self.share.index
        return turn * ROWS_OF_TURN + own % ROWS_OF_TURN

    @property
    def num_groups(self) -> int:
        """Rows of a lane."""
        return -(-self._rows[1] // WARP)

    def nowhere(self) -> BlockRows:
        zeros = tuple(Int32(0) for _ in range(self.num_groups))
        return BlockRows(zeros, zeros)

    def look_up(self, batch_idx: Int32, block: Int32, seqlen_k: Int32, key_of: KeyOf) -> BlockRows:
        """Places of the rows of a sequence's block, with unsettled page numbers (`settled`)."""
        pages, rows = [], []
        for group in range(self.num_groups):
            key = key_of(block, self._row(group * WARP + cute.arch.lane_idx()))
            row = self.pages.row(batch_idx, key)
            page = self.pages.entry(batch_idx, row)
            pages.append(page)
            rows.append(self.pages.place(page, row, seqlen_k).row)
        return BlockRows(tuple(pages), tuple(rows))

    def settled(self, at: BlockRows) -> BlockRows:
        return at._replace(pages=tuple(self.pages.number(page) for page in at.pages))

    @cute.jit
    def copy(self, pool: cute.Tensor, head: Int32, at: BlockRows, smem: cute.Tensor) -> None:
        """Start copying rows of a block to smem (rows, columns), and zeros to further columns."""
        rows_at_once = WARP // self._lanes(smem)
        unroll = UNROLL_OF_DECODING if self.is_decoding else UNROLL
        row_of_lane = cute.arch.lane_idx() // self._lanes(smem)
        least, most = self._rows
        # the steps that every warp has, and one that some have
        least -= least % rows_at_once
        for group in cutlass.range_constexpr(self.num_groups):
            first = group * WARP
            num_rows = max(min(WARP, least - first), 0)
            # the products of one row, for all lanes that copy it
            place = (at.pages[group], at.rows[group], head, 0)
            address = (pool.iterator + cute.crd2idx(place, pool.layout)).toint()
            for step in cutlass.range(num_rows // rows_at_once, unroll=unroll):
                row = step * rows_at_once + row_of_lane
                begin = _of_lane(address, row)
                self._copy_row(pool, begin, smem, self._row(first + row))
            if const_expr(first <= least < min(first + WARP, most)):
                begin = _of_lane(address, least - first + row_of_lane)
                row = self._row(least + row_of_lane)
                if row < self.tile_n:
                    self._copy_row(pool, begin, smem, row)

    @staticmethod
    def _lanes(smem: cute.Tensor) -> int:
        """Lanes that copy a row."""
        return math.gcd(_vectors(smem), LANES_OF_ROW)

    @cute.jit
    def _copy_row(self, pool: cute.Tensor, begin: Int64, smem: cute.Tensor, row: Int32) -> None:
        """Start copying a row of the pool, which begins at an address, by several lanes."""
        elements = VECTOR_BYTES * 8 // pool.element_type.width
        in_pool, lanes = pool.shape[3] // elements, self._lanes(smem)
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL),
            pool.element_type,
            num_bits_per_copy=VECTOR_BYTES * 8,
        )
        vector_of_lane = cute.arch.lane_idx() % lanes
        begin += vector_of_lane * VECTOR_BYTES
        start = cute.make_ptr(pool.element_type, begin, pool.memspace, assumed_align=VECTOR_BYTES)
        source = cute.make_tensor(start, cute.make_layout(cute.size(smem, mode=[1])))
        target = smem[row, None]
        for vector in cutlass.range_constexpr(0, _vectors(smem), lanes):
            to_vector = _vector(target, vector + vector_of_lane, elements)
            is_there = None
            if const_expr(vector + lanes > in_pool):
                is_there = cute.make_rmem_tensor((1,), Boolean)
                is_there[0] = vector + vector_of_lane < in_pool
            cute.copy_atom_call(atom, _vector(source, vector, elements), to_vector, pred=is_there)


def _vectors(smem: cute.Tensor) -> int:
    return cute.size(smem, mode=[1]) * smem.element_type.width // (VECTOR_BYTES * 8)


def _of_lane(word: Int64, lane: Int32) -> Int64:
    low = cute.arch.shuffle_sync(Int32(word), lane)
    high = cute.arch.shuffle_sync(Int32(word >> 32), lane)
    return (Int64(high) << 32) | Int64(Uint32(low))


def _vector(row: cute.Tensor, number: Int32, elements: int) -> cute.Tensor:
    return cute.local_tile(row, (elements,), (number,))
