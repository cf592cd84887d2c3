"""Torch's operators of flash attention, computed by this package.

Each function returns what the aten operator of its name returns: layouts, LSE (natural logarithm,
fp32, (batch, heads, seqlen_q) or (heads, total_q)), and the state of a random number generator that
no kernel here uses. As in torch's kernels for CUDA, `is_causal` of these operators is aligned
bottom-right. `F.scaled_dot_product_attention` means top-left, and calls them only where queries and
keys are equally many.

What cannot be computed here is refused, before any launch, by an exception of `ran.REFUSALS`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.integrations.ran import REFUSALS, left_to_torch, ran_here
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd
from flash_mask_cute.runtime.checks import check_memory_layout


class _Call(NamedTuple):
    """The arguments of a call, by their names in aten; defaults stand for those that the operator
    does not have."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Any = None
    grad_out: Any = None
    logsumexp: Any = None
    cum_seq_q: Tensor | None = None
    cum_seq_k: Tensor | None = None
    max_q: int | None = None
    max_k: int | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    return_debug_mask: bool = False
    scale: float | None = None
    window_size_left: int | None = None
    window_size_right: int | None = None
    seqused_k: Tensor | None = None
    alibi_slopes: Tensor | None = None
    block_table: Tensor | None = None
    num_splits: int | None = None
    # of random numbers, which no kernel here draws
    rng_state: Any = None
    unused: Any = None
    philox_seed: Any = None
    philox_offset: Any = None

    def heads_third(self) -> _Call:
        """Tensors (batch, heads, seqlen, head_dim) as (batch, seqlen, heads, head_dim)."""
        tensors = {name: getattr(self, name) for name in (*_INPUTS, *_OF_BACKWARD[:2])}
        moved = {name: x.transpose(1, 2) for name, x in tensors.items() if x is not None}
        return self._replace(**moved)

    def options(self) -> dict[str, Any]:
        """Scale, mask and lengths as arguments of a host call. Lengths of dense tensors are in
        their shapes. Every negative side of torch's window is open."""
        sides = self.window_size_left, self.window_size_right
        left, right = (None if side is None or side < 0 else side for side in sides)
        return {
            "softmax_scale": self.scale,
            "causal": self.is_causal,
            "window_size_left": left,
            "window_size_right": None if self.is_causal else right,
            "cu_seqlens_q": self.cum_seq_q,
            "cu_seqlens_k": self.cum_seq_k,
            "max_seqlen_q": None if self.cum_seq_q is None else self.max_q,
            "max_seqlen_k": None if self.cum_seq_k is None else self.max_k,
        }


_INPUTS = "query", "key", "value"
_OF_BACKWARD = "out", "grad_out", "logsumexp"


def flash_attention_forward(call: _Call) -> tuple[Tensor, ...]:
    """(out, lse, rng_state, unused, debug_mask) of tensors (batch, seqlen, heads, head_dim), or
    (total, heads, head_dim) with cum_seq_*. With block_table key and value are pages."""
    return *_attend(call, _laid_out_as(call.query)), *_unused_state(call.query)


def flash_attention_forward_no_dropout_inplace(call: _Call) -> Tensor:
    """lse; the output is written to out, of any strides."""
    query, out = call.query, call.out
    if _is_written_by_kernels(out):
        return _attend(call, out)[1]
    if out.shape != query.shape or out.dtype != query.dtype or out.device != query.device:
        raise ValueError(
            f"out must be like query, {query.dtype} {tuple(query.shape)} on {query.device}, got "
            f"{out.dtype} {tuple(out.shape)} on {out.device}"
        )
    result, lse = _attend(call)
    out.copy_(result)
    return lse


