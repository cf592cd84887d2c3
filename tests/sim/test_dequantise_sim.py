"""Prefill over keys and values in fp8 that are converted before attention, on the software GPU."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from conftest import ACTIVE_ARCH
from fp8_caches import Fp8Case, make_call
from planned import forward_call, planned
from quiet_runs import quiet_run
from simulated_forward import run_on_simulator

from flash_mask_cute import SelectedBlocks
from flash_mask_cute.call import fp8 as widen
from flash_mask_cute.call.fp8 import KERNEL_NAME, DequantiseFacts, build_dequantise
from flash_mask_cute.runtime.compiler import by_facts
from flash_mask_cute.runtime.target import Target

ARCH = "sm_90a"
assert ACTIVE_ARCH
CASES = (
    Fp8Case(
        "pages", 64, seqlen_q=70, lengths=(150, 90), capacity=160, page_size=16,
        scales=("token", "head"), keywords={"causal": True},
    ),
    Fp8Case("rows", 80, seqlen_q=40, scales=("token", "token"), lengths=(130, 0, 7), capacity=144),
    Fp8Case(
        "fp16 without scales", 64, seqlen_q=40, scales=("none", "none"), dtype=torch.float16,
        page_size=7, capacity=301,
    ),
    Fp8Case(
        "other columns", 192, 128, seqlen_q=33, heads=(6, 3), scales=("expanded", "token"),
        lengths=(100,), capacity=112,
    ),
    Fp8Case(
        "segments", 64, seqlen_q=35, lengths=(620,), capacity=640, page_size=16,
        keywords={"causal": True, "seqlen_k_per_split": 512},
    ),
    Fp8Case(
        "selected blocks", 64, seqlen_q=70, lengths=(310, 205), capacity=320, page_size=16,
        scales=("token", "head"),
        keywords={
            "causal": True,
            "block_sparse_tensors_torch": SelectedBlocks(
                torch.randint(5, (2, 2, 70, 2), generator=torch.Generator().manual_seed(1)), 64
            ),
        },
    ),
)  # fmt: skip


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_bits_of_16(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, case: Fp8Case
) -> None:
    monkeypatch.setattr(widen, "LEAST_ROWS", 64)
    call = make_call(case)
    results = []
    for seed in (None, 1):
        for (k, v), more in ((call.numbers, {}), (call.codes, call.descales)):
            made = forward_call(call.q, k, v, **call.keywords, **more)
            plan = planned(made, Target(ARCH, num_sms=2))
            assert bool(plan.instead) == bool(more), case.name
            with quiet_run(simulator, seed):
                out, lse = run_on_simulator(made)
            assert lse is not None and out.isfinite().all(), case.name
            results.append((out, lse))
    for other in zip(*results, strict=True):
        assert all(torch.equal(bits(other[0]), bits(x)) for x in other), case.name


def test_a_grid_of_many_sequences(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """All dimensions of a grid but the first one end at 65535."""
    batch, dim, launches = 65536, 16, []
    facts = DequantiseFacts("bfloat16", (dim, dim), False, False, (None, None))
    function = by_facts(KERNEL_NAME, facts, build_dequantise, Target.named(ARCH)).function
    monkeypatch.setattr(simulator, "simulate", lambda found, *_, **__: launches.extend(found))
    codes, wide = (torch.empty(batch, 1, 1, dim, dtype=x) for x in (torch.uint8, torch.bfloat16))
    function(codes, codes, wide, wide, None, None, None, None)
    simulator.RESULTS.clear()
    assert [x.grid for x in launches] == [(2 * batch, 1, 1)]
