"""Backwards of many short sequences: a CTA has all queries and keys of a batch entry."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import simulated_forward
import torch
from cases import FP16, FP32, Case
from conftest import ACTIVE_ARCH, SMS
from eager import assert_gradients_close
from inputs import make_inputs, make_output_gradients
from planned import planned
from quiet_runs import quiet_run
from simulated_backward import DELAY_SEEDS, launch_on_simulator, run_sim
from trained_mods import IN_GRID, TrainedRecipe, assert_aux_gradients_close, make_trained

from flash_mask_cute.runtime.target import Target

pytestmark = [
    pytest.mark.usefixtures("poisoned_allocations"),
    pytest.mark.skipif(ACTIVE_ARCH != "sm_90a", reason="Hopper has the kernel"),
]

# One, two and three warpgroups; blocks of 64, 48, 32 and 16 queries; tiles that end inside a block
# and inside a warp; more queries than keys and fewer.
PLAIN_CASES = (
    Case("64", 5, 64, 64, 2, 2, head_dim=64),
    Case("49-d32", 4, 49, 49, 3, 3, head_dim=32),
    Case("9-130-causal", 4, 9, 130, 2, 2, head_dim=40, causal=True, dtype=FP16),
    Case("144", 4, 144, 144, 2, 2, head_dim=32),
    Case("90-d64", 4, 90, 80, 2, 2, head_dim=64),
    Case("100-d128", 4, 100, 128, 2, 2, head_dim=128),
    Case("160-70-window", 5, 160, 70, 2, 2, head_dim=32, window_left=30, window_right=20),
    Case("144-causal-sink", 4, 144, 144, 2, 2, head_dim=32, causal=True, sink=FP32),
    Case("40-190-d80-64", 4, 40, 190, 2, 2, head_dim=80, head_dim_v=64),
    Case("90-17-empty-rows", 4, 90, 17, 2, 2, head_dim=32, causal=True),
    Case("70-80-transposed", 4, 70, 80, 2, 2, head_dim=32, strided="transposed"),
)


@pytest.mark.parametrize("case", PLAIN_CASES)
def test_against_oracle(
    simulator: ModuleType, case: Case, seeds: tuple[int | None, ...] = DELAY_SEEDS
) -> None:
    run_sim(simulator, make_inputs(case), seeds, launches=2)
    assert_ran(simulator)


def test_forward(simulator: ModuleType) -> None:
    inputs = make_trained(Case("swin-49", 5, 49, 49, 2, 2, head_dim=32), "swin").inputs
    tiles = planned(inputs, Target(ACTIVE_ARCH, SMS)).fwd_choice.tiles
    assert (tiles.tile_m, tiles.tile_n) == (64, 64)
    simulated_forward.run_sim(simulator, inputs)


def assert_ran(simulator: ModuleType) -> None:
    names = [x["kernel"] for result in simulator.RESULTS for x in result["launches"]]
    assert any("flash_bwd_short" in x or "flash_bwd_entries" in x for x in names), names


# A table that scores of an entry share, a bias of pairs, and of each with masks.
TRAINED_CASES = (
    (Case("swin-49", 5, 49, 49, 2, 2, head_dim=32), "swin"),
    (Case("swin-144", 4, 144, 144, 2, 2, head_dim=32), "swin"),
    (Case("pair-causal", 5, 50, 100, 2, 2, head_dim=64, causal=True), "pair"),
    (Case("pair-window-fp16", 4, 128, 120, 2, 2, head_dim=32, dtype=FP16, window_left=40), "pair"),
)


def gradients(
    simulator: ModuleType, case: Case, name: str | TrainedRecipe, seed: int | None, **more: Any
) -> Any:
    """Of a table, which are right; the gradients of q, k and v."""
    given = make_trained(case, name)
    dout, dlse = make_output_gradients(given.inputs)
    daux = [torch.full_like(x, float("nan")) for x in given.aux_tensors]
    with quiet_run(simulator, seed):
        found = launch_on_simulator(given.inputs, dout, dlse, daux=daux, **more)
    assert_ran(simulator)
    wanted = [daux[i] for i in given.wants_aux]
    assert_aux_gradients_close(wanted, given, dout, dlse)
    assert_gradients_close(found, given.inputs, dout, dlse)
    return [*wanted, *(found[x] for x in ("dq", "dk", "dv"))]


@pytest.mark.parametrize(("case", "name"), TRAINED_CASES)
def test_gradients_of_tables(simulator: ModuleType, case: Case, name: str) -> None:
    for seed in DELAY_SEEDS:
        gradients(simulator, case, name, seed)


# Queries of four and six blocks, the last of them without any; keys of two to six tiles.
ENTRY_CASES = (
    Case("grid-343", 4, 343, 343, 2, 2, head_dim=32),
    Case("grid-200-330-causal", 4, 200, 330, 2, 2, head_dim=32, causal=True),
    Case("grid-250-70-fp16-d64", 4, 250, 70, 2, 2, head_dim=64, dtype=FP16),
    Case("grid-256-fused", 4, 256, 256, 2, 2, head_dim=32, strided="fused_qkv"),
)


@pytest.mark.parametrize("case", ENTRY_CASES)
def test_several_key_tiles(
    simulator: ModuleType, case: Case, seeds: tuple[int | None, ...] = DELAY_SEEDS
) -> None:
    for seed in seeds:
        gradients(simulator, case, IN_GRID, seed)


def test_the_order_is_fixed(simulator: ModuleType) -> None:
    """Bits are equal whatever the order in which warps run, of a table as exact sums."""
    case = Case("ordered", 5, 49, 49, 2, 2, head_dim=32)
    runs = [gradients(simulator, case, "swin", seed, deterministic=True) for seed in (2, 3)]
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


NOT_FINITE = (
    Case("nan-short", 4, 120, 70, 2, 2, head_dim=32, causal=True),
    Case("nan-entries", 4, 250, 70, 2, 2, head_dim=32, causal=True),
    # the last queries, before a block without any
    Case("nan-last-of-entries", 4, 132, 200, 2, 2, head_dim=32, window_left=-2),
)


@pytest.mark.parametrize("case", NOT_FINITE)
def test_rows_that_are_not_finite(simulator: ModuleType, case: Case) -> None:
    """Queries that see nothing may have anything in q and dout."""
    given = make_trained(case, IN_GRID)
    dout, _ = make_output_gradients(given.inputs)
    runs = []
    empty = given.inputs.reference[1][:, 0].isinf()
    assert empty.any()
    for number in (None, float("nan")):
        if number is not None:
            given.inputs.q[empty] = number
            dout[empty] = float("inf")
        daux = [torch.empty_like(x) for x in given.aux_tensors]
        with quiet_run(simulator, None):
            found = launch_on_simulator(given.inputs, dout, daux=daux)
        assert_ran(simulator)
        runs.append([daux[-1], found["dk"], found["dv"], found["dq"][~empty]])
        assert not found["dq"][empty].any()
    assert all(torch.allclose(*pair) for pair in zip(*runs, strict=True))
