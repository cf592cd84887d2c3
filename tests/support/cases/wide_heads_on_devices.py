"""Forwards of heads above 256 columns, on every device."""

from __future__ import annotations

from typing import Any

import pytest
from cases import Case
from devices import Device, check_forward
from paged_inputs import paged
from wide_cases import DECODE, FEW, MANY, WIDE_CASES

from flash_mask_cute.call import splits


@pytest.mark.parametrize("case", WIDE_CASES)
def test_against_oracle(device: Device, case: Case) -> None:
    # two pairs of CTAs, and each has several work tiles
    check_forward(device, device.inputs(case), (1,), sms=4)


@pytest.mark.parametrize(
    "more", [{}, {"num_splits": 1}, {"num_splits": 3}, {"seqlen_k_per_split": 512}], ids=str
)
@pytest.mark.parametrize("page_size", [None, 16, 64, 12])
@pytest.mark.parametrize("case", [DECODE, FEW])
def test_decoding(device: Device, case: Case, page_size: int | None, more: dict[str, Any]) -> None:
    inputs = device.inputs(case)
    if page_size is not None:
        inputs = paged(inputs, page_size, "NHD")
    check_forward(device, inputs, device.pick((1,), (None,) * 3, (1,)), sms=10, **more)


@pytest.mark.parametrize("more", [{"num_splits": 3}, {"seqlen_k_per_split": 512}, {}], ids=str)
def test_splits_of_many_queries(
    device: Device, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(splits, "_LEAST_BLOCKS_OF_MANY", 4)
    check_forward(device, device.inputs(MANY), device.pick((1,), (None,) * 3, (1,)), sms=12, **more)
