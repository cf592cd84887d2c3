"""Gradients of aux tensors by the compiled backward, on the software GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from cases import Case
from conftest import ACTIVE_ARCH, SMS
from drawn_learned import draw_learned
from drawn_share import Draws
from eager import assert_close_to_oracle, assert_gradients_close
from inputs import make_output_gradients
from planned import call_of, planned
from quiet_runs import quiet_run
from simulated_backward import DELAY_SEEDS, launch_on_simulator, run_sim
from trained_mods import (
    FAR_CASES,
    LINE_CASES,
    TRAINED_CASES,
    assert_aux_gradients_close,
    make_trained,
)

from flash_mask_cute.call import tables as difference_tables
from flash_mask_cute.call.prepare import prepared_fwd
from flash_mask_cute.runtime.target import Target

DRAWN = Draws.of("LEARNED", 1)

DIMS = ((64, 64), (128, 128), (32, 32), (80, 80), (40, 40), (96, 64), (192, 128), (256, 256))

pytestmark = pytest.mark.usefixtures("poisoned_allocations")


def check(simulator: ModuleType, case: Case, name: str, seeds: Any, **more: Any) -> None:
    """Without a gradient by lse, and with one. more: keywords of the backward."""
    given = make_trained(case, name)
    dout, dlse = make_output_gradients(given.inputs)
    for seed in seeds:
        daux = given.new_daux()
        run_sim(simulator, given.inputs, (seed,), daux=daux, **more)
        trained = [x for x in daux if x is not None]
        assert_aux_gradients_close(trained, given, dout, None if seed is None else dlse)


@pytest.mark.parametrize(("case", "name"), TRAINED_CASES + LINE_CASES + FAR_CASES)
def test_against_oracle(simulator: ModuleType, case: Case, name: str) -> None:
    """Beside dq, dk, dv."""
    check(simulator, case, name, DELAY_SEEDS)


@pytest.mark.parametrize("head_dim", [64, 80])
def test_every_block_of_sequences_without_keys(simulator: ModuleType, head_dim: int) -> None:
    """Work tiles without scores, of several query blocks that nobody leaves out."""
    case = Case("unused", 3, 130, 150, 1, 1, head_dim=head_dim, seqused_q=(130, 0, 70),
                seqused_k=(0, 150, 100))  # fmt: skip
    check(simulator, case, "key_bias", (1,), config={"skip_blocks": False})


@pytest.mark.parametrize("number", range(DRAWN.most))
def test_drawn(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Any masks and layouts, with tables of differences and without, in both directions."""
    seed = DRAWN.seed * 1000 + number
    drawn = draw_learned(seed, DIMS if ACTIVE_ARCH == "sm_90a" else DIMS[:2])
    print(drawn.case)
    given = make_trained(drawn.case, drawn.recipe)
    if seed % 3:
        monkeypatch.setattr(difference_tables, "LEAST_SCORES", 0)
        monkeypatch.setattr(difference_tables, "SCORES_OF_ELEMENT", 0)
    plan = planned(call_of(given.inputs), Target(ACTIVE_ARCH, num_sms=SMS))
    call = call_of(given.inputs)
    with quiet_run(simulator, 1):
        out, lse = prepared_fwd(plan)(call.tensors, call.masks)
    assert_close_to_oracle(out, lse, given.inputs)
    dout, dlse = make_output_gradients(given.inputs)
    daux = given.new_daux()
    in_order = ACTIVE_ARCH == "sm_90a" and seed % 2 == 0
    with quiet_run(simulator, 1):
        grads = launch_on_simulator(given.inputs, dout, dlse, daux=daux, deterministic=in_order)
    assert_gradients_close(grads, given.inputs, dout, dlse)
    trained = [x for x in daux if x is not None]
    assert_aux_gradients_close(trained, given, dout, dlse)
