"""Attention of eager calls on plain tensors, as an autograd.Function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute import interface
from flash_mask_cute.autograd.passes import (
    recorded,
    refuse_second_derivative,
    restore,
    run_backward,
    save,
    with_outputs,
)
from flash_mask_cute.autograd.torch_ops import IMPLEMENTATIONS, run_backward_operator
from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.runtime.plain_tensors import NotPlainError


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        call: AttentionCall,
        wants_aux: tuple[int, ...],
        wants_max: bool,
        *_wanted: Tensor,
    ) -> tuple[Tensor, ...]:
        """out and lse, and the largest score of each row if wants_max. q, k, v, sink: of `call`,
        visible to autograd, as are _wanted, its aux tensors with indices in wants_aux."""
        call = with_outputs(recorded(call), wants_max)
        out, lse = interface.forward(call)
        assert lse is not None
        save(ctx, call, out, lse)
        ctx.wants_aux = wants_aux
        max_scores = call.tensors.max_scores
        if lse.dtype is torch.float64:
            lse = lse.float()
        if max_scores is None:
            return out, lse
        ctx.mark_non_differentiable(max_scores)
        return out, lse, max_scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dout, dlse, *_ = grads
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        call = restore(ctx, dout, dlse)
        if torch.is_grad_enabled():
            # only by create_graph=True
            found = _AttentionBackward.apply(call, ctx.wants_aux, *call.tensors.flat())
        else:
            found = _run_backward_of_any(call, ctx.wants_aux)
        dq, dk, dv, dsink, *daux = found
        return dq, dk, dv, dsink, None, None, None, *daux


class _AttentionBackward(torch.autograd.Function):
    """Computes gradients that refuse a second differentiation."""

    @staticmethod
    def forward(
        ctx: Any, call: AttentionCall, wants_aux: Sequence[int], *_tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        """_tensors: those of `call`, visible to autograd."""
        return _run_backward_of_any(call, wants_aux)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return refuse_second_derivative()


def _run_backward_of_any(
    call: AttentionCall, wants_aux: Sequence[int]
) -> tuple[Tensor | None, ...]:
    """`run_backward`, even if an output gradient is of a tensor subclass."""
    try:
        return run_backward(call, wants_aux)
    except NotPlainError as error:
        refused = error
    with refused.named_unless_from(IMPLEMENTATIONS):
        return run_backward_operator(call, wants_aux)
