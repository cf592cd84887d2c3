"""Combination of partial attention results over parts of the keys into results over all keys.

A row has *splits*: outputs O_j, each normalised by its own sum, and their LSE_j. With
LSE = log(sum of exp(LSE_j)) the row's output is the sum of exp(LSE_j - LSE) O_j. A split that saw
nothing has LSE -inf and does not count, whatever its O holds; a row of such splits has O = 0
and LSE -inf. A sink, one more logit of the row, is part of one split's LSE.

If scores may have any size, each LSE_j comes as a sum of two numbers: rounded to fp32, and its
rounding error. Far from 0 the first alone does not hold how many keys a split saw.

Splits have one of two layouts. *By rows*: split j of all rows is O_partial[j]. *Stream-K*: a kernel
that processed key blocks by chunks (`core/stream_k.py`) left a tile's splits in partial tiles of
CTAs. For each CTA it recorded the work tile that begins in its chunk and that other chunks continue
(`PendingCombine`).

A row is combined by one warp or by the four of a CTA, always in the same order, so bits do not
depend on timing. The kernel is launched programmatically: its CTAs may start before the kernel
whose results it combines has ended, and wait for its end.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_mask_cute.core.exp2 import LN_2, LOG2_E
from flash_mask_cute.core.partials import PendingCombine
from flash_mask_cute.core.stream_k import MAX_COLUMNS, partial_tile_of_first, partial_tile_of_later
from flash_mask_cute.core.warp_scan import WARP

WARPS_PER_CTA = 4
# columns of a lane
VECTOR = 4
# splits of a warp whose loads are in flight together
BATCH = 8


class Row(NamedTuple):
    """A row of the output, and its splits. tile_row, cta, stride: in stream-K, its row in a tile,
    the CTA of its first split, and the distance to that of the next."""

    is_there: Boolean
    num_splits: Int32
    batch_idx: Int32
    q_idx: Int32
    head_idx: Int32
    tile_row: Int32
    cta: Int32
    stride: Int32


class SplitTensors(NamedTuple):
    """The tensors of splits, as `Combine.__call__` takes them."""

    o: cute.Tensor
    lse: cute.Tensor
    low: cute.Tensor | None


@dataclass(eq=False, repr=False)
class Combine:
    """Combines partial results; to be passed to `cute.compile`.

    :param head_dim_v: columns of the output, a multiple of 8 up to MAX_COLUMNS
    :param tile_m: rows of a partial tile; None: splits lie by rows
    :param packed_heads: in stream-K, query heads whose rows alternate in a tile; the first `group`
        of them exist
    :param warps_per_row: 1 or WARPS_PER_CTA
    :raises ValueError: head_dim_v or warps_per_row is none of these
    """

    head_dim_v: int
    tile_m: int | None = None
    packed_heads: int = 1
    group: int = 1
    warps_per_row: int = 1

    def __post_init__(self) -> None:
        columns, warps = self.head_dim_v, self.warps_per_row
        if columns % 8 or not 0 < columns <= MAX_COLUMNS:
            raise ValueError(
                f"head_dim_v must be a multiple of 8 up to {MAX_COLUMNS}, got {columns}"
            )
        if warps not in (1, WARPS_PER_CTA):
            raise ValueError(f"warps_per_row must be 1 or {WARPS_PER_CTA}, got {warps}")

    @cute.jit
    def __call__(
        self,
        mO_partial: cute.Tensor,
        mLSE_partial: cute.Tensor,
        mLow_partial: cute.Tensor | None,
        mPending: cute.Tensor | None,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
        stream,
    ):
        """Launch on `stream`, for at least one row.

        :param mO_partial: fp32, bf16 or fp16, (splits, batch, row, head, d), last stride 1, others
            multiples of 4; in stream-K fp32 (partial tiles, rows, d), with the rows of a tile that
            may exist
        :param mLSE_partial: fp32 (splits, batch, row, head), or (partial tiles, rows)
        :param mLow_partial: like mLSE_partial, its rounding error, 0 where it is -inf
        :param mPending: int32 (CTAs, PENDING_WORDS), a `PendingCombine` each; in stream-K only
        :param mO: (batch, row, head, d), last stride 1, others multiples of 4
        :param mLSE: fp32 (batch, row, head)
        """
        if const_expr(self.tile_m is None):
            batch, rows, heads, _ = mO.shape
            num_rows = batch * rows * heads
        else:
            num_rows = mPending.shape[0] * mLSE_partial.shape[1]
        splits = SplitTensors(mO_partial, mLSE_partial, mLow_partial)
        self.kernel(splits, mPending, mO, mLSE).launch(
            grid=(cute.ceil_div(num_rows, WARPS_PER_CTA // self.warps_per_row), 1, 1),
            block=(WARP * WARPS_PER_CTA, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        splits: SplitTensors,
        mPending: cute.Tensor | None,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
    ):
        cta, _, _ = cute.arch.block_idx()
        number = cta
        if const_expr(self.warps_per_row == 1):
            number = cta * WARPS_PER_CTA + cute.arch.warp_idx()
        vectors = -(-self.head_dim_v // (VECTOR * WARP))
        values = cute.make_rmem_tensor((VECTOR, vectors), Float32)
        if const_expr(self.tile_m is not None):
            # the next attention, if it decodes in stream-K
            cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if const_expr(self.tile_m is None):
            row = self._row_by_rows(number, splits, mO)
        else:
            row = self._row_by_stream_k(number, mPending, splits.lse.shape[1])
        if row.is_there:
            if const_expr(self.warps_per_row == 1):
                sums = self._combined(row, Int32(0), splits, values)
                self._store(row, sums, values, mO, mLSE)
            else:
                layout = cute.make_layout((self.head_dim_v + 2, self.warps_per_row))
                storage = cutlass.memory.SmemAllocator().allocate_tensor(Float32, layout, 16)
                sums = self._combined_by_warps(row, storage, splits, values)
                if cute.arch.warp_idx() == 0:
                    self._store(row, sums, values, mO, mLSE)

    # -- rows -----------------------------------------------------------------------------------

    def _row_by_rows(self, number: Int32, splits: SplitTensors, mO: cute.Tensor) -> Row:
        batch, rows, heads, _ = mO.shape
        # heads change fastest, as they do in memory
        head_idx = number % heads
        of_head = number // heads
        is_there = number < batch * rows * heads
        zero = Int32(0)
        place = of_head // rows, of_head % rows, head_idx
        return Row(is_there, splits.o.shape[0], *place, zero, zero, zero)

    def _row_by_stream_k(self, number: Int32, mPending: cute.Tensor, rows: Int32) -> Row:
        cta, tile_row = number // rows, number % rows
        is_cta = cta < mPending.shape[0]
        pending = PendingCombine.read(mPending, cutlass.min(cta, mPending.shape[0] - 1))
        packed_row = pending.block * self.tile_m + tile_row
        q_idx = packed_row // self.packed_heads
        of_group = packed_row % self.packed_heads
        is_row = (q_idx < pending.slot) & (of_group < self.group)
        return Row(
            is_cta & is_row & (pending.num_splits > 0),
            pending.num_splits,
            pending.batch_idx,
            pending.offset_q + q_idx,
            pending.head_idx * self.group + of_group,
            tile_row,
            cta,
            pending.stride,
        )

    def _split(self, row: Row, split_idx: Int32) -> tuple:
        """The place of a row's split in a tensor of splits, without the column."""
        if self.tile_m is None:
            return split_idx, row.batch_idx, row.q_idx, row.head_idx
        cta = row.cta + split_idx * row.stride
        partial_tile = cutlass.select_(
            split_idx == 0, partial_tile_of_first(cta), partial_tile_of_later(cta)
        )
        return partial_tile, row.tile_row

    # -- a row ----------------------------------------------------------------------------------

    @cute.jit
    def _combined(
        self,
        row: Row,
        first_split: Int32,
        splits: SplitTensors,
        values: cute.Tensor,
    ) -> tuple:
        """Sums of every warps_per_row-th split of a row, from first_split on.

        Writes to `values` this lane's columns of the sum of exp(LSE_j - largest) O_j, and returns
        `largest`, the maximum of LSE_j as rounded to fp32, and the sum of exp(LSE_j - largest).
        """
        largest, total = -Float32.inf, Float32(0.0)
        values.fill(0.0)
        vectors = cute.size(values, mode=[1])
        lses = cute.make_rmem_tensor((BATCH,), Float32)
        lows = None
        if const_expr(splits.low is not None):
            lows = cute.make_rmem_tensor((BATCH,), Float32)
        of_splits = cute.make_rmem_tensor((VECTOR, vectors, BATCH), splits.o.element_type)
        stride = BATCH * self.warps_per_row
        for start in cutlass.range(first_split, row.num_splits, stride, unroll=1):
            lses.fill(-Float32.inf)
            if const_expr(lows is not None):
                lows.fill(0.0)
            for i in cutlass.range_constexpr(BATCH):
                split_idx = start + i * self.warps_per_row
                if split_idx < row.num_splits:
                    place = self._split(row, split_idx)
                    lses[i] = splits.lse[place]
                    if const_expr(lows is not None):
                        lows[i] = splits.low[place]
                    for v in cutlass.range_constexpr(vectors):
                        vector = v * WARP + cute.arch.lane_idx()
                        if vector < self.head_dim_v // VECTOR:
                            columns = splits.o[(*place, None)]
                            source = cute.local_tile(columns, (VECTOR,), (vector,))
                            cute.autovec_copy(source, of_splits[None, v, i])
            largest_before = largest
            for i in cutlass.range_constexpr(BATCH):
                largest = cute.arch.fmax(largest, lses[i])
            reference = _finite(largest)
            scale = _exp(largest_before - reference)
            total *= scale
            for v in cutlass.range_constexpr(vectors):
                for c in cutlass.range_constexpr(VECTOR):
                    values[c, v] = values[c, v] * scale
            for i in cutlass.range_constexpr(BATCH):
                exponent, counts = lses[i] - reference, lses[i] != -Float32.inf
                if const_expr(lows is not None):
                    # the difference is exact, or so far below 0 that its error does not matter
                    exponent = exponent + lows[i]
                weight = _exp(exponent)
                total += weight
                for v in cutlass.range_constexpr(vectors):
                    for c in cutlass.range_constexpr(VECTOR):
                        # not a product: what counts for nothing may hold NaN
                        added = weight * of_splits[c, v, i].to(Float32)
                        values[c, v] = values[c, v] + cutlass.select_(counts, added, Float32(0.0))
        return largest, total

    @cute.jit
    def _combined_by_warps(
        self,
        row: Row,
        storage: cute.Tensor,
        splits: SplitTensors,
        values: cute.Tensor,
    ) -> tuple:
        """`_combined` of all splits of a row, by the warps of a CTA. Every warp gets the sums,
        added in the order of the warps.

        storage: fp32 (head_dim_v + 2, warps_per_row) in shared memory.
        """
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        largest, total = self._combined(row, warp, splits, values)
        vectors = cute.size(values, mode=[1])
        for v in cutlass.range_constexpr(vectors):
            for c in cutlass.range_constexpr(VECTOR):
                column = (v * WARP + lane) * VECTOR + c
                if column < self.head_dim_v:
                    storage[column, warp] = values[c, v]
        if lane == 0:
            storage[self.head_dim_v, warp] = largest
            storage[self.head_dim_v + 1, warp] = total
        cute.arch.sync_threads()
        largest, total = -Float32.inf, Float32(0.0)
        for w in cutlass.range_constexpr(self.warps_per_row):
            largest = cute.arch.fmax(largest, storage[self.head_dim_v, w])
        values.fill(0.0)
        for w in cutlass.range_constexpr(self.warps_per_row):
            scale = _exp(storage[self.head_dim_v, w] - _finite(largest))
            total += scale * storage[self.head_dim_v + 1, w]
            for v in cutlass.range_constexpr(vectors):
                for c in cutlass.range_constexpr(VECTOR):
                    column = (v * WARP + lane) * VECTOR + c
                    if column < self.head_dim_v:
                        values[c, v] = values[c, v] + scale * storage[column, w]
        return largest, total

    @cute.jit
    def _store(
        self,
        row: Row,
        sums: tuple,
        values: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
    ):
        largest, total = sums
        # NaN is not empty
        is_empty = total == Float32(0.0)
        if const_expr(mLSE is not None):
            lse = largest + cute.math.log2(total, fastmath=True) * LN_2
            if cute.arch.lane_idx() == 0:
                lse = cutlass.select_(is_empty, -Float32.inf, lse)
                mLSE[row.batch_idx, row.q_idx, row.head_idx] = lse
        factor = cutlass.select_(is_empty, Float32(0.0), Float32(1.0) / total)
        for v in cutlass.range_constexpr(cute.size(values, mode=[1])):
            vector = v * WARP + cute.arch.lane_idx()
            if vector < self.head_dim_v // VECTOR:
                combined = cute.make_rmem_tensor((VECTOR,), mO.element_type)
                for c in cutlass.range_constexpr(VECTOR):
                    combined[c] = (values[c, v] * factor).to(mO.element_type)
                columns = mO[row.batch_idx, row.q_idx, row.head_idx, None]
                cute.autovec_copy(combined, cute.local_tile(columns, (VECTOR,), (vector,)))


def _finite(largest: Float32) -> Float32:
    """What exponents are relative to, also if nothing was seen."""
    return cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)


def _exp(x: Float32) -> Float32:
    return cute.math.exp2(x * LOG2_E, fastmath=True)
