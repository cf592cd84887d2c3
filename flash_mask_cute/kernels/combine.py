"""Merge of partial attention results over parts of the keys into results over all keys.

A row has *pieces*: outputs O_j, each normalised by its own sum, and their LSE_j. With
LSE = log(sum of exp(LSE_j)) the row's output is the sum of exp(LSE_j - LSE) O_j. A piece that saw
nothing has LSE -inf and does not count, whatever its O holds; a row of such pieces has O = 0
and LSE -inf. A sink, one more logit of the row, is part of one piece's LSE.

Pieces have one of two layouts. *By rows*: piece j of all rows is O_partial[j]. *By slots*: a kernel
that processed key blocks by shares (`core/shares.py`) left a tile's pieces in slots of tile_m rows
each. For each share it recorded the work tile that begins there and that other shares continue
(`Merge`).

A warp merges a row in key order, so bits do not depend on timing. The kernel is launched
programmatically: its CTAs may start before the kernel whose results it merges has ended, and wait
for its end.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_mask_cute.core.partials import Merge
from flash_mask_cute.core.shares import slot_of_first, slot_of_later

WARP = 32
WARPS_PER_CTA = 4
# columns of a lane
VECTOR = 4
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# pieces whose loads are in flight together
UNROLL = 8


class Row(NamedTuple):
    """A row of the output, and its pieces.

    tile_row, share: by slots, its row in a tile, and the share in which that tile begins.
    """

    is_there: Boolean
    num_pieces: Int32
    batch_idx: Int32
    q_idx: Int32
    head_idx: Int32
    tile_row: Int32
    share: Int32


class Combine:
    """Merges partial results; to be passed to `cute.compile`.

    :param head_dim_v: columns of the output, a multiple of 8 up to 256
    :param tile_m: rows of a slot; None: pieces lie by rows
    :param packed_heads: by slots, query heads whose rows alternate in a tile; the first `group` of
        them exist
    :raises ValueError: head_dim_v is none of these
    """

    def __init__(
        self, head_dim_v: int, tile_m: int | None = None, packed_heads: int = 1, group: int = 1
    ):
        if head_dim_v % 8 or not 0 < head_dim_v <= 256:
            raise ValueError(f"head_dim_v must be a multiple of 8 up to 256, got {head_dim_v}")
        self.head_dim_v = head_dim_v
        self.tile_m = tile_m
        self.packed_heads = packed_heads
        self.group = group

    @cute.jit
    def __call__(
        self,
        mO_partial: cute.Tensor,
        mLSE_partial: cute.Tensor,
        mMerges: cute.Tensor | None,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
        stream,
    ):
        """Launch on `stream`, for at least one row.

        :param mO_partial: fp32, bf16 or fp16, (pieces, batch, row, head, d), last stride 1, others
            multiples of 4; by slots fp32 (slots, tile_m, d)
        :param mLSE_partial: fp32 (pieces, batch, row, head), or (slots, tile_m)
        :param mMerges: int32 (shares, MERGE_WORDS), a `Merge` each; by slots only
        :param mO: (batch, row, head, d), last stride 1, others multiples of 4
        :param mLSE: fp32 (batch, row, head)
        """
        if const_expr(self.tile_m is None):
            batch, rows, heads, _ = mO.shape
            num_rows = batch * rows * heads
        else:
            num_rows = mMerges.shape[0] * self.tile_m
        self.kernel(mO_partial, mLSE_partial, mMerges, mO, mLSE).launch(
            grid=(cute.ceil_div(num_rows, WARPS_PER_CTA), 1, 1),
            block=(WARP * WARPS_PER_CTA, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mO_partial: cute.Tensor,
        mLSE_partial: cute.Tensor,
        mMerges: cute.Tensor | None,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        number = cta * WARPS_PER_CTA + thread // WARP
        cute.arch.griddepcontrol_wait()
        if const_expr(self.tile_m is None):
            row = self._row_by_rows(number, mO_partial, mO)
        else:
            row = self._row_by_slots(number, mMerges)
        if row.is_there:
            lse = self._merged_lse(row, mLSE_partial)
            if const_expr(mLSE is not None):  # noqa: SIM102 (decided while tracing)
                if thread % WARP == 0:
                    mLSE[row.batch_idx, row.q_idx, row.head_idx] = lse
            for first in cutlass.range_constexpr(0, self.head_dim_v // VECTOR, WARP):
                vector = first + thread % WARP
                if vector < self.head_dim_v // VECTOR:
                    self._merge_vector(row, vector, lse, mO_partial, mLSE_partial, mO)

    # -- rows -----------------------------------------------------------------------------------

    def _row_by_rows(self, number: Int32, mO_partial: cute.Tensor, mO: cute.Tensor) -> Row:
        batch, rows, heads, _ = mO.shape
        # heads change fastest, as they do in memory
        head_idx = number % heads
        of_head = number // heads
        is_there = number < batch * rows * heads
        pieces = mO_partial.shape[0]
        zero = Int32(0)
        return Row(is_there, pieces, of_head // rows, of_head % rows, head_idx, zero, zero)

    def _row_by_slots(self, number: Int32, mMerges: cute.Tensor) -> Row:
        share, tile_row = number // self.tile_m, number % self.tile_m
        is_share = share < mMerges.shape[0]
        merge = Merge.read(mMerges, cutlass.min(share, mMerges.shape[0] - 1))
        packed_row = merge.block * self.tile_m + tile_row
        q_idx = packed_row // self.packed_heads
        of_group = packed_row % self.packed_heads
        is_row = (q_idx < merge.slot) & (of_group < self.group)
        return Row(
            is_share & is_row & (merge.num_pieces > 0),
            merge.num_pieces,
            merge.batch_idx,
            merge.offset_q + q_idx,
            merge.head_idx * self.group + of_group,
            tile_row,
            share,
        )

    def _piece(self, row: Row, piece: Int32) -> tuple:
        """The place of a row's piece in a tensor of pieces, without the column."""
        if self.tile_m is None:
            return piece, row.batch_idx, row.q_idx, row.head_idx
        share = row.share + piece
        slot = cutlass.select_(piece == 0, slot_of_first(share), slot_of_later(share))
        return slot, row.tile_row

    # -- a row ----------------------------------------------------------------------------------

    @cute.jit
    def _merged_lse(self, row: Row, mLSE_partial: cute.Tensor) -> Float32:
        """LSE of a row, computed by the lanes of a warp."""
        lane = cute.arch.lane_idx()
        largest = -Float32.inf
        for start in cutlass.range(0, row.num_pieces, WARP, unroll=1):
            if start + lane < row.num_pieces:
                lse = mLSE_partial[self._piece(row, start + lane)]
                largest = cute.arch.fmax(largest, lse)
        largest = cute.arch.warp_reduction_max(largest)
        reference = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
        total = Float32(0.0)
        for start in cutlass.range(0, row.num_pieces, WARP, unroll=1):
            if start + lane < row.num_pieces:
                lse = mLSE_partial[self._piece(row, start + lane)]
                total += cute.math.exp2((lse - reference) * LOG2_E, fastmath=True)
        total = cute.arch.warp_reduction_sum(total)
        lse = reference + cute.math.log2(total, fastmath=True) * LN_2
        return cutlass.select_(largest == -Float32.inf, -Float32.inf, lse)

    @cute.jit
    def _merge_vector(
        self,
        row: Row,
        vector: Int32,
        lse: Float32,
        mO_partial: cute.Tensor,
        mLSE_partial: cute.Tensor,
        mO: cute.Tensor,
    ):
        """VECTOR columns of a row of the output."""
        sums = cute.make_rmem_tensor((VECTOR,), Float32)
        sums.fill(0.0)
        for piece in cutlass.range(row.num_pieces, unroll=UNROLL):
            place = self._piece(row, piece)
            of_piece = mLSE_partial[place]
            values = cute.make_rmem_tensor((VECTOR,), mO_partial.element_type)
            source = cute.local_tile(mO_partial[(*place, None)], (VECTOR,), (vector,))
            cute.autovec_copy(source, values)
            weight = cute.math.exp2((of_piece - lse) * LOG2_E, fastmath=True)
            counts = of_piece != -Float32.inf
            for i in cutlass.range_constexpr(VECTOR):
                # not a product: what counts for nothing may hold NaN
                added = cutlass.select_(counts, weight * values[i].to(Float32), Float32(0.0))
                sums[i] = sums[i] + added
        merged = cute.make_rmem_tensor((VECTOR,), mO.element_type)
        merged.store(sums.load().to(mO.element_type))
        place = row.batch_idx, row.q_idx, row.head_idx, None
        cute.autovec_copy(merged, cute.local_tile(mO[place], (VECTOR,), (vector,)))
