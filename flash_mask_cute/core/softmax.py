"""Online softmax over score tiles held in registers.

Value domains: scores arrive as the raw product Q K^T (or after soft-capping, already scaled); `scale_log2` turns them
into exponents of two. `row_max` is kept in the units of the scores, `row_sum` is the sum of exp2(score * scale_log2 -
max * scale_log2) over the columns this thread owns; columns of one row are spread over the four lanes of a quad.

Method: Milakov and Gimelshein 2018 (online normaliser), in the base-2 form of FlashAttention-2 (Dao 2023). The maximum
is allowed to lag: as long as it grew by less than `RESCALE_THRESHOLD` in the exponent, the old one stays in use and the
accumulator needs no rescaling (the idea of FlashAttention-4). Probabilities are then at most 2**RESCALE_THRESHOLD,
which bf16, fp16 and the fp32 sums hold with the same relative precision.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
RESCALE_THRESHOLD = 8.0
# independent chains per row for max and sum, so that their latency overlaps
CHAINS = 4


def _chained_reduce(values, op):
    """Reduce a Python list of scalars with CHAINS interleaved partial results."""
    partial = list(values[:CHAINS])
    for i in range(CHAINS, len(values)):
        partial[i % CHAINS] = op(partial[i % CHAINS], values[i])
    while len(partial) > 1:
        half = (len(partial) + 1) // 2
        partial = [
            op(partial[i], partial[i + half]) if i + half < len(partial) else partial[i]
            for i in range(half)
        ]
    return partial[0]


def quad_reduce(value: Float32, op) -> Float32:
    """Combine a value over the four lanes that share an accumulator row."""
    value = op(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return op(value, cute.arch.shuffle_sync_bfly(value, offset=2))


def _add(a, b):
    return a + b


class OnlineSoftmax(NamedTuple):
    """Running maximum and sum of the accumulator rows a thread owns."""

    scale_log2: Float32
    row_max: cute.Tensor
    row_sum: cute.Tensor

    @staticmethod
    def create(scale_log2: Float32, num_rows: int) -> "OnlineSoftmax":
        return OnlineSoftmax(
            scale_log2,
            cute.make_rmem_tensor((num_rows,), Float32),
            cute.make_rmem_tensor((num_rows,), Float32),
        )

    @cute.jit
    def step(self, scores: cute.Tensor, is_first: cutlass.Constexpr):
        """Replace scores (rows, cols) by probabilities; returns the factor per row for what was summed before.

        Hidden scores are -inf. While a row has seen nothing its maximum is -inf and all its probabilities are 0.
        """
        num_rows, num_cols = cute.size(scores, mode=[0]), cute.size(scores, mode=[1])
        factors = []
        for r in cutlass.range_constexpr(num_rows):
            cols = [scores[r, c] for c in range(num_cols)]
            tile_max = _chained_reduce(cols, cute.arch.fmax)
            factor = Float32(1.0)
            if const_expr(is_first):
                new_max = quad_reduce(tile_max, cute.arch.fmax)
            else:
                old_max = self.row_max[r]
                new_max = quad_reduce(cute.arch.fmax(tile_max, old_max), cute.arch.fmax)
                # false for -inf - -inf = nan too: nothing was visible yet, take the new maximum
                lag = (new_max - old_max) * self.scale_log2 <= RESCALE_THRESHOLD
                new_max = cutlass.select_(lag, old_max, new_max)
            finite_max = cutlass.select_(new_max == -Float32.inf, Float32(0.0), new_max)
            bias = -(finite_max * self.scale_log2)
            if const_expr(not is_first):
                factor = cute.math.exp2(
                    cute.math.fma(old_max, self.scale_log2, bias), fastmath=True
                )
            probs = [
                cute.math.exp2(cute.math.fma(x, self.scale_log2, bias), fastmath=True) for x in cols
            ]
            for c in cutlass.range_constexpr(num_cols):
                scores[r, c] = probs[c]
            tile_sum = _chained_reduce(probs, _add)
            self.row_max[r] = new_max
            if const_expr(is_first):
                self.row_sum[r] = tile_sum
            else:
                self.row_sum[r] = cute.math.fma(self.row_sum[r], factor, tile_sum)
            factors.append(factor)
        return tuple(factors)

    @cute.jit
    def finalize(self, sinks):
        """Returns per row (factor for the accumulator, natural-log LSE). sinks: a logit per row, or None."""
        results = []
        for r in cutlass.range_constexpr(cute.size(self.row_sum)):
            total = quad_reduce(self.row_sum[r], _add)
            max_log2 = self.row_max[r] * self.scale_log2
            empty = self.row_max[r] == -Float32.inf
            shift = Float32(1.0)
            if const_expr(sinks is not None):
                sink_log2 = sinks[r] * LOG2_E
                new_max = cute.arch.fmax(max_log2, sink_log2)
                shift = cute.math.exp2(max_log2 - new_max, fastmath=True)
                total = cute.math.fma(
                    total, shift, cute.math.exp2(sink_log2 - new_max, fastmath=True)
                )
                max_log2 = new_max
                lse = (max_log2 + cute.math.log2(total, fastmath=True)) * LN_2
            else:
                lse = (max_log2 + cute.math.log2(total, fastmath=True)) * LN_2
                lse = cutlass.select_(empty, -Float32.inf, lse)
            factor = cutlass.select_(empty, Float32(0.0), shift * cute.arch.rcp_approx(total))
            results.append((factor, lse))
        return tuple(results)


def needs_rescale(factors) -> Boolean:
    """Whether a row of this warp has a factor other than 1; a warp-uniform value."""
    needed = Boolean(False)
    for factor in factors:
        needed = needed | (factor != 1.0)
    return cute.arch.vote_any_sync(needed)


@cute.jit
def rescale(acc: cute.Tensor, factors):
    """Multiply the rows of acc (rows, cols) by their factors."""
    for r in cutlass.range_constexpr(cute.size(acc, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            acc[r, c] = acc[r, c] * factors[r]
