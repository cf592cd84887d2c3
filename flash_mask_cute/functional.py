"""Attention for autograd, `torch.compile` and checkpointing.

Every call has the same two halves, `_run_forward` and `_run_backward`, and one way to keep things
between them, `_save` and `_restore`. Eager calls on plain tensors reach them through an
`autograd.Function`. What traces or intercepts calls (torch.compile, torch.export, dispatch modes,
tensor subclasses) gets operators of the namespace flash_mask_cute instead, whose
arguments are tensors, numbers and strings only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from numbers import Integral
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch, from_block_mask
from flash_mask_cute.host.keywords import public_call, refuse_keywords
from flash_mask_cute.host.mask_extents import check_q_start
from flash_mask_cute.host.packed_launch import holds_documents
from flash_mask_cute.host.validate import (
    check_bool,
    check_gradient_settings,
    check_mod,
    check_unsupported,
    number_of,
    refuse_transforms,
    settle_order,
)
from flash_mask_cute.interface import (
    BwdConfig,
    FwdConfig,
    _flash_attn_bwd,
    _flash_attn_fwd,
    window_sides,
)
from flash_mask_cute.masks.column_mask import ANY, ColumnMask, Documents
from flash_mask_cute.masks.documents import Split
from flash_mask_cute.masks.key_bounds import num_key_blocks
from flash_mask_cute.mod_names import Mod, optional_mod, optional_name
from flash_mask_cute.plain_tensors import NotPlainError, check_plain, own_memory

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flashmask_attention"]

WindowSize: TypeAlias = tuple[int | None, int | None]


@public_call
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    mask_mod: Mod | None = None,
    *,
    score_mod: Mod | None = None,
    score_mod_bwd: Mod | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: Any = None,
    startend_row_indices: Tensor | ColumnMask | None = None,
    q_start: int | None = None,
    return_lse: bool = False,
    config: Any = None,
    **unknown: NoReturn,
) -> Any:
    """softmax(mask(q k^T * softmax_scale)) v, differentiable by q, k, v, learnable_sink, and by
    floating-point aux_tensors that score_mod reads.

    q is (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim), v like k
    with head_dim_v; bf16 or fp16 on CUDA, also fp32 and fp64 on the CPU. The arguments are those of
    `interface._flash_attn_fwd`, which tells what they mean and how they combine, but for:

    window_size: (left, right); None or -1 leaves a side open, and below -1 a side shifts the band:
    with right = -3 a token sees keys that are three or more before it.
    softmax_scale: a number, or a 0-dim CPU tensor, which is read and has no gradient.
    score_mod_bwd(grad, score, b_idx, h_idx, q_idx, kv_idx, aux_tensors) -> grad: the gradient by
    the score that score_mod gets, from the one by the score that it returns. Without it the
    derivative of score_mod is taken from its trace.
    block_sparse_tensors: a `BlockSparseTensorsTorch`, the pair that `compute_block_sparsity`
    returned, or a torch `BlockMask` with its mask as mask_mod.
    deterministic: gradients have the same bits in every run; so they have where
    `torch.use_deterministic_algorithms` is on (with warn_only, but for those beside aux tensors
    that require grad, which warn).
    config: a mapping of fields of both `FwdConfig` and `BwdConfig`, such as {"skip_blocks": False},
    for both directions; or a pair, (forward, backward), of what the two host calls take.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in the dtype of q; with return_lse (out, lse),
        lse fp32 (batch, heads_q, seqlen_q), natural log, differentiable too.

    Raises:
        TypeError, ValueError, NotImplementedError: before any launch, naming argument and value.
            A second differentiation is not supported, nor, where an aux tensor requires grad and
            there is a score_mod, deterministic=True or a score_mod_bwd.
    """
    if unknown:
        refuse_keywords("flash_attn_func", unknown)
    check_unsupported(num_splits, None)
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = _scale_number(softmax_scale)
    left, right = window_sides(window_size)
    call = _Call(
        None, None, None, None, None, None, softmax_scale, causal, left, right, softcap, score_mod,
        mask_mod, aux_tensors, block_sparse_tensors, startend_row_indices, score_mod_bwd,
        deterministic, pack_gqa, config, q_start,
    )  # fmt: skip
    return _attend(q, k, v, learnable_sink, call, return_lse)


@public_call
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    *,
    score_mod: Mod | None = None,
    score_mod_bwd: Mod | None = None,
    mask_mod: Mod | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: Any = None,
    startend_row_indices: Tensor | ColumnMask | None = None,
    q_start: int | None = None,
    return_lse: bool = False,
    config: Any = None,
    **unknown: NoReturn,
) -> Any:
    """`flash_attn_func` for sequences of different lengths.

    With cu_seqlens_q (int32, batch + 1) q is packed, (total_q, heads_q, head_dim), with
    cu_seqlens_k k and v are; a side without it is dense. seqused_* (int32, batch) count the rows in
    use of each slot. lse of packed queries is (heads_q, total_q). Gradients are 0 in rows that are
    not in use.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`; page_table is not
            supported yet.
    """
    if unknown:
        refuse_keywords("flash_attn_varlen_func", unknown)
    check_unsupported(num_splits, page_table)
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = _scale_number(softmax_scale)
    left, right = window_sides(window_size)
    call = _Call(
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k,
        softmax_scale, causal, left, right, softcap, score_mod, mask_mod, aux_tensors,
        block_sparse_tensors, startend_row_indices, score_mod_bwd, deterministic, pack_gqa, config,
        q_start,
    )  # fmt: skip
    return _attend(q, k, v, learnable_sink, call, return_lse)


@public_call
def flashmask_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    startend_row_indices: Tensor | ColumnMask | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    window_size: int | WindowSize | None = None,
    return_softmax_lse: bool = False,
    training: bool = True,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    q_start: int | None = None,
    **unknown: NoReturn,
) -> Any:
    """Attention under column intervals, called as PaddlePaddle's function of this name.

    q, k, v: as in `flash_attn_func`. startend_row_indices: int32 (batch or 1, heads, seqlen_k, n),
    heads 1, heads_kv or heads_q, as `ColumnMask` tells. window_size: as in `flash_attn_func`, or an
    int >= 0 for both sides; None or -1 leaves a side open. It and the intervals may be given
    together. deterministic, q_start: as in `flash_attn_func`; with fewer queries than keys,
    q_start=0 says that the intervals' row 0 is the first query.

    Returns:
        out, or (out, lse) with return_softmax_lse, as `flash_attn_func`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`; dropout in training is not
            supported.
    """
    if unknown:
        refuse_keywords("flashmask_attention", unknown)
    if dropout and training:
        raise NotImplementedError(f"dropout is not supported, got {dropout}; it must be 0")
    check_bool("return_softmax_lse", return_softmax_lse)
    if not isinstance(window_size, tuple | list):
        if isinstance(window_size, Integral) and window_size < -1:
            raise ValueError(
                "window_size must be an int >= 0 for both sides, None or -1 for none, or (left, "
                f"right), got {window_size}: both sides shifted apart would leave nothing"
            )
        window_size = (window_size, window_size)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        deterministic=deterministic,
        startend_row_indices=startend_row_indices,
        q_start=q_start,
        return_lse=return_softmax_lse,
    )


# -- a call -------------------------------------------------------------------------------------


class _Configs(NamedTuple):
    """The configurations of both directions."""

    forward: FwdConfig | None
    backward: BwdConfig | None

    @staticmethod
    def of(config: Any) -> _Configs:
        """What the argument `config` means.

        Raises:
            TypeError, ValueError: as `FwdConfig.of` and `BwdConfig.of`, or it is a tuple of another
                length than 2.
        """
        if not isinstance(config, tuple):
            return _Configs(FwdConfig.of(config), BwdConfig.of(config))
        if len(config) != 2:
            raise ValueError(f"config must be a pair (forward, backward), got {config!r}")
        return _Configs(FwdConfig.of(config[0]), BwdConfig.of(config[1]))


_NO_CONFIGS = _Configs(None, None)


class _Call(NamedTuple):
    """The arguments of a call but q, k, v and the sink, in the names of the host path."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    softmax_scale: float | None
    causal: bool
    window_size_left: int | None
    window_size_right: int | None
    softcap: float
    score_mod: Mod | None
    mask_mod: Mod | None
    aux_tensors: Sequence[Tensor] | None
    block_sparse_tensors_torch: Any
    startend_row_indices: Tensor | ColumnMask | None
    score_mod_bwd: Mod | None
    deterministic: bool
    pack_gqa: bool | None
    config: Any
    q_start: int | None = None

    @property
    def configs(self) -> _Configs:
        return _NO_CONFIGS if self.config is None else _Configs.of(self.config)

    @property
    def has_tensors(self) -> bool:
        return not (
            self.cu_seqlens_q is self.cu_seqlens_k is self.seqused_q is self.seqused_k is None
            and self.aux_tensors is self.block_sparse_tensors_torch is None
            and self.startend_row_indices is None
        )


