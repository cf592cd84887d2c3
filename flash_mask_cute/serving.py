"""Attention over a cache of keys and values, for decoding, and the merge of partial results.

`flash_attn_with_kvcache` has the argument order and the names of FlashAttention-3, and
`flash_attn_combine` those of flash-attn-4. docs/serving.md shows their use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from flash_mask_cute.autograd.append_op import append_by_operator
from flash_mask_cute.autograd.arguments import Call
from flash_mask_cute.autograd.combine_op import run_combine
from flash_mask_cute.autograd.mod_names import Mod
from flash_mask_cute.autograd.passes import check_forward_call
from flash_mask_cute.call.append import Append, append, check_append
from flash_mask_cute.call.arguments import QStart, window_sides
from flash_mask_cute.call.keywords import public_call, refuse_keywords
from flash_mask_cute.call.kvcache import (
    Cache,
    CacheView,
    batch_of,
    check_cache,
    check_contents,
    refuse_given,
    refuse_gradients,
    seqlens_of,
    view_of,
)
from flash_mask_cute.call.problem import END
from flash_mask_cute.call.validate import check_num_splits
from flash_mask_cute.flex.together import as_cute_mods
from flash_mask_cute.functional import WindowSize, attend, scale_number
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.runtime.checks import brief, check_bool, check_tensor, dtype_names

__all__ = ["flash_attn_combine", "flash_attn_with_kvcache"]

_PARTIAL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class NewRows(NamedTuple):
    """The arguments of `flash_attn_with_kvcache` that describe new keys and values."""

    k: Tensor | None
    v: Tensor | None
    cu_seqlens: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    rotary_seqlens: Tensor | None
    interleaved: bool

    def has_rows(self) -> bool:
        """Whether there are new rows.

        Raises:
            ValueError: there are no new rows, but arguments that need them.
        """
        if not (self.k is self.v is None):
            return True
        if not (self.cos is self.sin is self.rotary_seqlens is self.cu_seqlens is None):
            raise ValueError(
                "rotary_cos, rotary_sin, rotary_seqlens and cu_seqlens_k_new need new keys and "
                f"values, got k None beside {brief(self.cos)}, {brief(self.sin)}, "
                f"{brief(self.rotary_seqlens)} and {brief(self.cu_seqlens)}"
            )
        return False


@public_call
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: Any = None,
    startend_row_indices: Tensor | ColumnMask | None = None,
    q_start: QStart = END,
    return_lse: bool = False,
    config: Any = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over cached keys and values, optionally appending new ones first.

    q: (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with cu_seqlens_q
    (int32, batch + 1), for a batch that mixes prefill and decode. k_cache: (batch, rows, heads_kv,
    head_dim); v_cache: the same with head_dim_v. With page_table (int32, (batch, max_pages)) they
    are pools of pages (pages, page_size, heads_kv, ...), page_size 1 to 256. With cache_batch_idx
    (int32, batch) a sequence uses that entry of a larger cache. cache_seqlens: rows in use, an int
    or int32 (batch,); None: all. cache_leftpad (int32, batch): rows before the first key, counted
    in cache_seqlens. Unused rows may hold anything, even NaN.

    k, v: (batch, seqlen_new, heads_kv, ...), or (total_new, heads_kv, ...) with cu_seqlens_k_new.
    They are written into the cache behind the rows in use, and attended to. rotary_cos, rotary_sin:
    (positions, rotary_dim / 2), float32 or the dtype of q. Row i of k is rotated by position
    cache_seqlens + i before it is written. Row i of q is rotated by the same position under causal
    masking or a window, otherwise by position cache_seqlens. rotary_seqlens (int32, batch) replaces
    cache_seqlens here. rotary_interleaved: pairs are neighbours; otherwise they span the halves of
    rotary_dim.

    q_start: the position of the first query, for causal masking, windows, and all masks and mods;
    "end": the last query is at the last key, new keys included. The other arguments are those of
    `flash_attn_varlen_func`. Masks and mods see positions in the sequence; padding does not count.
    return_lse and return_softmax_lse mean the same. num_splits: 0, the library decides; 1, one
    pass; N, N parts. qv, *_descale, attention_chunk, scheduler_metadata and sm_margin only keep the
    argument positions.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) or (total_q, ...), and with return_lse (out,
        lse), lse fp32 (batch, heads_q, seqlen_q) or (heads_q, total_q).

    Raises:
        TypeError, ValueError, NotImplementedError: before any launch; names argument and value.
            Inputs that require grad have gradients only if nothing is written and the caches are
            contiguous, without cache_batch_idx and cache_leftpad.

    Example:
        >>> import torch
        >>> from flash_mask_cute import flash_attn_with_kvcache
        >>> cache = torch.zeros(2, 2, 64, 1, 16)  # k and v, batch, rows, heads, head_dim
        >>> q, k, v = torch.randn(3, 2, 1, 1, 16)  # one token of two sequences
        >>> lengths = torch.tensor([5, 9], dtype=torch.int32)
        >>> flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lengths, causal=True).shape
        torch.Size([2, 1, 1, 16])
    """
    if unknown:
        refuse_keywords("flash_attn_with_kvcache", unknown)
    nothing = (None,)
    refuse_given(
        {
            "qv": (qv, nothing), "q_descale": (q_descale, nothing),
            "k_descale": (k_descale, nothing), "v_descale": (v_descale, nothing),
            "attention_chunk": (attention_chunk, (0, None)),
            "scheduler_metadata": (scheduler_metadata, nothing), "sm_margin": (sm_margin, (0,)),
        }
    )  # fmt: skip
    batch = batch_of(q, cu_seqlens_q)
    cache = Cache(k_cache, v_cache, None, cache_leftpad, cache_batch_idx, page_table, batch)
    call = Call(
        cu_seqlens_q, None, None, None, max_seqlen_q, None, softmax_scale, causal,
        *window_sides(window_size), softcap, score_mod, mask_mod, aux_tensors, block_sparse_tensors,
        startend_row_indices, None, False, pack_gqa, config, q_start, None, num_splits,
    )  # fmt: skip
    rotary = rotary_cos, rotary_sin, rotary_seqlens, rotary_interleaved
    new = NewRows(k, v, cu_seqlens_k_new, *rotary)
    returns = return_lse, return_softmax_lse
    return _attend_over(cache, cache_seqlens, q, new, learnable_sink, call, returns)


