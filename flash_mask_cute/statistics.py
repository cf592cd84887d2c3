"""Statistics of the matrix of probabilities P, which is never in memory.

Callers add up P over queries to evict keys (H2O, SnapKV), over blocks to teach an indexer that
selects them, and watch the entropy of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_mask_cute.autograd.attend import scale_number, with_cute_mods
from flash_mask_cute.autograd.mod_names import Mod
from flash_mask_cute.call.arguments import (
    AttentionCall,
    Options,
    Tensors,
    lengths_of,
    masks_of,
    window_sides,
)
from flash_mask_cute.call.check.keywords import public_call, refuse_keywords
from flash_mask_cute.call.check.validate import refuse_transforms
from flash_mask_cute.call.statistics import (
    AttentionStatistics,
    StatisticsRequest,
    run_statistics,
)
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.masks.q_start import QStartArgument, split_q_start

__all__ = ["AttentionStatistics", "attention_statistics", "attention_statistics_varlen"]


@public_call
def attention_statistics(
    q: Tensor, k: Tensor, lse: Tensor, reduce: str | Sequence[str], *,
    block_size: tuple[int, int] = (1, 128), softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0, score_mod: Mod | None = None, mask_mod: Mod | None = None,
    aux_tensors: Sequence[Tensor] | None = None, block_sparse_tensors: Any = None,
    startend_row_indices: Tensor | ColumnMask | None = None, q_start: QStartArgument = None,
    deterministic: bool = False, **unknown: NoReturn,
) -> AttentionStatistics:  # fmt: skip
    """Reduce the probabilities P = exp(score - lse) of attention, in one walk over q k^T.

    q, k and the keywords of masks and scores are those of the `flash_attn_func` that returned lse,
    fp32 (batch, heads_q, seqlen_q), natural log, which has its sink. Results are fp32, without a
    gradient. reduce: names of those that are wanted, one or a list.

    key_sums (batch, heads_kv, seqlen_k): P summed over queries and the heads of a group.
    entropy (batch, heads_q, seqlen_q): minus the sum of p ln p over keys.
    block_sums (batch, heads_kv, queries / m, keys / n), rounded up: P summed over a block of
    block_size = (m, n) scores and the heads of a group; m is 1 or a multiple of 64, n 64 or 128.
    block_maxima: like block_sums, the largest p.

    p has a relative error of abs(lse) * 2^-24 by the rounding of lse. On a GPU the last bits of
    key_sums differ from call to call, unless deterministic=True. Other bits are always equal.

    Method: H2O (Zhang et al. 2023) and SnapKV (Li et al. 2024) evict keys by key_sums. P from LSE
    is that of FlashAttention's backward (Dao 2023).

    Raises:
        TypeError, ValueError, NotImplementedError: before any launch; the message names argument
            and value. Not supported: k in fp8, `SelectedBlocks`; on a GPU Blackwell, head_dim above
            256, scratch memory of blocks above 2^31 bytes.

    Example:
        >>> import torch
        >>> from flash_mask_cute import attention_statistics, flash_attn_func
        >>> q, (k, v) = torch.randn(1, 40, 4, 8), torch.randn(2, 1, 40, 2, 8)
        >>> out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
        >>> found = attention_statistics(q, k, lse, ["key_sums", "entropy"], causal=True)
        >>> found.key_sums.shape, found.entropy.shape, found.key_sums.sum().round()
        (torch.Size([1, 2, 40]), torch.Size([1, 4, 40]), tensor(160.))
    """
    if unknown:
        refuse_keywords("attention_statistics", unknown)
    return attention_statistics_varlen(
        q, k, lse, reduce, block_size=block_size, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, score_mod=score_mod, mask_mod=mask_mod,
        aux_tensors=aux_tensors, block_sparse_tensors=block_sparse_tensors,
        startend_row_indices=startend_row_indices, q_start=q_start, deterministic=deterministic,
    )  # fmt: skip


@public_call
def attention_statistics_varlen(
    q: Tensor, k: Tensor, lse: Tensor, reduce: str | Sequence[str],
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, *,
    block_size: tuple[int, int] = (1, 128), softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0, score_mod: Mod | None = None, mask_mod: Mod | None = None,
    aux_tensors: Sequence[Tensor] | None = None, block_sparse_tensors: Any = None,
    startend_row_indices: Tensor | ColumnMask | None = None, q_start: QStartArgument = None,
    deterministic: bool = False, **unknown: NoReturn,
) -> AttentionStatistics:  # fmt: skip
    """`attention_statistics` of sequences of different lengths, given as to
    `flash_attn_varlen_func`.

    For packed keys key_sums is (heads_kv, total_k); for packed queries lse and entropy are
    (heads_q, total_q). If k is one batch entry for all sequences, key_sums is (1, heads_kv,
    seqlen_k), summed over all of them. Blocks count from the start of each sequence, of up to
    max_seqlen_q queries and max_seqlen_k keys, by default all rows: with m = 1 and packed queries
    block_sums is (heads_kv, total_q, keys / n), else (batch, heads_kv, queries / m, keys / n).
    Blocks after the end of a sequence are 0.

    Raises:
        TypeError, ValueError, NotImplementedError: as `attention_statistics`.

    Example:
        >>> import torch
        >>> from flash_mask_cute import attention_statistics_varlen, flash_attn_varlen_func
        >>> q, k, v = torch.randn(3, 50, 2, 8)
        >>> ends = torch.tensor([0, 20, 50], dtype=torch.int32)
        >>> out, lse = flash_attn_varlen_func(q, k, v, ends, ends, return_lse=True)
        >>> attention_statistics_varlen(q, k, lse, "key_sums", ends, ends).key_sums.shape
        torch.Size([2, 50])
    """
    if unknown:
        refuse_keywords("attention_statistics_varlen", unknown)
    if torch.compiler.is_compiling():
        raise NotImplementedError("attention_statistics is not supported inside torch.compile")
    refuse_transforms()
    q_starts, start = split_q_start(q_start)
    given = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, None, q_starts
    options = Options(
        scale_number(softmax_scale), causal, *window_sides(window_size), softcap, max_seqlen_q,
        max_seqlen_k, start,
    )  # fmt: skip
    masks = masks_of(score_mod, mask_mod, aux_tensors, block_sparse_tensors, startend_row_indices)
    call = AttentionCall(Tensors(q, k, k, lengths=lengths_of(*given)), masks, options)
    if masks is not None:
        masks = masks.with_own_mod()
        call = with_cute_mods(call._replace(masks=masks), masks)
    return run_statistics(call, lse, StatisticsRequest.of(reduce, block_size, deterministic))
