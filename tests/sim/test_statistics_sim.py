"""Statistics of P by the kernel for Hopper, on the software GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import slow_roles
import torch
from cases import Case
from conftest import ACTIVE_ARCH, SMS
from drawn_share import Draws
from inputs import Inputs, make_inputs
from quiet_runs import quiet_run
from random_cases import small_case
from slow_roles import launched, with_each_role_slow
from statistics_cases import CASES, STATISTICS, Wanted, arguments, assert_right, draw_wanted

import flash_mask_cute
from flash_mask_cute import attention_statistics
from flash_mask_cute.call import second_walk, statistics
from flash_mask_cute.runtime.target import Target

DRAWN = Draws.of("STATISTICS", 4, 0)

pytestmark = pytest.mark.usefixtures("poisoned_allocations", "on_simulator")

ARCH = "sm_90a"
# of exponentials to base 2, of exponents that are rounded sums of fp32 products
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}


@pytest.fixture
def on_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public functions launch kernels for tensors on the CPU."""
    target = Target(ACTIVE_ARCH, num_sms=SMS)
    planned = partial(statistics.plan_statistics, target=target)
    monkeypatch.setattr(statistics, "plan_statistics", planned)
    monkeypatch.setattr(second_walk, "_kept", {})


def check(simulator: ModuleType, inputs: Inputs, wanted: Wanted, seed: int | None = 1) -> None:
    def run(name: str, *operands: Any, **keywords: Any) -> Any:
        with quiet_run(simulator, seed):
            return getattr(flash_mask_cute, name)(*operands, **keywords)

    assert_right(run, inputs, wanted, **TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_right(simulator: ModuleType, name: str) -> None:
    case, wanted = CASES[name]
    check(simulator, make_inputs(case), wanted)


@pytest.mark.parametrize("name", STATISTICS)
def test_each_alone(simulator: ModuleType, name: str) -> None:
    case = Case("alone", 1, 140, 200, 2, 1, 64, causal=True)
    check(simulator, make_inputs(case), Wanted((name,)))


@pytest.mark.parametrize("number", range(DRAWN.most))
def test_drawn(simulator: ModuleType, number: int) -> None:
    rng = random.Random(f"statistics {DRAWN.seed} {number}")
    case = replace(small_case(rng, ((64, 64), (128, 128), (72, 72)), 300), pack_gqa=None)
    check(simulator, make_inputs(case), draw_wanted(rng), rng.choice((None, 1, 2)))


def test_equal_bits(simulator: ModuleType) -> None:
    """In any order of the CTAs, if key_sums are deterministic; the others are always."""
    inputs = make_inputs(Case("bits", 1, 300, 300, 4, 1, 64, causal=True))
    _, operands, keywords = arguments(inputs, Wanted(deterministic=True))
    found = []
    for seed in (None, 1, 2):
        with quiet_run(simulator, seed):
            found.append(attention_statistics(*operands, **keywords))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


SLOWED = {
    "three-warpgroups": Case("slow", 1, 300, 700, 1, 1, 64, causal=True, column="stepped1"),
    "two-warpgroups": Case("slow-256", lengths_q=(140, 40, 129), lengths_k=(300, 20, 200),
        heads_q=1, heads_kv=1, head_dim=256, causal=True),
    "mask-warpgroup": Case("slow-mod", 1, 200, 300, 1, 1, 64, mask_mod="eviction"),
    "one-warpgroup-splits": Case("slow-few", 2, 3, 1500, 4, 1, 64),
}  # fmt: skip


@pytest.mark.parametrize("name", SLOWED)
def test_slow_roles(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    inputs = make_inputs(SLOWED[name])
    # the kernel of the forward, maybe named by the module of its subclass
    names = frozenset({"sm90.flash_statistics.kernel", "sm90.flash_fwd.kernel"})
    monkeypatch.setattr(slow_roles, "kernels_of_package", lambda: names)
    run = partial(check, simulator, inputs, Wanted(block_size=(1, 64)))
    run()
    (kernel,) = launched(simulator)
    assert with_each_role_slow(simulator, monkeypatch, [kernel], run) > 4
