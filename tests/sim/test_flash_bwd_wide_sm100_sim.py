"""Wide heads of Blackwell's backward by one CTA: every place of dQ, and two launches."""

from __future__ import annotations

from types import ModuleType

import pytest
from cases import FP16, Case
from drawn_blackwell import WIDE
from inputs import make_inputs, make_output_gradients
from simulated_backward import run_sim
from trained_mods import assert_aux_gradients_close, make_trained

ARCH = "sm_100a"

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

ALONE = {"cta_pair": False}
CASES = tuple(
    Case(f"d{d}-dv{d_v}-129x150", 1, 129, 150, 2, 1, head_dim=d, head_dim_v=d_v, causal=d_v > 128)
    for d, d_v in WIDE
)


@pytest.mark.parametrize("position", range(len(CASES)), ids=lambda i: CASES[i].id)
def test_against_oracle(simulator: ModuleType, position: int) -> None:
    run_sim(simulator, make_inputs(CASES[position]), (1,), config=ALONE)


def test_two_launches_make_the_gradients_of_one(simulator: ModuleType) -> None:
    """The gradients of aux tensors come with one of the launches only."""
    case = Case("two", 1, 70, 140, 2, 1, head_dim=256, dtype=FP16)
    given = make_trained(case, "slopes")
    dout, dlse = make_output_gradients(given.inputs)
    daux = given.new_daux()
    run_sim(simulator, given.inputs, (1,), daux=daux)
    trained = [x for x in daux if x is not None]
    assert_aux_gradients_close(trained, given, dout, dlse)
