"""Arguments by position, in the order of flash-attn 2 and 3."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from flash_mask_cute import flash_attn_func, flash_attn_varlen_func
from flash_mask_cute.runtime import warn_once

HINT = "no dropout_p before softmax_scale and causal: pass all that follows v, or the lengths, by"


@pytest.fixture(autouse=True)
def not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn_once, "_given", set())


def test_dropout_in_the_place_of_the_scale() -> None:
    """A scale of 0 is valid: it is told once, and the result is that of a scale of 0."""
    q, k, v = torch.randn(3, 1, 9, 4, 16, dtype=torch.float64)
    said = f"softmax_scale is 0, .* dropout_p=0.0 of flash-attn 2: .*{HINT} keyword"
    with pytest.warns(UserWarning, match=said) as told:
        out = flash_attn_func(q, k, v, 0.0, causal=True)
    assert [warning.filename for warning in told] == [__file__]
    expected = v.cumsum(1) / torch.arange(1, 10)[:, None, None]
    assert torch.allclose(out, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_func(q, k[:, :5], v[:, :5], softmax_scale=0)


def test_where_the_call_is_with_gradients() -> None:
    q = torch.randn(1, 9, 4, 16, requires_grad=True)
    with pytest.warns(UserWarning, match="dropout_p") as told:
        flash_attn_func(q, q, q, 0.0, causal=True).sum().backward()
    assert len(told) == 1 and told[0].filename == __file__


@pytest.mark.parametrize("scale", [None, 0.25, -0.1, 1e-9])
def test_other_scales(scale: float | None) -> None:
    q = torch.randn(1, 9, 4, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_func(q, q, q, scale, causal=True)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    ("more", "said"),
    [
        # flash-attn 2: dropout_p, softmax_scale, causal
        ((0.0,), r"seqused_q must be a torch.Tensor, got 0.0 \(float\)"),
        ((0.0, 0.5), r"seqused_q must be a torch.Tensor, got 0.0 \(float\)"),
        ((0.0, None, True), r"seqused_q must be a torch.Tensor, got 0.0 \(float\)"),
        ((None, None, True), r"page_table must be a torch.Tensor, got True \(bool\)"),
        ((None, 0.5), r"seqused_k must be a torch.Tensor, got 0.5 \(float\)"),
        # flash-attn 3: seqused_q, seqused_k, softmax_scale, causal
        ((None, None, 0.5, True), r"page_table must be a torch.Tensor, got 0.5 \(float\)"),
        ((None, None, None, True), r"softmax_scale must be a real number, got True \(bool\)"),
    ],
)
def test_numbers_in_the_places_of_tensors(
    more: tuple[Any, ...], said: str, requires_grad: bool
) -> None:
    q = torch.zeros(9, 2, 16, requires_grad=requires_grad)
    edges = torch.tensor([0, 4, 9], dtype=torch.int32)
    with pytest.raises(TypeError, match=f"{said}; .*{HINT} keyword"):
        flash_attn_varlen_func(q, q, q, edges, edges, 5, 5, *more)
