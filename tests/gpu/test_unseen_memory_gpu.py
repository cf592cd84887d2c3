"""What nobody may see reaches no result of a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import Case
from eager import assert_close_to_oracle
from inputs import Inputs, make_inputs
from public_call import forward
from test_flash_bwd import backward
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

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

UNUSED = (
    *UNUSED_CASES,
    *WIDE_UNUSED_CASES,
    # one row more and one row fewer than tiles and boxes have, in a batch of many
    Case("dense-many", 5, 257, 385, 4, 2, seqused_q=(1, 64, 129, 256, 0),
         seqused_k=(1, 0, 128, 129, 385)),
)  # fmt: skip


def check(inputs: Inputs, hostile: Hostile, **more: bool) -> None:
    results = forward(hostile.inputs)
    assert_close_to_oracle(*results, inputs)
    hostile.assert_close(backward(hostile.inputs, results, hostile.dout, hostile.dlse, **more))


@pytest.mark.shares(2)
@pytest.mark.parametrize("case", UNUSED, ids=lambda case: case.id)
def test_rows_that_are_not_in_use(case: Case) -> None:
    inputs = make_inputs(case, "cuda")
    for value in VALUES.values():
        check(inputs, with_unused_gradients(inputs, value))


@pytest.mark.shares(2)
@pytest.mark.parametrize("case", EMPTY_CASES, ids=lambda case: case.id)
def test_rows_of_queries_that_see_nothing(case: Case) -> None:
    inputs = make_inputs(case, "cuda")
    for value in VALUES.values():
        check(inputs, with_empty(inputs, value))


@pytest.mark.parametrize("case", [UNUSED[0], EMPTY_CASES[0], EMPTY_CASES[-1]], ids=lambda c: c.id)
def test_in_a_fixed_order(case: Case) -> None:
    inputs = make_inputs(case, "cuda")
    prepare = with_unused_gradients if case is UNUSED[0] else with_empty
    check(inputs, prepare(inputs, VALUES["nan"]), deterministic=True)


def test_long_walks() -> None:
    """Many blocks of each kind in flight, of which every seventh query is hostile."""
    case = Case("long", 1, 3000, 3000, 8, 2, mask_mod="blinding")
    inputs = make_inputs(case, "cuda")
    check(inputs, with_empty(inputs, VALUES["nan"]))
    inputs = make_inputs(replace(case, mask_mod=None, causal=True, seqlen_k=1500), "cuda")
    check(inputs, with_empty(inputs, VALUES["inf"]))


def test_padding_behind_documents() -> None:
    check_padded_documents(flash_attn_func, "cuda")
