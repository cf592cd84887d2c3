"""Powers of two by polynomial, on the software GPU of either architecture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import cutlass.cute as cute
import pytest
import torch
from conftest import ACTIVE_ARCH
from cutlass import Float32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from flash_mask_cute.core import exp2

ARCH = ACTIVE_ARCH


SPECIAL = torch.tensor(
    [-float("inf"), -1e30, -200.0, 0.0, 5.0, -3.0, 2.0**100, 200.0, float("nan")]
)
ORDINARY = torch.linspace(-40, 12, 1015)
# number * SCALE + BIAS is the exponent
SCALE, BIAS = 0.37, 3.0


def powers_of(
    simulator: ModuleType, power: Callable[[Float32, Float32], Any], numbers: torch.Tensor
) -> torch.Tensor:
    """power: of two numbers."""

    @cute.kernel
    def kernel(exponents: cute.Tensor, powers: cute.Tensor):  # type: ignore[no-untyped-def]
        thread = cute.arch.thread_idx()[0]
        x, y = power(exponents[2 * thread], exponents[2 * thread + 1])
        powers[2 * thread], powers[2 * thread + 1] = x, y

    @cute.jit
    def launch(exponents: cute.Tensor, powers: cute.Tensor, stream):  # type: ignore[no-untyped-def]
        kernel(exponents, powers).launch(grid=(1, 1, 1), block=(512, 1, 1), stream=stream)

    vector = partial(make_fake_compact_tensor, Float32, (1024,))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled = cute.compile(launch, vector(), vector(), stream, options="--enable-tvm-ffi")
    simulator.OPTIONS.pop("delay", None)
    powers = torch.empty(1024)
    compiled(numbers, powers)
    return powers


def assert_powers(powers: torch.Tensor, limit: float) -> None:
    """Of SPECIAL and ORDINARY exponents. limit: of the relative error."""
    assert powers[:3].tolist() == [0.0] * 3
    # too large, or no number: more than any sum that counts as small
    assert (powers[6:9] > 2.0**30).all()
    expected = torch.exp2(ORDINARY.double())
    assert ((powers[9:] - expected).abs() / expected).max() < limit


@pytest.mark.parametrize(
    "coefficients, limit", [(exp2.DEGREE_3, 8.7e-5), (exp2.DEGREE_5, 1.6e-7)], ids=["3", "5"]
)
def test_powers_against_float64(
    simulator: ModuleType, coefficients: tuple[float, ...], limit: float
) -> None:
    """An ulp of float32 is up to 1.2e-7."""

    def power(x: Float32, y: Float32) -> tuple[Float32, Float32]:
        return exp2.exp2_polynomial(x, coefficients), exp2.exp2_polynomial(y, coefficients)

    powers = powers_of(simulator, power, torch.cat([SPECIAL, ORDINARY]))
    assert powers[3:6].tolist() == [1.0, 32.0, 0.125]
    assert_powers(powers, limit)


def test_powers_of_a_line(simulator: ModuleType) -> None:
    """An exponent is rounded to a part of the range."""
    if ARCH == "sm_90a":
        pytest.skip("Hopper has no packed arithmetic")

    def power(x: Float32, y: Float32) -> tuple[Float32, Float32]:
        line = exp2.saturating_line(Float32(SCALE), Float32(BIAS))
        return exp2.exp2_of_line((x, y), line, exp2.CONTINUOUS_3)

    exponents = torch.cat([SPECIAL, ORDINARY])
    numbers = ((exponents.double() - BIAS) / SCALE).float()
    powers = powers_of(simulator, power, numbers)
    assert powers[3:6].tolist() == pytest.approx([1.0, 32.0, 0.125], rel=1.2e-5)
    assert powers[6:9].isinf().all()
    assert_powers(powers, 1.2e-4)
