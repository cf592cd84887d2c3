"""Forwards whose work tiles are computed in splits, and combined, on the software GPU."""

from __future__ import annotations

from types import ModuleType

import pytest
from inputs import make_inputs
from simulated_forward import DELAY_SEEDS, run_sim
from split_cases import SPLIT_CASES, SplitCase

from flash_mask_cute.call.choose import splits

pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True)
def short_walks_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many queries, too, over few keys, as longer walks are on a GPU."""
    monkeypatch.setattr(splits, "_LEAST_BLOCKS_OF_MANY", 4)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("split", SPLIT_CASES, ids=lambda split: split.id)
def test_against_oracle(simulator: ModuleType, split: SplitCase) -> None:
    seeds = DELAY_SEEDS[:2] if split.case.batch < 10 else (1,)
    run_sim(
        simulator,
        make_inputs(split.case),
        "sm_90a",
        seeds,
        sms=split.sms,
        num_splits=split.num_splits,
    )
    assert len(simulator.RESULTS) == 2, "one kernel computes splits, one combines them"
