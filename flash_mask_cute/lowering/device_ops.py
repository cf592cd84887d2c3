"""torch operators on scalars of the DSL, which the text of lowered mods calls.

Operands have one dtype unless stated otherwise, which the result has too; Python numbers may
replace some of them. The code is straight-line: both sides of a choice are computed. Where torch
and CuTe agree, lowered text uses the operator itself.
"""

import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, Uint64
from cutlass._mlir import ir

from flash_mask_cute.core.exp2 import LOG2_E
from flash_mask_cute.mods.derivative import detached as detached


def where(condition: Any, x: Any, y: Any) -> Any:
    """x or y; both have one dtype."""
    dtype = _dtype(x, y)
    return dtype(cutlass.select_(Boolean(condition), dtype(x), dtype(y)))


def _dtype(*numbers: Any) -> Any:
    """The dtype of the first argument that is no Python number."""
    return next(type(x) for x in numbers if isinstance(x, cutlass.Numeric))


# -- indices of captured tensors ----------------------------------------------------------------


def inside(table: Any, dimension: int, index: Any) -> Any:
    """A non-negative index. Kernels read the last element for one past the end; on the CPU the read
    is checked."""
    return index if table.check is not None else table.last_at_most(dimension, index)


def below(table: Any, dimension: int, extent: int, index: Any) -> Any:
    """A non-negative index less than `extent`, which the host has checked."""
    return index


def wrapped(table: Any, dimension: int, index: Any) -> Any:
    """As `inside`, but a negative index counts from the end."""
    index = index if isinstance(index, cutlass.Numeric) else Int32(index)
    extent = type(index)(cute.size(table, mode=[dimension]))
    index = where(index < 0, index + extent, index)
    if table.check is not None:
        return index
    return cutlass.max(cutlass.min(index, extent - 1), 0)


# -- integers -----------------------------------------------------------------------------------


def floor_divide(x: Any, y: Any) -> Any:
    """Floor division of integers. A divisor of 0 becomes 1: an error would end the process."""
    if not isinstance(y, cutlass.Numeric):
        return -x if y == -1 else x // y
    is_safe = (y != 0) & (y != -1)
    quotient = type(y)(x) // where(is_safe, y, 1)
    return where(y == -1, -type(y)(x), quotient)


