"""dK and dV from the sums of a backward with several CTAs for the same keys.

These split a group of heads, and leave partial sums, or have different queries of query lists
(`core/query_lists.py`), and add to the same sums.

The sums are fp32, in an order that suits the summing kernel. They are added in the order of the
parts, so the result does not depend on the run.
"""

from dataclasses import dataclass
from typing import Literal

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.row_blocks import by_lanes
from flash_mask_cute.core.warp_scan import WARP
from flash_mask_cute.kernels.bwd_postprocess import COLS_PER_GROUP
from flash_mask_cute.kernels.bwd_preprocess import (
    NUM_THREADS,
    VECTOR_32_BITS,
    rows_of,
    rows_of_head,
    vector_of,
)

# keys of a block: 16 of each warp
TILE_N = 128
# column groups that a CTA adds
GROUPS = 4

# The order of a key block's sums: that of accumulators with all columns (`bwd_postprocess`), that
# of `row_blocks.by_lanes`, or row by row, where warpgroups have different columns.
SumsOrder = Literal["accumulators", "lanes", "rows"]


@dataclass(eq=False, repr=False)
class BwdAddParts:
    """Adds partial sums of dK and dV and rounds them; to be passed to `cute.compile`.

    :param dtype: of dK and dV, 16 bits
    :param accum_cols: columns of a key block's sums of dK and of dV, multiples of 16
    :param tile_n: keys of a block: 128, or 64, where the second four warps had the second half
        of the columns
    """

    dtype: type[cutlass.Numeric]
    accum_cols: tuple[int, int]
    tile_n: int = TILE_N
    order: SumsOrder = "accumulators"

    def __post_init__(self) -> None:
        if self.tile_n not in (TILE_N, TILE_N // 2):
            raise ValueError(f"tile_n must be {TILE_N} or {TILE_N // 2}, got {self.tile_n}")
        # of a warp
        halves = TILE_N // self.tile_n
        self.num_groups = tuple(cols // halves // COLS_PER_GROUP for cols in self.accum_cols)
        self.num_chunks = tuple(-(-groups // GROUPS) for groups in self.num_groups)

    @cute.jit
    def __call__(
        self,
        mdKsums: cute.Tensor,
        mdVsums: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        stream,
        mCuSeqlensK: cute.Tensor | None,
        mSeqUsedK: cute.Tensor | None,
    ):
        """Launch on `stream`, for at least one head and key block.

        :param mdKsums, mdVsums: fp32 (heads_kv * parts, key_blocks, tile_n * accum_cols),
            contiguous and aligned to 16 bytes, the parts of a head one after the other
        :param mdK, mdV: (batch, seqlen_k, heads_kv, dim) or packed (total_k, heads_kv, dim). Get
            the sums; 0 in rows of a sequence that are not in use; rows of no sequence stay as they
            are.
        :param mCuSeqlensK: int32 (num_sequences + 1,), with at least one sequence; packed only
        :param mSeqUsedK: int32 (batch,) or (num_sequences,)
        """
        is_packed = const_expr(mCuSeqlensK is not None)
        seqlen_k = Int32(mdK.shape[0 if is_packed else 1])
        # of rows that are keys here
        lengths = Lengths(mCuSeqlensK, None, mSeqUsedK, None, seqlen_k, Int32(0))
        heads = mdK.shape[1 if is_packed else 2]
        num_parts, num_blocks = mdKsums.shape[0] // heads, mdKsums.shape[1]
        self.kernel(mdKsums, mdVsums, mdK, mdV, lengths, heads, num_parts).launch(
            # in one dimension: the others have at most 65535
            grid=(sum(self.num_chunks) * heads * num_blocks, 1, 1),
            block=(NUM_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mdKsums: cute.Tensor,
        mdVsums: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        lengths: Lengths,
        heads: Int32,
        num_parts: Int32,
    ):
        cta, _, _ = cute.arch.block_idx()
        chunks_k, chunks_v = self.num_chunks
        place = cta // (chunks_k + chunks_v)
        chunk = cta - place * (chunks_k + chunks_v)
        block = place // heads
        head_idx = place - block * heads
        if chunk < chunks_k:
            self._add(mdKsums, mdK, lengths, head_idx, block, num_parts, chunk, self.num_groups[0])
        else:
            chunk -= chunks_k
            self._add(mdVsums, mdV, lengths, head_idx, block, num_parts, chunk, self.num_groups[1])

    @cute.jit
    def _add(
        self,
        sums: cute.Tensor,
        target: cute.Tensor,
        lengths: Lengths,
        head_idx: Int32,
        block: Int32,
        num_parts: Int32,
        chunk: Int32,
        num_groups: cutlass.Constexpr[int],
    ):
        """Add some column groups of a key block; in each, a thread has two columns of two rows."""
        rows = rows_of(block, lengths, self.tile_n)
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // WARP, thread % WARP
        first = chunk * GROUPS
        row, first_pair = warp * 16 + lane // 4, first * 4 + lane % 4
        if const_expr(self.tile_n < TILE_N):
            row, first_pair = row % self.tile_n, first_pair + warp // 4 * num_groups * 4
        totals = [cute.make_rmem_tensor((VECTOR_32_BITS,), Float32) for _ in range(GROUPS)]
        for values in totals:
            values.fill(0.0)
        if rows.in_slot > 0:
            for part in cutlass.range(num_parts, unroll=1):
                source = sums[head_idx * num_parts + part, block, None]
                for g in cutlass.range_constexpr(GROUPS):
                    if first + g < num_groups:
                        values = cute.make_rmem_tensor((VECTOR_32_BITS,), Float32)
                        if const_expr(self.order == "lanes"):
                            stored = cute.make_tensor(source.iterator, by_lanes(num_groups))
                            for i in cutlass.range_constexpr(VECTOR_32_BITS):
                                values[i] = stored[i, lane, first + g, warp]
                        elif const_expr(self.order == "rows"):
                            width = cute.size(source) // self.tile_n
                            for i in cutlass.range_constexpr(2):
                                at = (row + 8 * i) * (width // 2) + first_pair + g * 4
                                pair = cute.local_tile(values, (2,), (i,))
                                cute.autovec_copy(vector_of(source, at, 2), pair)
                        else:
                            at = (warp * num_groups + first + g) * WARP + lane
                            cute.autovec_copy(vector_of(source, at, VECTOR_32_BITS), values)
                        totals[g].store(totals[g].load() + values.load())
            gRows = rows_of_head(target, head_idx, rows)
            for g in cutlass.range_constexpr(GROUPS):
                if first + g < num_groups:
                    self._store(totals[g], gRows, rows, row, first_pair + g * 4)

    @cute.jit
    def _store(self, values: cute.Tensor, gRows: cute.Tensor, rows, row: Int32, pair: Int32):
        """A pair of columns of a row, and of the row 8 after it, where they exist."""
        rounded = cute.make_rmem_tensor((VECTOR_32_BITS,), self.dtype)
        rounded.store(values.load().to(self.dtype))
        pairs = cute.recast_tensor(rounded, Int32)
        for i in cutlass.range_constexpr(2):
            if (row + 8 * i < rows.in_slot) & (pair * 2 < cute.size(gRows, mode=[1])):
                target = cute.recast_tensor(gRows[row + 8 * i, None], Int32)
                target[pair] = cutlass.select_(row + 8 * i < rows.in_use, pairs[i], Int32(0))
