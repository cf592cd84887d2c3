"""Torch's operators of flash attention, computed by this package.

Each function has the signature of the aten operator that it is named after, and its results:
layouts, LSE (natural logarithm, fp32, (batch, heads, seqlen_q) or (heads, total_q)), and the state
of a random number generator that no kernel here uses. As in torch's kernels for CUDA, `is_causal`
of these operators is aligned bottom-right. `F.scaled_dot_product_attention` means top-left, and
calls them only where queries and keys are equally many.

What cannot be computed here is refused, before any launch, by an exception of `ran.REFUSALS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.integrations.ran import REFUSALS, left_to_torch, ran_here
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd
from flash_mask_cute.runtime.checks import check_memory_layout


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, rng_state, unused, debug_mask) of tensors (batch, seqlen, heads, head_dim), or
    (total, heads, head_dim) with cum_seq_*. With block_table key and value are pages."""
    _refuse(dropout_p, return_debug_mask, alibi_slopes)
    out, lse = _attend(
        query, key, value, scale, _band(is_causal, window_size_left, window_size_right),
        _lengths(cum_seq_q, cum_seq_k, max_q, max_k) | _pages(seqused_k, block_table),
        num_splits=num_splits, out=_laid_out_as(query),
    )  # fmt: skip
    return out, lse, *_unused_state(query)


def flash_attention_forward_no_dropout_inplace(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """lse; the output is written to out, of any strides."""
    _refuse(dropout_p, return_debug_mask, alibi_slopes)
    attend = partial(
        _attend, query, key, value, scale, _band(is_causal, window_size_left, window_size_right),
        _lengths(cum_seq_q, cum_seq_k, max_q, max_k) | _pages(seqused_k, block_table),
        num_splits=num_splits,
    )  # fmt: skip
    if _is_written_by_kernels(out):
        return attend(out=out)[1]
    if out.shape != query.shape or out.dtype != query.dtype or out.device != query.device:
        raise ValueError(
            f"out must be like query, {query.dtype} {tuple(query.shape)} on {query.device}, got "
            f"{out.dtype} {tuple(out.shape)} on {out.device}"
        )
    result, lse = attend()
    out.copy_(result)
    return lse


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor | None,
    unused: Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, laid out as these are."""
    is_packed = cum_seq_q is not None
    _refuse(dropout_p)
    return _gradients(
        (query, key, value, out, grad_out, logsumexp),
        tuple(_laid_out_as(x, is_packed) for x in (query, key, value)),
        softmax_scale=scale,
        **_band(is_causal, window_size_left, window_size_right),
        **_lengths(cum_seq_q, cum_seq_k, max_q, max_k),
    )


def scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """(out, lse, None, None, max_q, max_k, rng_state, unused, debug_mask) of tensors (batch, heads,
    seqlen, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    max_q, max_k = query.shape[2], key.shape[2]
    _refuse(dropout_p, return_debug_mask)
    band = _band(is_causal, None, None)
    out, lse = _attend(q, k, v, scale, band, {}, out=_laid_out_as_heads_first(query, q))
    return out.transpose(1, 2), lse, None, None, max_q, max_k, *_unused_state(query)


def scaled_dot_product_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, laid out as these are."""
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    given = (query, q), (key, k), (value, v)
    _refuse(dropout_p)
    dq, dk, dv = _gradients(
        (q, k, v, o, dout, logsumexp),
        tuple(_laid_out_as_heads_first(x, as_bshd) for x, as_bshd in given),
        softmax_scale=scale,
        **_band(is_causal, None, None),
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


OPERATORS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_attention_forward_no_dropout_inplace,
    "_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_flash_attention": scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_backward": scaled_dot_product_flash_attention_backward,
}
"""By the name of the aten operator."""
# Came after torch's registry; without it torch has no `varlen_attn_out`.
_NEWER = "_flash_attention_forward_no_dropout_inplace"


def unknown_operator() -> str | None:
    """What differs between torch's operators and the functions here; None if they agree."""
    for name, function in OPERATORS.items():
        operator = _operator(name)
        if operator is None:
            if name != _NEWER:
                return f"it has no operator aten::{name}"
            continue
        known = inspect.signature(function).parameters
        given = operator._schema.arguments
        for argument in given:
            if argument.name not in known:
                return f"aten::{name} has an argument {argument.name}, which is not known here"
        places = [x.name for x in given if not x.kwarg_only]
        by_name = inspect.Parameter.KEYWORD_ONLY
        if places != [x.name for x in known.values() if x.kind != by_name]:
            return f"aten::{name} has other arguments: {', '.join(places)}"
    return None


class Activated:
    """Our functions in the place of torch's kernels, until `remove`.

    Torch's kernel of an operator is asked for before ours is set, and computes what ours refuses.
    """

    def __init__(self, dispatch_key: str) -> None:
        """dispatch_key: that of the tensors in calls that are taken, "CUDA"."""
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        for name, function in OPERATORS.items():
            if _operator(name) is not None:
                kept = _kernel_of_torch(name, dispatch_key)
                call = _ours_or_kept(name, function, kept)
                self._library.impl(name, call, dispatch_key, allow_override=True)

    def remove(self) -> None:
        """Give torch's kernels their places back."""
        self._library = None


def _operator(name: str) -> Any:
    packet = getattr(torch.ops.aten, name, None)
    return None if packet is None else packet.default


def _kernel_of_torch(name: str, dispatch_key: str) -> Callable[..., Any] | None:
    """What computes the operator now; None if nothing does."""
    operator = f"aten::{name}"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator, dispatch_key):
        return None
    kernel = torch.library.get_kernel(operator, dispatch_key)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[dispatch_key])

    def call(*args: Any, **keywords: Any) -> Any:
        return kernel.call_boxed(keys, *args, **keywords)

    return call