def nonneg_quotient(x: Any, y: int) -> Any:
    """A non-negative integer divided by a known positive one, without instructions for signs."""
    if not isinstance(x, cutlass.Numeric):
        return x // y
    unsigned = Uint64 if x.width == 64 else Uint32
    return type(x)(unsigned(x) // unsigned(y))


def nonneg_remainder(x: Any, y: int) -> Any:
    """Remainder of `nonneg_quotient`."""
    return x - nonneg_quotient(x, y) * y


def trunc_divide(x: Any, y: Any) -> Any:
    """Division of integers, rounded towards zero."""
    dtype = _dtype(x, y)
    quotient = floor_divide(x, y)
    is_below = (quotient < 0) & (quotient * y != x)
    return where(is_below, quotient + 1, dtype(quotient))


def remainder(x: Any, y: Any) -> Any:
    """Remainder of integers, with the sign of the divisor; CuTe's `%` has that of the dividend."""
    return x - floor_divide(x, y) * y


def trunc_remainder(x: Any, y: Any) -> Any:
    """Remainder of integers, with the sign of the dividend."""
    return x - trunc_divide(x, y) * y


def shift_left(x: Any, count: Any) -> Any:
    """Left shift; 0 if the count is negative or not less than the bits of the dtype."""
    dtype, count, is_inside = _shift(x, count)
    return where(is_inside, dtype(x) << count, 0)


def shift_right(x: Any, count: Any) -> Any:
    """Right shift; only copies of the sign if the count is negative or not less than the bits."""
    dtype, count, is_inside = _shift(x, count)
    return dtype(x) >> where(is_inside, count, dtype.width - 1)


def _shift(x: Any, count: Any) -> tuple[Any, Any, Any]:
    dtype = _dtype(x, count)
    count = dtype(count)
    is_inside = (count >= 0) & (count < dtype.width)
    return dtype, where(is_inside, count, 0), is_inside


def whole_power(x: Any, exponent: int) -> Any:
    """Power with a known integer exponent of at least 1."""
    power = x if exponent % 2 else None
    square = x
    while exponent := exponent // 2:
        square = square * square
        if exponent % 2:
            power = square if power is None else power * square
    return power


def sign(x: Any) -> Any:
    dtype = _dtype(x)
    return where(x > 0, dtype(1), where(x < 0, dtype(-1), dtype(0)))


# -- numbers of either kind ---------------------------------------------------------------------


def maximum(x: Any, y: Any) -> Any:
    """The larger number, or NaN if either is NaN."""
    return _chosen(x, y, lambda a, b: a > b, cutlass.max)


def minimum(x: Any, y: Any) -> Any:
    """The smaller number, or NaN if either is NaN."""
    return _chosen(x, y, lambda a, b: a < b, cutlass.min)


def at_least(x: Any, low: Any) -> Any:
    """x, or `low` if that is larger: `clamp`, with slope 1 where they are equal."""
    return _chosen(x, low, lambda a, b: a >= b, cutlass.max)


def at_most(x: Any, high: Any) -> Any:
    return _chosen(x, high, lambda a, b: a <= b, cutlass.min)


def _chosen(
    x: Any, y: Any, is_first: Callable[[Any, Any], Any], of_integers: Callable[[Any, Any], Any]
) -> Any:
    dtype = _dtype(x, y)
    x, y = dtype(x), dtype(y)
    if dtype is Int32:
        # one instruction, and no slope that depends on which is taken
        return of_integers(x, y)
    takes_x = is_first(x, y)
    if dtype.is_float:
        takes_x = takes_x | (x != x)
    return where(takes_x, x, y)


# -- floating-point numbers ---------------------------------------------------------------------


def float_remainder(x: Any, y: Any) -> Any:
    """Floating-point remainder, with the sign of the divisor."""
    dtype = _dtype(x, y)
    x, y = dtype(x), dtype(y)
    rest = x % y
    return where((rest != 0.0) & ((rest < 0.0) != (y < 0.0)), rest + y, rest)


def float_floor_divide(x: Any, y: Any) -> Any:
    """Exact floor division, by the remainder; by 0 it gives what division gives."""
    dtype = _dtype(x, y)
    x, y = dtype(x), dtype(y)
    rest = x % y
    near = (x - rest) / y
    near = where((rest != 0.0) & ((rest < 0.0) != (y < 0.0)), near - 1.0, near)
    floored = cute.math.floor(near)
    # `near` is a whole number but for rounding
    whole = where(near - floored > 0.5, floored + 1.0, floored)
    return where(y == 0.0, x / y, whole)


def _of_two(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(x: Any, y: Any) -> Any:
        dtype = _dtype(x, y)
        return dtype(function(dtype(x), dtype(y)))

    return apply


power, atan2, copysign = map(_of_two, (cute.math.pow, cute.math.atan2, cute.math.copysign))


def hypot(x: Any, y: Any) -> Any:
    """sqrt(x^2 + y^2) without an overflow of the squares."""
    dtype = _dtype(x, y)
    x, y = abs(dtype(x)), abs(dtype(y))
    large, small = where(x > y, x, y), where(x > y, y, x)
    ratio = small / where(large > 0.0, large, 1.0)
    found = large * cute.math.sqrt(1.0 + ratio * ratio)
    return where((x == math.inf) | (y == math.inf), math.inf, dtype(found))


# asinh(x) / x as a polynomial in x^2: its Taylor series, for |x| < 0.25
_ASINH_NEAR = (1.0, -1 / 6, 3 / 40, -15 / 336, 105 / 3456, -945 / 42240)


def asinh(x: Any) -> Any:
    """With an error of 4e-7 of the result; the function of `cute.math` has no CPU code."""
    dtype, size = _dtype(x), abs(x)
    # of a large number, it is the logarithm of the double
    is_near, is_large = size < 0.25, size > 1e4
    near, middle = where(is_near, size, 0.0), where(is_large, 1.0, size)
    of_near = near * _polynomial(near * near, _ASINH_NEAR)
    of_middle = cute.math.log(middle + cute.math.sqrt(1.0 + middle * middle))
    of_large = cute.math.log(where(is_large, size, 1.0)) + math.log(2.0)
    found = where(is_large, dtype(of_large), where(is_near, dtype(of_near), dtype(of_middle)))
    return copysign(found, x)


def sigmoid(x: Any) -> Any:
    below = 1.0 + cute.math.exp2(x * -LOG2_E, fastmath=True)
    return cute.math.rcp(below, approx=True, ftz=True) if _is_in_kernel() else 1.0 / below


def _is_in_kernel() -> bool:
    """Whether a kernel is traced now, and not a function for the CPU."""
    place = ir.InsertionPoint.current.block.owner
    while place is not None and place.operation.name != "gpu.module":
        place = place.operation.parent
    return place is not None


# -- waves --------------------------------------------------------------------------------------

# Kernels reduce arguments up to here to a period with an error of 1e-6.
MOST_WAVE = float(2**26)
# 2 pi as a sum of two float32 numbers
_PERIOD = 6.2831854820251465, -1.7484555314695172e-07


def sin(x: Any) -> Any:
    return _wave(cute.math.sin, x)


def cos(x: Any) -> Any:
    return _wave(cute.math.cos, x)


def _wave(function: Callable[..., Any], x: Any) -> Any:
    """sin or cos. In kernels, where `cute.math` takes 300 instructions, one approximate instruction
    after a reduction to a period; NaN for |x| > MOST_WAVE."""
    if not _is_in_kernel():
        return function(x)
    periods = cute.math.floor(x * (1.0 / math.tau) + 0.5)
    rest = x
    for part in _PERIOD:
        # without rounding of the product
        rest = cute.math.fma(periods, Float32(-part), rest)
    return function(where(abs(x) <= MOST_WAVE, rest, math.nan), fastmath=True)


def is_nan(x: Any) -> Any:
    return x != x


def is_infinite(x: Any) -> Any:
    return (x == math.inf) | (x == -math.inf)


# erf(x) / x as a polynomial in x^2 for |x| <= 1, and log(erfc(x)) as one in x for 1 <= x <= 4, the
# lowest power first: least squares at the nodes of Chebyshev, in fp64.
_ERF_NEAR = (
    1.12837916706,
    -0.37612638476,
    0.112837826221,
    -0.0268654383128,
    0.00522105341815,
    -0.000848439662462,
    0.000112682543866,
    -9.67359211316e-06,
)
_ERF_FAR = (
    0.000303213001065,
    -1.13016667563,
    -0.631937093479,
    -0.109978245294,
    0.0263647174516,
    -0.00474022237099,
    0.000592769543733,
    -4.55906231076e-05,
    1.61406163479e-06,
)


def erf(x: Any) -> Any:
    """erf with an error of 1.5e-7; the function of `cute.math` has no CPU code."""
    dtype = _dtype(x)
    size = abs(x)
    near_size = where(size < 1.0, size, 1.0)
    far_size = where(size > 1.0, where(size < 4.0, size, 4.0), 1.0)
    near = near_size * _polynomial(near_size * near_size, _ERF_NEAR)
    far = 1.0 - cute.math.exp(_polynomial(far_size, _ERF_FAR))
    found = where(size < 1.0, near, far)
    found = where(x < 0.0, -found, found)
    return where(x != x, x, dtype(found))


def _polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    result: Any = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        result = result * x + coefficient
    return result


def gelu(x: Any) -> Any:
    return x * 0.5 * (1.0 + erf(x * math.sqrt(0.5)))


def gelu_by_tanh(x: Any) -> Any:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1.0 + cute.math.tanh(inner, fastmath=True))
