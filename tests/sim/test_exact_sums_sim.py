"""Exact sums of fp32 numbers, which threads add to memory in any order, on the software GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from conftest import ACTIVE_ARCH
from cutlass import Boolean
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from quiet_runs import quiet_run
from torch import Tensor

from flash_mask_cute.call.aux_sums import values_of
from flash_mask_cute.mods.aux_gradients import add_to_memory, offset_in
from flash_mask_cute.mods.fixed_point_sums import NUM_WORDS
from flash_mask_cute.runtime.fake_tensors import strided

pytestmark = pytest.mark.skipif(ACTIVE_ARCH != "sm_90a", reason="same text")
NUMBERS, SUMS = 2048, 4


@pytest.fixture(scope="module")
def add() -> Callable[[Tensor, Tensor], None]:
    """Adds number i of the first to the sum i % SUMS of the second, 256 threads each eight."""

    @cute.kernel
    def kernel(numbers: cute.Tensor, words: cute.Tensor):  # type: ignore[no-untyped-def]
        thread = cute.arch.thread_idx()[0]
        for i in cutlass.range_constexpr(NUMBERS // 256):
            n = thread + i * 256
            add_to_memory(Boolean(True), words, offset_in(words, (n % SUMS,)), numbers[n])

    @cute.jit
    def launch(numbers: cute.Tensor, words: cute.Tensor, stream):  # type: ignore[no-untyped-def]
        kernel(numbers, words).launch(grid=(1, 1, 1), block=(256, 1, 1), stream=stream)

    numbers = make_fake_compact_tensor(cutlass.Float32, (NUMBERS,))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = "--enable-tvm-ffi"
    compiled: Any = cute.compile(launch, numbers, strided(2, "int64"), stream, options=options)
    return lambda numbers, words: compiled(numbers, words)


def summed(simulator: ModuleType, add: Any, numbers: Tensor, seed: int | None = None) -> Tensor:
    words = torch.zeros(NUM_WORDS, SUMS, dtype=torch.int64)
    with quiet_run(simulator, seed, 1):
        add(numbers, words)
    return values_of(words)


def random_numbers(seed: int) -> Tensor:
    """Finite numbers of any exponent, as their bits are."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (NUMBERS,), generator=generator).to(torch.int32)
    numbers = bits.view(torch.float32)
    return torch.where(numbers.isfinite(), numbers, torch.tensor(2.0**-140))


def test_sums_are_exact_whatever_the_order(simulator: ModuleType, add: Any) -> None:
    """Pairs that cancel leave what is 2^250 times smaller."""
    numbers = random_numbers(0)
    numbers[1024:] = -numbers[:1024]
    rest = torch.tensor([2.0**-149, -(2.0**-126), 3.0, -1.5e38])
    numbers[1020:1024] = rest
    numbers[2044:] = 0.0
    expected = [math.fsum(numbers[i::SUMS].tolist()) for i in range(SUMS)]
    found = summed(simulator, add, numbers)
    assert expected == rest.tolist()
    assert found.tolist() == expected
    shuffled = numbers.view(-1, SUMS)[torch.randperm(NUMBERS // SUMS)].reshape(-1)
    assert torch.equal(summed(simulator, add, shuffled, 3), found)


def test_sums_of_one_sign(simulator: ModuleType, add: Any) -> None:
    for numbers in (random_numbers(1), random_numbers(2).abs(), -torch.rand(NUMBERS)):
        expected = [math.fsum(numbers[i::SUMS].tolist()) for i in range(SUMS)]
        torch.testing.assert_close(
            summed(simulator, add, numbers),
            torch.tensor(expected, dtype=torch.float64),
            rtol=2.0**-50,
            atol=0.0,
        )


def test_what_is_not_finite_stays(simulator: ModuleType, add: Any) -> None:
    numbers = random_numbers(3)
    numbers[0], numbers[1], numbers[2] = math.inf, -math.inf, math.nan
    numbers[3], numbers[7] = math.inf, -math.inf
    found = summed(simulator, add, numbers)
    assert found[0] == math.inf and found[1] == -math.inf
    assert found[2:].isnan().all()
