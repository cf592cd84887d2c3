"""What nobody may see reaches no result, on the CPU and on a GPU."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from devices import Device
from eager import assert_close_to_oracle
from inputs import Inputs
from unseen_memory import (
    EMPTY_CASES,
    UNUSED_CASES,
    VALUES,
    WIDE_UNUSED_CASES,
    Hostile,
    check_padded_documents,
    with_empty,
    with_unused_gradients,
)

from flash_mask_cute import flash_attn_func

UNUSED = (
    *UNUSED_CASES,
    *WIDE_UNUSED_CASES,
    # one row more and one row fewer than tiles and boxes have, in a batch of many
    Case("dense-many", 5, 257, 385, 4, 2, seqused_q=(1, 64, 129, 256, 0),
         seqused_k=(1, 0, 128, 129, 385)),
)  # fmt: skip


def check(device: Device, inputs: Inputs, hostile: Hostile, **more: bool) -> None:
    given = hostile.inputs
    out, lse = device.forward(given.q, given.k, given.v, **given.keywords)
    assert_close_to_oracle(out, lse, inputs)
    keywords = given.bwd_keywords | {"dlse": hostile.dlse} | more
    sink, dsink = keywords["learnable_sink"], None
    if sink is not None:
        dsink = keywords["dsink"] = torch.full_like(sink, torch.nan)
    operands = given.q, given.k, given.v, out, hostile.dout, lse
    gradients = device.backward(*operands, **keywords)
    hostile.assert_close(dict(zip(("dq", "dk", "dv"), gradients, strict=True)) | {"dsink": dsink})


@pytest.mark.parametrize("case", UNUSED)
def test_rows_that_are_not_in_use(device: Device, case: Case) -> None:
    inputs = device.inputs(case)
    for value in VALUES.values():
        check(device, inputs, with_unused_gradients(inputs, value))


@pytest.mark.parametrize("case", EMPTY_CASES)
def test_rows_of_queries_that_see_nothing(device: Device, case: Case) -> None:
    inputs = device.inputs(case)
    for value in VALUES.values():
        check(device, inputs, with_empty(inputs, value))


@pytest.mark.parametrize("case", [UNUSED[0], EMPTY_CASES[0], EMPTY_CASES[-1]])
def test_in_a_fixed_order(device: Device, case: Case) -> None:
    inputs = device.inputs(case)
    prepare = with_unused_gradients if case is UNUSED[0] else with_empty
    check(device, inputs, prepare(inputs, VALUES["nan"]), deterministic=True)


def test_padding_behind_documents(device: Device) -> None:
    for value in VALUES.values():
        check_padded_documents(flash_attn_func, device.where, value)
