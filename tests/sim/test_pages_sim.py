"""Keys and values in pages, on the software GPU."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import pytest
from cases import FP32, Case
from inputs import make_inputs
from paged_inputs import paged
from simulated_forward import DELAY_SEEDS, run_sim


class PageCase(NamedTuple):
    case: Case
    page_size: int
    layout: str = "NHD"
    num_splits: int = 0

    @property
    def id(self) -> str:
        return f"{self.case.id}-page{self.page_size}-{self.layout}-{self.num_splits}"


_DECODE = Case(
    "decode", 3, 1, 700, 8, 2, head_dim=64, causal=True, seqused_k=(700, 0, 131), sink=FP32
)
_D128 = Case("d128", 2, 3, 600, 4, 2, causal=True, seqused_k=(513, 65))
_PREFILL = Case("prefill", 2, 150, 300, 2, 1, causal=True, seqused_k=(300, 170), pack_gqa=False)
PAGE_CASES = (
    PageCase(_DECODE, 16),
    PageCase(_DECODE, 128, "HND"),
    PageCase(_DECODE, 256, num_splits=3),
    PageCase(_D128, 64, "packed"),
    PageCase(_D128, 8, "HND", 1),
    PageCase(_D128, 24),
    PageCase(_DECODE, 1),
    PageCase(_D128, 4, "HND"),
    PageCase(_D128, 17, "packed", 3),
    PageCase(_PREFILL, 2, "HND", 1),
    PageCase(_PREFILL, 32, num_splits=1),
    PageCase(_PREFILL, 128, "HND", 2),
)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("pages", PAGE_CASES)
def test_against_oracle(simulator: ModuleType, pages: PageCase) -> None:
    inputs = paged(make_inputs(pages.case), pages.page_size, pages.layout)
    run_sim(simulator, inputs, DELAY_SEEDS[:2], sms=5, num_splits=pages.num_splits)
