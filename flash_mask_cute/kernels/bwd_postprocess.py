"""Conversion of the backward's fp32 sums of dQ, in the layout of the summing kernel, to dQ.

A CTA processes one row block of one head. It reads the sums in memory order, and transposes them
into rows through shared memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, range_constexpr

from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.row_blocks import PART_OF_HALF, alternating_sums, by_queries, dq_parts
from flash_mask_cute.core.warp_scan import WARP
from flash_mask_cute.kernels.bwd_preprocess import (
    ALONE,
    NUM_THREADS,
    VECTOR_16_BITS,
    VECTOR_32_BITS,
    Packing,
    packed_rows,
    rows_of,
    rows_of_head,
    vector_of,
)

THREADS_PER_WARPGROUP = 128
NUM_WARPGROUPS = 2
# orders of sums
BY_ACCUMULATORS, BY_LANES = "accumulators", "lanes"
ROWS_PER_WARPGROUP = 64
COLS_PER_GROUP = 8
# column groups that a thread loads before it waits for one
IN_FLIGHT = 16
# Makes a row an odd number of 16-byte units long, so that the 8 rows of a group of columns, which
# a warp writes together, lie in different banks.
PADDING = 8


@dataclass(eq=False, repr=False)
class BwdPostprocess:
    """Turns the backward's sums into dQ; to be passed to `cute.compile`.

    In accumulator order two warpgroups w of four warps v wrote the sums of a row block, each for 64
    rows of an accumulator with n columns: half of dQ's rows (tile_m 128), or parts of its columns
    in turn (tile_m 64, `dq_parts`). The values of lane l in columns [8 g, 8 g + 8) of a part lie,
    relative to the part's start, at
    (((w * 4 + v) * (n / 8) + g) * 32 + l) * 4;
    w is 0 in a part of one warpgroup.

    In lane order, where lanes are rows, column c of row r lies at
    (c / 4 * tile_m + r) * 4 + c % 4.
    Of a pair of CTAs, each has half of the rows, in which `_place` orders the groups of 4 columns.

    :param dtype: of dQ, 16 bits
    :param head_dim: a multiple of 8, at most accum_cols
    :param tile_m: query rows of a row block: 64 or 128
    :param accum_cols: columns of a row block's sums: a multiple of 32, or one of 16 where tile_m is
        128 or a warpgroup summed a row block alone (`alternating_sums`)
    :param order: of the sums, "accumulators" or "lanes"
    :param num_ctas: CTAs that summed a row block together, 1 or 2
    :param packing: query heads of a KV head that share a tile's rows, query by query; the rows of a
        query are a power of two up to 64, of a tile of 64. Heads of the sums are then KV heads, and
        their order is that of `row_blocks.by_queries`.
    :param in_halves: each warpgroup summed half of the columns in one product
    :raises ValueError: a size is none of these
    """

    dtype: type[cutlass.Numeric]
    head_dim: int
    tile_m: int
    accum_cols: int
    order: str = BY_ACCUMULATORS
    num_ctas: int = 1
    packing: Packing = ALONE
    in_halves: bool = False

    def __post_init__(self) -> None:
        if self.tile_m not in (64, 128):
            raise ValueError(f"tile_m must be 64 or 128, got {self.tile_m}")
        head_dim, accum_cols = self.head_dim, self.accum_cols
        by_16 = self.tile_m == 128 or alternating_sums(accum_cols, self.num_ctas)
        if accum_cols % (16 if by_16 else 32):
            raise ValueError(f"rows of {accum_cols} sums do not fit tile_m={self.tile_m}")
        if head_dim % VECTOR_16_BITS or not 0 < head_dim <= accum_cols:
            raise ValueError(f"head_dim must be a multiple of 8 up to accum_cols, got {head_dim}")
        if self.order not in (BY_ACCUMULATORS, BY_LANES):
            raise ValueError(f"order of sums must be accumulators or lanes, got {self.order!r}")
        self.vectors_per_row = head_dim // VECTOR_16_BITS
        self.parts = None
        if self.order == BY_ACCUMULATORS and self.tile_m == ROWS_PER_WARPGROUP:
            self.parts = dq_parts(accum_cols, self.num_ctas, self.in_halves)
        shares = self.parts is not None and all(x.sharers == 2 for x in self.parts)
        if self.packing.is_there and not shares:
            raise ValueError(f"{self.packing} needs sums of 64 rows in parts of both warpgroups")

    @cute.jit
    def __call__(
        self,
        mdQaccum: cute.Tensor,
        mSemaphores: cute.Tensor | None,
        mdQ: cute.Tensor,
        scale: Float32,
        stream,
        mCuSeqlensQ: cute.Tensor | None,
        mSeqUsedQ: cute.Tensor | None,
    ):
        """Launch on `stream`, for at least one head and row block.

        :param mdQaccum: fp32 (heads_q, num_row_blocks, tile_m * accum_cols), contiguous and aligned
            to 16 bytes
        :param mSemaphores: int32 (heads_q, num_ctas * num_row_blocks), those of a row block side by
            side, or None if all row blocks have sums; 0: the sums of a row block were never
            written, and count as zeros
        :param mdQ: (batch, seqlen_q, heads_q, head_dim) or packed (total_q, heads_q, head_dim),
            rows contiguous and aligned to 16 bytes, other strides free. Gets scale times the sums;
            0 in rows of a sequence that are not in use; rows of no sequence stay as they are.
        :param mCuSeqlensQ: int32 (num_sequences + 1,), with at least one sequence; packed only
        :param mSeqUsedQ: int32 (batch,) or (num_sequences,)
        """
        # the rows of packed tensors are of no interest: lengths come from mCuSeqlensQ
        seqlen_q = Int32(mdQ.shape[0 if const_expr(mCuSeqlensQ is not None) else 1])
        lengths = Lengths(mCuSeqlensQ, None, mSeqUsedQ, None, seqlen_q, Int32(0))
        heads, num_row_blocks, _ = mdQaccum.shape
        mdQ = packed_rows(mdQ, self.packing.heads)
        self.kernel(mdQaccum, mSemaphores, mdQ, scale, lengths).launch(
            grid=(heads * num_row_blocks, 1, 1), block=(NUM_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mdQaccum: cute.Tensor,
        mSemaphores: cute.Tensor | None,
        mdQ: cute.Tensor,
        scale: Float32,
        lengths: Lengths,
    ):
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        # heads change fastest, as they do in memory
        block = cta // mdQaccum.shape[0]
        head_idx = cta - block * mdQaccum.shape[0]
        # rows of pairs of columns
        layout = cute.make_layout(
            (self.tile_m, self.accum_cols // 2), stride=((self.accum_cols + PADDING) // 2, 1)
        )
        sdQ = cutlass.memory.SmemAllocator().allocate_tensor(Int32, layout, 16)
        rows = rows_of(block, lengths, self.tile_m, self.packing)
        if rows.in_slot > 0:
            has_sums = Boolean(True)
            if const_expr(mSemaphores is not None):
                # its CTAs have the same walks
                has_sums = mSemaphores[head_idx, block * self.num_ctas] != 0
            sums = mdQaccum[head_idx, block, None]
            if const_expr(self.order == BY_LANES):
                self._lanes_to_rows(sums, sdQ, scale, thread)
            else:
                self._sums_to_rows(sums, sdQ, scale, thread)
            cute.arch.sync_threads()
            sRows = cute.recast_tensor(sdQ, self.dtype)
            gdQ = rows_of_head(mdQ, head_idx, rows)
            num_vectors = self.tile_m * self.vectors_per_row
            for start in range_constexpr(0, num_vectors, NUM_THREADS):
                row = (start + thread) // self.vectors_per_row
                vector = (start + thread) % self.vectors_per_row
                if (row < rows.in_slot) & self.packing.is_head(row):
                    values = cute.make_rmem_tensor((VECTOR_16_BITS,), self.dtype)
                    cute.autovec_copy(vector_of(sRows[row, None], vector, VECTOR_16_BITS), values)
                    pairs = cute.recast_tensor(values, Int32)
                    is_sum = has_sums & (row < rows.in_use)
                    for i in range_constexpr(cute.size(pairs)):
                        pairs[i] = cutlass.select_(is_sum, pairs[i], Int32(0))
                    target = gdQ[self.packing.place(row), None]
                    cute.autovec_copy(values, vector_of(target, vector, VECTOR_16_BITS))

    @cute.jit
    def _lanes_to_rows(self, sums: cute.Tensor, sdQ: cute.Tensor, scale: Float32, thread: Int32):
        """Write scaled and rounded sums to sdQ: a thread has a row, in every second group."""
        row, first = thread % self.tile_m, thread // self.tile_m
        step = NUM_THREADS // self.tile_m
        groups = self.accum_cols // VECTOR_32_BITS // step
        for start in range_constexpr(0, groups, IN_FLIGHT):
            batch = range(start, min(start + IN_FLIGHT, groups))
            loaded = []
            for i in batch:
                values = cute.make_rmem_tensor((VECTOR_32_BITS,), Float32)
                source = self._place(i * step + first, row)
                cute.autovec_copy(vector_of(sums, source, VECTOR_32_BITS), values)
                loaded.append(values)
            for i, values in zip(batch, loaded, strict=True):
                self._keep_rounded(values, sdQ, scale, row, (i * step + first) * 2, by_row=False)

    def _place(self, group: Int32, row: Int32) -> Int32:
        """The number of 4 columns of a row in lane order."""
        if self.num_ctas == 1:
            return group * self.tile_m + row
        # a CTA has half of the rows, and its parts have columns of both halves
        rows, parts = self.tile_m // self.num_ctas, self.accum_cols // (2 * PART_OF_HALF)
        groups, size = self.accum_cols // VECTOR_32_BITS, PART_OF_HALF // VECTOR_32_BITS
        half, part, in_part = group // (groups // 2), group // size % parts, group % size
        number = (part * 2 + half) * size + in_part
        return (row // rows * groups + number) * rows + row % rows

    def _keep_rounded(self, values, sdQ, scale, row: Int32, pair: Int32, by_row: bool) -> None:
        """Write two pairs of columns: side by side in a row or, by_row, in rows 8 apart."""
        rounded = cute.make_rmem_tensor((VECTOR_32_BITS,), self.dtype)
        rounded.store((values.load() * scale).to(self.dtype))
        pairs = cute.recast_tensor(rounded, Int32)
        for i in range(2):
            if by_row:
                sdQ[row + 8 * i, pair] = pairs[i]
            else:
                sdQ[row, pair + i] = pairs[i]

    @cute.jit
    def _sums_to_rows(
        self,
        gdQaccum: cute.Tensor,
        sdQ: cute.Tensor,
        scale: Float32,
        thread: Int32,
    ):
        """Write scaled and rounded sums to sdQ."""
        warpgroup_idx = thread // THREADS_PER_WARPGROUP
        if const_expr(self.parts is None):
            first_row = warpgroup_idx * ROWS_PER_WARPGROUP
            groups = self.accum_cols // COLS_PER_GROUP
            source = thread // WARP * groups
            self._part_to_rows(gdQaccum, sdQ, scale, thread, source, groups, first_row, Int32(0))
        else:
            first_value = 0
            for columns in self.parts:
                width = columns.width
                groups = width // COLS_PER_GROUP
                source = thread // WARP * groups
                if const_expr(columns.sharers == 1):
                    # half of the part for each warpgroup of this kernel
                    source = thread % THREADS_PER_WARPGROUP // WARP * groups
                    width, groups = width // NUM_WARPGROUPS, groups // NUM_WARPGROUPS
                    source += warpgroup_idx * groups
                first_col = columns.first + warpgroup_idx * width
                if const_expr(self.packing.is_there):
                    # the parts of a query follow each other
                    first_value = columns.first * self.packing.rows
                size = columns.num_cols * ROWS_PER_WARPGROUP
                part = cute.make_tensor(gdQaccum.iterator + first_value, cute.make_layout(size))
                at = Int32(0), first_col
                self._part_to_rows(part, sdQ, scale, thread, source, groups, *at)
                first_value += size

    @cute.jit
    def _part_to_rows(
        self,
        part: cute.Tensor,
        sdQ: cute.Tensor,
        scale: Float32,
        thread: Int32,
        source_group: Int32,
        groups: cutlass.Constexpr[int],
        first_row: Int32,
        first_col: Int32,
    ):
        """Write this warp's `groups` of columns, from number `source_group` on."""
        warp, lane = thread // WARP, thread % WARP
        first_row += (warp % 4) * 16 + lane // 4
        first_pair = first_col // 2 + lane % 4
        for start in range_constexpr(0, groups, IN_FLIGHT):
            batch = range(start, min(start + IN_FLIGHT, groups))
            sums = []
            for g in batch:
                values = cute.make_rmem_tensor((VECTOR_32_BITS,), Float32)
                if const_expr(not self.packing.is_there):
                    source = (source_group + g) * WARP + lane
                    cute.autovec_copy(vector_of(part, source, VECTOR_32_BITS), values)
                else:
                    layout = by_queries(self.packing.rows, groups * COLS_PER_GROUP, self.accum_cols)
                    stored = cute.make_tensor(part.iterator, layout)
                    quad = cute.make_tensor(values.iterator, cute.make_layout((2, 2)))
                    cute.autovec_copy(stored[None, None, lane, g, warp], quad)
                sums.append(values)
            for g, values in zip(batch, sums, strict=True):
                pair = first_pair + g * (COLS_PER_GROUP // 2)
                self._keep_rounded(values, sdQ, scale, first_row, pair, by_row=True)
