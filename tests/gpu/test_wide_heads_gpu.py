"""Heads above 256 columns on Hopper: with masks, gradients, splits, pages, graphs, new keys."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from inputs import make_inputs
from public_call import capture, check_replay, forward
from test_functional_gpu import arguments_of, check
from wide_cases import TRAINED_WIDE_CASES
from wide_heads_on_devices import (  # noqa: F401
    test_against_oracle,
    test_decoding,
    test_splits_of_many_queries,
)

from flash_mask_cute import flash_attn_func, flash_attn_with_kvcache
from flash_mask_cute.interface import _flash_attn_fwd

pytestmark = pytest.mark.usefixtures("poisoned_allocations")
CUDA = torch.device("cuda")
test_against_oracle, test_decoding = map(
    pytest.mark.shares(4), (test_against_oracle, test_decoding)
)


@pytest.mark.parametrize("head_dim", [264, 512])
def test_graph_replays_on_new_inputs(head_dim: int) -> None:
    case = Case("graph", 2, 300, 500, 4, 2, head_dim, causal=True)
    inputs = make_inputs(case, CUDA)
    graph, results = capture(lambda: forward(inputs))
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


@pytest.mark.shares(3)
@pytest.mark.parametrize("case", TRAINED_WIDE_CASES)
def test_gradients(case: Case) -> None:
    """Each has one owner, so its bits are equal every time."""
    inputs = make_inputs(case, CUDA)
    check(inputs)
    function, keywords = arguments_of(inputs)
    out, _ = function(**keywords)
    operands = [keywords[name] for name in "qkv"]
    first, *others = (
        torch.autograd.grad(out, operands, torch.ones_like(out), retain_graph=True)
        for _ in range(3)
    )
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


def test_gradients_of_modified_scores_are_refused_before_anything_runs() -> None:
    q, k, v = (torch.randn(1, 64, 2, 512, device=CUDA, dtype=torch.bfloat16) for _ in "qkv")
    v.requires_grad_()
    with pytest.raises(NotImplementedError, match=r"with gradients and softcap: .*512 and 512"):
        flash_attn_func(q, k, v, softcap=9.0)
    with torch.no_grad():
        assert flash_attn_func(q, k, v, softcap=9.0).isfinite().all()
