"""Heads above 256 columns, of whose values two CTAs have half each, on the software GPU."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest
from cases import Case
from inputs import make_inputs
from paged_inputs import paged
from simulated_forward import run_sim
from slow_roles import ISLANDS, SEED, add_islands, with_each_role_slow
from wide_cases import DECODE, FEW, MANY, WIDE_CASES

from flash_mask_cute.call import splits
from flash_mask_cute.limits import ctas_of_tile

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("poisoned_allocations")]

SMS = 4  # two pairs of CTAs, and each has several work tiles


@pytest.mark.parametrize("case", WIDE_CASES, ids=lambda case: case.id)
def test_against_oracle(simulator: ModuleType, case: Case) -> None:
    assert ctas_of_tile(case.head_dim_v) == 2
    run_sim(simulator, make_inputs(case), (1,), sms=SMS)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("page_size", [None, 16, 64, 12])
@pytest.mark.parametrize("case", [DECODE, FEW], ids=lambda case: case.id)
def test_decoding(
    simulator: ModuleType, case: Case, page_size: int | None, num_splits: int
) -> None:
    inputs = make_inputs(case)
    if page_size is not None:
        inputs = paged(inputs, page_size, "NHD")
    run_sim(simulator, inputs, (1,), sms=10, num_splits=num_splits)


@pytest.mark.parametrize("more", [{"num_splits": 3}, {"seqlen_k_per_split": 512}, {}], ids=str)
def test_splits_of_many_queries(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(splits, "_LEAST_BLOCKS_OF_MANY", 4)
    run_sim(simulator, make_inputs(MANY), (1,), sms=12, **more)


@pytest.mark.parametrize("head_dim", [512, 320])
def test_each_role_slow(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    add_islands(monkeypatch)
    lengths = {"lengths_q": (300, 40, 129), "lengths_k": (600, 20, 200)}
    inputs = make_inputs(Case("slow", **ISLANDS, **lengths, head_dim=head_dim))
    run = partial(run_sim, simulator, inputs, (SEED,), sms=SMS)
    with_each_role_slow(simulator, monkeypatch, ["sm90.flash_fwd.kernel"], run)
