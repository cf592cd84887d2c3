"""Forwards in splits, and keys in pages, on the software GPU of Blackwell."""

from __future__ import annotations

from types import ModuleType

import pytest
from cases import FP32, Case
from inputs import make_inputs
from paged_inputs import paged
from simulated_forward import run_sim
from split_cases import SplitCase

ARCH = "sm_100a"
pytestmark = pytest.mark.sim

_DECODE = Case(
    "decode", 3, 1, 700, 8, 2, head_dim=64, causal=True, seqused_k=(700, 0, 131), sink=FP32
)
_D128 = Case("d128", 2, 3, 600, 4, 2, causal=True, seqused_k=(513, 65))
_GROUP3 = Case("group3", 1, 5, 600, 6, 2, head_dim=64, causal=True)
_SCORE_MOD = Case("score_mod", 1, 4, 700, 4, 2, head_dim=64, score_mod="alibi", causal=True)
CASES = (
    (SplitCase(_DECODE, sms=5), None, "NHD"),
    (SplitCase(_D128, 3, sms=2), None, "NHD"),
    (SplitCase(_GROUP3, sms=5), None, "NHD"),
    (SplitCase(_SCORE_MOD, sms=5), None, "NHD"),
    (SplitCase(_SCORE_MOD, 3, sms=2), None, "NHD"),
    (SplitCase(_D128, sms=3), 16, "HND"),
    (SplitCase(_DECODE, 1, sms=2), 128, "packed"),
    (SplitCase(_DECODE, sms=5), 1, "NHD"),
)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize(
    ("split", "page_size", "layout"), CASES, ids=lambda x: x.id if isinstance(x, SplitCase) else x
)
def test_against_oracle(
    simulator: ModuleType, split: SplitCase, page_size: int | None, layout: str
) -> None:
    inputs = make_inputs(split.case)
    if page_size is not None:
        inputs = paged(inputs, page_size, layout)
    run_sim(simulator, inputs, ARCH, (None, 1), sms=split.sms, num_splits=split.num_splits)
