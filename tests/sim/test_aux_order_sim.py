"""Gradients of aux tensors in a fixed order by the compiled backward, on the software GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from cases import Case
from conftest import ACTIVE_ARCH
from gradient_oracle import make_output_gradients
from quiet_runs import quiet_run
from simulated_backward import DELAY_SEEDS, launch_on_simulator, run_sim
from trained_mods import (
    FAR_CASES,
    LINE_CASES,
    ORDERED_CASES,
    TRAINED_CASES,
    TrainedInputs,
    assert_aux_gradients_close,
    make_trained,
)

pytestmark = [
    pytest.mark.sim,
    pytest.mark.usefixtures("poisoned_allocations"),
    pytest.mark.skipif(ACTIVE_ARCH != "sm_90a", reason="refused on Blackwell"),
]
cases = pytest.mark.parametrize(
    ("case", "name"),
    ORDERED_CASES + TRAINED_CASES[1:5] + LINE_CASES + FAR_CASES,
    ids=lambda x: getattr(x, "id", x),
)


def new_daux(given: TrainedInputs) -> list[torch.Tensor | None]:
    return [
        torch.full_like(x, float("nan")) if i in given.wants_aux else None
        for i, x in enumerate(given.aux_tensors)
    ]


@cases
def test_against_oracle(simulator: ModuleType, case: Case, name: str) -> None:
    given = make_trained(case, name)
    dout, dlse = make_output_gradients(given.inputs)
    for seed in DELAY_SEEDS:
        daux = new_daux(given)
        run_sim(simulator, given.inputs, (seed,), daux=daux, deterministic=True)
        trained = [x for x in daux if x is not None]
        assert_aux_gradients_close(trained, given, dout, None if seed is None else dlse)


@pytest.mark.parametrize(
    ("case", "name"), ORDERED_CASES[:2] + TRAINED_CASES[1:2], ids=lambda x: getattr(x, "id", x)
)
def test_equal_bits_in_any_order_of_warps(simulator: ModuleType, case: Case, name: str) -> None:
    given = make_trained(case, name)
    dout, _ = make_output_gradients(given.inputs)
    found: list[Any] = []
    for seed in (None, 1, 2, 3):
        daux = new_daux(given)
        with quiet_run(simulator, seed):
            launch_on_simulator(given.inputs, dout, daux=daux, deterministic=True)
        found.append([x.clone() for x in daux if x is not None])
    for others in found[1:]:
        for x, y in zip(found[0], others, strict=True):
            assert torch.equal(x, y)
