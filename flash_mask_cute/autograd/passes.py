"""Forward and backward of a call that autograd records, and the values saved between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_mask_cute import interface
from flash_mask_cute.block_sparsity import from_block_mask
from flash_mask_cute.call.arguments import (
    NO_MASKS,
    AttentionCall,
    CallLengths,
    Direction,
    Gradients,
    Masks,
    Tensors,
    lengths_of,
    masks_of,
)
from flash_mask_cute.masks.selected_blocks import SelectedBlocks
from flash_mask_cute.runtime.named_tuples import made, replaced

_NO_TENSORS: Any = Tensors(None, None, None)  # type: ignore[arg-type]


def refuse_dual_level() -> None:
    """Refuse forward-mode tangents, which operators would drop. Calls of a Function have none: its
    jvp makes the tangents."""
    if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
        raise NotImplementedError("forward-mode differentiation of attention is not supported here")


def with_outputs(call: AttentionCall, wants_max: bool, wants_low: bool = True) -> AttentionCall:
    """The call with new tensors for results beside out and lse.

    wants_low: for a backward, lse_low, the rounding error of LSE, and an LSE in float64 beside
    float64 tensors. Scores without a score_mod are too small for lse_low to matter. wants_max:
    max_scores, the largest score of each row, -inf in rows of no sequence. A q of a wrong shape,
    which the call will refuse, gets none.
    """
    x, q = call.tensors, call.tensors.q
    has_mod = wants_low and call.masks is not None and call.masks.score_mod is not None
    is_wide = wants_low and getattr(q, "dtype", None) is torch.float64
    if not (has_mod or wants_max or is_wide) or q.dim() not in (3, 4):
        return call
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    if is_wide:
        x = replaced(x, lse=q.new_empty(shape))
    if has_mod:
        x = replaced(x, lse_low=q.new_empty(shape, dtype=lse_dtype(q)))
    if wants_max:
        x = replaced(x, max_scores=q.new_full(shape, -torch.inf, dtype=torch.float32))
    return AttentionCall(x, call.masks, call.options, call.backward)


def lse_dtype(q: Tensor) -> torch.dtype:
    """The dtype of the LSE that autograd saves, and of its rounding error."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def recorded(call: AttentionCall) -> AttentionCall:
    """The call as autograd records it (`Options.recorded`)."""
    tensors, masks, options, backward, direction = call
    return made(AttentionCall, (tensors, masks, options.recorded(), backward, direction))


def run_backward(call: AttentionCall, wants_aux: Sequence[int]) -> tuple[Tensor | None, ...]:
    """dq, dk, dv, dsink, and the gradients of the aux tensors with indices in wants_aux. call: of a
    forward, with its results and their gradients among its tensors."""
    x, aux_tensors = call.tensors, (call.masks or NO_MASKS).aux_tensors
    sink = x.learnable_sink
    dsink = None if sink is None else torch.empty_like(sink)
    daux: list[Tensor | None] | None = None
    if wants_aux and aux_tensors is not None:
        daux = [torch.empty_like(y) if i in wants_aux else None for i, y in enumerate(aux_tensors)]
    if not (dsink is daux is None):
        x = replaced(x, gradients=replaced(x.gradients, dsink=dsink, daux=daux))
    backward = AttentionCall(x, call.masks, call.options, call.backward, Direction.BACKWARD)
    dq, dk, dv = interface.backward(backward)
    return dq, dk, dv, dsink, *(y for y in daux or () if y is not None)


def save(ctx: Any, call: AttentionCall, out: Tensor, lse: Tensor) -> None:
    """Everything goes through `save_for_backward`, so that torch notices a change in place.

    Masks are kept as they are, too: what is cached for them is found by the identity of their
    tensors, which hooks on saved tensors change.
    """
    x, masks, options, backward, direction = call
    # calls with optional tensors have no gradients
    tensors = x.q, x.k, x.v, x.learnable_sink, *x.lengths, x.lse_low, out, lse
    if masks is None:
        ctx.num_aux = None
        ctx.save_for_backward(*tensors)
    else:
        aux_tensors = saveable(masks.aux_tensors or ())
        ctx.num_aux = None if masks.aux_tensors is None else len(aux_tensors)
        of_masks = *aux_tensors, *_mask_tensors(masks)
        ctx.save_for_backward(*tensors, *of_masks)
        masks = masks_of(*replaced(masks, aux_tensors=None))
    ctx.call = made(AttentionCall, (_NO_TENSORS, masks, options.of_backward(), backward, direction))
    ctx.set_materialize_grads(False)


def saveable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors of inference mode, which torch does not save."""
    return [x.clone() if x.is_inference() else x for x in tensors]


def restore(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> AttentionCall:
    """The saved call, with its results and their gradients among its tensors; without the sink if
    it needs no gradient. dout: None for 0."""
    call: AttentionCall = ctx.call
    saved = iter(ctx.saved_tensors)
    q, k, v, sink = islice(saved, 4)
    lengths = lengths_of(*islice(saved, len(CallLengths._fields)))
    lse_low, out, lse = islice(saved, 3)
    masks = call.masks
    if ctx.num_aux is not None:
        masks = replaced(masks or NO_MASKS, aux_tensors=tuple(islice(saved, ctx.num_aux)))
    tensors = Tensors(
        *(q, k, v),
        # lse holds the sink for the backward
        sink if ctx.needs_input_grad[3] else None,
        lengths,
        out=out,
        lse=lse,
        lse_low=lse_low,
        gradients=Gradients(torch.zeros_like(out) if dout is None else dout, dlse),
    )
    return AttentionCall(tensors, masks, call.options, call.backward)


def _mask_tensors(masks: Masks) -> list[Tensor]:
    tensors: list[Tensor | None] = []
    if masks.startend_row_indices is not None:
        mask: Any = masks.startend_row_indices
        tensors.append(mask.startend_row_indices)
    lists = masks.block_sparse_tensors_torch
    if lists is not None:
        lists = lists if isinstance(lists, SelectedBlocks) else from_block_mask(lists)
        tensors += [x for x in lists if isinstance(x, Tensor)]
    # inference tensors cannot be saved, and nothing reports when they change
    return [x for x in tensors if x is not None and not x.is_inference()]


def refuse_second_derivative(*_: Any) -> Any:
    raise NotImplementedError(
        "flash_mask_cute attention cannot be differentiated twice: double backward is not supported"
    )
