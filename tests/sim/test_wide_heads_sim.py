"""Heads above 256 columns, of whose values two CTAs have half each, on the software GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import Case
from eager import assert_close_to_oracle
from inputs import make_inputs
from quiet_runs import quiet_run
from simulated_forward import DELAY_SEEDS, launch_on_simulator, run_sim
from slow_roles import ISLANDS, SEED, add_islands, with_each_role_slow
from unseen_memory import EMPTY_CASES, INF, NAN, UNUSED_CASES, with_empty, with_unused
from wide_cases import WIDE_CASES
from wide_heads_on_devices import (  # noqa: F401
    test_against_oracle,
    test_decoding,
    test_splits_of_many_queries,
)

from flash_mask_cute.limits import ctas_of_tile

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

SMS = 4  # two pairs of CTAs, and each has several work tiles


def test_two_ctas_have_half_of_the_values_each() -> None:
    assert all(ctas_of_tile(case.head_dim_v) == 2 for case in WIDE_CASES)


@pytest.mark.parametrize("head_dim", [512, 320])
def test_each_role_slow(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    add_islands(monkeypatch)
    lengths = {"lengths_q": (300, 40, 129), "lengths_k": (600, 20, 200)}
    inputs = make_inputs(Case("slow", **ISLANDS, **lengths, head_dim=head_dim))
    run = partial(run_sim, simulator, inputs, (SEED,), sms=SMS)
    with_each_role_slow(simulator, monkeypatch, ["sm90.flash_fwd.kernel"], run)
    # what CTAs exchange: a warpgroup of either, and all of either
    for warps in (
        {(rank, x) for x in some} for rank in range(2) for some in (range(4, 8), range(12))
    ):
        monkeypatch.setitem(simulator.OPTIONS, "slow", frozenset(warps))
        run()


@pytest.mark.parametrize(
    "fields",
    [
        # half a block without keys, a jump of scores, a row that sees the peer's half alone
        {"lengths_q": (70, 130, 3), "lengths_k": (65, 127, 200)},
        {"batch": 1, "seqlen_q": 130, "seqlen_k": 300, "softmax_scale": 3.0},
        {"batch": 1, "seqlen_q": 130, "seqlen_k": 300, "window_left": 20, "window_right": 20},
    ],
    ids=str,
)
def test_equal_bits(simulator: ModuleType, fields: dict[str, Any]) -> None:
    """However long anything takes."""
    inputs = make_inputs(Case("bits", heads_q=2, heads_kv=1, head_dim=320, **fields))
    found = []
    for seed in DELAY_SEEDS:
        with quiet_run(simulator, seed):
            found.append(launch_on_simulator(inputs, sms=SMS))
        assert_close_to_oracle(*found[-1], inputs)
    for others in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], others, strict=True))


@pytest.mark.parametrize("position", [0, 3, 4, 5, 6])
def test_rows_that_are_not_in_use(simulator: ModuleType, position: int) -> None:
    case = replace(UNUSED_CASES[position], head_dim=264, head_dim_v=264)
    run_sim(simulator, with_unused(make_inputs(case), (NAN, INF)[position % 2]), (SEED,), sms=SMS)


@pytest.mark.parametrize("position", [0, 5, 6, 8])
def test_rows_of_queries_that_see_nothing(simulator: ModuleType, position: int) -> None:
    case = replace(EMPTY_CASES[position], head_dim=264, head_dim_v=264)
    run_sim(simulator, with_empty(make_inputs(case), NAN).inputs, (SEED,), sms=SMS)
