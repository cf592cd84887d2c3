"""Keys and values of small pages, copied row by row by the threads of the load warp.

TMA cannot load pages with fewer keys than a swizzle atom of shared memory, or with a number of keys
that has no divisor of that size. Each lane looks up the places of some rows of a block. Then a few
lanes copy each row, 16 bytes at a time (cp.async), so that one address serves several copies. A row
behind the sequence's end is replaced by its last row: its probabilities are 0, and its values are
finite, regardless of the memory behind the end. A tile may have more columns than the heads: these
become zeros, as TMA makes them, for a product with NaN that is left there would be NaN.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from flash_mask_cute.core.pages import Pages
from flash_mask_cute.core.warp_scan import WARP

# of a copy
VECTOR_BYTES = 16
# Lanes that copy a row, at most: 128 bytes side by side. With fewer lanes a copy of the warp takes
# parts of more cache lines, and with more it takes more addresses.
LANES_OF_ROW = 8
# Rows of a lane whose addresses are worked out together. In decoding all registers are free for
# them, and a warp that waits for addresses would copy more slowly than memory reads.
UNROLL, UNROLL_OF_DECODING = 4, 8


class BlockRows(NamedTuple):
    """The places of a block's rows lane, lane + 32, ...: the page, and the row in it."""

    pages: tuple
    rows: tuple


@dataclass(frozen=True)
class RowCopies:
    """tile_n: rows of a block. is_decoding: work tiles have at most `DECODE_ROWS` rows."""

    pages: Pages
    tile_n: cutlass.Constexpr[int]
    is_decoding: cutlass.Constexpr[bool]

    @property
    def num_groups(self) -> int:
        """Rows of a lane."""
        return -(-self.tile_n // WARP)

    def nowhere(self) -> BlockRows:
        zeros = tuple(Int32(0) for _ in range(self.num_groups))
        return BlockRows(zeros, zeros)

    def look_up(self, batch_idx: Int32, block: Int32, seqlen_k: Int32) -> BlockRows:
        """The places of the rows of a block of a sequence, with page numbers as the table has
        them, which nobody waits for before `settled`."""
        pages, rows = [], []
        for group in range(self.num_groups):
            key = block * self.tile_n + group * WARP + cute.arch.lane_idx()
            key = cutlass.max(cutlass.min(key, seqlen_k - 1), 0)
            row = self.pages.row(batch_idx, key)
            page = self.pages.entry(batch_idx, row)
            pages.append(page)
            rows.append(self.pages.place(page, row, seqlen_k).row)
        return BlockRows(tuple(pages), tuple(rows))

    def settled(self, at: BlockRows) -> BlockRows:
        return at._replace(pages=tuple(self.pages.number(page) for page in at.pages))

    @cute.jit
    def copy(self, pool: cute.Tensor, head: Int32, at: BlockRows, smem: cute.Tensor) -> None:
        """Start copying the rows of a block into smem (rows, columns), and zeros into its columns
        behind those of the pool."""
        elements = VECTOR_BYTES * 8 // pool.element_type.width
        per_row = cute.size(smem, mode=[1]) // elements
        in_pool = pool.shape[3] // elements
        lanes = math.gcd(per_row, LANES_OF_ROW)
        rows_at_once = WARP // lanes
        unroll = UNROLL_OF_DECODING if self.is_decoding else UNROLL
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL),
            pool.element_type,
            num_bits_per_copy=VECTOR_BYTES * 8,
        )
        row_of_lane, vector_of_lane = cute.arch.lane_idx() // lanes, cute.arch.lane_idx() % lanes
        for group in cutlass.range_constexpr(self.num_groups):
            num_rows = min(WARP, self.tile_n - group * WARP)
            # the products of one row, for all lanes that copy it
            place = (at.pages[group], at.rows[group], head, 0)
            address = (pool.iterator + cute.crd2idx(place, pool.layout)).toint()
            for step in cutlass.range(num_rows // rows_at_once, unroll=unroll):
                row = step * rows_at_once + row_of_lane
                begin = _of_lane(address, row) + vector_of_lane * VECTOR_BYTES
                source = _tensor_at(begin, pool, cute.size(smem, mode=[1]))
                target = smem[group * WARP + row, None]
                for vector in cutlass.range_constexpr(0, per_row, lanes):
                    to_vector = _vector(target, vector + vector_of_lane, elements)
                    is_there = None
                    if cutlass.const_expr(vector + lanes > in_pool):
                        is_there = cute.make_rmem_tensor((1,), Boolean)
                        is_there[0] = vector + vector_of_lane < in_pool
                    cute.copy_atom_call(
                        atom, _vector(source, vector, elements), to_vector, pred=is_there
                    )


def _of_lane(word: Int64, lane: Int32) -> Int64:
    """What a lane of this warp has."""
    low = cute.arch.shuffle_sync(Int32(word), lane)
    high = cute.arch.shuffle_sync(Int32(word >> 32), lane)
    return (Int64(high) << 32) | Int64(Uint32(low))


def _tensor_at(address: Int64, pool: cute.Tensor, size: int) -> cute.Tensor:
    """The elements from an address inside a pool on."""
    dtype, space = pool.element_type, pool.memspace
    begin = cute.make_ptr(dtype, address, space, assumed_align=VECTOR_BYTES)
    return cute.make_tensor(begin, cute.make_layout(size))


def _vector(row: cute.Tensor, number: Int32, elements: int) -> cute.Tensor:
    return cute.local_tile(row, (elements,), (number,))