def _attend_over(
    cache: Cache,
    cache_seqlens: int | Tensor | None,
    q: Tensor,
    new: NewRows,
    sink: Tensor | None,
    call: Call,
    returns: tuple[bool, bool],
) -> Tensor | tuple[Tensor, Tensor]:
    """returns: return_lse and return_softmax_lse. `call` does not hold the cache lengths yet."""
    check_num_splits(call.num_splits)
    for name, returns_lse in zip(("return_lse", "return_softmax_lse"), returns, strict=True):
        check_bool(name, returns_lse)
    scale = call.softmax_scale
    if scale is not None and type(scale) is not float:
        call = call._replace(softmax_scale=scale_number(scale))
    check_cache(cache, call.startend_row_indices)
    cache = cache._replace(seqlens=seqlens_of(cache_seqlens, cache))
    check_contents(cache)
    if not (call.score_mod is call.mask_mod is None or torch.compiler.is_compiling()):
        mods = as_cute_mods(call.score_mod, call.mask_mod, call.aux_tensors, q.device)
        call = call._replace(**mods._asdict())
    if not new.has_rows():
        if cache.batch_idx is not None or cache.leftpad is not None:
            reason = "there are no gradients beside cache_batch_idx and cache_leftpad"
            tensors = {"q": q, "k_cache": cache.k, "v_cache": cache.v, "learnable_sink": sink}
            refuse_gradients(reason, **tensors)
        view = view_of(cache, None)
        return _attend_to(view, q, sink, call, any(returns))
    if new.k is None or new.v is None or cache.seqlens is None:
        raise ValueError(
            "k, v and cache_seqlens go together, the last one being where new rows are written, "
            f"got {brief(new.k)}, {brief(new.v)} and {brief(cache_seqlens)}"
        )
    is_banded = bool(call.causal) or not (call.window_size_left is call.window_size_right is None)
    given = Append(
        cache.k, cache.v, new.k, new.v, q, cache.seqlens, cache.leftpad, cache.batch_idx,
        cache.page_table, new.cu_seqlens, call.cu_seqlens_q, new.cos, new.sin, new.rotary_seqlens,
        new.interleaved, is_banded,
    )  # fmt: skip
    return _append_and_attend(cache, given, sink, call, any(returns))


