"""Gradients of aux tensors in a fixed order by the compiled backward, on the software GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from cases import FP32, Case
from conftest import ACTIVE_ARCH
from inputs import make_output_gradients
from quiet_runs import quiet_run
from simulated_backward import DELAY_SEEDS, launch_on_simulator, run_sim
from trained_mods import (
    FAR_CASES,
    LINE_CASES,
    ORDERED_CASES,
    TRAINED_CASES,
    TrainedInputs,
    TrainedRecipe,
    assert_aux_gradients_close,
    make_trained,
)

from flash_mask_cute.call import tables as difference_tables

pytestmark = [
    pytest.mark.usefixtures("poisoned_allocations"),
    pytest.mark.skipif(ACTIVE_ARCH != "sm_90a", reason="refused on Blackwell"),
]
cases = pytest.mark.parametrize(
    ("case", "name"), ORDERED_CASES + TRAINED_CASES[1:5] + LINE_CASES + FAR_CASES
)


@cases
def test_against_oracle(simulator: ModuleType, case: Case, name: str) -> None:
    given = make_trained(case, name)
    dout, dlse = make_output_gradients(given.inputs)
    for seed in DELAY_SEEDS:
        daux = given.new_daux()
        run_sim(simulator, given.inputs, (seed,), daux=daux, deterministic=True)
        trained = [x for x in daux if x is not None]
        assert_aux_gradients_close(trained, given, dout, None if seed is None else dlse)


@pytest.mark.parametrize(("case", "name"), ORDERED_CASES[:2] + TRAINED_CASES[1:2])
def test_equal_bits_in_any_order_of_warps(simulator: ModuleType, case: Case, name: str) -> None:
    given = make_trained(case, name)
    runs = [ordered_gradients(simulator, given, seed) for seed in (None, 1, 2, 3)]
    assert_equal_bits(runs)


def test_equal_bits_whatever_a_cta_computed_before(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mask warps sum dS that is rounded: of which blocks must not depend on the work tiles that a
    CTA had before. Three tiles have three blocks each; CTAs run one by one, or together."""
    monkeypatch.setattr(difference_tables, "LEAST_SCORES", 0)
    given = make_trained(Case("grid-3-blocks", 1, 130, 260, 1, 1), "grid")
    runs = []
    for resident in (1, 2):
        monkeypatch.setitem(simulator.OPTIONS, "resident", resident)
        runs.append(ordered_gradients(simulator, given, 1))
    assert_equal_bits(runs)


def _of_entry(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """In wide buckets, which all heads share."""
    return score + aux[-1][b[0], (q[0] - k[0] + 800) // 200]


def test_equal_bits_however_many_ctas_share_heads(simulator: ModuleType) -> None:
    """As many as the size of the batch makes worthwhile."""
    recipe = TrainedRecipe(
        _of_entry,
        lambda score, b, h, q, k, table: score + table[b][(q - k + 800) // 200],
        lambda x: [((x.batch, 9), FP32)],
    )
    given = make_trained(Case("of-entry-gqa4", 1, 200, 130, 4, 1, head_dim=64), recipe)
    runs = [
        ordered_gradients(simulator, given, None, config={"group_splits": n}) for n in (1, 2, 4)
    ]
    assert_equal_bits(runs)


def ordered_gradients(
    simulator: ModuleType, given: TrainedInputs, seed: int | None, **more: Any
) -> list[torch.Tensor]:
    """Of the trained tensors."""
    dout, _ = make_output_gradients(given.inputs)
    daux = given.new_daux()
    with quiet_run(simulator, seed):
        launch_on_simulator(given.inputs, dout, daux=daux, deterministic=True, **more)
    return [x for x in daux if x is not None]


def assert_equal_bits(runs: list[list[torch.Tensor]]) -> None:
    first, *others = runs
    for found in others:
        assert all(torch.equal(x, y) for x, y in zip(first, found, strict=True))
