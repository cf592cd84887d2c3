"""Forward and backward of a public call, and the values saved between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_mask_cute.autograd.arguments import NO_LENGTHS, Call, splits_recorded
from flash_mask_cute.block_sparsity import from_block_mask
from flash_mask_cute.call.arguments import split_q_start
from flash_mask_cute.interface import (
    _flash_attn_bwd,
    _flash_attn_fwd,
    check_forward,
)

NO_FORWARD_MODE = "forward-mode differentiation of attention is not supported"


def refuse_dual_level() -> None:
    """Refuse forward-mode tangents: operators would drop them, and cannot see them below
    autograd."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(NO_FORWARD_MODE)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    call: Call,
    return_lse: bool = True,
    lse_low: Tensor | None = None,
    max_scores: Tensor | None = None,
    is_recorded: bool = False,
) -> tuple[Tensor, Any]:
    """is_recorded: autograd records a graph."""
    keywords = _forward_keywords(sink, call, return_lse)
    if is_recorded:
        keywords["num_splits"] = splits_recorded(call.num_splits)
    return _flash_attn_fwd(q, k, v, lse_low=lse_low, max_scores=max_scores, **keywords)


def check_forward_call(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: Call, return_lse: bool
) -> None:
    """Raise what `run_forward` would raise, without running anything."""
    check_forward(q, k, v, **_forward_keywords(sink, call, return_lse))


def _forward_keywords(sink: Tensor | None, call: Call, return_lse: bool) -> dict[str, Any]:
    return {
        "learnable_sink": sink,
        "pack_gqa": call.pack_gqa,
        "num_splits": call.num_splits,
        "page_table": call.page_table,
        "return_lse": return_lse,
        "config": call.configs.forward,
        "softmax_scale": call.softmax_scale,
        "causal": call.causal,
        "window_size_left": call.window_size_left,
        "window_size_right": call.window_size_right,
        "softcap": call.softcap,
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_k,
        "max_seqlen_q": call.max_seqlen_q,
        "max_seqlen_k": call.max_seqlen_k,
        "seqused_q": call.seqused_q,
        "seqused_k": call.seqused_k,
        "score_mod": call.score_mod,
        "mask_mod": call.mask_mod,
        "aux_tensors": call.aux_tensors,
        "block_sparse_tensors_torch": call.block_sparse_tensors_torch,
        "startend_row_indices": call.startend_row_indices,
        "q_start": call.q_start,
    }


def new_lse_low(q: Tensor, call: Call) -> Tensor | None:
    """A new tensor for the rounding error of LSE.

    None if scores are plain products, too small for that error to matter, or if the call will be
    refused.
    """
    if call.score_mod is None or q.dim() not in (3, 4):
        return None
    return q.new_empty(_lse_shape(q), dtype=torch.float32)


def new_max_scores(q: Tensor) -> Tensor | None:
    """A new tensor for the largest score of each row, -inf in rows of no sequence; None if the call
    will be refused."""
    if q.dim() not in (3, 4):
        return None
    return q.new_full(_lse_shape(q), -torch.inf, dtype=torch.float32)


def _lse_shape(q: Tensor) -> tuple[int, ...]:
    return (*q.shape[:-3], q.shape[-2], q.shape[-3])


def run_backward(
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
    call: Call,
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv, dsink, and the gradients of the aux tensors with indices in wants_aux."""
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


def save(
    ctx: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor | None,
    call: Call,
) -> None:
    """Everything goes through `save_for_backward`, so that torch notices a change in place.

    Masks are kept as they are, too: data derived from them is found by the identity of their
    tensors, which hooks on saved tensors change.
    """
    plain = (q, k, v, sink, out, lse, lse_low)
    aux_tensors = call.aux_tensors
    ctx.num_aux = None if aux_tensors is None else len(aux_tensors)
    ctx.has_more = call.has_tensors
    if not call.has_tensors:
        ctx.save_for_backward(*plain)
    else:
        lengths = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k
        q_starts, _ = split_q_start(call.q_start)
        ctx.save_for_backward(
            *plain, *lengths, q_starts, *(aux_tensors or ()), *_mask_tensors(call)
        )
        call = call._replace(**NO_LENGTHS, aux_tensors=None)
        if q_starts is not None:
            call = call._replace(q_start=None)
    ctx.call = call
    ctx.set_materialize_grads(False)


def restore(ctx: Any) -> tuple[Any, ...]:
    """q, k, v, sink, out, lse, lse_low and the call."""
    call = ctx.call
    q, k, v, sink, out, lse, lse_low, *more = ctx.saved_tensors
    if ctx.has_more:
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_starts, *more = more
        call = call._replace(
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            aux_tensors=None if ctx.num_aux is None else tuple(islice(more, ctx.num_aux)),
            q_start=call.q_start if q_starts is None else q_starts,
        )
    return q, k, v, sink, out, lse, lse_low, call


def _mask_tensors(call: Call) -> list[Tensor]:
    tensors: list[Tensor | None] = []
    if call.startend_row_indices is not None:
        mask: Any = call.startend_row_indices
        tensors.append(mask.startend_row_indices)
    if call.block_sparse_tensors_torch is not None:
        lists = from_block_mask(call.block_sparse_tensors_torch)
        tensors += [x for x in lists if isinstance(x, Tensor)]
    # inference tensors cannot be saved, and nothing tells when they change
    return [x for x in tensors if x is not None and not x.is_inference()]


def gradients_of(
    ctx: Any,
    grads: tuple[Tensor | None, ...],
    restored: Callable[[Any], tuple[Any, ...]],
    run: Callable[..., Any],
    wants_aux: Sequence[int],
) -> tuple[list[Tensor | None], dict[int, Tensor | None]]:
    """Input gradients from the gradients of out and lse.

    They are dq, dk, dv and dsink (None unless requested), and those of wanted aux tensors by index.

    restored: `restore`, or what gives the call in another form. run: `run_backward`, or what takes
    that form.
    """
    dout, dlse, *_ = grads
    if dout is None and dlse is None:
        return [None] * 4, {}
    q, k, v, sink, out, lse, lse_low, call = restored(ctx)
    if not ctx.needs_input_grad[3]:
        # lse tells the backward of the sink
        sink = None
    if dout is None:
        dout = torch.zeros_like(out)
    gradients = run(q, k, v, sink, out, lse, lse_low, dout, dlse, wants_aux, call)
    dq, dk, dv, dsink, *daux = gradients
    return [dq, dk, dv, dsink], dict(zip(wants_aux, daux, strict=True))


def refuse_second_derivative(*_: Any) -> Any:
    raise NotImplementedError(
        "flash_mask_cute attention cannot be differentiated twice: double backward is not supported"
    )
