"""Exponentials on the multiply-add pipes, for kernels limited by the special function unit.

An SM computes 16 exponentials a clock, and its multiply-add pipes have room for more (the idea of
FlashAttention-4). 2^x is 2^n 2^f with n the floor of x (Cody and Waite). n is found by adding,
rounding down, a number so large that its last bit is worth 1. It joins the result by adding
exponents. 2^f for 0 <= f < 1 is a polynomial that is 1 at 0, so powers of two are exact.
"""

from collections.abc import Sequence
from typing import Protocol

import cutlass.cute as cute
from cutlass import Float32

Numbers = tuple[Float32, ...]

# between base e and base 2, of whose powers there is an instruction
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453

# c1, c2, ... of 1 + c1 f + c2 f^2 + ... with the least relative error (Remez exchange in fp64;
# rounded to fp32). Of degree 3, 8.6e-5: 1/20 of half an ulp of bf16, a third of that of fp16. Of
# degree 5, 1.5e-7 as it is evaluated, where the instruction for 2^x has 2.4e-7 (PTX ISA, ex2).
DEGREE_3 = (0.6951167583465576, 0.22764499485492706, 0.07706703990697861)
DEGREE_5 = (
    0.6931512951850891,
    0.24016444385051727,
    0.05579991266131401,
    0.009017030708491802,
    0.0018671300495043397,
)
# adding it leaves the floor of a number below 2^22 in the last bits
ROUNDER = 2.0**23 + 2.0**22
# exponents are held to what a float can be scaled by; the upper end is beyond what probabilities of
# a tile may sum up to
LOWEST, HIGHEST = -127.0, 127.0


class Arithmetic(Protocol):
    """Operations on a few numbers at a time."""

    def floor_add(self, a: Numbers, b: float) -> Numbers:
        """a + b, rounded down."""
        ...

    def subtract(self, a: Numbers, b: Numbers) -> Numbers: ...

    def fma(self, a: Numbers, b: Numbers, c: Numbers) -> Numbers: ...


class Single:
    """One number per instruction."""

    def floor_add(self, a: Numbers, b: float) -> Numbers:
        down = cute.math.RoundingMode.DOWN
        return tuple(cute.math.add(x, Float32(b), rounding=down) for x in a)

    def subtract(self, a: Numbers, b: Numbers) -> Numbers:
        return tuple(x - y for x, y in zip(a, b, strict=True))

    def fma(self, a: Numbers, b: Numbers, c: Numbers) -> Numbers:
        return tuple(cute.math.fma(x, y, z) for x, y, z in zip(a, b, c, strict=True))


class Packed:
    """Two numbers per instruction, from Blackwell on."""

    def floor_add(self, a: Numbers, b: float) -> Numbers:
        return cute.arch.add_packed_f32x2(a, (b, b), rnd="rm")

    def subtract(self, a: Numbers, b: Numbers) -> Numbers:
        return cute.arch.sub_packed_f32x2(a, b)

    def fma(self, a: Numbers, b: Numbers, c: Numbers) -> Numbers:
        return cute.arch.fma_packed_f32x2(a, b, c)


SINGLE, PACKED = Single(), Packed()


def exp2_polynomial(
    exponents: Numbers, coefficients: Sequence[float], arithmetic: Arithmetic
) -> Numbers:
    """2 ** x of a few exponents; exactly 0 for -inf, a huge number for overflow and for NaN."""

    def each(constant: float) -> Numbers:
        return tuple(Float32(constant) for _ in exponents)

    x = tuple(
        cute.arch.fmin(cute.arch.fmax(e, LOWEST, nan=True), HIGHEST, nan=True) for e in exponents
    )
    shifted = arithmetic.floor_add(x, ROUNDER)
    fraction = arithmetic.subtract(x, arithmetic.subtract(shifted, each(ROUNDER)))
    power = each(coefficients[-1])
    for coefficient in (*coefficients[-2::-1], 1.0):
        power = arithmetic.fma(power, fraction, each(coefficient))
    return tuple(_scaled(p, n) for p, n in zip(power, shifted, strict=True))


def _scaled(power: Float32, shifted: Float32) -> Float32:
    """power * 2 ** n, where n is in the last bits of `shifted`."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 n, p; mov.b32 n, {$r0}; mov.b32 p, {$r1}; shl.b32 n, n, 23; "
        "add.s32 p, p, n; mov.b32 {$w0}, p; }",
        write_only_types=[Float32],
        read_only_args=[shifted, power],
    )
