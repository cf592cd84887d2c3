"""Powers of two by polynomial, on the software GPU of either architecture."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import cutlass
import cutlass.cute as cute
import pytest
import torch
from conftest import ACTIVE_ARCH
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from flash_mask_cute.core import exp2

ARCH = ACTIVE_ARCH

pytestmark = pytest.mark.sim


@pytest.mark.parametrize(
    "coefficients, limit", [(exp2.DEGREE_3, 8.7e-5), (exp2.DEGREE_5, 1.6e-7)], ids=["3", "5"]
)
@pytest.mark.parametrize("arithmetic", [exp2.SINGLE, exp2.PACKED], ids=["single", "packed"])
def test_powers_against_float64(
    simulator: ModuleType,
    arithmetic: exp2.Arithmetic,
    coefficients: tuple[float, ...],
    limit: float,
) -> None:
    """limit: of the relative error; an ulp of float32 is up to 1.2e-7."""
    if arithmetic is exp2.PACKED and ARCH == "sm_90a":
        pytest.skip("Hopper has no packed arithmetic")

    @cute.kernel
    def kernel(exponents: cute.Tensor, powers: cute.Tensor):  # type: ignore[no-untyped-def]
        thread = cute.arch.thread_idx()[0]
        pair = (exponents[2 * thread], exponents[2 * thread + 1])
        x, y = exp2.exp2_polynomial(pair, coefficients, arithmetic)
        powers[2 * thread], powers[2 * thread + 1] = x, y

    @cute.jit
    def launch(exponents: cute.Tensor, powers: cute.Tensor, stream):  # type: ignore[no-untyped-def]
        kernel(exponents, powers).launch(grid=(1, 1, 1), block=(512, 1, 1), stream=stream)

    vector = partial(make_fake_compact_tensor, cutlass.Float32, (1024,))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled = cute.compile(launch, vector(), vector(), stream, options="--enable-tvm-ffi")
    simulator.OPTIONS.pop("delay", None)
    exponents = torch.linspace(-40, 12, 1024)
    special = torch.tensor([-float("inf"), -1e30, -200.0, 0.0, 5.0, -3.0, 2.0**100, 200.0])
    exponents[:8] = special
    exponents[8] = float("nan")
    powers = torch.empty(1024)
    compiled(exponents, powers)
    assert powers[:6].tolist() == [0.0, 0.0, 0.0, 1.0, 32.0, 0.125]
    # too large, or no number: more than any sum that counts as small
    assert (powers[6:9] > 2.0**30).all()
    expected = torch.exp2(exponents[9:].double())
    assert ((powers[9:] - expected).abs() / expected).max() < limit
