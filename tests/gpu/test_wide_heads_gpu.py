"""Heads above 256 columns on Hopper: with masks, gradients, splits, pages, graphs, new keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case
from inputs import make_inputs
from paged_inputs import paged
from public_call import check, check_replay, forward
from test_functional_gpu import arguments_of
from test_functional_gpu import check as check_gradients
from tolerances import assert_close_to_oracle
from wide_cases import DECODE, FEW, MANY, TRAINED_WIDE_CASES, WIDE_CASES

from flash_mask_cute import flash_attn_func, flash_attn_with_kvcache
from flash_mask_cute.interface import _flash_attn_fwd

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_allocations")]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("case", WIDE_CASES, ids=lambda case: case.id)
def test_against_oracle(case: Case) -> None:
    check(make_inputs(case, CUDA))


@pytest.mark.parametrize("case", TRAINED_WIDE_CASES, ids=lambda case: case.id)
def test_gradients(case: Case) -> None:
    """By roles: each gradient has one owner, so its bits are equal."""
    inputs = make_inputs(case, CUDA)
    check_gradients(inputs)
    function, keywords = arguments_of(inputs)
    out, _ = function(**keywords)
    operands = [keywords[name] for name in "qkv"]
    first, *others = (
        torch.autograd.grad(out, operands, torch.ones_like(out), retain_graph=True)
        for _ in range(3)
    )
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


@pytest.mark.parametrize("more", [{"num_splits": 3}, {"seqlen_k_per_split": 512}, {}], ids=str)
@pytest.mark.parametrize("page_size", [None, 16, 64, 12])
@pytest.mark.parametrize("case", [DECODE, FEW, MANY], ids=lambda case: case.id)
def test_splits_and_pages(case: Case, page_size: int | None, more: dict[str, Any]) -> None:
    """Right, and with the same bits each time."""
    inputs = make_inputs(case, CUDA)
    if page_size is not None:
        inputs = paged(inputs, page_size, "NHD")
    x = inputs.q, inputs.k, inputs.v
    results = [_flash_attn_fwd(*x, **inputs.keywords, **more) for _ in range(3)]
    out, lse = results[0]
    assert lse is not None
    assert_close_to_oracle(out, lse, inputs)
    assert all(torch.equal(again, out) for again, _ in results)


@pytest.mark.parametrize("head_dim", [264, 512])
def test_graph_replays_on_new_inputs(head_dim: int) -> None:
    case = Case("graph", 2, 300, 500, 4, 2, head_dim, causal=True)
    inputs = make_inputs(case, CUDA)
    forward(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = forward(inputs)
    check_replay(graph, inputs, results, make_inputs(case, CUDA, 1))


def test_new_keys() -> None:
    case = Case("append", 2, 3, 600, 4, 2, 512, causal=True, seqused_k=(600, 131))
    inputs = make_inputs(case, CUDA)
    k, v, used = inputs.k.clone(), inputs.v.clone(), inputs.keywords["seqused_k"]
    rows = (used - 3)[:, None] + torch.arange(3, device=CUDA)
    entry = torch.arange(2, device=CUDA)[:, None]
    new_k, new_v = k[entry, rows].clone(), v[entry, rows].clone()
    k[entry, rows], v[entry, rows] = 0, 0
    out = flash_attn_with_kvcache(
        inputs.q, k, v, k=new_k, v=new_v, cache_seqlens=(used - 3).int(), causal=True
    )
    wanted, _ = _flash_attn_fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords)
    torch.testing.assert_close(out, wanted, atol=2e-3, rtol=2e-2)


def test_gradients_are_refused_before_anything_runs() -> None:
    q, k, v = (torch.randn(1, 64, 2, 512, device=CUDA, dtype=torch.bfloat16) for _ in "qkv")
    v.requires_grad_()
    with pytest.raises(NotImplementedError, match=r"a forward only: .*got 512 and 512"):
        flash_attn_func(q, k, v)
    with torch.no_grad():
        assert flash_attn_func(q, k, v).isfinite().all()
