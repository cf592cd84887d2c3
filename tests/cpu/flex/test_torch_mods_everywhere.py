"""Mods written in torch as arguments of our own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_mask_cute import (
    create_block_mask,
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    plot,
)

B, H, S, D = 2, 4, 90, 16
IDS = torch.stack([torch.arange(S) // 40, torch.arange(S) // 23])


def tensors(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randn(B, S, H, D, generator=g, dtype=dtype) for _ in range(3)]


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return IDS[b, q] == IDS[b, k]


def test_both_mods_and_a_gradient_of_what_one_captured() -> None:
    table = torch.nn.Parameter(torch.randn(H, 2 * S, dtype=torch.float32))

    def bias(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + table[h, q - k + S]

    q, k, v = tensors()
    out = flash_attn_func(q, k, v, causal=True, score_mod=bias, mask_mod=documents)
    (found,) = torch.autograd.grad(out.square().sum(), table)

    at = torch.arange(S)
    sees = (IDS[:, None, :, None] == IDS[:, None, None, :]) & (at[:, None] >= at)
    dense = table.detach().double().requires_grad_()
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * D**-0.5
    scores = scores + dense[:, at[:, None] - at + S]
    p = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    expected = torch.einsum("bhqk,bkhd->bqhd", p, v)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    (wanted,) = torch.autograd.grad(expected.square().sum(), dense)
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=2e-5)


def test_packed_sequences_count_inside_themselves() -> None:
    q, k, v = (x.flatten(0, 1) for x in tensors())
    edges = torch.tensor([0, 50, 180], dtype=torch.int32)

    def every_third(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q - k) % 3 == 0

    lengths = {"cu_seqlens_q": edges, "cu_seqlens_k": edges}
    out = flash_attn_varlen_func(q, k, v, **lengths, mask_mod=every_third)
    for start, end in ((0, 50), (50, 180)):
        at = torch.arange(end - start)
        part = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
        sees = (at[:, None] - at) % 3 == 0
        expected = torch.nn.functional.scaled_dot_product_attention(*part, attn_mask=sees)
        torch.testing.assert_close(out[start:end], expected[0].transpose(0, 1))


def test_a_cute_mod_beside_one_of_torch() -> None:
    """Aux tensors of the CuTe mod keep their numbers."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])

    def alibi(s: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return s + aux[0][h[0]] * (k - q)

    q, k, v = tensors(torch.float32)
    found = flash_attn_func(
        q, k, v, score_mod=alibi, mask_mod=documents, aux_tensors=[slopes], causal=True
    )
    at = torch.arange(S)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * D**-0.5
    scores = scores + slopes.double()[:, None, None] * (at - at[:, None])
    sees = (IDS[:, None, :, None] == IDS[:, None, None, :]) & (at[:, None] >= at)
    p = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    expected = torch.einsum("bhqk,bkhd->bqhd", p, v.double())
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)


def test_explain_takes_them() -> None:
    q = torch.zeros(1, 300, 4, 64, dtype=torch.bfloat16)
    told = explain(q, q, q, mask_mod=lambda b, h, q, k: q >= k)
    assert "mask_mod is evaluated once for all heads" in told.masks


def test_the_wrong_number_of_arguments_is_named() -> None:
    q, k, v = tensors()
    with pytest.raises(TypeError, match="mask_mod"):
        flash_attn_func(q, k, v, mask_mod=lambda q, k: q >= k)
    with pytest.raises(TypeError, match="score_mod"):
        flash_attn_func(q, k, v, score_mod=lambda s, q, k: s)


def test_an_index_outside_is_told_by_the_name_of_what_is_captured() -> None:
    """Also beside aux tensors of a CuTe mod, which keep their names."""
    short, line = torch.arange(10), __file__

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return short[q] == short[k]

    def bias(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + short[q - 20]

    def cute_bias(s: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return s + aux[0][k[0]]

    q, k, v = tensors()
    long, of_10 = torch.zeros(S), torch.zeros(10)
    named = f"mask_mod .*mask .{line}.* reads closure variable 'short' of .*mask at index 10 of"
    with pytest.raises(IndexError, match=named):
        flash_attn_func(q, k, v, mask_mod=mask)
    with pytest.raises(IndexError, match=named):
        create_block_mask(mask, 1, 1, 16, 16, device="cpu", BLOCK_SIZE=4)
    with pytest.raises(IndexError, match=named):
        plot(mask, seqlen_q=16, seqlen_k=16)
    with pytest.raises(IndexError, match=named):
        flash_attn_func(q, k, v, mask_mod=mask, score_mod=cute_bias, aux_tensors=[long])
    with pytest.raises(IndexError, match="bias .*reads closure variable 'short' .* index -20 of"):
        flash_attn_func(q, k, v, score_mod=bias)
    with pytest.raises(IndexError, match=r"cute_bias .*reads aux_tensors\[0\] at index 10 of"):
        flash_attn_func(q, k, v, mask_mod=documents, score_mod=cute_bias, aux_tensors=[of_10])
