"""`return_max_logit` of the public functions, and the rows' maxima that flex_attention returns."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
import pytest
import torch
from cases import FP32, FP64, Case
from inputs import make_inputs
from oracle import largest_scores
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

from flash_mask_cute import ColumnMask, flash_attn_func, flash_attn_varlen_func, flex_attention
from flash_mask_cute.interface import _flash_attn_fwd

CASES = (
    Case("causal-empty-rows", 2, 70, 40, causal=True, dtype=FP32),
    Case("window-softcap", 1, 50, 90, window_left=9, window_right=3, softcap=2.0, dtype=FP64),
    Case("varlen", lengths_q=(30, 0, 40), lengths_k=(30, 9, 0), causal=True, dtype=FP32),
    Case("seqused-sink", 2, 40, 60, seqused_q=(30, 0), seqused_k=(60, 20), sink=FP32, dtype=FP32),
    Case("columns-mods", 1, 130, 130, column="stepped2", mask_mod="checks", score_mod="alibi"),
    Case("lists", 1, 200, 200, 4, 2, mask_mod="documents", blocks=(64, 64), dtype=FP32),
)


@pytest.mark.parametrize("case", CASES)
def test_rows(case: Case) -> None:
    inputs = make_inputs(case)
    expected = largest_scores(inputs.q, inputs.k, inputs.v, inputs.dense, **inputs.plain_keywords)
    max_scores = torch.full(expected.shape, torch.nan)
    _flash_attn_fwd(inputs.q, inputs.k, inputs.v, max_scores=max_scores, **inputs.keywords)
    torch.testing.assert_close(max_scores.double(), expected, rtol=1e-6, atol=1e-6)


def _qkv(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, requires_grad=True) for _ in range(3)]


def test_per_head() -> None:
    q, k, v = _qkv(2, 30, 3, 16)
    out, lse, largest = flash_attn_func(
        q, k, v, causal=True, return_lse=True, return_max_logit=True
    )
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25
    scores = scores.masked_fill(~torch.ones(30, 30, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(largest, scores.amax((0, 2, 3)).detach())
    assert not largest.requires_grad and largest.dtype == torch.float32
    with_maxima = torch.autograd.grad(out.sum() + lse.sum(), q)[0]
    plain = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert torch.equal(with_maxima, torch.autograd.grad(plain[0].sum() + plain[1].sum(), q)[0])
    with torch.no_grad():
        assert torch.equal(flash_attn_func(q, k, v, causal=True, return_max_logit=True)[1], largest)


def test_rows_of_no_sequence_do_not_count() -> None:
    q, k, v = _qkv(30, 2, 16)
    starts = torch.tensor([0, 10, 20], dtype=torch.int32)
    _, largest = flash_attn_varlen_func(q, k, v, starts, starts, return_max_logit=True)
    pairs = [torch.einsum("qhd,khd->hqk", q[a:b], k[a:b]) for a, b in ((0, 10), (10, 20))]
    torch.testing.assert_close(largest, torch.cat(pairs, 1).amax((1, 2)).detach() * 0.25)
    none = torch.zeros(1, dtype=torch.int32)
    nothing = flash_attn_varlen_func(q[:0], k[:0], v[:0], none, none, return_max_logit=True)
    assert nothing[1].tolist() == [-torch.inf] * 2


@pytest.mark.parametrize("batch", [1, 2])
def test_documents_packed_as_sequences(batch: int) -> None:
    q, k, v = _qkv(batch, 300, 2, 16)
    ends = torch.full((batch, 1, 300, 1), 300, dtype=torch.int32)
    ends[:, :, :120] = 120
    documents = ColumnMask(ends, causal=True, documents=True)
    _, largest = flash_attn_func(
        q, k, v, startend_row_indices=documents, causal=True, return_max_logit=True
    )
    plain = ColumnMask(ends, causal=True)
    _, expected = flash_attn_func(
        q, k, v, startend_row_indices=plain, causal=True, return_max_logit=True
    )
    torch.testing.assert_close(largest, expected)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_in_one_graph() -> None:
    q, k, v = _qkv(1, 20, 2, 16)

    def clipped(q: Any, k: Any, v: Any) -> Any:
        out, largest = flash_attn_func(q, k, v, causal=True, return_max_logit=True)
        return out * largest.amax()

    compiled = torch.compile(clipped, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(compiled, clipped(q, k, v))
    (gradient,) = torch.autograd.grad(compiled.sum(), q)
    torch.testing.assert_close(gradient, torch.autograd.grad(clipped(q, k, v).sum(), q)[0])


def test_of_flex_attention() -> None:
    q, k, v = (x.transpose(1, 2) for x in _qkv(2, 40, 2, 16))
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q > 3), 2, None, 40, 40, device="cpu")
    request = AuxRequest(lse=True, max_scores=True)
    _, aux = flex_attention(
        q, k, v, score_mod=lambda s, b, h, q, k: s + h, block_mask=mask, return_aux=request
    )
    scores = q @ k.mT * 0.25 + torch.arange(2)[:, None, None]
    hidden = ~torch.ones(40, 40, dtype=torch.bool).tril()
    hidden[:4] = True
    torch.testing.assert_close(
        aux.max_scores, scores.masked_fill(hidden, -torch.inf).amax(-1).detach()
    )
    assert aux.lse is not None and aux.max_scores is not None
    assert not aux.max_scores.requires_grad
    _, aux = flex_attention(q, k, v, return_aux=AuxRequest())
    assert aux == (None, None)


def test_refusals() -> None:
    q, k, v = _qkv(1, 20, 2, 16)
    with pytest.raises(TypeError, match="return_max_logit must be True or False, got 1"):
        flash_attn_func(q, k, v, return_max_logit=1)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"max_scores must have shape \(1, 2, 20\), got \(2, 20\)"):
        _flash_attn_fwd(q, k, v, max_scores=torch.empty(2, 20))
    lse = torch.empty(1, 2, 20)
    with pytest.raises(ValueError, match="max_scores must not share memory with lse"):
        _flash_attn_fwd(q, k, v, lse=lse, max_scores=lse)


def test_a_mod_that_hides_everything() -> None:
    @cute.jit
    def hides(score, b_idx, h_idx, q_idx, kv_idx, aux_tensors):  # type: ignore[no-untyped-def]
        return score - cute.Float32.inf

    q, k, v = _qkv(1, 20, 2, 16)
    _, largest = flash_attn_func(q, k, v, score_mod=hides, return_max_logit=True)
    assert largest.tolist() == [-torch.inf] * 2
