"""Derivatives of functions and operators one at a time, against torch.autograd in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32, Int32
from derived import GENERATOR, HEAD, K_IDX, Q_IDX, SHAPE, check, derive, fake_tensor, points, trace
from torch import Tensor

from flash_mask_cute.mods import derivative
from flash_mask_cute.mods.on_cpu import compile_for_host
from flash_mask_cute.runtime.cache import compile_lock

pytestmark = pytest.mark.usefixtures("same_points_for_each_test")

m = cute.math
UNARY: dict[str, tuple[Callable[..., Any], Callable[[Tensor], Tensor], float, float]] = {
    "sin": (m.sin, torch.sin, -3, 3),
    "cos": (m.cos, torch.cos, -3, 3),
    "tan": (m.tan, torch.tan, -1.2, 1.2),
    "asin": (m.asin, torch.asin, -0.9, 0.9),
    "acos": (m.acos, torch.acos, -0.9, 0.9),
    "atan": (m.atan, torch.atan, -3, 3),
    "sinh": (m.sinh, torch.sinh, -2, 2),
    "cosh": (m.cosh, torch.cosh, -2, 2),
    "tanh": (m.tanh, torch.tanh, -3, 3),
    "exp": (m.exp, torch.exp, -3, 3),
    "exp2": (m.exp2, torch.exp2, -3, 3),
    "expm1": (m.expm1, torch.expm1, -3, 3),
    "log": (m.log, torch.log, 0.1, 5),
    "log2": (m.log2, torch.log2, 0.1, 5),
    "log10": (m.log10, torch.log10, 0.1, 5),
    "log1p": (m.log1p, torch.log1p, -0.8, 5),
    "sqrt": (m.sqrt, torch.sqrt, 0.1, 5),
    "rsqrt": (m.rsqrt, torch.rsqrt, 0.1, 5),
    "abs": (m.abs, torch.abs, -3, 3),
    "neg": (m.neg, torch.neg, -3, 3),
    "rcp": (m.rcp, torch.reciprocal, 0.2, 3),
    "floor": (lambda x: m.floor(x) + x, lambda x: x.floor() + x, -3, 3),
    "ceil": (lambda x: m.ceil(x) * x, lambda x: x.ceil() * x, -3, 3),
    "round": (lambda x: m.round(x) * x, lambda x: x.round() * x, -3, 3),
    "trunc": (lambda x: m.trunc(x) * x, lambda x: x.trunc() * x, -3, 3),
    "sincos": (lambda x: m.sincos(x)[0] * m.sincos(x)[1], lambda x: x.sin() * x.cos(), -3, 3),
    "cosine of sincos": (lambda x: m.sincos(x)[1], torch.cos, -3, 3),
}
BINARY: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "atan2": (m.atan2, torch.atan2),
    "pow": (m.pow, torch.pow),
    "copysign": (m.copysign, torch.copysign),
    "add": (m.add, torch.add),
    "sub": (m.sub, torch.sub),
    "mul": (m.mul, torch.mul),
    "div": (m.div, torch.div),
    "rem": (m.rem, torch.fmod),
    "min": (m.min, torch.minimum),
    "max": (m.max, torch.maximum),
    "+": (lambda x, y: x + y, torch.add),
    "-": (lambda x, y: x - y, torch.sub),
    "*": (lambda x, y: x * y, torch.mul),
    "/": (lambda x, y: x / y, torch.div),
    "//": (lambda x, y: x // y + x, lambda x, y: (x / y).floor() + x),
    "%": (lambda x, y: x % y, torch.fmod),
    "**": (lambda x, y: x**y, torch.pow),
    "where": (lambda x, y: cute.where(x > y, x * x, y), lambda x, y: torch.where(x > y, x * x, y)),
}


@pytest.mark.shares(4)
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_argument(name: str) -> None:
    function, reference, low, high = UNARY[name]

    def on_vector_and_scalar(score, b, h, q, k, aux):
        if name == "rcp":  # of a scalar it is an instruction of the GPU
            return function(score * 1.25) * 2.0 + function(score)
        return function(score * 1.25)[0] * 2.0 + function(score[0])

    scores = points(low / 1.25, high / 1.25) if low < 1 else points(low, high)
    check(on_vector_and_scalar, lambda x: 2 * reference(1.25 * x) + reference(x), scores, 1e-5)


@pytest.mark.shares(4)
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_arguments(name: str) -> None:
    """Both arguments depend on the score; then either is a number, a scalar or a vector."""
    function, reference = BINARY[name]
    is_operator = not hasattr(m, name)

    def in_all_orders(score, b, h, q, k, aux):
        other = score * score + 0.5
        total = function(score, other) + function(other, score)
        # Python numbers and indices may stand on either side of an operator only
        constants = [cute.full_like(score, 1.7)]
        if is_operator and name != "where":
            constants += [1.7, Float32(1.7), (h + 1).to(Float32)]
        for constant in constants:
            total = total + function(score, constant) + function(constant, score)
        return total

    def dense(x: Tensor) -> Tensor:
        other = x * x + 0.5
        total = reference(x, other) + reference(other, x)
        constants = [1.7] if not is_operator or name == "where" else [1.7, 1.7, 1.7, HEAD + 1.0]
        for constant in constants:
            y = torch.full_like(x, constant)
            total = total + reference(x, y) + reference(y, x)
        return total

    check(in_all_orders, dense, points(0.2, 3), 1e-5, 1e-5)


def test_operators_with_integers_and_scalars() -> None:
    def mixed(score, b, h, q, k, aux):
        x = score[0]
        vector = 2 * score - k + q * score / 7 - (k - q)[0] * score + score**2 + abs(-score)
        scalar = 3 * x - x * k[0] + 2 / x + x**2 - (-x) + x / 3 - 1 + Float32(1.5) * x
        return vector + scalar

    def dense(x: Tensor) -> Tensor:
        q, k = Q_IDX[:, None].double(), K_IDX.double()
        vector = 2 * x - k + q * x / 7 - (k - q) * x + x**2 + x.abs()
        return vector + 3 * x - x * k + 2 / x + x**2 + x + x / 3 - 1 + 1.5 * x

    scores = points(0.3, 2) * (torch.rand(SHAPE, generator=GENERATOR) > 0.5).float().mul(2).sub(1)
    check(mixed, dense, scores, 1e-5, 1e-5)


def test_powers_at_zero_and_of_negative_numbers() -> None:
    def powers(score, b, h, q, k, aux):
        return (
            score**2
            + score**0.0
            + score**3.0
            + m.fpowi(score, cute.full((1,), 3, Int32))
            + m.fpowi(score[0], 0)
            + 0.0 ** (score * score + 1.0)
        )

    scores = points(-2, 2)
    scores[0] = 0
    check(powers, lambda x: x**2 + 2 + 2 * x**3, scores, 1e-5, 1e-5)


def test_fma_and_clamp() -> None:
    def mod(score, b, h, q, k, aux):
        x = score[0]
        third = cute.full_like(score, 0.5)
        return m.fma(score, third, score * score) + m.fma(x, x, x) + m.clamp(x, -1.0, 1.0)

    check(mod, lambda x: 1.5 * x + 2 * x * x + x.clamp(-1, 1), points(-2, 2))


def test_extrema_of_scalars_follow_the_first_of_equals() -> None:
    def mod(score, b, h, q, k, aux):
        x = score[0]
        return cutlass.max(x, 0.0) + 3.0 * cutlass.min(x, Float32(0.0)) + m.max(2.0 * x, x)

    scores = points(-2, 2)
    scores[0] = 0
    got = derive(mod, scores)
    x = scores.double()
    slopes = (x >= 0).double() + 3 * (x <= 0) + 1 + (x >= 0)
    torch.testing.assert_close(got.slopes.double(), slopes)


def test_conversions_between_floating_point_types() -> None:
    def mod(score, b, h, q, k, aux):
        low = score.to(cutlass.BFloat16)
        half = score[0].to(cutlass.Float16)
        return (low * low).to(Float32) + (half * 3.0).to(Float32) + score.to(cutlass.Float64)

    scores = points(-2, 2).bfloat16().float()
    got = derive(mod, scores)
    torch.testing.assert_close(got.slopes, 2 * scores + 4, rtol=1e-6, atol=1e-6)
    assert derive(lambda s, *_: s.to(cutlass.BFloat16), scores).slopes.eq(1).all()


ALONE: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "erf": (torch.erf, -2, 2),
    "erfc": (torch.erfc, -2, 2),
    "asinh": (torch.asinh, -3, 3),
    "acosh": (torch.acosh, 1.2, 4),
    "atanh": (torch.atanh, -0.9, 0.9),
    "cbrt": (lambda x: x.sign() * x.abs() ** (1 / 3), -2, 2),
}


@pytest.mark.parametrize("name", ALONE)
def test_functions_that_only_a_gpu_has(name: str) -> None:
    """Their derivatives are made of functions that run here."""
    function, low, high = ALONE[name]
    x = points(low, high).flatten()
    y = x.double().requires_grad_()
    out = function(y)
    (expected,) = torch.autograd.grad(out.sum(), y)
    slopes, out = torch.empty_like(x), out.detach().float()
    rule = derivative._PARTIALS[f"math.{name}"][0]
    with compile_lock():
        run = compile_for_host(
            ("score_mod", rule), _apply_rule, rule, *map(fake_tensor, (x, out, slopes))
        )
    run(x, out, slopes)
    torch.testing.assert_close(slopes.double(), expected, rtol=1e-5, atol=1e-6)
    assert f"math.{name}" in trace(lambda s, *_: getattr(m, name)(s))


class _Alone(NamedTuple):
    """What these rules look at of a `derivative._Step`."""

    a: Float32
    out: Float32
    grad: Float32
    fastmath: bool = False

    def divide(self, x: Float32, y: Float32) -> Float32:
        return x / y


@cute.jit
def _apply_rule(rule: cutlass.Constexpr, x: Any, out: Any, slopes: Any) -> None:
    for i in range(cute.size(x)):
        slopes[i] = rule(_Alone(x[i], out[i], Float32(1.0)))


def _arch(name: str) -> Callable[..., Any]:
    return getattr(cute.arch, name)


@pytest.mark.parametrize(
    ("mod", "expected"),
    [
        (lambda s: m.exp2(s, approx=True, ftz=True), ["llvm.nvvm.ex2.approx.ftz"]),
        (lambda s: m.tanh(s, approx=True), ["llvm.nvvm.tanh.approx"]),
        (lambda s: m.rcp(s), ["llvm.nvvm.rcp.rn.f"]),
        (lambda s: m.div(s, s, full=True), ["llvm.nvvm.div.full"]),
        (lambda s: m.log2(s, approx=True), ["llvm.nvvm.lg2.approx.f", "llvm.nvvm.div.approx.f"]),
        (lambda s: m.sin(s, approx=True), ["llvm.nvvm.sin.approx.f", "math.cos"]),
        (lambda s: m.mul(s, s, ftz=True), ["llvm.nvvm.mul.rn.ftz.f"]),
        (lambda s: m.add(s, s, ftz=True), ["nvvm.addf"]),
        (lambda s: m.fma(s, s, s, ftz=True), ["nvvm.fma"]),
        (lambda s: m.max(s, 1.0, ftz=True), ["nvvm.fmax"]),
        (lambda s: m.abs(s, ftz=True), ["nvvm.fabs"]),
        (lambda s: _arch("fmin")(s, Float32(1.0)), ["nvvm.fmin"]),
        (lambda s: _arch("rcp_approx")(s), ["nvvm.rcp.approx.ftz.f"]),
        (lambda s: _arch("exp2")(s), ["ex2.approx.ftz.f32"]),
        (lambda s: _arch("exp")(s), ["ex2.approx.ftz.f32"]),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_instructions_of_a_gpu_have_derivatives(
    mod: Callable[..., Any], expected: list[str]
) -> None:
    """Traced only, so what is asserted is that they are accepted, and what is computed."""
    text = trace(lambda s, *_: mod(s[0]))
    assert all(name in text for name in expected)


def test_rules_of_instructions_are_those_of_functions() -> None:
    """What cannot run here shares its rule with something that does."""
    pairs = {"nvvm.fabs": "math.absf", "nvvm.fmax": "arith.maximumf", "nvvm.fmin": "arith.minimumf"}
    pairs |= {"nvvm.addf": "arith.addf", "nvvm.fma": "math.fma"}
    for instruction, function in pairs.items():
        assert derivative._PARTIALS[instruction] == derivative._PARTIALS[function]
    assert set(derivative._INTRINSICS.values()) <= set(derivative._PARTIALS)
