"""Scores of any size on a Hopper GPU, through the functions for autograd."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Case
from eager import assert_close_to_oracle
from inputs import make_output_gradients
from score_tables import HOPPER_CASES, LOWEST, PLAIN, TABLES, make_tabled
from test_functional_gpu import arguments_of, run_and_check_gradients
from trained_mods import assert_aux_gradients_close

from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

# each with a forward or a backward that goes another way
CASES = (
    PLAIN,
    Case("tables-long", 1, 1500, 1500, 2, 1),
    replace(HOPPER_CASES[0], batch=2, heads_q=2, heads_kv=2),
    Case("tables-d256", 1, 150, 300, 2, 1, head_dim=256),
    *(HOPPER_CASES[i] for i in (1, 2, 3, 5)),
)


@pytest.mark.parametrize("case", CASES)
def test_both_ways(case: Case) -> None:
    """One kernel of either direction for all tables."""
    for name in TABLES:
        inputs = make_tabled(case, name, "cuda").inputs
        function, keywords = arguments_of(inputs)
        assert_close_to_oracle(*run_and_check_gradients(inputs, function, keywords), inputs)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_the_table(compiled: bool) -> None:
    torch._dynamo.reset()
    for name in ("causal-1e30", "descending", "steps", "extremes", "hidden"):
        given = make_tabled(PLAIN, name, "cuda")
        function, keywords = arguments_of(given.inputs)
        if compiled:
            function = torch.compile(function, fullgraph=True)
        table = given.trained[0].clone().requires_grad_()
        keywords["aux_tensors"] = [*given.aux_tensors[:-1], table]
        results = run_and_check_gradients(given.inputs, function, keywords)
        assert_close_to_oracle(*results, given.inputs)
        # an element is the gradient of one score
        of_call = given, *make_output_gradients(given.inputs)
        assert_aux_gradients_close([table.grad], *of_call, rtol=4e-3)


def test_a_last_factor() -> None:
    """Which the softmax multiplies by; the lowest numbers become -inf and are hidden."""
    for name in ("causal-fp32", "descending", "steps", "offsets", "hidden"):
        inputs = make_tabled(PLAIN, name, "cuda", has_factor=True).inputs
        function, keywords = arguments_of(inputs)
        assert_close_to_oracle(*run_and_check_gradients(inputs, function, keywords), inputs)


def test_rows_of_nothing_but_the_lowest_number() -> None:
    """The mean of v, probabilities that sum to 1, and finite gradients by LSE alone, too."""
    inputs = make_tabled(PLAIN, "causal-fp32", "cuda").inputs
    keywords = inputs.bwd_keywords
    lse_low = torch.empty(1, 1, 300, device="cuda")
    out, lse = _flash_attn_fwd(inputs.q, inputs.k, inputs.v, lse_low=lse_low, **keywords)
    assert lse is not None
    rows = torch.arange(300, device="cuda") % 50 == 7
    mean = inputs.v[0, :, 0].float().mean(dim=0)
    torch.testing.assert_close(out[0, rows, 0].float(), mean.expand(6, -1), rtol=0.02, atol=1e-3)
    assert (lse[0, 0, rows] == LOWEST).all()
    dout = torch.zeros_like(out)
    dout[:, rows] = 1.0
    operands = inputs.q, inputs.k, inputs.v, out, dout, lse
    with_low = _flash_attn_bwd(*operands, lse_low=lse_low, **keywords)
    sums = with_low[2].float().sum(dim=1), dout.float().sum(dim=1)
    torch.testing.assert_close(*sums, rtol=0.01, atol=0.0)
    assert all(x.isfinite().all() for x in (*with_low, *_flash_attn_bwd(*operands, **keywords)))
