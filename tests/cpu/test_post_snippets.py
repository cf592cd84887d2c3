# ruff: noqa: UP045
"""Code written for FlexAttention in flash-attn-4 runs here with only the package's name changed.

What stands in `post_mods` and between the lines "quoted" and "end" is from the post that introduced
it (work of Tri Dao, Driss Guessous and others), so that users who learn from that post find it true
here. Tensors are on the CPU; `test_compile.py` compiles the callables for a GPU. Every result is
held against dense attention in float64, whose bias and mask are written in torch, independently of
the callables.
"""

import inspect
from collections.abc import Callable
from typing import Any, Optional

import cutlass
import pytest
import torch
from post_mods import (
    alibi_score_mod,
    create_causal_mask_with_offset,
    create_prefix_lm_mask,
    doc_rel_bias_score_mod,
    document_mask_mod,
    document_mask_mod_of_heads,
    head_bias_score_mod,
    my_mask_mod,
    my_score_mod,
    rel_bias_score_mod_cute,
    sliding_window_mask_mod,
)
from torch import Tensor

from flash_mask_cute import create_block_mask
from flash_mask_cute.block_sparsity import (
    BlockSparseTensors,
    BlockSparseTensorsTorch,
    to_cute_block_sparse_tensors,
)
from flash_mask_cute.compute_block_sparsity import (
    compute_block_sparsity,
    compute_blocksparse_tensors,
)
from flash_mask_cute.flash_fwd import FlashAttentionForwardSm90
from flash_mask_cute.interface import _flash_attn_fwd

# a score_mod computes in float32, LSE is float32
TOLERANCE = 1e-5


def make_qkv(
    batch: int, heads_q: int, heads_kv: int, seqlen_q: int, seqlen_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, seqlen_q, heads_q, 64)] + [(batch, seqlen_k, heads_kv, 64)] * 2
    q, k, v = (torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes)
    return q, k, v


def positions(seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """q (seqlen_q, 1) and k (1, seqlen_k)."""
    return torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None]


def check(
    result: tuple[Tensor, Optional[Tensor]],
    qkv: tuple[Tensor, Tensor, Tensor],
    modify: Callable[[Tensor], Tensor] = lambda scores: scores,
    visible: Optional[Tensor] = None,
) -> None:
    """modify: what becomes of the scores (batch, heads, q, k); visible: bool, broadcast to them."""
    q, k, v = (x.transpose(1, 2) for x in qkv)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = modify(q @ k.mT / 8)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(-1)
    expected = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp() @ v
    out, out_lse = result
    assert out_lse is not None
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(out_lse.double(), lse, rtol=0, atol=TOLERANCE)


# -- score modification -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_t5_bias(dtype: torch.dtype) -> None:
    qkv = q, k, v = make_qkv(2, 4, 2, 130, 150)
    bias = torch.randn(2, 4, 150).to(dtype)
    aux_tensors = [bias]
    # quoted
    out, lse = _flash_attn_fwd(
        q, k, v,  # torch.Tensor
        score_mod=rel_bias_score_mod_cute,
        aux_tensors=aux_tensors,  # Optional[list[torch.Tensor]]
    )  # fmt: skip
    # end
    q_idx, k_idx = positions(130, 150)
    check((out, lse), qkv, lambda scores: scores + bias.double()[:, :, (q_idx - k_idx).abs()])


def test_alibi() -> None:
    qkv = q, k, v = make_qkv(1, 4, 2, 150, 130)
    result = _flash_attn_fwd(q, k, v, score_mod=alibi_score_mod)
    q_idx, k_idx = positions(150, 130)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64).view(-1, 1, 1)
    check(result, qkv, lambda scores: scores - slopes * (q_idx - k_idx).abs())


# -- mask modification --------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [20, -40])
def test_causal_mask_with_offset(offset: int) -> None:
    qkv = q, k, v = make_qkv(1, 2, 1, 130, 150)
    result = _flash_attn_fwd(q, k, v, mask_mod=create_causal_mask_with_offset(offset))
    q_idx, k_idx = positions(130, 150)
    check(result, qkv, visible=k_idx <= q_idx + offset)


def test_causal_mask_with_the_offset_of_the_lengths_is_causal() -> None:
    q, k, v = make_qkv(1, 2, 1, 130, 150)
    by_mod, lse_by_mod = _flash_attn_fwd(q, k, v, mask_mod=create_causal_mask_with_offset(20))
    out, lse = _flash_attn_fwd(q, k, v, causal=True)
    torch.testing.assert_close(by_mod, out)
    torch.testing.assert_close(lse_by_mod, lse)


