"""Callables that read aux tensors of every dtype, through the public functions on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aux_dtypes
import pytest
import torch
from aux_dtypes import CASES, make_all_dtypes
from cases import Case
from eager import assert_close_to_oracle
from inputs import make_output_gradients
from test_functional_gpu import arguments_of, run_and_check_gradients
from trained_mods import assert_aux_gradients_close

from flash_mask_cute import create_block_mask

DEVICE = "cuda"


def check(case: Case, compiled: bool = False) -> None:
    """Forward, all gradients, and that of the table that a uint8 indexes."""
    given = make_all_dtypes(case, DEVICE)
    function, keywords = arguments_of(given.inputs)
    aux = list(given.aux_tensors)
    table = aux[aux_dtypes.TABLE] = given.trained[0].clone().requires_grad_()
    keywords["aux_tensors"] = aux
    call: Callable[..., Any] = torch.compile(function, fullgraph=True) if compiled else function
    out, lse = run_and_check_gradients(given.inputs, call, keywords)
    assert_close_to_oracle(out, lse, given.inputs)
    assert table.grad is not None
    assert_aux_gradients_close([table.grad], given, *make_output_gradients(given.inputs))


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("case", CASES)
def test_attention(case: Case) -> None:
    check(case)


def test_inductor() -> None:
    torch._dynamo.reset()
    check(CASES[1], compiled=True)


def test_block_lists() -> None:
    aux = make_all_dtypes(CASES[0], DEVICE).aux_tensors
    sizes: Any = {"device": DEVICE, "BLOCK_SIZE": aux_dtypes.BLOCK_SIZE, "aux_tensors": aux}
    lists = create_block_mask(aux_dtypes.mask_mod, 1, 1, 200, 300, **sizes)
    aux_dtypes.assert_block_lists(lists, aux)
