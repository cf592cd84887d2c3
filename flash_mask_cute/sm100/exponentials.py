"""Exponentials of Blackwell's softmax: packed fp32, with a share computed on the multiply-add
pipes.

An SM computes 16 exponentials a clock, too few for the products of a score tile. So a share of them
is evaluated by a polynomial instead (`core/exp2.py`).
"""

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Float32

from flash_mask_cute.core.exp2 import DEGREE_3, PACKED, exp2_polynomial
from flash_mask_cute.core.softmax import BinaryOp

# some of so many neighbouring pairs of a row go by the polynomial
PERIOD = 16
# chains of sums, in pairs
CHAINS = 4


class WholeRows:
    """`RowArithmetic` for threads that have all columns of a row.

    polynomial: of 128 exponentials, so many are computed by `exp2_polynomial`.
    """

    def __init__(self, polynomial: int):
        self.by_polynomial = spread(polynomial // (128 // PERIOD))

    def across(self, value: Float32, op: BinaryOp) -> Float32:
        return value

    def exponentials(
        self, scores: Sequence[Float32], scale_log2: Float32, bias: Float32
    ) -> list[Float32]:
        results = []
        for i, scores_pair in enumerate(_pairs(scores)):
            exponents = cute.arch.fma_packed_f32x2(
                scores_pair, (scale_log2, scale_log2), (bias, bias)
            )
            if i % PERIOD in self.by_polynomial:
                results += exp2_polynomial(exponents, DEGREE_3, PACKED)
            else:
                results += [cute.math.exp2(x, fastmath=True) for x in exponents]
        return results

    def total(self, values: Sequence[Float32]) -> Float32:
        pairs = _pairs(values)
        sums = pairs[:CHAINS]
        for i, pair in enumerate(pairs[CHAINS:]):
            sums[i % CHAINS] = cute.arch.add_packed_f32x2(sums[i % CHAINS], pair)
        while len(sums) > 1:
            sums = [cute.arch.add_packed_f32x2(a, b) for a, b in _pairs(sums)]
        return sums[0][0] + sums[0][1]


def spread(count: int) -> tuple[int, ...]:
    """So many of PERIOD places, at equal distances."""
    step = PERIOD // max(count, 1)
    return tuple(range(step // 2, PERIOD, step))[:count]


def _pairs(values: Sequence) -> list[tuple]:
    return list(zip(values[::2], values[1::2], strict=True))
