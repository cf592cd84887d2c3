"""What nobody may see reaches no result on the CPU, and who pays for that on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import FP32, Case
from inputs import Inputs, make_inputs
from planned import planned
from unseen_memory import EMPTY_CASES, VALUES, empty_rows
from unseen_memory_on_devices import (  # noqa: F401
    test_in_a_fixed_order,
    test_padding_behind_documents,
    test_rows_of_queries_that_see_nothing,
    test_rows_that_are_not_in_use,
)

from flash_mask_cute.call.arguments import Direction
from flash_mask_cute.call.problem import AttentionProblem, may_empty_rows
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
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


@pytest.mark.parametrize("case", EMPTY_CASES)
def test_cases_are_told_apart(case: Case) -> None:
    """Masks that do empty rows may; and the oracle finds no such row where they may not."""
    inputs = make_inputs(case)
    if case.lengths_q is None:
        assert backward_problem(inputs).may_empty_rows
    plain = Case("plain", 1, 60, 70, causal=True, window_left=9, sink=FP32)
    inputs = make_inputs(plain)
    assert not backward_problem(inputs).may_empty_rows
    assert not empty_rows(inputs).any()