_LENGTHS = _Call._fields[:4]
_NO_LENGTHS: dict[str, Any] = dict.fromkeys(_LENGTHS)
_NO_FORWARD_MODE = "forward-mode differentiation of attention is not supported"


def _aux_that_require_grad(call: _Call) -> tuple[int, ...]:
    """Their numbers; none where no graph is recorded."""
    aux_tensors = call.aux_tensors
    if not isinstance(aux_tensors, list | tuple) or not torch.is_grad_enabled():
        return ()
    return tuple(i for i, x in enumerate(aux_tensors) if isinstance(x, Tensor) and x.requires_grad)


def _scale_number(softmax_scale: Any) -> Any:
    """Read once, for the backward as well."""
    if (
        isinstance(softmax_scale, Tensor)
        and softmax_scale.requires_grad
        and torch.is_grad_enabled()
    ):
        raise NotImplementedError(
            "softmax_scale requires grad, and attention has no gradient by it: multiply q by the "
            f"tensor instead, or detach it; got {softmax_scale}"
        )
    return number_of("softmax_scale", softmax_scale)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: _Call, return_lse: bool
) -> Any:
    check_bool("return_lse", return_lse)
    check_gradient_settings(call.deterministic, call.score_mod_bwd, call.score_mod)
    if torch._C._is_any_autocast_enabled():
        q, k, v = _as_autocast_casts(q, k, v)
    wants_aux = _aux_that_require_grad(call)
    reason = None
    if wants_aux and call.score_mod is not None:
        reason = f"aux_tensors[{wants_aux[0]}] requires grad"
    if reason is not None or torch.are_deterministic_algorithms_enabled():
        in_order = settle_order(reason, call.score_mod_bwd, call.deterministic)
        call = call._replace(deterministic=in_order)
    refused = None
    if not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0):
        refuse_transforms()
        try:
            out, lse = _attend_eagerly(q, k, v, sink, call, wants_aux, return_lse)
            return (out, lse) if return_lse else out
        except NotPlainError as error:
            refused = error
    if refused is None:
        out, lse = _attend_by_operators(q, k, v, sink, call)
    else:
        with refused.named_unless_from(_IMPLEMENTATIONS):
            out, lse = _attend_by_operators(q, k, v, sink, call)
    return (out, lse) if return_lse else out