def test_document_masking() -> None:
    qkv = q, k, v = make_qkv(2, 4, 2, 200, 200)
    starts = torch.rand(2, 4, 200, generator=torch.Generator().manual_seed(1)) < 1 / 40
    doc_ids = starts.cumsum(-1, dtype=torch.int32)
    # quoted
    out, lse = _flash_attn_fwd(
        q, k, v,
        mask_mod=document_mask_mod_of_heads,
        aux_tensors=[doc_ids],
    )  # fmt: skip
    # end
    check((out, lse), qkv, visible=doc_ids[..., None] == doc_ids[..., None, :])


def test_sliding_window_of_the_quick_reference() -> None:
    qkv = q, k, v = make_qkv(1, 2, 2, 200, 150)
    q_idx, k_idx = positions(200, 150)
    result = _flash_attn_fwd(q, k, v, mask_mod=sliding_window_mask_mod)
    check(result, qkv, visible=(q_idx - k_idx).abs() <= 30)  # the last rows see nothing


# -- block sparsity -----------------------------------------------------------------------------


def test_block_mask_of_torch() -> None:
    B, H, seqlen_q, seqlen_kv, tile_m, tile_n = 1, 1, 300, 400, 128, 128
    qkv = q, k, v = make_qkv(B, H, 1, seqlen_q, seqlen_kv)
    mask_mod, score_mod, aux_tensors = create_causal_mask_with_offset(100), None, None

    def mask_mod_fn(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= q_idx + 100

    # quoted
    from torch.nn.attention.flex_attention import create_block_mask

    block_mask_torch = create_block_mask(
        mask_mod_fn,  # PyTorch mask function
        B, H, seqlen_q, seqlen_kv,
        device="cpu",
        BLOCK_SIZE=(tile_m, tile_n),
    )  # fmt: skip
    # Convert to CuTe DSL format
    _, _, mask_cnt, mask_idx, full_cnt, full_idx, *_ = block_mask_torch.as_tuple()
    block_sparse_tensors = BlockSparseTensorsTorch(
        mask_block_cnt=mask_cnt,
        mask_block_idx=mask_idx,
        full_block_cnt=full_cnt,
        full_block_idx=full_idx,
    )
    result = _flash_attn_fwd(
        q, k, v,  # torch.Tensor
        score_mod=score_mod,  # Callable
        mask_mod=mask_mod,  # Callable
        block_sparse_tensors_torch=block_sparse_tensors,  # BlockSparseTensorsTorch
        aux_tensors=aux_tensors,  # Optional[list[torch.Tensor]]
    )  # fmt: skip
    # end
    q_idx, k_idx = positions(seqlen_q, seqlen_kv)
    check(result, qkv, visible=k_idx <= q_idx + 100)
    sparse_tensors = to_cute_block_sparse_tensors(block_sparse_tensors)
    assert isinstance(sparse_tensors, BlockSparseTensors)


def test_documents_with_relative_bias() -> None:
    # quoted
    # 3 documents at positions [0:230], [230:410], [410:640]
    doc_ids = torch.zeros((1, 1, 640), dtype=torch.int32)
    doc_ids[0, 0, :230] = 0
    doc_ids[0, 0, 230:410] = 1
    doc_ids[0, 0, 410:] = 2
    rel_bias = torch.randn((1, 1, 640), dtype=torch.float32)
    aux_tensors = [rel_bias, doc_ids]
    # end
    qkv = q, k, v = make_qkv(1, 1, 1, 640, 640)
    block_sparse_tensors = compute_block_sparsity(
        128, 128, 1, 1, 640, 640, document_mask_mod, aux_tensors, "cpu"
    )
    # quoted
    out, lse = _flash_attn_fwd(
        q, k, v,
        score_mod=doc_rel_bias_score_mod,
        mask_mod=document_mask_mod,
        block_sparse_tensors_torch=block_sparse_tensors,
        aux_tensors=aux_tensors,
    )  # fmt: skip
    # end
    q_idx, k_idx = positions(640, 640)
    bias = rel_bias.double()[:, :, (q_idx - k_idx).abs()]
    visible = doc_ids[..., None] == doc_ids[..., None, :]
    check((out, lse), qkv, lambda scores: scores + bias, visible)
    _, (mask_block_cnt, _, full_block_cnt, _) = block_sparse_tensors
    assert full_block_cnt is not None
    assert 0 < int(mask_block_cnt.sum() + full_block_cnt.sum()) < 25, "blocks were skipped"


def test_prefix_lm_with_head_bias() -> None:
    num_heads, seqlen = 2, 768
    qkv = q, k, v = make_qkv(1, num_heads, 1, seqlen, seqlen)
    # quoted
    head_biases = torch.randn(num_heads, dtype=torch.float32)
    mask_mod = create_prefix_lm_mask(prefix=204, offset=0)
    # end
    block_sparse_tensors = create_block_mask(
        mask_mod, 1, None, seqlen, seqlen, device="cpu", BLOCK_SIZE=(128, 128)
    )
    # quoted
    out, lse = _flash_attn_fwd(
        q, k, v,
        score_mod=head_bias_score_mod,
        mask_mod=mask_mod,
        block_sparse_tensors_torch=block_sparse_tensors,
        aux_tensors=[head_biases],
    )  # fmt: skip
    # end
    q_idx, k_idx = positions(seqlen, seqlen)
    bias = head_biases.double().view(-1, 1, 1)
    check((out, lse), qkv, lambda scores: scores + bias, (k_idx < 204) | (k_idx <= q_idx))
    # the prefix ends in block 1; what follows it is cut on the diagonal only
    assert block_sparse_tensors.mask_block_cnt.tolist() == [[[1, 1, 1, 1, 1, 1]]]
    assert block_sparse_tensors.full_block_cnt is not None
    assert block_sparse_tensors.full_block_cnt.tolist() == [[[1, 1, 2, 3, 4, 5]]]


# -- getting started ----------------------------------------------------------------------------


def test_getting_started() -> None:
    B, H, seqlen_q, seqlen_kv = 2, 2, 200, 300
    qkv = q, k, v = make_qkv(B, H, H, seqlen_q, seqlen_kv)
    # quoted
    block_mask = create_block_mask(
        my_mask_mod,
        B, H, seqlen_q, seqlen_kv,
        device="cpu",
        BLOCK_SIZE=(128, 128)
    )  # fmt: skip
    out, lse = _flash_attn_fwd(
        q, k, v,
        score_mod=my_score_mod,
        mask_mod=my_mask_mod,
        block_sparse_tensors_torch=block_mask
    )  # fmt: skip
    # end
    q_idx, k_idx = positions(seqlen_q, seqlen_kv)
    check((out, lse), qkv, lambda scores: scores * 1.1, k_idx <= q_idx)


# -- appendix: what can be said of it without a GPU (examples/07_native_api.py runs it) ---------


def test_signature_of_the_block_sparsity_kernel() -> None:
    names = ["tile_m", "tile_n", "batch_size", "num_heads", "seqlen_q", "seqlen_k", "mask_mod"]
    names += ["aux_tensors", "device", "compute_full_blocks", "use_fast_sampling"]
    parameters = inspect.signature(compute_blocksparse_tensors).parameters
    assert list(parameters) == names
    defaults = {name: x.default for name, x in parameters.items() if x.default is not x.empty}
    assert defaults == {"device": "cuda", "compute_full_blocks": True, "use_fast_sampling": False}


def test_kernel_object_and_its_arguments() -> None:
    dtype, head_dim, head_dim_v, qhead_per_kvhead = cutlass.BFloat16, 128, 128, 4
    tile_m, tile_n = 128, 128
    mask_mod, score_mod, aux_tensors = document_mask_mod, doc_rel_bias_score_mod, [None, None]
    # quoted
    fa_fwd = FlashAttentionForwardSm90(
        dtype,
        head_dim,
        head_dim_v,
        qhead_per_kvhead,
        is_causal=False,
        is_local=False,
        pack_gqa=False,
        tile_m=tile_m,
        tile_n=tile_n,
        num_stages=2,
        num_threads=384,
        Q_in_regs=False,
        intra_wg_overlap=True,  # tunable hyperparameter for optimizations
        mma_pv_is_rs=True,  # tunable hyperparameter for optimizations
        mask_mod=mask_mod,
        score_mod=score_mod,
        has_aux_tensors=aux_tensors is not None,  # known at compile time
    )
    # end
    call: Any = FlashAttentionForwardSm90.__call__
    words = ("Q", "K", "V", "O", "LSE", "scale", "stream", "CuSeqlensQ", "CuSeqlensK", "UsedQ")
    words += ("UsedK", "PageTable", "left", "right", "sink", "blocksparse", "aux")
    names = list(inspect.signature(call).parameters)[1 : len(words) + 1]
    assert all(word in name for word, name in zip(words, names, strict=True)), names
    assert fa_fwd.traits.num_threads == 384
