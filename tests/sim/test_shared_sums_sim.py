"""Gradients of tables that all batch entries share, by a kernel with an owner for each element."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from cases import Case
from conftest import ACTIVE_ARCH, SMS
from inputs import make_output_gradients
from planned import planned
from quiet_runs import quiet_run
from simulated_backward import DELAY_SEEDS, launch_on_simulator, run_sim
from trained_mods import SHARED_CASES, TrainedInputs, assert_aux_gradients_close, make_trained

from flash_mask_cute.call import bias_rows as entry_order
from flash_mask_cute.call.arguments import Direction
from flash_mask_cute.core import key_schedule
from flash_mask_cute.runtime.target import Target

pytestmark = [
    pytest.mark.usefixtures("poisoned_allocations"),
    pytest.mark.skipif(ACTIVE_ARCH != "sm_90a", reason="Hopper has the kernel"),
]


def gradients(
    simulator: ModuleType, given: TrainedInputs, seed: int | None, **more: Any
) -> list[torch.Tensor]:
    """Of the trained tensors; more: keywords of the backward."""
    # asked for, so that many short sequences do not have a kernel of their own
    more = {"config": {"tile_m": 64}} | more
    dout, dlse = make_output_gradients(given.inputs)
    daux = given.new_daux()
    with quiet_run(simulator, seed):
        given_dlse = None if seed is None else dlse
        launch_on_simulator(given.inputs, dout, given_dlse, daux=daux, **more)
        names = [x["kernel"] for result in simulator.RESULTS for x in result["launches"]]
    assert any("flash_bwd_shared" in name for name in names), names
    found = [x for x in daux if x is not None]
    assert_aux_gradients_close(found, given, dout, given_dlse)
    return found


@pytest.mark.parametrize(("case", "name"), SHARED_CASES)
def test_against_oracle(simulator: ModuleType, case: Case, name: str) -> None:
    given = make_trained(case, name)
    for seed in DELAY_SEEDS:
        gradients(simulator, given, seed)


@pytest.mark.parametrize("deterministic", [False, True])
def test_entries_of_a_head_take_turns(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """With large tables: all gradients, of a batch that fills no group of entries but the first."""
    monkeypatch.setattr(entry_order, "LEAST_BYTES", 0)
    monkeypatch.setattr(key_schedule, "ENTRIES_TOGETHER", 2)
    case = Case("pair-turns", 3, 130, 260, 4, 2, head_dim=64, causal=True)
    given = make_trained(case, "pair")
    dout, dlse = make_output_gradients(given.inputs)
    for seed in DELAY_SEEDS:
        daux = [torch.full_like(x, float("nan")) for x in given.aux_tensors]
        more: dict[str, Any] = {"daux": daux, "deterministic": deterministic, "launches": 4}
        run_sim(simulator, given.inputs, (seed,), **more)
        assert_aux_gradients_close(daux, given, dout, None if seed is None else dlse)


def test_the_order_is_fixed(simulator: ModuleType) -> None:
    """Bits are equal whatever the order in which warps run, and in whatever way dQ is summed."""
    given = make_trained(Case("pair-ordered", 4, 70, 140, 2, 2, head_dim=32), "pair")
    more = ({"deterministic": True}, {"deterministic": True}, {})
    found = [
        gradients(simulator, given, seed, **x)[0] for seed, x in zip((2, 3, 4), more, strict=True)
    ]
    assert all(torch.equal(x, found[0]) for x in found)
    daux = [torch.empty_like(x) for x in given.aux_tensors]
    of_backward: Any = {"direction": Direction.BACKWARD, "daux": daux, "deterministic": True}
    plan = planned(given.inputs, Target(ACTIVE_ARCH, SMS), **of_backward)
    # fewer numbers than exact sums have words
    assert plan.shared is not None and not plan.problem.exact_aux and not plan.problem.wants_aux


def test_sums_of_windows_are_exact(simulator: ModuleType) -> None:
    """Additions of several queries and keys to an element, in any order."""
    given = make_trained(*SHARED_CASES[-1])
    found = [gradients(simulator, given, seed, deterministic=True)[0] for seed in (2, 3)]
    assert torch.equal(*found)


def test_rows_that_are_not_finite(simulator: ModuleType) -> None:
    """Queries that see nothing may have anything in q and dout."""
    case = Case("pair-nan", 2, 200, 70, 1, 1, head_dim=32, causal=True)
    given = make_trained(case, "pair")
    dout, _ = make_output_gradients(given.inputs)
    clean = gradients(simulator, given, None)[0]
    empty = given.inputs.reference[1][:, 0].isinf()
    assert empty.any()
    given.inputs.q[empty] = float("nan")
    dout[empty] = float("inf")
    daux = [torch.empty_like(x) for x in given.aux_tensors]
    with quiet_run(simulator, None):
        launch_on_simulator(given.inputs, dout, daux=daux)
    assert torch.equal(daux[-1], clean)


def test_hidden_keys_that_are_not_finite(simulator: ModuleType) -> None:
    """In a tile of which other keys are visible."""
    case = Case("pair-hidden", 2, 70, 200, 1, 1, head_dim=32, window_left=20, window_right=0)
    given = make_trained(case, "pair")
    dout, _ = make_output_gradients(given.inputs)
    clean = gradients(simulator, given, None)[0]
    hidden = 200 - 70 - 20
    for x in (given.inputs.k, given.inputs.v):
        x[:, :hidden] = float("nan")
    daux = [torch.full_like(x, float("nan")) for x in given.aux_tensors]
    with quiet_run(simulator, None):
        launch_on_simulator(given.inputs, dout, daux=daux)
    assert torch.equal(daux[-1], clean)