def _as_autocast_casts(q: Any, k: Any, v: Any) -> list[Any]:
    """q, k and v as autocast hands them to torch's scaled_dot_product_attention."""
    if not isinstance(q, Tensor) or not torch.is_autocast_enabled(q.device.type):
        return [q, k, v]
    dtype = torch.get_autocast_dtype(q.device.type)
    return [
        x.to(dtype)
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in (q, k, v)
    ]


def _attend_eagerly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    call: _Call,
    wants_aux: tuple[int, ...],
    return_lse: bool,
) -> tuple[Tensor, Any]:
    """On plain tensors. Raises NotPlainError for others, before anything is computed."""
    # now, and not when the backward runs
    check_mod("score_mod_bwd", call.score_mod_bwd)
    if call.config is not None:
        call = call._replace(config=call.configs)
    if isinstance(call.startend_row_indices, Tensor):
        # forward and backward then share the bounds
        mask = ColumnMask(call.startend_row_indices, call.causal)
        call = call._replace(startend_row_indices=mask)
    if wants_aux or _needs_graph(q, k, v, sink):
        aux_tensors: Any = call.aux_tensors
        wanted = [aux_tensors[i] for i in wants_aux]
        out, lse = _Attention.apply(q, k, v, sink, call, wants_aux, *wanted)
        return out, lse
    return _run_forward(q, k, v, sink, call, return_lse)


def _attend_by_operators(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: _Call
) -> tuple[Tensor, Tensor]:
    """For what wants to see operators: a trace, a dispatch mode, a tensor subclass."""
    refuse_transforms(but_functionalize=True)
    _refuse_dual_level()
    # an operator's arguments are numbers
    check_q_start(call.q_start)
    others = *call[:6], call.score_mod, call.mask_mod, call.block_sparse_tensors_torch
    packs = holds_documents(q, k, v, call.startend_row_indices, call.causal, others)
    arguments = _to_operator(call, q.shape[0] if packs else None)
    out, lse, _ = torch.ops.flash_mask_cute.attention_fwd(q, k, v, sink, *arguments)
    return out, lse