def _append_and_attend(
    cache: Cache, given: Append, sink: Tensor | None, call: Call, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    x = given
    reason = "new rows are written into the cache, of which there are no gradients"
    refuse_gradients(
        reason, q=x.q, k_cache=x.k_cache, v_cache=x.v_cache, k=x.k, v=x.v, learnable_sink=sink
    )
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        q, total = append_by_operator(given)
    else:
        check_append(given)
        # what is wrong in the rest is told before anything is written
        view = view_of(cache, x.cache_seqlens)
        check_forward_call(x.q, view.k, view.v, sink, _over(call, view), return_lse)
        q, total = append(given)
    return _attend_to(view_of(cache, total), q, sink, call, return_lse)


def _attend_to(
    view: CacheView, q: Tensor, sink: Tensor | None, call: Call, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    results = attend(q, view.k, view.v, sink, _over(call, view), return_lse, False)
    return (results.out, results.lse) if return_lse else results.out


def _over(call: Call, view: CacheView) -> Call:
    """Run one call over a cache."""
    return call._replace(
        cu_seqlens_k=view.cu_seqlens_k,
        seqused_k=view.seqused_k,
        max_seqlen_k=view.max_seqlen_k,
        page_table=view.page_table,
    )


@public_call
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    return_lse: bool = True,
    **unknown: NoReturn,
) -> tuple[Tensor, Tensor | None]:
    """Merge attention over parts of the keys into attention over all of them.

    out_partial: (num_splits, batch, seqlen, heads, head_dim), or (num_splits, total, heads,
    head_dim) for packed sequences. lse_partial: fp32, the same shape without head_dim, natural log.
    out_dtype: by default the dtype of out_partial. out, cu_seqlens and seqused only keep their
    names. A part that saw nothing has the LSE -inf, and its output may hold anything. A row whose
    parts all saw nothing has out 0 and lse -inf. Both inputs have gradients.

    Returns:
        (out, lse): out (batch, seqlen, heads, head_dim) or (total, heads, head_dim), lse the same
        shape without head_dim. lse is None without return_lse.

    Raises:
        TypeError, ValueError, NotImplementedError: naming argument and value.

    Example:
        >>> import torch
        >>> from flash_mask_cute import flash_attn_combine, flash_attn_func
        >>> q, k, v = torch.randn(3, 1, 8, 2, 16)
        >>> parts = [flash_attn_func(q, k[:, i], v[:, i], return_lse=True)
        ...          for i in (slice(3), slice(3, 8))]
        >>> outs, lses = (torch.stack(x) for x in zip(*parts))
        >>> out, lse = flash_attn_combine(outs, lses.mT)
        >>> torch.allclose(out, flash_attn_func(q, k, v), atol=1e-6)
        True
    """
    if unknown:
        refuse_keywords("flash_attn_combine", unknown)
    nothing = (None,)
    refuse_given(
        {"out": (out, nothing), "cu_seqlens": (cu_seqlens, nothing), "seqused": (seqused, nothing)}
    )
    check_bool("return_lse", return_lse)
    check_tensor("out_partial", out_partial)
    check_tensor("lse_partial", lse_partial)
    if out_partial.dtype not in _PARTIAL_DTYPES:
        raise TypeError(
            f"out_partial must have one of the dtypes {dtype_names(_PARTIAL_DTYPES)}, got "
            f"{out_partial.dtype}"
        )
    wide = torch.promote_types(out_partial.dtype, torch.float32)
    if lse_partial.dtype not in (torch.float32, wide):
        raise TypeError(f"lse_partial must have dtype float32, got {lse_partial.dtype}")
    if out_partial.dim() not in (4, 5):
        raise ValueError(
            "out_partial must have shape (num_splits, batch, seqlen, heads, head_dim) or "
            f"(num_splits, total, heads, head_dim), got {tuple(out_partial.shape)}"
        )
    if lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"lse_partial must have the shape of out_partial without head_dim, "
            f"{tuple(out_partial.shape[:-1])}, got {tuple(lse_partial.shape)}"
        )
    if lse_partial.device != out_partial.device:
        raise ValueError(
            f"lse_partial must be on the device of out_partial ({out_partial.device}), got "
            f"{lse_partial.device}"
        )
    dtype = out_partial.dtype if out_dtype is None else out_dtype
    if dtype not in _PARTIAL_DTYPES:
        raise TypeError(
            f"out_dtype must be one of {dtype_names(_PARTIAL_DTYPES)} or None, got {out_dtype}"
        )
    merged, lse = run_combine(out_partial, lse_partial, dtype)
    return merged, lse if return_lse else None
