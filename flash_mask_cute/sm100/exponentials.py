"""Exponentials of Blackwell's softmax: packed fp32, and a share of them on the multiply-add pipes.

An SM computes 16 exponentials a clock, which is too few for the products of a score tile: a share
of them is evaluated by a polynomial instead (the idea of FlashAttention-4). 2^x is 2^n 2^f with n
the floor of x (Cody and Waite): n is found by adding a number so large that its last bit is worth
1, rounding down, and joins the result as a sum of exponents; 2^f for 0 <= f < 1 is a polynomial of
degree 3 that is 1 at 0, so that powers of two are exact.
"""

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Float32

from flash_mask_cute.core.softmax import BinaryOp

# 1 + c1 f + c2 f^2 + c3 f^3 with the least relative error, 8.6e-5 (Remez exchange in fp64; rounded
# to fp32): 1/20 of half an ulp of bf16, a third of that of fp16
COEFFICIENTS = (0.6951167583465576, 0.22764499485492706, 0.07706703990697861)
# adding it leaves the floor of a number below 2^22 in the last bits
ROUNDER = 2.0**23 + 2.0**22
# exponents are held to what a float can be scaled by; the upper end is beyond SUM_LIMITS
LOWEST, HIGHEST = -127.0, 127.0
# of this many neighbouring pairs of a row, these go by the polynomial
PERIOD = 16
BY_POLYNOMIAL = (2, 7, 12)
# chains of sums, in pairs
CHAINS = 4

Pair = tuple[Float32, Float32]


class WholeRows:
    """`RowArithmetic` where a thread has all columns of a row.

    uses_polynomial: whether a share of the exponentials is computed by `exp2_polynomial`.
    """

    def __init__(self, uses_polynomial: bool):
        self.uses_polynomial = uses_polynomial

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
            if self.uses_polynomial and i % PERIOD in BY_POLYNOMIAL:
                results += exp2_polynomial(exponents)
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


def _pairs(values: Sequence) -> list[tuple]:
    return list(zip(values[::2], values[1::2], strict=True))


def exp2_polynomial(exponents: Pair) -> Pair:
    """2 ** x of two exponents; exactly 0 for -inf, huge for what is too large, and for NaN."""
    c1, c2, c3 = ((c, c) for c in COEFFICIENTS)
    x = tuple(
        cute.arch.fmin(cute.arch.fmax(e, LOWEST, nan=True), HIGHEST, nan=True) for e in exponents
    )
    shifted = cute.arch.add_packed_f32x2(x, (ROUNDER, ROUNDER), rnd="rm")
    floor = cute.arch.sub_packed_f32x2(shifted, (ROUNDER, ROUNDER))
    fraction = cute.arch.sub_packed_f32x2(x, floor)
    power = cute.arch.fma_packed_f32x2(fraction, c3, c2)
    power = cute.arch.fma_packed_f32x2(power, fraction, c1)
    power = cute.arch.fma_packed_f32x2(power, fraction, (1.0, 1.0))
    return tuple(_scaled(p, n) for p, n in zip(power, shifted, strict=True))


def _scaled(power: Float32, shifted: Float32) -> Float32:
    """power * 2 ** n, where n is in the last bits of `shifted`."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 n, p; mov.b32 n, {$r0}; mov.b32 p, {$r1}; shl.b32 n, n, 23; "
        "add.s32 p, p, n; mov.b32 {$w0}, p; }",
        write_only_types=[Float32],
        read_only_args=[shifted, power],
    )
