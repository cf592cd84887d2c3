"""Forwards whose work tiles are computed in splits and combined; on Blackwell paged keys, too."""

from __future__ import annotations

from types import ModuleType

import pytest
import wide_outputs
from cases import FP32, Case
from conftest import ACTIVE_ARCH, HOPPER
from inputs import make_inputs
from paged_inputs import paged
from planned import call_of
from quiet_runs import quiet_run
from simulated_forward import DELAY_SEEDS, run_on_simulator, run_sim
from split_cases import SPLIT_CASES, SplitCase, take_chunks

from flash_mask_cute.call import splits

ARCH = ACTIVE_ARCH
pytestmark = pytest.mark.usefixtures("poisoned_allocations")

_DECODE = Case(
    "decode", 3, 1, 700, 8, 2, head_dim=64, causal=True, seqused_k=(700, 0, 131), sink=FP32
)
_D128 = Case("d128", 2, 3, 600, 4, 2, causal=True, seqused_k=(513, 65))
_GROUP3 = Case("group3", 1, 5, 600, 6, 2, head_dim=64, causal=True)
_SCORE_MOD = Case("score_mod", 1, 4, 700, 4, 2, head_dim=64, score_mod="alibi", causal=True)
# `test_pages_sim.py` has the pages of Hopper
BLACKWELL_CASES = (
    (SplitCase(_DECODE, sms=5), None, "NHD"),
    (SplitCase(_D128, 3, sms=2), None, "NHD"),
    (SplitCase(_GROUP3, sms=5), None, "NHD"),
    (SplitCase(_SCORE_MOD, sms=5), None, "NHD"),
    (SplitCase(_SCORE_MOD, 3, sms=2), None, "NHD"),
    (SplitCase(_D128, sms=3), 16, "HND"),
    (SplitCase(_DECODE, 1, sms=2), 128, "packed"),
    (SplitCase(_DECODE, sms=5), 1, "NHD"),
)
CASES = [(x, None, "NHD") for x in SPLIT_CASES] if ARCH == HOPPER else BLACKWELL_CASES


@pytest.fixture(autouse=True)
def short_walks_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many queries, too, over few keys, as longer walks are on a GPU."""
    monkeypatch.setattr(splits, "_LEAST_BLOCKS_OF_MANY", 4)


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    take_chunks(monkeypatch)


@pytest.mark.parametrize(("split", "page_size", "layout"), CASES)
def test_against_oracle(
    simulator: ModuleType, split: SplitCase, page_size: int | None, layout: str
) -> None:
    inputs = make_inputs(split.case)
    if page_size is not None:
        inputs = paged(inputs, page_size, layout)
    seeds = DELAY_SEEDS[:2] if split.case.batch < 10 else (1,)
    run_sim(simulator, inputs, seeds, sms=split.sms, num_splits=split.num_splits)
    if split.num_splits != 1:
        assert len(simulator.RESULTS) == 2, "one kernel computes splits, one combines them"


@pytest.mark.parametrize("case", wide_outputs.CASES)
def test_an_output_in_float32(simulator: ModuleType, case: Case) -> None:
    """Of one split, if no more are asked for."""
    inputs = make_inputs(case)
    for num_splits in (0, 1, 2):
        call = call_of(inputs, out=wide_outputs.new_out(inputs), num_splits=num_splits)
        with quiet_run(simulator, num_splits):
            out, lse = run_on_simulator(call, sms=3)
        assert lse is not None
        wide_outputs.assert_wide(out, lse, inputs)
        assert len(simulator.RESULTS) == 2
