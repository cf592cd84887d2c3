"""The backward of heads above 256 columns, on the software GPU."""

from __future__ import annotations

from types import ModuleType

import pytest
from cases import Case
from inputs import make_inputs
from simulated_backward import run_sim

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("poisoned_allocations")]


@pytest.mark.parametrize(
    "case",
    [Case("full", 1, 64, 64, head_dim=512), Case("causal", 1, 200, 300, 2, 1, 512, causal=True)],
    ids=lambda case: case.id,
)
def test_against_oracle(simulator: ModuleType, case: Case) -> None:
    run_sim(simulator, make_inputs(case), (1,), launches=2)
