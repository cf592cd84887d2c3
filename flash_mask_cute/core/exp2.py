"""Exponentials on the multiply-add pipes, for kernels limited by the special function unit.

An SM computes 16 exponentials a clock, and its multiply-add pipes have room for more (the idea of
FlashAttention-4). 2^x is 2^n 2^f with n the floor of x (Cody and Waite). n is found by adding,
rounding down, a number so large that its last bit is worth 1. It joins the result by adding
exponents. 2^f for 0 <= f < 1 is a polynomial that is 1 at 0, so powers of two are exact.
"""

from collections.abc import Sequence
from typing import TypeAlias

import cutlass.cute as cute
from cutlass import Float32

# between base e and base 2, of whose powers there is an instruction
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453

# c1, c2, ... of 1 + c1 f + c2 f^2 + ... with the least relative error (Remez exchange in fp64;
# rounded to fp32). Of degree 3, 8.6e-5: 1/20 of half an ulp of bf16, a third of that of fp16. Of
# degree 5, 1.5e-7 as it is evaluated, where the instruction for 2^x has 2.4e-7 (PTX ISA, ex2).
DEGREE_3 = (0.6951167583465576, 0.22764499485492706, 0.07706703990697861)
# of those that are 2 at 1, too: 1.03e-4, and 2^0 is right where a rounded exponent is just below 0
CONTINUOUS_3 = (0.6954243183135986, 0.226307675242424, 0.07826796919107437)
DEGREE_5 = (
    0.6931512951850891,
    0.24016444385051727,
    0.05579991266131401,
    0.009017030708491802,
    0.0018671300495043397,
)
# adding it leaves the floor of a number below 2^22 in the last bits
ROUNDER = 2.0**23 + 2.0**22
# exponents are held to what a float can be scaled by
LOWEST, HIGHEST = -127.0, 127.0
# of a saturating multiply-add, whose result 0 stands for the exponent TOP, of an infinite power,
# and 1 for LOWEST
TOP = 128.0
SPAN = TOP - LOWEST


def exp2_polynomial(exponent: Float32, coefficients: Sequence[float]) -> Float32:
    """2 ** x; exactly 0 for -inf, a huge number for overflow and for NaN."""
    x = cute.arch.fmin(cute.arch.fmax(exponent, LOWEST, nan=True), HIGHEST, nan=True)
    shifted = cute.math.add(x, Float32(ROUNDER), rounding=cute.math.RoundingMode.DOWN)
    fraction = x - (shifted - Float32(ROUNDER))
    power = Float32(coefficients[-1])
    for coefficient in (*coefficients[-2::-1], 1.0):
        power = cute.math.fma(power, fraction, Float32(coefficient))
    return _scaled(power, shifted)


Pair: TypeAlias = tuple[Float32, Float32]


def exp2_of_pair(exponents: Pair, coefficients: Sequence[float]) -> Pair:
    """`exp2_polynomial` of two numbers, from Blackwell on, which has instructions for two."""
    x = tuple(
        cute.arch.fmin(cute.arch.fmax(e, LOWEST, nan=True), HIGHEST, nan=True) for e in exponents
    )
    rounder = (Float32(ROUNDER),) * 2
    shifted = cute.arch.add_packed_f32x2(x, rounder, rnd="rm")
    rounded = cute.arch.sub_packed_f32x2(shifted, rounder)
    return _pair_power(cute.arch.sub_packed_f32x2(x, rounded), shifted, coefficients)


def saturating_line(scale: Float32, bias: Float32) -> Pair:
    """Factor and addend of `exp2_of_line`, for exponents number * scale + bias."""
    return scale * Float32(-1 / SPAN), cute.math.fma(bias, Float32(-1 / SPAN), Float32(TOP / SPAN))


def exp2_of_line(numbers: Pair, line: Pair, coefficients: Sequence[float]) -> Pair:
    """2 ** (number * scale + bias) of two numbers. line: `saturating_line(scale, bias)`.

    Exactly 0 for -inf, infinity for overflow and for NaN: a saturating multiply-add holds an
    exponent to the range, and is 0 for NaN. It rounds an exponent by up to 1.6e-5. So the
    polynomial is to be continuous.
    """
    held = tuple(_saturated_fma(number, *line) for number in numbers)
    span, top = (Float32(-SPAN),) * 2, (Float32(ROUNDER + TOP),) * 2
    shifted = cute.arch.fma_packed_f32x2(held, span, top, rnd="rm")
    # exact but for the last step
    rest = cute.arch.sub_packed_f32x2(top, shifted)
    return _pair_power(cute.arch.fma_packed_f32x2(held, span, rest), shifted, coefficients)


def _pair_power(fraction: Pair, shifted: Pair, coefficients: Sequence[float]) -> Pair:
    """2 ** (n + fraction), where n is in the last bits of `shifted`."""
    power = (Float32(coefficients[-1]),) * 2
    for coefficient in (*coefficients[-2::-1], 1.0):
        power = cute.arch.fma_packed_f32x2(power, fraction, (Float32(coefficient),) * 2)
    return _scaled(power[0], shifted[0]), _scaled(power[1], shifted[1])


def _saturated_fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c from 0 to 1, and 0 for NaN."""
    return cute.arch.inline_ptx(
        "fma.rn.sat.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


def _scaled(power: Float32, shifted: Float32) -> Float32:
    """power * 2 ** n, where n is in the last bits of `shifted`."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 n, p; mov.b32 n, {$r0}; mov.b32 p, {$r1}; shl.b32 n, n, 23; "
        "add.s32 p, p, n; mov.b32 {$w0}, p; }",
        write_only_types=[Float32],
        read_only_args=[shifted, power],
    )