def _ours_or_kept(
    name: str, function: Callable[..., Any], kept: Callable[..., Any] | None
) -> Callable[..., Any]:
    def call(*args: Any, **keywords: Any) -> Any:
        try:
            results = function(*args, **keywords)
        except REFUSALS as error:
            if kept is None:
                raise NotImplementedError(
                    f"aten::{name}: {error}; torch has no kernel of its own for these tensors"
                ) from error
            reason = str(error)
        else:
            ran_here(name)
            return results
        left_to_torch(name, reason)
        return kept(*args, **keywords)

    return call


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    band: dict[str, Any],
    lengths: dict[str, Any],
    *,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse. out: where to write, or None."""
    if value.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"query and value must have the same head_dim in torch's operators, got "
            f"{query.shape[-1]} and {value.shape[-1]}"
        )
    found, lse = _flash_attn_fwd(
        query, key, value, out=out, softmax_scale=scale, **band, **lengths,
        num_splits=num_splits or 0, return_lse=True,
    )  # fmt: skip
    assert lse is not None  # it was asked for
    return found, lse


def _gradients(
    results: tuple[Tensor, ...], memory: tuple[Tensor | None, ...], **arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv. results: arguments of the host call. memory: where to write, or None."""
    dq, dk, dv = memory
    return _flash_attn_bwd(
        *results,
        **arguments,
        dq=dq,
        dk=dk,
        dv=dv,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _refuse(
    dropout_p: float, return_debug_mask: bool = False, alibi_slopes: Tensor | None = None
) -> None:
    if dropout_p:
        raise NotImplementedError(f"dropout_p={dropout_p} is not supported: only 0")
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask=True is not supported: no mask is stored")
    if alibi_slopes is not None:
        raise NotImplementedError(
            "alibi_slopes are not supported: write them as score_mod of "
            "flash_mask_cute.flash_attn_varlen_func"
        )


def _band(is_causal: bool, left: int | None, right: int | None) -> dict[str, Any]:
    """Torch's window, where every negative side is open, as arguments of a host call."""
    left, right = (None if side is None or side < 0 else side for side in (left, right))
    if is_causal:
        right = None
    return {"causal": is_causal, "window_size_left": left, "window_size_right": right}


def _lengths(
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int
) -> dict[str, Any]:
    """Lengths of packed sequences. Those of dense tensors are in their shapes."""
    return {
        "cu_seqlens_q": cum_seq_q,
        "cu_seqlens_k": cum_seq_k,
        "max_seqlen_q": None if cum_seq_q is None else max_q,
        "max_seqlen_k": None if cum_seq_k is None else max_k,
    }


def _pages(seqused_k: Tensor | None, block_table: Tensor | None) -> dict[str, Any]:
    """Used lengths and pages, to be joined to `_lengths`."""
    if block_table is None:
        return {"seqused_k": seqused_k}
    if seqused_k is None:
        raise ValueError("block_table needs seqused_k, the number of keys of each sequence")
    # seqused_k has the lengths, and pages are not packed
    return {
        "seqused_k": seqused_k,
        "page_table": block_table,
        "cu_seqlens_k": None,
        "max_seqlen_k": None,
    }


def _laid_out_as(x: Tensor, cleared: bool = False) -> Tensor | None:
    """Memory for a result with the strides that torch promises for it, those of `empty_like(x)`;
    None if they are those of a new tensor.

    cleared: rows that no sequence has are not written in given memory, and must be zero.
    """
    if x.is_contiguous():
        return None
    like = torch.empty_like(x)
    if like.is_contiguous():
        return None
    return like.zero_() if cleared else like


def _laid_out_as_heads_first(x: Tensor, as_bshd: Tensor) -> Tensor | None:
    """`_laid_out_as` of x (batch, heads, seqlen, head_dim), as (batch, seqlen, heads, head_dim).
    as_bshd: x in that order; torch would take its strides otherwise if heads are expanded."""
    if as_bshd.is_contiguous():
        return None
    like = torch.empty_like(x).transpose(1, 2)
    return None if like.is_contiguous() else like


def _is_written_by_kernels(out: Tensor) -> bool:
    """Whether rows of out lie as kernels write them."""
    try:
        check_memory_layout("out", out, aligned=True)
    except ValueError:
        return False
    return True


def _unused_state(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and debug mask, shaped as torch's; without dropout nothing writes them."""
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    offset = torch.empty((), dtype=torch.uint64, device=query.device)
    return state, offset, query.new_empty(0)
