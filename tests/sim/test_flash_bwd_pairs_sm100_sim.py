"""Pairs of CTAs in Blackwell's backward, on the software GPU."""

from __future__ import annotations

from types import ModuleType

import pytest
from cases import Case
from inputs import make_inputs
from simulated_backward import run_sim

ARCH = "sm_100a"

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("poisoned_allocations")]

PAIR = {"cta_pair": True, "clears_dq": True}
CASES = (
    Case("full-129x300", 1, 129, 300, 1, 1, head_dim=128),
    Case("causal-gqa2-257x300", 1, 257, 300, 2, 1, head_dim=128, causal=True),
)


@pytest.mark.parametrize("position", range(len(CASES)), ids=lambda i: CASES[i].id)
def test_against_oracle(simulator: ModuleType, position: int) -> None:
    run_sim(simulator, make_inputs(CASES[position]), (1,), config=PAIR)
