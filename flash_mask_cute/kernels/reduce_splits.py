"""Reduction of the fixed splits of rows into their results, in the order of the keys.

The attention kernel left each fixed split of a row (`core/fixed_splits.py`), normalised by its own
sum, with its LSE. A warp reduces them one after the other, by the arithmetic of
`core/ordered_sums.py`, so bits are those of a CTA that computed all of them. A fixed split that saw
nothing has LSE -inf.

The kernel is launched programmatically: its CTAs may start before the kernel whose results it
reduces has ended, and wait for its end.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_mask_cute.core.ordered_sums import VECTOR, RowSums, normalised, reduced
from flash_mask_cute.core.warp_scan import WARP
from flash_mask_cute.kernels.combine import WARPS_PER_CTA, SplitTensors

# numbers of a lane, of all fixed splits whose loads are in flight together
IN_FLIGHT = 64


class ReduceSplits:
    """Reduces fixed splits; for `cute.compile`. head_dim_v: a multiple of 8 up to 256."""

    def __init__(self, head_dim_v: int):
        self.head_dim_v = head_dim_v
        self.vectors = -(-head_dim_v // (VECTOR * WARP))
        self.batch = IN_FLIGHT // (VECTOR * self.vectors)

    @cute.jit
    def __call__(
        self,
        mO_partial: cute.Tensor,
        mLSE_partial: cute.Tensor,
        mLow_partial: cute.Tensor | None,
        mSink: cute.Tensor | None,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
        stream,
    ):
        """Launch on `stream`: as `Combine`, for splits by rows in fp32. mSink: logits (heads,)."""
        batch, rows, heads, _ = mO.shape
        splits = SplitTensors(mO_partial, mLSE_partial, mLow_partial)
        self.kernel(splits, mSink, mO, mLSE).launch(
            grid=(cute.ceil_div(batch * rows * heads, WARPS_PER_CTA), 1, 1),
            block=(WARP * WARPS_PER_CTA, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        splits: SplitTensors,
        mSink: cute.Tensor | None,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
    ):
        cta, _, _ = cute.arch.block_idx()
        number = cta * WARPS_PER_CTA + cute.arch.warp_idx()
        batch, rows, heads, _ = mO.shape
        cute.arch.griddepcontrol_wait()
        if number < batch * rows * heads:
            # heads change fastest, as they do in memory
            of_head = number // heads
            place = of_head // rows, of_head % rows, number % heads
            values = cute.make_rmem_tensor((VECTOR, self.vectors), Float32)
            values.fill(0.0)
            sums = self._reduced(place, splits, values)
            sink = None
            if const_expr(mSink is not None):
                sink = mSink[place[2]].to(Float32)
            result = sums.finish(sink, has_low=False)
            if const_expr(mLSE is not None):  # noqa: SIM102 (decided while tracing)
                if cute.arch.lane_idx() == 0:
                    mLSE[place] = result.lse
            self._store(values, result.factor, mO[(*place, None)])

    @cute.jit
    def _reduced(self, place: tuple, splits: SplitTensors, values: cute.Tensor) -> RowSums:
        """Reduce the fixed splits of a row: their outputs into this lane's columns, `values`."""
        sums = RowSums.empty()
        num_splits = splits.o.shape[0]
        lses, lows = (cute.make_rmem_tensor((self.batch,), Float32) for _ in range(2))
        of_splits = cute.make_rmem_tensor((VECTOR, self.vectors, self.batch), Float32)
        for start in cutlass.range(0, num_splits, self.batch, unroll=1):
            lses.fill(-Float32.inf)
            lows.fill(0.0)
            for i in cutlass.range_constexpr(self.batch):
                if start + i < num_splits:
                    self._load(start + i, place, splits.o, of_splits[None, None, i])
                    lses[i] = splits.lse[(start + i, *place)]
                    if const_expr(splits.low is not None):
                        lows[i] = splits.low[(start + i, *place)]
            for i in cutlass.range_constexpr(self.batch):
                low = None if const_expr(splits.low is None) else lows[i]
                # the last batch has places without a fixed split, whose memory may hold anything
                counts = lses[i] != -Float32.inf
                sums, scale, weight = sums.add(lses[i], low)
                for x in cutlass.range_constexpr(VECTOR * self.vectors):
                    own = cutlass.select_(counts, of_splits[None, None, i][x], Float32(0.0))
                    values[x] = reduced(values[x], scale, own, weight)
        return sums

    @cute.jit
    def _load(self, split_idx: Int32, place: tuple, source: cute.Tensor, target: cute.Tensor):
        columns = source[(split_idx, *place, None)]
        for v in cutlass.range_constexpr(self.vectors):
            vector = v * WARP + cute.arch.lane_idx()
            if vector < self.head_dim_v // VECTOR:
                cute.autovec_copy(cute.local_tile(columns, (VECTOR,), (vector,)), target[None, v])

    @cute.jit
    def _store(self, values: cute.Tensor, factor: Float32, columns: cute.Tensor):
        for v in cutlass.range_constexpr(self.vectors):
            vector = v * WARP + cute.arch.lane_idx()
            if vector < self.head_dim_v // VECTOR:
                result = cute.make_rmem_tensor((VECTOR,), columns.element_type)
                for c in cutlass.range_constexpr(VECTOR):
                    result[c] = normalised(values[c, v], factor).to(columns.element_type)
                cute.autovec_copy(result, cute.local_tile(columns, (VECTOR,), (vector,)))
