"""What nobody may see reaches no result on the CPU, and who pays for that on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import FP32, Case
from eager import assert_close_to_oracle
from inputs import Inputs, make_inputs
from planned import planned
from unseen_memory import (
    EMPTY_CASES,
    UNUSED_CASES,
    VALUES,
    WIDE_UNUSED_CASES,
    Hostile,
    check_padded_documents,
    empty_rows,
    with_empty,
    with_unused,
    with_unused_gradients,
)

from flash_mask_cute import flash_attn_func
from flash_mask_cute.call.arguments import Direction
from flash_mask_cute.call.problem import AttentionProblem, may_empty_rows
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

ALL_UNUSED = (*UNUSED_CASES, *WIDE_UNUSED_CASES)
NAMES = ("dq", "dk", "dv")
each_value = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
each_empty = pytest.mark.parametrize("case", EMPTY_CASES, ids=lambda case: case.id)
each_unused = pytest.mark.parametrize("case", ALL_UNUSED, ids=lambda case: case.id)


@each_value
@each_unused
def test_rows_that_are_not_in_use(case: Case, value: float) -> None:
    inputs = make_inputs(case)
    hostile = with_unused(inputs, value)
    out, lse = _flash_attn_fwd(hostile.q, hostile.k, hostile.v, **inputs.keywords)
    assert lse is not None
    assert_close_to_oracle(out, lse, inputs)
    check_gradients(with_unused_gradients(inputs, value))


@each_value
@each_empty
def test_rows_of_queries_that_see_nothing(case: Case, value: float) -> None:
    hostile = with_empty(make_inputs(case), value)
    given = hostile.inputs
    out, lse = _flash_attn_fwd(given.q, given.k, given.v, **given.keywords)
    assert lse is not None
    assert_close_to_oracle(out, lse, hostile.clean_inputs)
    check_gradients(hostile)


def check_gradients(hostile: Hostile) -> None:
    inputs = hostile.inputs
    out, lse = inputs.reference[0].to(inputs.q.dtype), inputs.reference[1].float()
    keywords = inputs.bwd_keywords
    sink, dsink = keywords["learnable_sink"], None
    if sink is not None:
        dsink = keywords["dsink"] = torch.empty_like(sink)
    operands = inputs.q, inputs.k, inputs.v, out, hostile.dout, lse
    gradients = _flash_attn_bwd(*operands, dlse=hostile.dlse, **keywords)
    hostile.assert_close(dict(zip(NAMES, gradients, strict=True)) | {"dsink": dsink})


@each_value
def test_padding_behind_documents(value: float) -> None:
    check_padded_documents(flash_attn_func, value=value)


@each_value
def test_a_value_that_is_seen_stays(value: float) -> None:
    """Also where a sink is nearly all that a query sees, and the rest is 0."""
    inputs = make_inputs(Case("seen", 1, 40, 40, 1, 1, causal=True, sink=FP32))
    inputs.v.zero_()
    inputs.keywords["learnable_sink"].fill_(12.0)
    out, lse = _flash_attn_fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords)
    dout = torch.ones_like(out)
    dout[0, 20] = value
    keywords = inputs.bwd_keywords
    _, _, dv = _flash_attn_bwd(inputs.q, inputs.k, inputs.v, out, dout, lse, **keywords)
    assert not dv[0, :21].isfinite().any()


# -- who pays -----------------------------------------------------------------------------------

PLAIN = AttentionProblem("bfloat16", 64, 64, needs_lse=False)
SAME, MORE_QUERIES, MORE_KEYS = (100, 100), (101, 100), (100, 101)
VARLEN = {"varlen_q": True, "varlen_k": True}


@pytest.mark.parametrize(
    ("fields", "seqlens", "window", "expected"),
    [
        ({}, MORE_QUERIES, (None, None), False),
        (VARLEN, SAME, (None, None), False),
        ({"has_seqused_k": True}, SAME, (None, None), False),
        ({"has_softcap": True}, MORE_QUERIES, (None, None), False),
        ({"is_causal": True}, SAME, (None, None), False),
        ({"is_causal": True}, MORE_KEYS, (None, None), False),
        ({"is_causal": True}, MORE_QUERIES, (None, None), True),
        ({"is_causal": True, **VARLEN}, SAME, (None, None), True),
        ({"is_causal": True, "has_seqused_k": True}, SAME, (None, None), True),
        ({"is_causal": True, "has_window_left": True}, SAME, (20, None), False),
        ({"has_window_left": True}, MORE_QUERIES, (20, None), False),
        ({"has_window_left": True, "has_window_right": True}, SAME, (20, 0), False),
        ({"has_window_right": True}, MORE_QUERIES, (None, 5), True),
        ({"has_window_left": True, "has_window_right": True}, SAME, (20, -5), True),
        ({"has_window_left": True}, SAME, (-5, None), True),
        ({"mask_mod": "key"}, SAME, (None, None), True),
        ({"score_mod": "key"}, SAME, (None, None), True),
        ({"intervals": (1, True), "is_causal": True}, SAME, (None, None), True),
        ({"has_lists": True}, SAME, (None, None), True),
        ({"has_bits": True}, SAME, (None, None), True),
        ({"reads_mask_bits": True}, SAME, (None, None), True),
    ],
)
def test_calls_whose_masks_may_empty_rows(
    fields: dict[str, Any],
    seqlens: tuple[int, int],
    window: tuple[int | None, int | None],
    expected: bool,
) -> None:
    assert may_empty_rows(replace(PLAIN, **fields), seqlens, window) is expected


def backward_problem(inputs: Inputs) -> AttentionProblem:
    found = planned(inputs, direction=Direction.BACKWARD)
    assert found.gradients is not None
    # the sink tells the kernel before which rows see nothing, and nothing else
    has_sink = inputs.case.sink is not None
    sink_dtype = found.gradients.sink_dtype
    assert (sink_dtype == "float32") == (has_sink and found.problem.may_empty_rows)
    return found.problem


@each_empty
def test_cases_are_told_apart(case: Case) -> None:
    """Masks that do empty rows may; and the oracle finds no such row where they may not."""
    inputs = make_inputs(case)
    if case.lengths_q is None:
        assert backward_problem(inputs).may_empty_rows
    plain = Case("plain", 1, 60, 70, causal=True, window_left=9, sink=FP32)
    inputs = make_inputs(plain)
    assert not backward_problem(inputs).may_empty_rows
    assert not empty_rows(inputs).any()
