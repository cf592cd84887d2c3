"""The compiled backward of Blackwell, its kernels one after the other, on the software GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import simulated_backward
import torch
from case_log import note
from cases import BF16, FP16, MASK_CASES, Case
from gradient_oracle import assert_gradients_close, make_output_gradients
from inputs import make_inputs
from random_cases import small_case
from simulated_backward import DELAY_SEEDS, assert_same_bits, launch_on_simulator
from test_flash_bwd_sim import CASES as HOPPER_CASES
from test_flash_bwd_sim import SIM_MASK_CASES
from trained_mods import TRAINED_CASES, assert_aux_gradients_close, make_trained
from unseen_memory import EMPTY_CASES, INF, NAN, UNUSED_CASES, with_empty, with_unused_gradients

ARCH = "sm_100a"
MAX_DIM = 128

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("poisoned_allocations")]
run_sim = partial(simulated_backward.run_sim)
run_hostile = partial(simulated_backward.run_hostile, arch=ARCH)

# A work tile has 128 keys, a block 128 queries; the software GPU has two SMs.
CASES = (
    Case("dense-d64-300x300", 1, 300, 300, 2, 2, head_dim=64),
    Case("dense-d96-fp16-200x260", 1, 200, 260, 1, 1, head_dim=96, dtype=FP16),
    Case("causal-d96-gqa2-257x300", 1, 257, 300, 2, 1, head_dim=96, causal=True),
    Case("causal-d64-gqa2-257x300", 1, 257, 300, 4, 2, head_dim=64, causal=True),
    Case("d128-dv64-129x130", 1, 129, 130, head_dim=128, head_dim_v=64),
    *(case for case in HOPPER_CASES if max(case.head_dim, case.head_dim_v) <= MAX_DIM),
)
EMPTY = tuple(case for case in EMPTY_CASES if max(case.head_dim, case.head_dim_v) <= MAX_DIM)


@pytest.mark.parametrize("position", range(len(CASES)), ids=lambda i: CASES[i].id)
def test_against_oracle(simulator: ModuleType, position: int) -> None:
    """With a gradient by lse, and for each second case without one as well."""
    run_sim(simulator, make_inputs(CASES[position]), DELAY_SEEDS if position % 2 else (1,))


@pytest.mark.parametrize("position", range(len(SIM_MASK_CASES)), ids=lambda i: SIM_MASK_CASES[i].id)
def test_masks_against_oracle(simulator: ModuleType, position: int) -> None:
    """Of wide heads and of narrow ones by turns."""
    case = replace(SIM_MASK_CASES[position], pack_gqa=None)
    if position % 3 and not case.head_dim_v:
        case = replace(case, head_dim=(64, 96)[position % 2])
    run_sim(simulator, make_inputs(case), ((1,), (None,))[position % 2])


DIMS = ((64, 64), (96, 96), (128, 128), (40, 72), (104, 24), (128, 64))


@pytest.mark.parametrize("number", range(44))
def test_fuzzed_combinations(simulator: ModuleType, number: int) -> None:
    """Every third one with sums in a fixed order."""
    case = replace(small_case(random.Random(number), DIMS, 200), pack_gqa=None)
    more = {"deterministic": True} if number % 3 == 0 else {}
    run_sim(simulator, make_inputs(case, seed=number), (number,), **more)


@pytest.mark.parametrize("seed", [2, 3])
def test_many_delays(simulator: ModuleType, seed: int) -> None:
    """Of several work tiles in each CTA, with whole and cut blocks."""
    case = Case("delays", 1, 400, 520, 2, 1, head_dim=64, causal=True, column="stepped1")
    run_sim(simulator, make_inputs(case), seeds=(seed,))


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=lambda case: case.id)
def test_work_tiles_that_come_to_a_row_block_together(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """Both CTAs run at a time: the second one adds to what the first one stores."""
    monkeypatch.setitem(simulator.OPTIONS, "resident", 2)
    run_sim(simulator, make_inputs(case), seeds=(1, 2))


@pytest.mark.parametrize("config", [{"clears_dq": True}, {"stages_do": 1}], ids=str)
def test_configurations_that_no_row_has(simulator: ModuleType, config: dict[str, Any]) -> None:
    case = Case("config", 1, 200, 300, 2, 1, head_dim=64, causal=True, column="stepped1")
    run_sim(simulator, make_inputs(case), seeds=(1,), config=config)


@pytest.mark.parametrize(
    "case",
    [
        Case("causal", 1, 200, 500, 4, 2, head_dim=64, causal=True),
        Case("window-before-30-d128", 1, 200, 500, 1, 1, window_left=150, window_right=-30),
        Case("lists", 1, 150, 400, 1, 1, head_dim=64, blocks=(48, 80)),
        replace(
            next(c for c in MASK_CASES if c.id == "columns-random2"), head_dim=96, pack_gqa=None
        ),
    ],
    ids=lambda case: case.id,
)
def test_deterministic(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """The order of sums does not depend on which CTA is ahead."""
    monkeypatch.setitem(simulator.OPTIONS, "resident", 2)
    inputs = make_inputs(case)
    dout, _ = make_output_gradients(inputs)
    runs = []
    for seed in (1, 2):
        simulator.OPTIONS["delay"] = seed
        simulator.RESULTS.clear()
        runs.append(launch_on_simulator(inputs, dout, deterministic=True))
        assert not any(result["warnings"] for result in simulator.RESULTS)
    assert_same_bits(*runs)
    note(case, 1, assert_gradients_close(runs[0], inputs, dout), deterministic=True)


def test_skipping_changes_no_bit(simulator: ModuleType) -> None:
    inputs = make_inputs(
        Case("skip", 1, 200, 300, 1, 1, 64, causal=True, column="stepped2", blocks=(64, 64))
    )
    dout, dlse = make_output_gradients(inputs)
    simulator.OPTIONS.pop("delay", None)
    run = partial(launch_on_simulator, inputs, dout, dlse, deterministic=True)
    visiting = run(config={"skip_blocks": False})
    assert_same_bits(run(), visiting)
    share = assert_gradients_close(visiting, inputs, dout, dlse)
    note(inputs.case, None, share, deterministic=True, config={"skip_blocks": False})


@pytest.mark.parametrize(("case", "name"), TRAINED_CASES, ids=lambda x: getattr(x, "id", x))
def test_gradients_of_aux_tensors(simulator: ModuleType, case: Case, name: str) -> None:
    """Beside dq, dk, dv."""
    if max(case.head_dim, case.head_dim_v) > MAX_DIM:
        case = replace(case, head_dim=MAX_DIM, head_dim_v=0)
    given = make_trained(case, name)
    dout, dlse = make_output_gradients(given.inputs)
    daux = [
        torch.full_like(x, NAN) if i in given.wants_aux else None
        for i, x in enumerate(given.aux_tensors)
    ]
    run_sim(simulator, given.inputs, (1,), daux=daux)
    trained = [x for x in daux if x is not None]
    assert_aux_gradients_close(trained, given, dout, dlse)


@pytest.mark.parametrize("position", range(len(UNUSED_CASES)), ids=lambda i: UNUSED_CASES[i].id)
def test_rows_that_are_not_in_use(simulator: ModuleType, position: int) -> None:
    inputs = make_inputs(replace(UNUSED_CASES[position], pack_gqa=None))
    hostile = with_unused_gradients(inputs, (NAN, INF)[position % 2])
    run_hostile(simulator, hostile, deterministic=position % 3 == 1)


@pytest.mark.parametrize("position", range(len(EMPTY)), ids=lambda i: EMPTY[i].id)
def test_rows_of_queries_that_see_nothing(simulator: ModuleType, position: int) -> None:
    inputs, value = make_inputs(EMPTY[position]), (NAN, INF)[position % 2]
    run_hostile(simulator, with_empty(inputs, value), deterministic=position % 3 == 1)


def test_given_outputs(simulator: ModuleType) -> None:
    """Slices of one tensor, of which nothing else is written."""
    inputs = make_inputs(Case("given", 1, 129, 129, 2, 2, causal=True))
    dout, dlse = make_output_gradients(inputs)
    guarded = inputs.q.new_full((1, 131, 8, 128), float("nan"))
    fused = guarded[:, 1:-1, 1:-1]
    given = dict(zip(("dq", "dk", "dv"), fused.split((2, 2, 2), dim=2), strict=True))
    simulator.OPTIONS.pop("delay", None)
    gradients = launch_on_simulator(inputs, dout, dlse, **given)
    assert all(gradients[name] is x for name, x in given.items())
    note(inputs.case, None, assert_gradients_close(gradients, inputs, dout, dlse))
    assert guarded.isnan().sum() == guarded.numel() - fused.numel()


def _scale_bwd(grad: Any, score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return grad * 1.1


def test_a_derivative_of_the_users(simulator: ModuleType) -> None:
    """Of a score_mod that multiplies by as much."""
    inputs = make_inputs(Case("told", 1, 129, 200, 2, 1, causal=True, score_mod="scale"))
    run_sim(simulator, inputs, seeds=(1,), score_mod_bwd=_scale_bwd)


def test_wider_heads_are_refused(simulator: ModuleType) -> None:
    inputs = make_inputs(Case("wide", 1, 129, 129, 1, 1, head_dim=192, dtype=BF16))
    dout, _ = make_output_gradients(inputs)
    with pytest.raises(NotImplementedError, match="up to 128, got 192/192"):
        launch_on_simulator(inputs, dout)
