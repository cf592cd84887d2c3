"""Attention of eager calls on plain tensors, as an autograd.Function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.autograd.arguments import Call
from flash_mask_cute.autograd.passes import (
    NO_FORWARD_MODE,
    gradients_of,
    new_lse_low,
    new_max_scores,
    refuse_second_derivative,
    restore,
    run_backward,
    run_forward,
    save,
)
from flash_mask_cute.autograd.torch_ops import IMPLEMENTATIONS, run_backward_operator
from flash_mask_cute.runtime.plain_tensors import NotPlainError


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        call: Call,
        wants_aux: tuple[int, ...],
        wants_max: bool,
        *_wanted: Tensor,
    ) -> tuple[Tensor, ...]:
        """out and lse, and the largest score of each row if wants_max.

        _wanted: the aux tensors of `call` with indices in wants_aux, visible to autograd.
        """
        lse_low = new_lse_low(q, call)
        max_scores = new_max_scores(q) if wants_max else None
        out, lse = run_forward(
            q, k, v, sink, call, lse_low=lse_low, max_scores=max_scores, is_recorded=True
        )
        save(ctx, q, k, v, sink, out, lse, lse_low, call)
        ctx.wants_aux = wants_aux
        if max_scores is None:
            return out, lse
        ctx.mark_non_differentiable(max_scores)
        return out, lse, max_scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # only create_graph=True runs this with gradients enabled
        run = _AttentionBackward.apply if torch.is_grad_enabled() else _run_backward_of_any
        gradients, daux = gradients_of(ctx, grads, restore, run, ctx.wants_aux)
        return *gradients, None, None, None, *map(daux.get, ctx.wants_aux)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(NO_FORWARD_MODE)


class _AttentionBackward(torch.autograd.Function):
    """Computes gradients that refuse a second differentiation."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        return _run_backward_of_any(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return refuse_second_derivative()


def _run_backward_of_any(*arguments: Any) -> tuple[Tensor | None, ...]:
    """`run_backward`, even if an output gradient is of a tensor subclass."""
    try:
        return run_backward(*arguments)
    except NotPlainError as error:
        refused = error
    with refused.named_unless_from(IMPLEMENTATIONS):
        return run_backward_operator(*arguments)