def _refuse_dual_level() -> None:
    """Operators would drop tangents, and cannot see them where they run below autograd."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(_NO_FORWARD_MODE)


def _needs_graph(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> bool:
    # forward-mode differentiation does not ask for requires_grad
    if forward_ad._current_level >= 0:
        return True
    if not torch.is_grad_enabled():
        return False
    try:
        return (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (sink is not None and sink.requires_grad)
        )
    except AttributeError:
        return False  # what is no tensor is refused by the host path, by name


def _run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    call: _Call,
    return_lse: bool = True,
    lse_low: Tensor | None = None,
) -> tuple[Tensor, Any]:
    return _flash_attn_fwd(
        q,
        k,
        v,
        learnable_sink=sink,
        pack_gqa=call.pack_gqa,
        return_lse=return_lse,
        lse_low=lse_low,
        config=call.configs.forward,
        softmax_scale=call.softmax_scale,
        causal=call.causal,
        window_size_left=call.window_size_left,
        window_size_right=call.window_size_right,
        softcap=call.softcap,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=call.max_seqlen_k,
        seqused_q=call.seqused_q,
        seqused_k=call.seqused_k,
        score_mod=call.score_mod,
        mask_mod=call.mask_mod,
        aux_tensors=call.aux_tensors,
        block_sparse_tensors_torch=call.block_sparse_tensors_torch,
        startend_row_indices=call.startend_row_indices,
        q_start=call.q_start,
    )


def _new_lse_low(q: Tensor, call: _Call) -> Tensor | None:
    """Where the forward is to write what rounding takes from LSE; None where scores are products,
    which are too small for that to matter, and where the call will be refused."""
    if call.score_mod is None or q.dim() not in (3, 4):
        return None
    return q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)


def _run_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor | None,
    dout: Tensor,
    dlse: Tensor | None,
    wants_aux: Sequence[int],
    call: _Call,
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv, dsink, and the gradients of the aux tensors that wants_aux numbers."""
    dsink = None if sink is None else torch.empty_like(sink)
    daux: list[Tensor | None] | None = None
    if wants_aux and call.aux_tensors is not None:
        daux = [
            torch.empty_like(x) if i in wants_aux else None for i, x in enumerate(call.aux_tensors)
        ]
    dq, dk, dv = _flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse,
        learnable_sink=sink,
        score_mod_bwd=call.score_mod_bwd,
        deterministic=call.deterministic,
        config=call.configs.backward,
        dlse=dlse,
        dsink=dsink,
        lse_low=lse_low,
        daux=daux,
        softmax_scale=call.softmax_scale,
        causal=call.causal,
        window_size_left=call.window_size_left,
        window_size_right=call.window_size_right,
        softcap=call.softcap,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=call.max_seqlen_k,
        seqused_q=call.seqused_q,
        seqused_k=call.seqused_k,
        score_mod=call.score_mod,
        mask_mod=call.mask_mod,
        aux_tensors=call.aux_tensors,
        block_sparse_tensors_torch=call.block_sparse_tensors_torch,
        startend_row_indices=call.startend_row_indices,
        q_start=call.q_start,
    )
    return dq, dk, dv, dsink, *(x for x in daux or () if x is not None)


# -- between forward and backward ---------------------------------------------------------------


def _save(
    ctx: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor | None,
    call: _Call,
) -> None:
    """Everything goes through `save_for_backward`, so that torch notices a change in place.

    Masks are kept as they are, too: what was computed of them is found by the identity of their
    tensors, which hooks on saved tensors change.
    """
    plain = (q, k, v, sink, out, lse, lse_low)
    aux_tensors = call.aux_tensors
    ctx.num_aux = None if aux_tensors is None else len(aux_tensors)
    if not call.has_tensors:
        ctx.save_for_backward(*plain)
    else:
        ctx.save_for_backward(*plain, *call[:4], *(aux_tensors or ()), *_mask_tensors(call))
        call = call._replace(**_NO_LENGTHS, aux_tensors=None)
    ctx.call = call
    ctx.set_materialize_grads(False)


