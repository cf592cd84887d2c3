"""What is Blackwell's own of the compiled backward, on the software GPU."""

from __future__ import annotations

from types import ModuleType

import pytest
from cases import Case
from inputs import make_inputs, make_output_gradients
from simulated_backward import run_sim
from trained_mods import TRAINED_CASES, assert_aux_gradients_close, make_trained

ARCH = "sm_100a"

pytestmark = pytest.mark.usefixtures("poisoned_allocations")


@pytest.mark.parametrize("seed", [2, 3])
def test_many_delays(simulator: ModuleType, seed: int) -> None:
    """Of several work tiles in each CTA, with whole and cut blocks."""
    case = Case("delays", 1, 400, 520, 2, 1, head_dim=64, causal=True, column="stepped1")
    run_sim(simulator, make_inputs(case), seeds=(seed,))


@pytest.mark.parametrize("d", [64, 96, 128])
def test_sums_that_the_first_one_stores(simulator: ModuleType, d: int) -> None:
    """Not what the table chooses: the first CTA at a row block stores, and others wait for it."""
    case = Case("first", 1, 300, 400, 2, 1, head_dim=d, causal=True)
    run_sim(simulator, make_inputs(case), seeds=(d,), config={"clears_dq": False})


@pytest.mark.parametrize(("case", "name"), TRAINED_CASES)
def test_gradients_of_aux_tensors(simulator: ModuleType, case: Case, name: str) -> None:
    """Beside dq, dk, dv."""
    given = make_trained(case, name)
    dout, dlse = make_output_gradients(given.inputs)
    daux = given.new_daux()
    run_sim(simulator, given.inputs, (1,), daux=daux)
    trained = [x for x in daux if x is not None]
    assert_aux_gradients_close(trained, given, dout, dlse)
