"""Attention over a cache of keys and values, for decoding, and the combination of partial results.

`flash_attn_with_kvcache` has the argument order and the names of FlashAttention-3, and
`flash_attn_combine` those of flash-attn-4. docs/serving.md shows their use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from flash_mask_cute.autograd.append_op import IMPLEMENTATIONS as WRITE_IMPLEMENTATIONS
from flash_mask_cute.autograd.append_op import (
    append_and_attend,
    append_and_attend_by_operator,
    over_view,
    prepare_append,
)
from flash_mask_cute.autograd.attend import attend, scale_number, with_configs, with_cute_mods
from flash_mask_cute.autograd.combine_op import IMPLEMENTATIONS as COMBINE_IMPLEMENTATIONS
from flash_mask_cute.autograd.combine_op import check_parts_plain, run_combine
from flash_mask_cute.autograd.mod_names import Mod
from flash_mask_cute.autograd.passes import refuse_dual_level
from flash_mask_cute.autograd.torch_ops import IMPLEMENTATIONS
from flash_mask_cute.call.append import Append
from flash_mask_cute.call.arguments import (
    NO_MASKS,
    NO_OPTIONAL,
    AttentionCall,
    BackwardOptions,
    CallLengths,
    CausalArgument,
    OptionalTensors,
    Options,
    Tensors,
    configs_of,
    masks_of,
    split_causal,
    window_sides,
)
from flash_mask_cute.call.check.keywords import public_call, refuse_keywords
from flash_mask_cute.call.check.kvcache import (
    Cache,
    batch_of,
    check_cache,
    check_contents,
    refuse_given,
    refuse_gradients,
    seqlens_of,
    view_of,
)
from flash_mask_cute.call.check.validate import check_num_splits, refuse_transforms
from flash_mask_cute.functional import WindowSize
from flash_mask_cute.lowering.pair import OutsideError, named_by_mods, resolve_mods
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.masks.q_start import END, QStartArgument, split_q_start
from flash_mask_cute.runtime.checks import brief, check_bool, check_dense, dtype_names
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.plain_tensors import kind_refused

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
        if not (self.cos is self.sin is None):
            raise ValueError(
                "rotary_cos and rotary_sin need new keys and values, got k None beside "
                f"{brief(self.cos)} and {brief(self.sin)}"
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
    causal: CausalArgument = False,
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
    q_start: QStartArgument = END,
    seqlen_k_per_split: int | None = None,
    return_lse: bool = False,
    config: Any = None,
    out: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over cached keys and values, optionally appending new ones first.

    q: (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with cu_seqlens_q
    (int32, batch + 1), for a batch that mixes prefill and decode. k_cache: (batch, rows, heads_kv,
    head_dim); v_cache: the same with head_dim_v. With page_table (int32, (batch, max_pages)) they
    are pools of pages (pages, page_size, heads_kv, ...), page_size 1 to 256. With cache_batch_idx
    (int32, batch) a sequence uses that entry of a larger cache, or that row of a larger page_table.
    cache_seqlens: rows in use, an int or int32 (batch,); None: all. cache_leftpad (int32, batch):
    rows before the first key, counted in cache_seqlens. Unused rows may hold anything, even NaN.

    k, v: (batch, seqlen_new, heads_kv, ...), or (total_new, heads_kv, ...) with cu_seqlens_k_new
    (ignored without k). They are written after the rows in use, and attended to. No row may be
    written twice, and no elements of caches may share memory. rotary_cos, rotary_sin: (rows of a
    sequence or more, rotary_dim / 2), float32 or the dtype of q. Row i of k is rotated by position
    cache_seqlens + i before it is written, row i of q by the same under causal masking (of any
    sequence) or a window, else by cache_seqlens. rotary_seqlens (int32, batch; ignored without
    tables) replaces cache_seqlens here. rotary_interleaved: pairs are neighbours, not halves.

    q_start: the position of the first query, for all masks and mods, which do not count padding;
    "end": the last query is at the last key, new keys included. Others: `flash_attn_varlen_func`.
    qv, q_descale, attention_chunk, scheduler_metadata, sm_margin: flash-attention's, defaults only.
    Caches may be float8_e4m3fn beside a 16-bit q. k_descale, v_descale: None (1), fp32 (batch,
    heads_kv), or fp32 of the cache's shape without head_dim, into which new rows' scales go.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) or (total_q, ...), and with return_lse (out,
        lse), lse fp32 (batch, heads_q, seqlen_q) or (heads_q, total_q).

    Raises:
        TypeError, ValueError, NotImplementedError: before any launch or write; names argument and
            value. Contents are checked on the CPU only. Contiguous caches without new rows,
            cache_batch_idx and cache_leftpad support gradients.

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
    refuse_given((None,), q_descale=q_descale, qv=qv, scheduler_metadata=scheduler_metadata)
    refuse_given((0, None), attention_chunk=attention_chunk, sm_margin=sm_margin)
    where = None, cache_leftpad, cache_batch_idx, page_table, batch_of(q, cu_seqlens_q), q.device
    cache = Cache(k_cache, v_cache, *where, k_descale, v_descale)
    q_starts, start = split_q_start(q_start)
    per_seq, causal = split_causal(causal)
    config_fwd, config_bwd = configs_of(config)
    call = AttentionCall(
        Tensors(
            q, k_cache, v_cache, learnable_sink, CallLengths(cu_seqlens_q, q_starts=q_starts),
            NO_OPTIONAL if per_seq is None else OptionalTensors(causal_per_seq=per_seq), out=out),
        masks_of(score_mod, mask_mod, aux_tensors, block_sparse_tensors, startend_row_indices),
        Options(
            softmax_scale, causal, *window_sides(window_size), softcap, max_seqlen_q,
            q_start=start, num_splits=num_splits, seqlen_k_per_split=seqlen_k_per_split,
            pack_gqa=pack_gqa, config=config_fwd),
        BackwardOptions(config=config_bwd),
    )  # fmt: skip
    rotary = rotary_cos, rotary_sin, rotary_seqlens, rotary_interleaved
    new = NewRows(k, v, cu_seqlens_k_new, *rotary)
    return _attend_and_name(cache, cache_seqlens, new, call, (return_lse, return_softmax_lse))


def _attend_and_name(
    cache: Cache, cache_seqlens: Any, new: NewRows, call: AttentionCall, returns: tuple[bool, bool]
) -> Tensor | tuple[Tensor, Tensor]:
    """`_attend_over`, whose errors name what a mod of the caller captured."""
    if torch.compiler.is_compiling():
        return _attend_over(cache, cache_seqlens, new, call, returns, is_compiling=True)
    try:
        return _attend_over(cache, cache_seqlens, new, call, returns, is_compiling=False)
    except OutsideError as error:
        masks = call.masks or NO_MASKS
        mods = masks.score_mod, masks.mask_mod, masks.aux_tensors
        raise named_by_mods(error, *mods, cache.device) from error


def _attend_over(
    cache: Cache,
    cache_seqlens: int | Tensor | None,
    new: NewRows,
    call: AttentionCall,
    returns: tuple[bool, bool],
    is_compiling: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """returns: return_lse and return_softmax_lse. `call` does not hold the cache lengths yet."""
    options, x, masks = call.options, call.tensors, (call.masks or NO_MASKS).with_own_mod()
    check_num_splits(options.num_splits)
    for name, returns_lse in zip(("return_lse", "return_softmax_lse"), returns, strict=True):
        check_bool(name, returns_lse)
    if type(new.interleaved) is not bool:
        check_bool("rotary_interleaved", new.interleaved)
    options = replaced(options, return_lse=any(returns))
    scale = options.softmax_scale
    if scale is not None and type(scale) is not float:
        options = replaced(options, softmax_scale=scale_number(scale))
    call = replaced(call, options=options)
    # Dynamo cannot trace checks; the operators of its graph run them
    wrapped = None
    if not is_compiling:
        wrapped = kind_refused(check_cache, cache, masks.startend_row_indices)
    cache = replaced(cache, seqlens=seqlens_of(cache_seqlens, cache))
    if not is_compiling and wrapped is None:
        wrapped = kind_refused(check_contents, cache)
    if not is_compiling and not (masks.score_mod is masks.mask_mod is None):
        mods = resolve_mods(masks.score_mod, masks.mask_mod, masks.aux_tensors, x.q.device)
        call = replaced(call, masks=replaced(masks, **mods._asdict()))
    write = None
    if new.has_rows():
        reason = "new rows are written into the cache, and there are no gradients of it"
        scales = {"k_descale": cache.k_descale, "v_descale": cache.v_descale}
        refuse_gradients(reason, x, k=new.k, v=new.v, **scales)
        write = _append_of(cache, new, call)
        if not is_compiling and wrapped is None:
            if not (call.options.config is call.backward.config is None):
                call = with_configs(call)
            # what is wrong in the rest is reported before anything is written
            wrapped = kind_refused(prepare_append, write, call)
    elif cache.batch_idx is not None or cache.leftpad is not None:
        refuse_gradients("there are no gradients beside cache_batch_idx and cache_leftpad", x)
    is_traced = is_compiling or torch._C._len_torch_dispatch_stack() > 0
    if is_traced or wrapped is None:
        return _append_and_attend(cache, write, call, by_operator=is_traced)
    with wrapped.named_unless_from(IMPLEMENTATIONS | WRITE_IMPLEMENTATIONS):
        return _append_and_attend(cache, write, call, by_operator=True)


def _append_of(cache: Cache, new: NewRows, call: AttentionCall) -> Append:
    """The write that a call asks for.

    Raises:
        ValueError: k, v and cache_seqlens are not given together.
    """
    if new.k is None or new.v is None or cache.seqlens is None:
        raise ValueError(
            "k, v and cache_seqlens go together, the last one being where new rows are written, "
            f"got {brief(new.k)}, {brief(new.v)} and {brief(cache.seqlens)}"
        )
    x, options = call.tensors, call.options
    has_window = not (options.window_size_left is options.window_size_right is None)
    return Append(
        cache.k, cache.v, new.k, new.v, x.q, cache.seqlens,
        leftpad=cache.leftpad, batch_idx=cache.batch_idx, page_table=cache.page_table,
        cu_seqlens_k_new=new.cu_seqlens, cu_seqlens_q=x.lengths.cu_seqlens_q,
        cos=new.cos, sin=new.sin, interleaved=new.interleaved,
        rotary_seqlens=None if new.cos is None else new.rotary_seqlens,
        advances=bool(options.causal) or has_window or x.optional.causal_per_seq is not None,
        k_descale=cache.k_descale, v_descale=cache.v_descale,
    )  # fmt: skip


def _append_and_attend(
    cache: Cache, write: Append | None, call: AttentionCall, *, by_operator: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """write: checked, unless the operator checks it."""
    if write is None:
        return _attend_over_keys(over_view(call, view_of(cache, None)))
    if not by_operator:
        return append_and_attend(write, call, _attend_over_keys)
    refuse_transforms(but_functionalize=True)
    refuse_dual_level()
    masks = call.masks
    # not a chain of `is`: Dynamo of torch 2.9 does not know two functions from inside
    if masks is not None and (masks.score_mod is not None or masks.mask_mod is not None):
        call = with_cute_mods(call, masks)
    out, lse = append_and_attend_by_operator(write, call)
    return (out, lse) if call.options.return_lse else out


def _attend_over_keys(call: AttentionCall) -> Tensor | tuple[Tensor, Tensor]:
    results = attend(call)
    return (results.out, results.lse) if call.options.return_lse else results.out


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
    """Combine attention over parts of the keys into attention over all of them.

    out_partial: (num_splits, batch, seqlen, heads, head_dim), or (num_splits, total, heads,
    head_dim) for packed sequences. lse_partial: fp32, the same shape without head_dim, natural log.
    out_dtype: by default the dtype of out, or of out_partial. out: receives the result; it has the
    shape of out_partial without num_splits, any strides, and memory of its own, and there are no
    gradients. On a GPU head_dim is a multiple of 8 up to 512, and dtypes have 16 or 32 bits.
    cu_seqlens and seqused must be None. A part that saw nothing has the LSE -inf, and its output
    may hold anything. If all parts of a row saw nothing, its out is 0 and its lse -inf. Gradients
    of both inputs are supported without out.

    Returns:
        (out, lse): out (batch, seqlen, heads, head_dim) or (total, heads, head_dim), lse the same
        shape without head_dim. lse is None without return_lse. out is the argument, if given.

    Raises:
        TypeError, ValueError, NotImplementedError: naming argument and value. ValueError also if
            autograd would record a call with out.

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
    refuse_given((None,), cu_seqlens=cu_seqlens, seqused=seqused)
    check_bool("return_lse", return_lse)
    # Dynamo cannot trace these
    if not torch.compiler.is_compiling():
        check_dense("out_partial", out_partial)
        check_dense("lse_partial", lse_partial)
        if out is not None:
            check_dense("out", out)
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
    dtype = out_dtype
    if dtype is None:
        dtype = (out_partial if out is None else out).dtype
    if dtype not in _PARTIAL_DTYPES:
        raise TypeError(
            f"out_dtype must be one of {dtype_names(_PARTIAL_DTYPES)}, or None for the dtype of "
            f"out or out_partial, got {dtype}"
        )
    if out is not None:
        _check_combined(out, out_partial, lse_partial, dtype)
    wrapped = None
    if not torch.compiler.is_compiling():
        wrapped = kind_refused(check_parts_plain, out_partial, lse_partial)
    if wrapped is None or torch._C._len_torch_dispatch_stack() > 0:
        combined, lse = run_combine(out_partial, lse_partial, dtype, out)
    else:
        with wrapped.named_unless_from(COMBINE_IMPLEMENTATIONS):
            combined, lse = run_combine(out_partial, lse_partial, dtype, out)
    return combined, lse if return_lse else None


def _check_combined(
    out: Tensor, out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype
) -> None:
    """Check the memory for the combined output; that it is its own, the operator checks."""
    if out.dtype != dtype:
        raise TypeError(f"out must have dtype out_dtype ({dtype}), got {out.dtype}")
    if out.shape != out_partial.shape[1:]:
        raise ValueError(
            f"out must have the shape of out_partial without num_splits, "
            f"{tuple(out_partial.shape[1:])}, got {tuple(out.shape)}"
        )
    if out.device != out_partial.device:
        raise ValueError(
            f"out must be on the device of out_partial ({out_partial.device}), got {out.device}"
        )
    if not torch.is_grad_enabled():
        return
    for name, x in (("out", out), ("out_partial", out_partial), ("lse_partial", lse_partial)):
        if x.requires_grad:
            raise ValueError(
                f"out must be None where gradients are recorded, for which the result is new "
                f"memory: {name} requires grad; use torch.no_grad(), or detach it"
            )
