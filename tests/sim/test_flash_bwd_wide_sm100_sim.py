"""Wide heads of Blackwell's backward, on the software GPU."""

from __future__ import annotations

from types import ModuleType

import pytest
from cases import FP16, Case
from inputs import make_inputs
from simulated_backward import run_sim

ARCH = "sm_100a"

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("poisoned_allocations")]

CASES = (
    Case("d192-dv128-129x129", 1, 129, 129, 1, 1, head_dim=192, head_dim_v=128),
    Case("d192-70x200", 1, 70, 200, 1, 1, head_dim=192),
    Case("d256-70x200", 1, 70, 200, 1, 1, head_dim=256),
)


@pytest.mark.parametrize("position", range(len(CASES)), ids=lambda i: CASES[i].id)
def test_against_oracle(simulator: ModuleType, position: int) -> None:
    run_sim(simulator, make_inputs(CASES[position]), (1,))