def _restore(ctx: Any) -> tuple[Any, ...]:
    """q, k, v, sink, out, lse, lse_low and the call."""
    saved, call = ctx.saved_tensors, ctx.call
    if len(saved) > 7:
        aux_tensors = None if ctx.num_aux is None else saved[11 : 11 + ctx.num_aux]
        lengths = dict(zip(_LENGTHS, saved[7:11], strict=True))
        call = call._replace(**lengths, aux_tensors=aux_tensors)
    return *saved[:7], call


def _mask_tensors(call: _Call) -> list[Tensor]:
    tensors: list[Tensor | None] = []
    if call.startend_row_indices is not None:
        mask: Any = call.startend_row_indices
        tensors.append(mask.startend_row_indices)
    if call.block_sparse_tensors_torch is not None:
        tensors += from_block_mask(call.block_sparse_tensors_torch)[:4]
    # inference tensors cannot be saved, and nothing tells when they change
    return [x for x in tensors if x is not None and not x.is_inference()]


def _gradients(
    ctx: Any,
    grads: tuple[Tensor | None, ...],
    run: Callable[..., Any],
    wants_aux: Sequence[int],
) -> tuple[list[Tensor | None], dict[int, Tensor | None]]:
    """dq, dk, dv and dsink (None where nobody asks), and the gradients of wanted aux tensors by
    number, from the gradients by out and lse.

    run: `_run_backward`, or another way to it.
    """
    dout, dlse = grads
    if dout is None and dlse is None:
        return [None] * 4, {}
    q, k, v, sink, out, lse, lse_low, call = _restore(ctx)
    if not ctx.needs_input_grad[3]:
        # lse tells the backward of the sink
        sink = None
    if dout is None:
        dout = torch.zeros_like(out)
    gradients = run(q, k, v, sink, out, lse, lse_low, dout, dlse, wants_aux, call)
    return list(gradients[:4]), dict(zip(wants_aux, gradients[4:], strict=True))


def _refuse_second_derivative(*_: Any) -> Any:
    raise NotImplementedError(
        "flash_mask_cute attention cannot be differentiated twice: double backward is not supported"
    )


# -- eager calls --------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        call: _Call,
        wants_aux: tuple[int, ...],
        *_wanted: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """_wanted: the aux tensors of call that wants_aux numbers, for autograd to see."""
        lse_low = _new_lse_low(q, call)
        out, lse = _run_forward(q, k, v, sink, call, lse_low=lse_low)
        _save(ctx, q, k, v, sink, out, lse, lse_low, call)
        ctx.wants_aux = wants_aux
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # only create_graph=True runs this with gradients enabled
        run = _AttentionBackward.apply if torch.is_grad_enabled() else _run_backward_of_any
        gradients, daux = _gradients(ctx, grads, run, ctx.wants_aux)
        return *gradients, None, None, *map(daux.get, ctx.wants_aux)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(_NO_FORWARD_MODE)


