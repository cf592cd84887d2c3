"""Online softmax over score tiles held in registers.

Value domains: scores arrive as the raw product Q K^T (or, after soft-capping, already scaled).
`scale_log2` turns them into exponents of two. `row_max` is in the units of the scores. `row_sum` is
the sum of exp2(score * scale_log2 - max * scale_log2) over the columns of this thread. The
architecture defines how a row is spread over threads, and how exponentials are computed
(`RowArithmetic`).

Method: Milakov and Gimelshein 2018 (online normaliser), in the base-2 form of FlashAttention-2 (Dao
2023). The maximum may lag: while it has grown by less than `RESCALE_THRESHOLD` in the exponent, the
old maximum stays in use and the accumulator needs no rescaling (the idea of FlashAttention-4). If
registers suffice to keep the scores, exponentials use the old maximum before the tile's is found,
and their sum shows whether it was too old (`exponentials`, `overflowed`). Probabilities are then at
most 2**RESCALE_THRESHOLD, or the SUM_LIMITS of their dtype.

The exponent of a score is one multiply-add. Its addend, the bias of the row, is a rounded product.
A score_mod may return numbers of any magnitude, such as the -1e30 of additive masks; the rounding
error of such a bias is larger than the exponents themselves (`takes_any_size`). So the bias of a
row whose maximum is too far from 0 is NaN. The sums of the row are then NaN, too, and `overflowed`
treats them as an overflow. The second pass subtracts the maximum first, which is exact
(`exponentials` with `exactly`). For other maxima the rounding error in all exponents of the row is
known (`_residue`), and is removed from the LSE.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_mask_cute.core.exp2 import LN_2, LOG2_E, exp2_polynomial

# with it, an operation is not fused with another one
NEAREST = cute.math.RoundingMode.NEAREST_EVEN
RESCALE_THRESHOLD = 8.0
# Probabilities of a tile, rounded to these types, may sum up to this before their maximum counts as
# too old. For bf16, which has room, so large that a row whose first tile had few keys need not be
# renewed by its second one, and so small that products with large values stay finite.
SUM_LIMITS = {cutlass.BFloat16: 2.0**30, cutlass.Float16: 2.0**15}
# makes the exponential of any visible score infinite, but for those far below 0
OVERFLOWING_BIAS = 2.0**100
# Exponents of two from which on a maximum is too far from 0 for a rounded bias. Up to there,
# `_residue` is at most 1/16. Where a factor makes scores of what the softmax sees, the rounding of
# that product counts as well, which the bias knows nothing of: probabilities are right to 2**-12.
FAR, FAR_OF_PRODUCTS = 2.0**20, 2.0**12
# neighbouring columns of a row; some go by a polynomial where exponentials are scarce
PERIOD = 16
# independent chains per row for max and sum, so that their latency overlaps
CHAINS = 4


class ScoreScales(NamedTuple):
    """Factors that turn raw products Q K^T into exponents of two, through soft cap and score_mod.

    scale_in: of the raw product, None without these. scale_log2: of the input of the softmax.
    """

    scale_log2: Float32
    scale_in: Float32 | None
    cap: Float32 | None

    @staticmethod
    def create(
        softmax_scale: Float32, softcap: Float32 | None, has_score_mod: bool
    ) -> "ScoreScales":
        scale_log2, scale_in = softmax_scale * LOG2_E, None
        if const_expr(softcap is not None):
            scale_log2, scale_in = softcap * LOG2_E, softmax_scale / softcap
        elif const_expr(has_score_mod):
            scale_in = softmax_scale
        if const_expr(has_score_mod):
            scale_log2 = Float32(LOG2_E)
        return ScoreScales(scale_log2, scale_in, softcap)

    def bounded(self, product: Float32 | cute.TensorSSA) -> Float32 | cute.TensorSSA:
        """A raw product (a number or a vector) as a fraction of the cap, from -1 to 1."""
        return cute.math.tanh(product * self.scale_in, fastmath=True)

    @property
    def scale_mod(self) -> Float32:
        """Turns a raw product, or the result of `bounded`, into the score that score_mod gets."""
        return self.scale_in if self.cap is None else self.cap


BinaryOp = Callable[[Float32, Float32], Float32]


class ScoreArgs(NamedTuple):
    """Processing of the scores of a forward; sink: logits (heads_q,)."""

    scales: ScoreScales
    sink: cute.Tensor | None

    def multiplied(self, factor: float) -> "ScoreArgs":
        """The same scales with an additional factor in the softmax."""
        if factor == 1.0:
            return self
        scale_log2 = self.scales.scale_log2 * factor
        return self._replace(scales=self.scales._replace(scale_log2=scale_log2))


def _chained_reduce(values: Sequence[Float32], op: BinaryOp) -> Float32:
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


def quad_reduce(value: Float32, op: BinaryOp) -> Float32:
    """Combine a value over the four lanes that share an accumulator row."""
    value = op(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return op(value, cute.arch.shuffle_sync_bfly(value, offset=2))


def _add(a: Float32, b: Float32) -> Float32:
    return a + b


class RowResult(NamedTuple):
    """Final values of a row: the factor for its accumulator, its natural-log LSE, and the rounding
    error of the LSE (None unless scores may have any magnitude)."""

    factor: Float32
    lse: Float32
    lse_low: Float32 | None = None


class RowArithmetic(Protocol):
    """The architecture's part of a row's softmax."""

    def across(self, value: Float32, op: BinaryOp) -> Float32:
        """Combine a value over the threads that share a row."""
        ...

    def exponentials(
        self, scores: Sequence[Float32], scale_log2: Float32, bias: Float32
    ) -> list[Float32]:
        """exp2(score * scale_log2 + bias); too large an exponent gives more than SUM_LIMITS."""
        ...

    def total(self, values: Sequence[Float32]) -> Float32: ...


class QuadRows:
    """`RowArithmetic` of WGMMA's accumulators, which spread a row over four lanes.

    by_polynomial: how many of PERIOD exponentials are computed by `exp2_polynomial`, a divisor of
    PERIOD, or 0. This pays if scores need the special function unit, too, and it costs energy.
    """

    def __init__(self, by_polynomial: int = 0, coefficients: tuple[float, ...] = ()):
        self.stride = PERIOD // by_polynomial if by_polynomial else None
        self.coefficients = coefficients

    def across(self, value: Float32, op: BinaryOp) -> Float32:
        return quad_reduce(value, op)

    def exponentials(
        self, scores: Sequence[Float32], scale_log2: Float32, bias: Float32
    ) -> list[Float32]:
        results = []
        for c, score in enumerate(scores):
            exponent = cute.math.fma(score, scale_log2, bias)
            if self.stride is not None and c % self.stride == 0:
                results.append(exp2_polynomial(exponent, self.coefficients))
            else:
                results.append(cute.math.exp2(exponent, fastmath=True))
        return results

    def total(self, values: Sequence[Float32]) -> Float32:
        return _chained_reduce(values, _add)


def rounded_difference(a: Float32, b: Float32) -> Float32:
    """a - b of two rounded numbers.

    The assembler merges a product and a plain difference into one multiply-add. Far from 0 the
    resulting error is larger than the difference (docs/facts/compiler.md#arithmetic).
    """
    return cute.math.add(a, -b, rounding=NEAREST)


def _row(scores: cute.Tensor, r: int) -> list[Float32]:
    return [scores[r, c] for c in range(cute.size(scores, mode=[1]))]


QUAD_ROWS = QuadRows()


@dataclass(frozen=True)
class OnlineSoftmax:
    """Running maximum and sum of the accumulator rows a thread owns.

    row_max: the maximum in use (-inf while a row has seen nothing). row_limit: scores above it make
    row_max too old. row_bias: the addend that turns score * scale_log2 into the exponent. row_sum,
    row_largest: of this thread's scores. row_largest may exceed row_max; None: it is not wanted.
    factor: turns what the softmax gets into scores in natural units, if these may have any
    magnitude; None: it gets scaled products. rows_alone: the bits of a row do not depend on the
    other rows of its warp.
    """

    scale_log2: Float32
    row_max: cute.Tensor
    row_limit: cute.Tensor
    row_bias: cute.Tensor
    row_sum: cute.Tensor
    row_largest: cute.Tensor | None
    arithmetic: cutlass.Constexpr[RowArithmetic]
    sum_limit: cutlass.Constexpr[float]
    factor: cutlass.Constexpr[float | None]
    rows_alone: cutlass.Constexpr[bool] = False

    @staticmethod
    def create(
        scale_log2: Float32,
        num_rows: int,
        dtype: type[cutlass.Numeric],
        arithmetic: RowArithmetic = QUAD_ROWS,
        factor: float | None = None,
        keeps_largest: bool = False,
        rows_alone: bool = False,
    ) -> "OnlineSoftmax":
        """Uninitialised state; dtype is what probabilities are rounded to."""
        state = (cute.make_rmem_tensor((num_rows,), Float32) for _ in range(4))
        largest = cute.make_rmem_tensor((num_rows,), Float32) if keeps_largest else None
        return OnlineSoftmax(
            scale_log2, *state, largest, arithmetic, SUM_LIMITS[dtype], factor, rows_alone
        )

    @property
    def takes_any_size(self) -> bool:
        return self.factor is not None

    @property
    def num_rows(self) -> int:
        return cute.size(self.row_sum)

    @cute.jit
    def start(self, scores: cute.Tensor) -> None:
        """Restart rows with their first tile of scores (rows, cols)."""
        for r in cutlass.range_constexpr(self.num_rows):
            largest = _chained_reduce(_row(scores, r), cute.arch.fmax)
            self._adopt(r, self.arithmetic.across(largest, cute.arch.fmax))
            self.row_sum[r] = Float32(0.0)
            if const_expr(self.row_largest is not None):
                self.row_largest[r] = largest

    @cute.jit
    def clear(self) -> None:
        """Restart rows that have seen nothing; `renew` takes the maximum of their first tile."""
        for r in cutlass.range_constexpr(self.num_rows):
            self._adopt(r, Float32(-Float32.inf))
            self.row_sum[r] = Float32(0.0)
            if const_expr(self.row_largest is not None):
                self.row_largest[r] = Float32(-Float32.inf)

    @cute.jit
    def see(self, scores: cute.Tensor) -> None:
        """Record the largest of scores (rows, cols), if wanted; calling it twice does no harm."""
        if const_expr(self.row_largest is not None):
            for r in cutlass.range_constexpr(self.num_rows):
                largest = _chained_reduce(_row(scores, r), cute.arch.fmax)
                self.row_largest[r] = cute.arch.fmax(self.row_largest[r], largest)

    def largest(self) -> tuple:
        """The largest score of each row so far, in natural units; -inf if it has seen nothing."""
        results = []
        for r in range(self.num_rows):
            value = self.arithmetic.across(self.row_largest[r], cute.arch.fmax)
            if self.takes_any_size:
                results.append(self.score(value))
            else:
                results.append(value * (self.scale_log2 * LN_2))
        return tuple(results)

    def tile_max(self, scores: cute.Tensor) -> tuple:
        return tuple(_chained_reduce(_row(scores, r), cute.arch.fmax) for r in range(self.num_rows))

    @cute.jit
    def exponentials(
        self,
        scores: cute.Tensor,
        keep: cutlass.Constexpr,
        exactly: cutlass.Constexpr[bool] = False,
    ) -> tuple:
        """This thread's sum of probabilities per row, with the maximum in use; scores stay.

        keep(r, c, p, q): receives the probabilities of columns c and c + 1 of row r. exactly: also
        for rows with a maximum far from 0, if scores may have any magnitude.
        """
        sums = []
        for r in cutlass.range_constexpr(self.num_rows):
            probs = self._row_exponentials(scores, r, exactly)
            for c in cutlass.range_constexpr(0, len(probs), 2):
                keep(r, c, probs[c], probs[c + 1])
            sums.append(self.arithmetic.total(probs))
        return tuple(sums)

    def overflowed(self, sums: tuple) -> tuple:
        """Per row, whether `exponentials` used an unusable maximum: too old, none where there is
        one, or one far from 0.

        Rows that had seen nothing before scores far below 0 are found by `is_empty` instead.
        """
        return tuple((total < self.sum_limit) == Boolean(False) for total in sums)

    def is_empty(self) -> tuple:
        return tuple(self.row_max[r] == -Float32.inf for r in range(self.num_rows))

    def non_empty_of(self, flags: tuple) -> tuple:
        """Per row, whether its flag is set and it has seen something."""
        return tuple(flag & (self.row_max[r] != -Float32.inf) for r, flag in enumerate(flags))

    @cute.jit
    def add(self, sums: tuple) -> None:
        for r in cutlass.range_constexpr(self.num_rows):
            self.row_sum[r] = self.row_sum[r] + sums[r]

    def outgrown(self, tile_max: tuple) -> tuple:
        """Per row, whether it needs a newer maximum before `accumulate`."""
        return tuple(tile_max[r] > self.row_limit[r] for r in range(self.num_rows))

    @cute.jit
    def renew(self, tile_max: tuple, is_old: tuple) -> tuple:
        """Take newer maxima for rows in which a thread found the old one too old.

        Returns the factor per row for the sums accumulated with the old maximum, 1 if there are
        none. It depends only on the row's own scores.
        """
        factors = []
        for r in cutlass.range_constexpr(self.num_rows):
            vote = cutlass.select_(is_old[r], Float32(1.0), Float32(0.0))
            is_renewed = self.arithmetic.across(vote, cute.arch.fmax) > 0.0
            old_max = self.row_max[r]
            new_max = self.arithmetic.across(cute.arch.fmax(tile_max[r], old_max), cute.arch.fmax)
            self._adopt(r, cutlass.select_(is_renewed, new_max, old_max))
            factor = self._factor_from(old_max, r)
            if const_expr(self.takes_any_size):
                old_max = self.score(old_max)
            was_non_empty = old_max != -Float32.inf
            factor = cutlass.select_(is_renewed & was_non_empty, factor, Float32(1.0))
            self.row_sum[r] = self.row_sum[r] * factor
            factors.append(factor)
        return tuple(factors)

    def _factor_from(self, other_max: Float32, r: int) -> Float32:
        """The factor of sums with another maximum of row r, not above the one in use."""
        if self.takes_any_size:
            return self._factor_between(other_max, self.row_max[r])
        exponent = cute.math.fma(other_max, self.scale_log2, self.row_bias[r])
        return cute.math.exp2(exponent, fastmath=True)

    def differs_from(self, maxima: tuple) -> tuple:
        """Per row, whether another maximum is not the one in use."""
        return tuple(other != self.row_max[r] for r, other in enumerate(maxima))

    def join(self, maxima: tuple) -> tuple:
        """Take other maxima where they are larger. Returns factors at most 1 per row: for sums with
        the maximum that was in use, and for sums with the other one."""
        own = self.renew(maxima, tuple(x > self.row_max[r] for r, x in enumerate(maxima)))
        others = []
        for r, other in enumerate(maxima):
            factor = self._factor_from(other, r)
            others.append(cutlass.select_(other == self.row_max[r], Float32(1.0), factor))
        return own, tuple(others)

    @cute.jit
    def accumulate(self, scores: cute.Tensor) -> None:
        """Replace scores by probabilities and add them to the sums; hidden scores (-inf) give 0."""
        if const_expr(not self.takes_any_size):
            self._accumulate(scores, False)
        elif any_in_warp(self.far()):
            self._accumulate(scores, True)
        else:
            self._accumulate(scores, False)

    @cute.jit
    def _accumulate(self, scores: cute.Tensor, exactly: cutlass.Constexpr[bool]) -> None:
        for r in cutlass.range_constexpr(self.num_rows):
            probs = self._row_exponentials(scores, r, exactly)
            for c in cutlass.range_constexpr(len(probs)):
                scores[r, c] = probs[c]
            self.row_sum[r] = self.row_sum[r] + self.arithmetic.total(probs)

    def _row_exponentials(self, scores: cute.Tensor, r: int, exactly: bool) -> list[Float32]:
        row, scale_log2, bias = _row(scores, r), self.scale_log2, self.row_bias[r]
        if exactly:
            largest = self.score(self.row_max[r])
            # where all scores are hidden so far, any number will do
            largest = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
            differences = [rounded_difference(self.score(x), largest) for x in row]
            exact = Float32(LOG2_E), self._residue(self.row_max[r])
            if self.rows_alone:
                # a row that is near is not computed in another way because its neighbour is far
                is_far = self._is_far(self.row_max[r])
                row = [cutlass.select_(is_far, *x) for x in zip(differences, row, strict=True)]
                scale_log2 = cutlass.select_(is_far, exact[0], scale_log2)
                bias = cutlass.select_(is_far, exact[1], bias)
            else:
                row, (scale_log2, bias) = differences, exact
        return self.arithmetic.exponentials(row, scale_log2, bias)

    def _adopt(self, r: int, row_max: Float32) -> None:
        # In a row that has seen nothing, hidden scores get exponents of -inf whatever the bias, and
        # the first visible one must not go unnoticed.
        self.row_max[r] = row_max
        self.row_limit[r] = row_max + cute.arch.rcp_approx(self.scale_log2) * RESCALE_THRESHOLD
        self.row_bias[r] = cutlass.select_(
            row_max == -Float32.inf, Float32(OVERFLOWING_BIAS), -(row_max * self.scale_log2)
        )
        if const_expr(self.takes_any_size):
            is_far = self._is_far(row_max)
            self.row_bias[r] = cutlass.select_(is_far, Float32(float("nan")), self.row_bias[r])

    # -- scores of any size ---------------------------------------------------------------------

    def score(self, value: Float32) -> Float32:
        """An input of the softmax in natural units, rounded as a score_mod rounds it."""
        if self.factor == 1.0:
            return value
        # a plain product might become a multiply-add with what follows
        return cute.math.mul(value, Float32(self.factor), rounding=NEAREST)

    def far(self) -> tuple:
        """Per row, whether its maximum is so far from 0 that `exponentials` must be exact."""
        return tuple(self._is_far(self.row_max[r]) for r in range(self.num_rows))

    def _is_near(self, row_max: Float32) -> Boolean:
        """Whether a rounded bias is accurate enough; false for -inf."""
        # a power of two multiplies exactly
        is_exact = math.frexp(self.factor)[0] == 0.5
        exponent = cute.math.abs(row_max * self.scale_log2)
        return exponent < (FAR if is_exact else FAR_OF_PRODUCTS)

    def _is_far(self, row_max: Float32) -> Boolean:
        return (self._is_near(row_max) == Boolean(False)) & (row_max != -Float32.inf)

    def _residue(self, row_max: Float32) -> Float32:
        """The rounding error of the bias in the exponents of a row with this maximum, to base 2."""
        residue = cute.math.fma(row_max, self.scale_log2, -(row_max * self.scale_log2))
        return cutlass.select_(self._is_near(row_max), residue, Float32(0.0))

    def _factor_between(self, old_max: Float32, new_max: Float32) -> Float32:
        """The factor for sums with the old maximum: 1 if it stays, any number if it was -inf."""
        residue = self._residue(new_max) - self._residue(old_max)
        difference = self.score(old_max) - self.score(new_max)
        return cute.math.exp2(cute.math.fma(difference, Float32(LOG2_E), residue), fastmath=True)

    def _finalize_any_size(self, r: int, sinks: tuple | None) -> RowResult:
        """As `finalize`, in natural units: LSE is accurate to its last bit."""
        total = self.arithmetic.across(self.row_sum[r], _add)
        largest, residue = self.score(self.row_max[r]), self._residue(self.row_max[r])
        empty, shift = largest == -Float32.inf, Float32(1.0)
        if const_expr(sinks is not None):
            own = largest
            largest = cute.arch.fmax(own, sinks[r])
            largest = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
            exponent = cute.math.fma(own - largest, Float32(LOG2_E), -residue)
            shift, residue = cute.math.exp2(exponent, fastmath=True), Float32(0.0)
            of_sink = cute.math.exp2((sinks[r] - largest) * LOG2_E, fastmath=True)
            total = cute.math.fma(total, shift, of_sink)
        log_total = (cute.math.log2(total, fastmath=True) - residue) * LN_2
        lse = largest + log_total
        factor = cutlass.select_(empty, Float32(0.0), shift * cute.arch.rcp_approx(total))
        if const_expr(sinks is None):
            lse = cutlass.select_(empty, -Float32.inf, lse)
        # the maximum is the larger one where this matters
        low = cutlass.select_(lse == -Float32.inf, Float32(0.0), (largest - lse) + log_total)
        return RowResult(factor, lse, low)

    @cute.jit
    def finalize(self, sinks: tuple | None) -> tuple:
        """Returns a `RowResult` per row. sinks: a logit per row, or None."""
        if const_expr(self.takes_any_size):
            return tuple(self._finalize_any_size(r, sinks) for r in range(self.num_rows))
        results = []
        for r in cutlass.range_constexpr(cute.size(self.row_sum)):
            total = self.arithmetic.across(self.row_sum[r], _add)
            max_log2 = self.row_max[r] * self.scale_log2
            empty = self.row_max[r] == -Float32.inf
            shift = Float32(1.0)
            if const_expr(sinks is not None):
                sink_log2 = sinks[r] * LOG2_E
                new_max = cute.arch.fmax(max_log2, sink_log2)
                new_max = cutlass.select_(new_max == -Float32.inf, Float32(0.0), new_max)
                shift = cute.math.exp2(max_log2 - new_max, fastmath=True)
                total = cute.math.fma(
                    total, shift, cute.math.exp2(sink_log2 - new_max, fastmath=True)
                )
                lse = (new_max + cute.math.log2(total, fastmath=True)) * LN_2
            else:
                lse = (max_log2 + cute.math.log2(total, fastmath=True)) * LN_2
                lse = cutlass.select_(empty, -Float32.inf, lse)
            factor = cutlass.select_(empty, Float32(0.0), shift * cute.arch.rcp_approx(total))
            results.append(RowResult(factor, lse))
        return tuple(results)


def round_pair(p: Float32, q: Float32, dtype: type[cutlass.Numeric]) -> Int32:
    """Two 16-bit values in a word, the first in its lower half.

    Written as PTX: the compiler would move its own conversion behind the next join
    (docs/facts/compiler.md#a-conversion-in-both-arms-moves-behind-the-join).
    """
    name = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{name}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Int32],
        read_only_args=[q, p],
    )


def either(flags: tuple, others: tuple) -> tuple:
    return tuple(a | b for a, b in zip(flags, others, strict=True))


def any_in_warp(flags: tuple) -> Boolean:
    """Whether a flag is set in any thread of this warp; a warp-uniform value."""
    found = Boolean(False)
    for flag in flags:
        found = found | flag
    return cute.arch.vote_any_sync(found)


def differ_from_one(factors: tuple) -> Boolean:
    """Whether any row of this warp has a factor other than 1; a warp-uniform value. Not a test of
    the flag that was asked before (docs/facts/compiler.md#two-tests-of-one-flag-are-joined)."""
    return any_in_warp(tuple(factor != 1.0 for factor in factors))


@cute.jit
def rescale(acc: cute.Tensor, factors: tuple) -> None:
    """Multiply the rows of acc (rows, cols) by their factors."""
    for r in cutlass.range_constexpr(cute.size(acc, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            acc[r, c] = acc[r, c] * factors[r]
