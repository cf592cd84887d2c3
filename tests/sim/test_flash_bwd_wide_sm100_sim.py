"""Wide heads of Blackwell's backward by one CTA, on the software GPU: every place of dQ, and two
launches."""

from __future__ import annotations

import random
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from cases import FP16, Case
from gradient_oracle import assert_gradients_close, make_output_gradients
from inputs import make_inputs
from quiet_runs import quiet_run
from random_cases import small_case
from simulated_backward import assert_same_bits, launch_on_simulator, run_sim
from trained_mods import assert_aux_gradients_close, make_trained
from unseen_memory import NAN

ARCH = "sm_100a"

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("poisoned_allocations")]

ALONE = {"cta_pair": False}
# dQ of its own, over dP, over S, and beside two launches
DIMS = (
    *((64, 256), (192, 64), (96, 256), (192, 128), (136, 72)),
    *((192, 192), (256, 128), (128, 256), (256, 256), (200, 136), (256, 192)),
)
CASES = tuple(
    Case(f"d{d}-dv{d_v}-129x150", 1, 129, 150, 2, 1, head_dim=d, head_dim_v=d_v, causal=d_v > 128)
    for d, d_v in DIMS
)


@pytest.mark.parametrize("position", range(len(CASES)), ids=lambda i: CASES[i].id)
def test_against_oracle(simulator: ModuleType, position: int) -> None:
    run_sim(simulator, make_inputs(CASES[position]), (1,), config=ALONE)


@pytest.mark.parametrize("number", range(52))
def test_fuzzed_combinations(simulator: ModuleType, number: int) -> None:
    """Every third one with sums in a fixed order."""
    case = replace(small_case(random.Random(1000 + number), DIMS, 140), pack_gqa=None)
    more = {"deterministic": True} if number % 3 == 0 else {}
    run_sim(simulator, make_inputs(case, seed=number), (number,), config=ALONE, **more)


@pytest.mark.parametrize("dims", [(192, 128), (192, 192), (256, 256)], ids=str)
def test_deterministic(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int]
) -> None:
    case = Case(
        "ordered", 1, 150, 300, 2, 1, causal=True, head_dim=dims[0], head_dim_v=dims[1]
    )  # fmt: skip
    inputs = make_inputs(case)
    dout, _ = make_output_gradients(inputs)
    runs = []
    for seed, resident in ((1, 2), (2, 1)):
        monkeypatch.setitem(simulator.OPTIONS, "resident", resident)
        with quiet_run(simulator, seed):
            runs.append(launch_on_simulator(inputs, dout, deterministic=True))
    assert_same_bits(*runs)
    assert_gradients_close(runs[0], inputs, dout)


def test_two_launches_make_the_gradients_of_one(simulator: ModuleType) -> None:
    """The gradients of aux tensors come with one of the launches only."""
    case = Case("two", 1, 70, 140, 2, 1, head_dim=256, dtype=FP16)
    given = make_trained(case, "slopes")
    dout, dlse = make_output_gradients(given.inputs)
    daux = [
        torch.full_like(x, NAN) if i in given.wants_aux else None
        for i, x in enumerate(given.aux_tensors)
    ]
    run_sim(simulator, given.inputs, (1,), daux=daux)
    trained = [x for x in daux if x is not None]
    assert_aux_gradients_close(trained, given, dout, dlse)