def flash_attention_backward(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, laid out as these are."""
    is_packed = call.cum_seq_q is not None
    return _gradients(call, *(_laid_out_as(x, is_packed) for x in call[:3]))


def scaled_dot_product_flash_attention(call: _Call) -> tuple[Any, ...]:
    """(out, lse, None, None, max_q, max_k, rng_state, unused, debug_mask) of tensors (batch, heads,
    seqlen, head_dim)."""
    query, moved = call.query, call.heads_third()
    out, lse = _attend(moved, _laid_out_as_heads_first(query, moved.query))
    lengths = query.shape[2], call.key.shape[2]
    return out.transpose(1, 2), lse, None, None, *lengths, *_unused_state(query)


def scaled_dot_product_flash_attention_backward(call: _Call) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, laid out as these are."""
    moved = call.heads_third()
    gradients = _gradients(moved, *map(_laid_out_as_heads_first, call[:3], moved[:3]))
    return tuple(x.transpose(1, 2) for x in gradients)


OPERATORS: dict[str, Callable[[_Call], Any]] = {
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
    """How torch's operators differ from those that are known here, or None."""
    for name in OPERATORS:
        operator = _operator(name)
        if operator is None:
            if name != _NEWER:
                return f"it has no operator aten::{name}"
            continue
        given = [x.name for x in operator._schema.arguments]
        for argument in given:
            if argument not in _Call._fields:
                return f"aten::{name} has an argument {argument}, which is not known here"
        for argument in (*_INPUTS, *(_OF_BACKWARD if name.endswith("_backward") else ())):
            if argument not in given:
                return f"aten::{name} has no argument {argument}"
    return None


class Activated:
    """Our functions in the place of torch's kernels, which compute what ours refuse."""

    def __init__(self, dispatch_key: str) -> None:
        """dispatch_key: that of the tensors in calls that are taken, "CUDA"."""
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        for name in OPERATORS:
            if _operator(name) is not None:
                call = _ours_or_kept(name, _kernel_of_torch(name, dispatch_key))
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


def _binder(names: list[str]) -> Callable[[tuple[Any, ...], dict[str, Any]], _Call]:
    """Makes a call of arguments by position, as `names` has them, and of those by name."""
    order = [*names, *(field for field in _Call._fields if field not in names)]
    defaults = tuple(_Call._field_defaults.get(field) for field in order)
    places = {field: i for i, field in enumerate(order)}
    in_order = itemgetter(*(places[field] for field in _Call._fields))

    def bind(args: tuple[Any, ...], keywords: dict[str, Any]) -> _Call:
        given = [*args, *defaults[len(args) :]]
        for field, value in keywords.items():
            given[places[field]] = value
        return _Call._make(in_order(given))

    return bind


def _ours_or_kept(name: str, kept: Callable[..., Any] | None) -> Callable[..., Any]:
    bind = _binder([x.name for x in _operator(name)._schema.arguments])

    def call(*args: Any, **keywords: Any) -> Any:
        try:
            results = OPERATORS[name](bind(args, keywords))
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


def _attend(call: _Call, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out and lse. out: where to write, or None."""
    _refuse(call)
    query, value = call.query, call.value
    if value.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"query and value must have the same head_dim in torch's operators, got "
            f"{query.shape[-1]} and {value.shape[-1]}"
        )
    options = call.options() | {"seqused_k": call.seqused_k}
    if call.block_table is not None:
        if call.seqused_k is None:
            raise ValueError("block_table needs seqused_k, the number of keys of each sequence")
        # seqused_k has the lengths, and pages are not packed
        options |= {"page_table": call.block_table, "cu_seqlens_k": None, "max_seqlen_k": None}
    splits = call.num_splits or 0
    found, lse = _flash_attn_fwd(
        query, call.key, value, out=out, num_splits=splits, return_lse=True, **options
    )
    assert lse is not None  # it was asked for
    return found, lse


def _gradients(
    call: _Call, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, written to the given memory if there is any."""
    _refuse(call)
    return _flash_attn_bwd(
        *call[:6],
        dq=dq,
        dk=dk,
        dv=dv,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **call.options(),
    )


def _refuse(call: _Call) -> None:
    if call.dropout_p:
        raise NotImplementedError(f"dropout_p={call.dropout_p} is not supported: only 0")
    if call.return_debug_mask:
        raise NotImplementedError("return_debug_mask=True is not supported: no mask is stored")
    if call.alibi_slopes is not None:
        raise NotImplementedError(
            "alibi_slopes are not supported: write them as score_mod of "
            "flash_mask_cute.flash_attn_varlen_func"
        )


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
