"""Exponentials of Blackwell's softmax: packed fp32, some of them by polynomials (`core.exp2`)."""

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Float32

from flash_mask_cute.core.exp2 import (
    CONTINUOUS_3,
    DEGREE_3,
    exp2_of_line,
    exp2_of_pair,
    saturating_line,
)
from flash_mask_cute.core.softmax import BinaryOp
from flash_mask_cute.sm100 import umma

# chains of sums, in pairs
CHAINS = 4


class WholeRows:
    """`RowArithmetic` for threads that have all columns of a row, for a chunk of them.

    by_polynomial: pairs of the chunk that are computed by a polynomial. saturates: by
    `exp2_of_line`, if there are registers for it, otherwise by `exp2_of_pair`.
    """

    def __init__(self, by_polynomial: Sequence[int] = (), saturates: bool = True):
        self.by_polynomial, self.saturates = by_polynomial, saturates

    def across(self, value: Float32, op: BinaryOp) -> Float32:
        return value

    def exponentials(
        self, scores: Sequence[Float32], scale_log2: Float32, bias: Float32
    ) -> list[Float32]:
        results = []
        for i, scores_pair in enumerate(_pairs(scores)):
            if i in self.by_polynomial and self.saturates:
                line = saturating_line(scale_log2, bias)
                results += exp2_of_line(scores_pair, line, CONTINUOUS_3)
                continue
            exponents = cute.arch.fma_packed_f32x2(
                scores_pair, (scale_log2, scale_log2), (bias, bias)
            )
            if i in self.by_polynomial:
                results += exp2_of_pair(exponents, DEGREE_3)
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


def spread(polynomial: int, columns: int, num_chunks: int) -> list[tuple[int, ...]]:
    """Pairs of each chunk for so many exponentials: at equal distances in the first `columns`."""
    pairs, count = columns // 2, polynomial // 2
    places = {(2 * i + 1) * pairs // (2 * count) for i in range(count)}
    of_chunk = umma.CHUNK // 2
    return [
        tuple(i for i in range(of_chunk) if chunk * of_chunk + i in places)
        for chunk in range(num_chunks)
    ]


def _pairs(values: Sequence) -> list[tuple]:
    return list(zip(values[::2], values[1::2], strict=True))
