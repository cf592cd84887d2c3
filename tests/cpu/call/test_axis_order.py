"""Tensors of (batch, heads, seqlen, head_dim) are noticed where their extents tell."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_mask_cute import flash_attn_func, flash_attn_varlen_func, flex_attention
from flash_mask_cute.integrations.torch import sdpa
from flash_mask_cute.interface import _flash_attn_fwd, explain
from flash_mask_cute.runtime import warn_once


@pytest.fixture(autouse=True)
def not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn_once, "_given", set())


def like_torch(heads: int = 4, seqlen: int = 129) -> Tensor:
    return torch.zeros(2, heads, seqlen, 16)


def test_it_is_told_once_where_the_call_is() -> None:
    q = like_torch()
    said = (
        r"^q of shape \(2, 4, 129, 16\) is read as \(batch, seqlen, heads, head_dim\), 129 heads "
        r"of 4 rows; if it is \(batch, heads, seqlen, head_dim\), .* pass q.transpose\(1, 2\)"
    )
    with pytest.warns(UserWarning, match=said) as told:
        flash_attn_func(q, q, q)
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _flash_attn_fwd(q, q, q)


def test_where_the_call_is_with_gradients_and_in_explain() -> None:
    q = like_torch().requires_grad_()
    with pytest.warns(UserWarning, match="is read as") as told:
        flash_attn_func(q, q, q).sum().backward()
    assert [warning.filename for warning in told] == [__file__]


@pytest.mark.parametrize("call", [_flash_attn_fwd, explain])
def test_other_calls(call) -> None:
    q = like_torch()
    with pytest.warns(UserWarning, match="is read as") as told:
        call(q, q, q)
    assert [warning.filename for warning in told] == [__file__]


def test_packed() -> None:
    q, edges = torch.zeros(4, 129, 16), torch.tensor([0, 4], dtype=torch.int32)
    said = r"read as \(total, heads, head_dim\), 129 heads of 4 rows.*pass q.transpose\(0, 1\)"
    with pytest.warns(UserWarning, match=said):
        flash_attn_varlen_func(q, q, q, edges, edges)


@pytest.mark.parametrize(
    "shape",
    [
        *((2, 129, 129, 8), (2, 130, 129, 8), (1, 300, 4, 8)),
        # a prompt of 8 tokens, the first token of one, more heads, and no rows
        *((1, 8, 32, 8), (1, 1, 32, 8), (1, 8, 64, 8), (2, 0, 3, 8)),
    ],
)
def test_it_is_not_told_where_it_may_be_right(shape: tuple[int, ...]) -> None:
    q = torch.zeros(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _flash_attn_fwd(q, q, q)


@pytest.mark.parametrize("seqlen", [65, 68, 128, 50, 9, 63])
@pytest.mark.parametrize("is_packed", [False, True])
def test_short_sequences(seqlen: int, is_packed: bool) -> None:
    """More than 64 heads, or a number that 4 does not divide, and fewer rows in q, k and v."""
    q = like_torch(seqlen=seqlen)
    said = f"{seqlen} heads of 4 rows; if it is"
    with pytest.warns(UserWarning, match=said) as told:
        if is_packed:
            edges = torch.tensor([0, 4], dtype=torch.int32)
            flash_attn_varlen_func(q[0], q[0], q[0], edges, edges)
        else:
            flash_attn_func(q, q, q)
    assert [warning.filename for warning in told] == [__file__]


def test_short_sequences_that_may_be_right() -> None:
    """Some of q, k and v have rows enough: a decode step, few heads of keys, and pages."""
    one = torch.zeros(1, 1, 14, 8)
    pages, table = torch.zeros(6, 1, 2, 8), torch.arange(6, dtype=torch.int32)[None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_func(one, *[torch.zeros(1, 20, 14, 8)] * 2)
        flash_attn_func(torch.zeros(1, 5, 14, 8), *[torch.zeros(1, 5, 2, 8)] * 2)
        used = torch.tensor([6], dtype=torch.int32)
        flash_attn_varlen_func(one, pages, pages, seqused_k=used, page_table=table)


def test_keys_alone_tell_and_errors_of_heads() -> None:
    """One query of (batch, heads, 1, head_dim) beside a cache of 200 keys."""
    q, k = like_torch(seqlen=1), like_torch(seqlen=200)
    said = (
        r"^heads_q must be a multiple of heads_kv, got heads_q=1 and heads_kv=200; k of shape "
        r"\(2, 4, 200, 16\) is read as"
    )
    with pytest.raises(ValueError, match=said):
        flash_attn_func(q, k, k)
    with pytest.raises(ValueError, match="got heads_q=3 and heads_kv=2$"):
        flash_attn_func(torch.zeros(1, 5, 3, 8), *[torch.zeros(1, 5, 2, 8)] * 2)


@pytest.mark.shares(3)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["flex_attention", "sdpa", "register"])
def test_functions_in_torchs_order_say_nothing(name: str, is_compiled: bool) -> None:
    """14 heads of 5 tokens, which are few tokens and an unusual number of heads for others."""
    if name == "flex_attention":
        call = flex_attention
    elif name == "sdpa":
        call = sdpa()(F.scaled_dot_product_attention)
    else:
        modeling = pytest.importorskip("transformers.modeling_utils")
        from flash_mask_cute.integrations.transformers import register

        attend = modeling.ALL_ATTENTION_FUNCTIONS[register("heads_first")]

        def call(*qkv: Tensor) -> Tensor:
            return attend(nn.Module(), *qkv, None)[0]

    if is_compiled:
        call = torch.compile(call, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(*torch.randn(3, 2, 14, 5, 16))
