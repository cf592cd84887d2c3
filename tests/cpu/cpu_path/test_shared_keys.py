"""Several sequences of queries over the keys of one batch entry: CPU results, and GPU plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import attend_rows
from placed_attention import assert_calls_and_gradients
from planned import backward_call, forward_call, planned
from shared_keys import CommonKeys
from torch import Tensor

from flash_mask_cute import explain, flash_attn_func, flash_attn_varlen_func
from flash_mask_cute.call.copies import FirstEntry
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd
from flash_mask_cute.runtime.target import Target

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

HOPPER, INT = Target.named("sm_90a"), torch.int32


@pytest.mark.parametrize("earliest", [0, -200])
@pytest.mark.parametrize("seed", range(3))
def test_random_calls(seed: int, earliest: int) -> None:
    draw = CommonKeys(seed, torch.float64, 8, 260, earliest)
    draw.has_rows_behind = True
    assert_calls_and_gradients(draw, 14)


def test_random_calls_that_use_some_keys() -> None:
    draw = CommonKeys(5, torch.float64, 8, 260)
    draw.has_used_keys = True
    for call in draw.calls(20):
        out, lse = _flash_attn_fwd(call.q, call.k, call.v, **call.keywords)
        assert lse is not None
        call.assert_output(out, lse)


def _rollouts(dtype: torch.dtype = torch.float64) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """q, k and v, and the keywords, of three sequences over 90 keys."""
    generator = torch.Generator().manual_seed(2)
    rows = (60, 4), (1, 90, 2), (1, 90, 2)
    tensors = (torch.randn(*shape, 16, generator=generator).to(dtype) for shape in rows)
    starts = torch.tensor([70, 12, 50], dtype=INT)
    keywords = {"cu_seqlens_q": torch.tensor([0, 20, 20, 60], dtype=INT), "q_start": starts}
    return tuple(tensors), keywords | {"causal": True}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_public_function(is_compiled: bool) -> None:
    """Its gradients by keys are of batch 1."""
    (q, k, v), keywords = _rollouts()
    attend = flash_attn_varlen_func
    if is_compiled:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves, **keywords, return_lse=True)
    (out.sum() + lse.square().sum()).backward()
    others = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = []
    for rows, start in ((slice(0, 20), 70), (slice(20, 60), 50)):
        of_rows = (others[0][None, rows], *others[1:])
        expected.append(flash_attn_func(*of_rows, causal=True, q_start=start, return_lse=True))
    assert torch.allclose(out, torch.cat([x[0] for x, _ in expected]), atol=1e-9)
    sum(x.sum() + y.square().sum() for x, y in expected).backward()
    for ours, theirs in zip(leaves, others, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert ours.grad.shape == theirs.grad.shape
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)


def test_views_are_read_where_they_are() -> None:
    """A forward reads k and v of batch stride 0; a backward writes gradients and copies."""
    q = torch.randn(3, 40, 4, 64).bfloat16()
    k, v = (torch.randn(1, 50, 2, 64).bfloat16().expand(3, -1, -1, -1) for _ in "kv")
    plan = planned(forward_call(q, k, v), HOPPER)
    assert plan.problem.shared_kv
    for name, x in (("k", k), ("v", v)):
        to = plan.conversions[name]
        assert isinstance(to, FirstEntry)
        entry = to(x)
        assert entry.data_ptr() == x.data_ptr() and entry.shape == (1, 50, 2, 64)
    assert explain(q, k, v, target="sm_90a").copies == ""
    lse = torch.zeros(3, 4, 40)
    backward = planned(backward_call(q, k, v, q, q, lse), HOPPER)
    assert not backward.problem.shared_kv and "stride of 0" in str(backward.conversions["k"])
    # of what TMA cannot read, a copy of one entry
    odd = torch.randn(1, 50, 2, 65).bfloat16()[..., :64].expand(3, -1, -1, -1)
    to = planned(forward_call(q, odd, odd), HOPPER).conversions["k"]
    assert to is not None and to(odd).shape == (1, 50, 2, 64)
    # of one view alone there are no common keys
    assert not planned(forward_call(q, k, v.clone()), HOPPER).problem.shared_kv


def test_the_tiles_of_few_keys_are_split_by_heads() -> None:
    """A work tile visits the queries of all sequences, so that there are few."""
    q = torch.empty(16384, 8, 64, dtype=torch.bfloat16)
    k = torch.empty(1, 512, 1, 64, dtype=torch.bfloat16)
    lse, starts = torch.empty(8, 16384), torch.arange(0, 16385, 1024, dtype=INT)
    call = backward_call(q, k, k, q, q, lse, cu_seqlens_q=starts, max_seqlen_q=1024)
    assert planned(call, HOPPER).bwd_choice.group_splits == 8


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two": ({"k": 2}, "batch of q and k must be equal, got 3 from cu_seqlens_q and 2 from"),
    "dense": ({"q": 3}, "batch of q and k must be equal, got 3 .* and 1 from the shape of k"),
    "columns": ({"columns": 2}, "startend_row_indices must have 1 or 3 batch entries"),
    "pages": ({"table": 1}, "batch of q and k must be equal, got 3 from cu_seqlens_q and 1 from"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    change, text = REFUSED[name]
    (q, k, v), keywords = _rollouts()
    if "k" in change:
        k, v = (x.expand(2, -1, -1, -1) for x in (k, v))
    if "q" in change:
        q, keywords = q.view(3, 20, 4, 16), {}
    if "columns" in change:
        keywords["startend_row_indices"] = torch.full((2, 1, 90, 1), 90, dtype=INT)
    if "table" in change:
        keywords["page_table"] = torch.zeros(1, 1, dtype=INT)
    with pytest.raises(ValueError, match=text):
        _flash_attn_fwd(q, k, v, **keywords)


def test_used_keys_have_no_gradients() -> None:
    """Refused where a graph is recorded, and by the host call."""
    (q, k, v), keywords = _rollouts()
    keywords["seqused_k"] = torch.tensor([90, 0, 80], dtype=INT)
    out, lse = flash_attn_varlen_func(q, k, v, **keywords, return_lse=True)
    with pytest.raises(NotImplementedError, match=r"no gradients beside seqused_k .* k\[:, :n\]"):
        flash_attn_varlen_func(q, k.requires_grad_(), v, **keywords)
    with pytest.raises(NotImplementedError, match="no gradients beside seqused_k .*, got a torch"):
        _flash_attn_bwd(q, k.detach(), v, out, out, lse, **keywords)


def test_gradients_of_aux_tensors_have_no_order() -> None:
    def bias(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return score + aux[0][h[0]]

    (q, k, v), keywords = _rollouts(torch.bfloat16)
    table = torch.zeros(4)
    keywords |= {"score_mod": bias, "aux_tensors": [table], "daux": [table.clone()]}
    call = backward_call(q, k, v, q, q, torch.zeros(4, 60), deterministic=True, **keywords)
    with pytest.raises(NotImplementedError, match="daux .* one batch entry .* deterministic=True"):
        planned(call, HOPPER)


def test_a_table_by_sequence() -> None:
    """The first index of a mod is the sequence of its query, also of gradients of the table."""
    (q, k, v), keywords = _rollouts()
    table = torch.randn(3, 90, dtype=torch.float32, requires_grad=True)
    out = flash_attn_varlen_func(
        q, k, v, **keywords, score_mod=lambda score, b, h, q, k: score + table[b, k]
    )
    (found,) = torch.autograd.grad(out.square().sum(), table)
    other = table.detach().double().requires_grad_()
    parts = []
    for b, rows, start in ((0, slice(0, 20), 70), (2, slice(20, 60), 50)):
        position = start + torch.arange(rows.stop - rows.start)[:, None]
        visible = torch.arange(90) <= position
        parts.append(attend_rows(q[rows], k[0], v[0], visible, bias=other[b]).out)
    assert torch.allclose(out, torch.cat(parts), atol=1e-5)
    (expected,) = torch.autograd.grad(torch.cat(parts).square().sum(), other)
    assert torch.allclose(found.double(), expected, atol=1e-4)
    assert found[0].any() and not found[1].any() and found[2].any()