class _AttentionBackward(torch.autograd.Function):
    """Makes gradients that know that they cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        return _run_backward_of_any(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _refuse_second_derivative()


def _run_backward_of_any(*arguments: Any) -> tuple[Tensor | None, ...]:
    """`_run_backward`, also where a gradient by an output is of a tensor subclass."""
    try:
        return _run_backward(*arguments)
    except NotPlainError as error:
        refused = error
    with refused.named_unless_from(_IMPLEMENTATIONS):
        return _run_backward_operator(*arguments)


# -- operators ----------------------------------------------------------------------------------

# Bounds of column intervals are an operand of the operators, so that a graph computes them once for
# all calls with a mask. Tiles of both directions have as many keys for head dimensions up to 128,
# but for those of a forward with a score_mod up to 64; what it lacks, the forward computes itself.
_TILE_N = 128

# torch looks for subclasses in a Tensor[], but not in a Tensor[]?: an empty one is aux_tensors None
_CALL_SCHEMA = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? softmax_scale, bool causal, "
    "SymInt? window_size_left, SymInt? window_size_right, float softcap, "
    "str? score_mod, str? mask_mod, Tensor[] aux_tensors, "
    "Tensor? mask_block_cnt, Tensor? mask_block_idx, Tensor? full_block_cnt, "
    "Tensor? full_block_idx, SymInt? block_q, SymInt? block_k, SymInt[]? list_seqlens, "
    "Tensor? startend_row_indices, Tensor? column_bounds, bool columns_causal, "
    "SymInt? column_seqlen_q, "
    "Tensor? document_starts, Tensor? document_rows, Tensor? document_bounds, "
    "str? score_mod_bwd, bool deterministic, bool? pack_gqa, str? config, SymInt? q_start"
)
# what stands for `ANY` there
_ANY_SEQLEN = -1
# where they are in that
_SCORE_MOD_POSITION = _Call._fields.index("score_mod")
_AUX_POSITION = _Call._fields.index("aux_tensors")
_library = torch.library.Library("flash_mask_cute", "DEF")
_library.define(
    "column_bounds(Tensor startend_row_indices, bool causal, Tensor? cu_seqlens_k) -> Tensor"
)
_library.define(
    "column_documents(Tensor startend_row_indices, bool causal, SymInt batch) "
    "-> (Tensor cu_seqlens, Tensor rows, Tensor bounds)"
)
_library.define(
    f"attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? learnable_sink, {_CALL_SCHEMA}) "
    "-> (Tensor out, Tensor lse, Tensor lse_low)"
)
_library.define(
    "attention_bwd(Tensor q, Tensor k, Tensor v, Tensor? learnable_sink, Tensor out, Tensor lse, "
    f"Tensor? lse_low, Tensor dout, Tensor? dlse, int[] wants_aux, {_CALL_SCHEMA}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor[] daux)"
)


class _BoundedMask(ColumnMask):
    """A mask of one call whose bounds for `_TILE_N` operators have computed, and its documents.

    seqlen_q: as an operator has it (`_operator_seqlen`).
    """

    def __init__(
        self,
        startend_row_indices: Tensor,
        causal: bool,
        given: Tensor,
        documents: Documents | None = None,
        seqlen_q: int | None = None,
    ) -> None:
        rows = ANY if seqlen_q == _ANY_SEQLEN else seqlen_q
        super().__init__(startend_row_indices, causal, documents is not None, rows)
        object.__setattr__(self, "given", given)
        object.__setattr__(self, "given_documents", documents)

    def bounds(self, tile_n: int, cu_seqlens_k: Tensor | None = None) -> Tensor:
        given: Tensor = vars(self)["given"]
        return given if tile_n == _TILE_N else super().bounds(tile_n, cu_seqlens_k)

    def split(self, batch: int) -> Documents:
        given: Documents = vars(self)["given_documents"]
        return given

    def operator_documents(self) -> tuple[Tensor | None, ...]:
        """Starts of the documents, their rows and the bounds of these, if there are any."""
        documents: Documents | None = vars(self)["given_documents"]
        if documents is None:
            return None, None, None
        of_rows = documents.mask
        return documents.cu_seqlens, of_rows.startend_row_indices, of_rows.bounds(_TILE_N)


def _operator_seqlen(seqlen_q: Any) -> int | None:
    """`ColumnMask.seqlen_q` as a number."""
    return _ANY_SEQLEN if seqlen_q == ANY else seqlen_q


def _to_operator(call: _Call, batch: int | None = None) -> tuple[Any, ...]:
    """The arguments of an operator by `_CALL_SCHEMA`.

    batch: of sequences, where the operator is to pack the documents of its mask.
    """
    lists: tuple[Any, ...] = (None,) * 7
    if call.block_sparse_tensors_torch is not None:
        *tensors, block_size, seqlens = from_block_mask(call.block_sparse_tensors_torch)
        lists = (*tensors, *((None, None) if block_size is None else block_size), seqlens)
    mask: Any = call.startend_row_indices
    columns: tuple[Any, ...] = (None, None, False, None)
    documents: tuple[Any, ...] = (None, None, None)
    if isinstance(mask, _BoundedMask):
        seqlen_q = _operator_seqlen(mask.seqlen_q)
        columns = mask.startend_row_indices, mask.bounds(_TILE_N), mask.causal, seqlen_q
        documents = mask.operator_documents()
    elif mask is not None:
        indices, causal, seqlen_q = mask, call.causal, None
        if not isinstance(mask, Tensor):
            indices, causal = mask.startend_row_indices, mask.causal
            seqlen_q = _operator_seqlen(mask.seqlen_q)
        bounds = torch.ops.flash_mask_cute.column_bounds(indices, causal, call.cu_seqlens_k)
        columns = indices, bounds, causal, seqlen_q
        if batch is not None:
            documents = torch.ops.flash_mask_cute.column_documents(indices, causal, batch)
    aux_tensors = [] if call.aux_tensors is None else list(call.aux_tensors)
    return (
        *call[:11], optional_name(call.score_mod), optional_name(call.mask_mod), aux_tensors,
        *lists, *columns, *documents, optional_name(call.score_mod_bwd), call.deterministic,
        call.pack_gqa, _config_text(call.config), call.q_start,
    )  # fmt: skip


def _from_operator(arguments: Sequence[Any]) -> _Call:
    """The call with these arguments of an operator by `_CALL_SCHEMA`."""
    score_mod, mask_mod, aux_tensors, *rest = arguments[11:]
    *list_tensors, block_q, block_k, list_seqlens = rest[:7]
    indices, bounds, causal, seqlen_q, starts, rows, row_bounds = rest[7:14]
    score_mod_bwd, deterministic, pack_gqa, config, q_start = rest[14:]
    lists = None
    if list_tensors[0] is not None:
        block_size = None if block_q is None else (block_q, block_k)
        lists = BlockSparseTensorsTorch(*list_tensors)._replace(
            block_size=block_size, seqlens=list_seqlens and tuple(list_seqlens)
        )
    mask = documents = None
    if starts is not None:
        documents = Documents(starts, _BoundedMask(rows, causal, row_bounds))
    if indices is not None:
        mask = _BoundedMask(indices, causal, bounds, documents, seqlen_q)
    mods = optional_mod(score_mod), optional_mod(mask_mod)
    configs = None if config is None else _Configs.of(tuple(json.loads(config)))
    others = optional_mod(score_mod_bwd), deterministic, pack_gqa, configs, q_start
    return _Call._make((*arguments[:11], *mods, aux_tensors or None, lists, mask, *others))


def _config_text(config: Any) -> str | None:
    if config is None:
        return None
    # Dynamo knows dictionaries as constants, but not dataclasses
    pair = config if isinstance(config, tuple) else (config, config)
    return _text_of(tuple(asdict(x) if isinstance(x, FwdConfig | BwdConfig) else x for x in pair))


@torch.compiler.assume_constant_result
def _text_of(pair: tuple[Any, ...]) -> str:
    return json.dumps([None if x is None else asdict(x) for x in _Configs.of(pair)])


def _without_identity(call: _Call) -> _Call:
    """With block lists that nothing is remembered for.

    Retiled lists are found by the identity and version of tensors. A compiled graph writes new
    contents into a tensor that it no longer needs, and torch does not count that.
    """
    lists = call.block_sparse_tensors_torch
    if lists is None:
        return call
    fresh = (None if x is None else x.detach() for x in lists[:4])
    return call._replace(block_sparse_tensors_torch=type(lists)(*fresh, *lists[4:]))


def _own_memory(arguments: Iterable[Any]) -> list[Any]:
    """Of an operator, with plain tensors for subclasses that did not take it apart."""
    found = []
    for x in arguments:
        if isinstance(x, list):
            x = _own_memory(x)
        found.append(own_memory(x) if isinstance(x, Tensor) else x)
    return found


@torch.library.impl(_library, "column_bounds", "CompositeExplicitAutograd")
def _column_bounds(indices: Tensor, causal: bool, cu_seqlens_k: Tensor | None) -> Tensor:
    indices, cu_seqlens_k = _own_memory((indices, cu_seqlens_k))
    return ColumnMask(indices, causal).bounds(_TILE_N, cu_seqlens_k)


@torch.library.register_fake("flash_mask_cute::column_bounds", lib=_library)
def _(indices: Tensor, causal: bool, cu_seqlens_k: Tensor | None) -> Tensor:
    batch, heads, seqlen_k, num_vectors = indices.shape
    num_blocks = num_key_blocks(seqlen_k, _TILE_N, cu_seqlens_k)
    return indices.new_empty((batch, heads, 2 * num_vectors, num_blocks))


@torch.library.impl(_library, "column_documents", "CompositeExplicitAutograd")
def _column_documents(indices: Tensor, causal: bool, batch: int) -> tuple[Tensor, ...]:
    starts, mask = ColumnMask(own_memory(indices), causal).split(batch)
    return starts, mask.startend_row_indices, mask.bounds(_TILE_N, starts)


@torch.library.register_fake("flash_mask_cute::column_documents", lib=_library)
def _(indices: Tensor, causal: bool, batch: int) -> tuple[Tensor, ...]:
    return Split.empty_like(indices, batch)[2:]


@torch.library.impl(_library, "attention_fwd", "CompositeExplicitAutograd")
def _attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """lse_low has no elements where there is no score_mod."""
    q, k, v, sink, *of_call = _own_memory((q, k, v, sink, *arguments))
    # a compiled graph runs on what it is given
    _refuse_dual_level()
    call = _without_identity(_from_operator(of_call))
    lse_low = _new_lse_low(q, call)
    out, lse = _run_forward(q, k, v, sink, call, lse_low=lse_low)
    return out, lse, q.new_empty(0, dtype=torch.float32) if lse_low is None else lse_low


@torch.library.register_fake("flash_mask_cute::attention_fwd", lib=_library)
def _(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *rows, heads_q, _ = q.shape
    out = q.new_empty((*rows, heads_q, v.shape[-1]))
    lse_shape = *rows[:-1], heads_q, rows[-1]
    low_shape = (0,) if arguments[_SCORE_MOD_POSITION] is None else lse_shape
    lse, lse_low = (q.new_empty(shape, dtype=torch.float32) for shape in (lse_shape, low_shape))
    return out, lse, lse_low


@torch.library.impl(_library, "attention_bwd", "CompositeExplicitAutograd")
def _attention_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor | None,
    dout: Tensor,
    dlse: Tensor | None,
    wants_aux: list[int],
    *arguments: Any,
) -> tuple[Any, ...]:
    q, k, v, sink, out, lse, lse_low, dout, dlse, *of_call = _own_memory(
        (q, k, v, sink, out, lse, lse_low, dout, dlse, *arguments)
    )
    call = _without_identity(_from_operator(of_call))
    dq, dk, dv, dsink, *daux = _run_backward(
        q, k, v, sink, out, lse, lse_low, dout, dlse, wants_aux, call
    )
    return dq, dk, dv, q.new_empty(0) if dsink is None else dsink, daux


@torch.library.register_fake("flash_mask_cute::attention_bwd", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *arguments: Any) -> tuple[Any, ...]:
    _, _, _, _, _, wants_aux, *of_call = arguments
    aux_tensors = of_call[_AUX_POSITION]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dsink = q.new_empty(0) if sink is None else torch.empty_like(sink)
    return dq, dk, dv, dsink, [torch.empty_like(aux_tensors[i]) for i in wants_aux]


@torch.library.impl(_library, "attention_bwd", "Batched")
def _refuse_batches(*arguments: Any) -> Any:
    """Of `torch.autograd.grad(is_grads_batched=True)`; the vmap of torch.func asks for each."""
    names = "q", "k", "v", "learnable_sink", "out", "lse", "lse_low", "dout", "dlse"
    for name, x in zip(names, arguments, strict=False):
        if x is not None:
            check_plain(name, x)


# of whom the errors are those of attention
_IMPLEMENTATIONS = frozenset(
    implementation.__code__
    for implementation in (_attention_fwd, _attention_bwd, _column_bounds, _column_documents)
)


def _run_backward_operator(*arguments: Any) -> tuple[Tensor | None, ...]:
    *others, call = arguments
    dq, dk, dv, dsink, daux = torch.ops.flash_mask_cute.attention_bwd(*others, *_to_operator(call))
    return dq, dk, dv, None if others[3] is None else dsink, *daux


def _setup_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sink, *arguments = inputs
    out, lse, lse_low = output
    call = _from_operator(arguments)
    _save(ctx, q, k, v, sink, out, lse, None if call.score_mod is None else lse_low, call)
    ctx.num_arguments = len(arguments)


def _operator_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    others: list[Any] = [None] * ctx.num_arguments
    asked = ctx.needs_input_grad[4 + _AUX_POSITION]
    wants_aux = [i for i, is_asked in enumerate(asked) if is_asked]
    # nothing has a gradient by lse_low
    gradients, daux = _gradients(ctx, grads[:2], _run_backward_operator, wants_aux)
    others[_AUX_POSITION] = [daux.get(i) for i in range(len(asked))]
    return *gradients, *others


torch.library.register_autograd(
    "flash_mask_cute::attention_fwd",
    _operator_gradients,
    setup_context=_setup_operator,
    lib=_library,
)
torch.library.register_autograd(
    "flash_mask_cute::attention_bwd", _refuse_second_derivative, lib=_library
)
