"""Attention at a dual level: torch.func.jvp, torch.autograd.forward_ad, and torch.func.grad around
them.

torch.func wants a Function with `setup_context`, and hands wrapped tensors to it. So this one takes
the arguments of the operators (`torch_ops`), which are tensors, numbers and strings, and calls
these. A trace takes it as one node, since Dynamo would trace the forward without its jvp.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.utils import _pytree as pytree

from flash_mask_cute.autograd.passes import (
    recorded,
    refuse_dual_level,
    refuse_second_derivative,
    saveable,
)
from flash_mask_cute.autograd.torch_ops import CALL_SCHEMA, call_of_operator, to_operator
from flash_mask_cute.call.arguments import NO_MASKS, AttentionCall
from flash_mask_cute.call.documents import packs_declared_documents
from flash_mask_cute.call.lookup import in_transform
from flash_mask_cute.call.tangent import (
    NO_FORWARD_MODE,
    Tangents,
    refuse_beside_tangents,
    tangent,
)
from flash_mask_cute.runtime.constant_result import assume_constant_result
from flash_mask_cute.runtime.plain_tensors import own_memory

_library = torch.library.Library("flash_mask_cute", "FRAGMENT")
_library.define(
    "attention_tangent(Tensor tq, Tensor tk, Tensor tv, Tensor out, Tensor lse, Tensor q, "
    f"Tensor k, Tensor v, Tensor? learnable_sink, {CALL_SCHEMA}) -> (Tensor tout, Tensor tlse)"
)
_NUM_GIVEN = len(Tangents._fields)


@assume_constant_result
def _transforms() -> tuple[str, ...]:
    """The transforms of torch.func around the call, from the outermost inwards."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return tuple(x.key().name for x in stack)


@assume_constant_result
def at_dual_level() -> bool:
    """Whether a tensor may have a tangent. Dynamo would guard the level, which only a trace has."""
    return forward_ad._current_level >= 0


def outside_transforms() -> AbstractContextManager[Any]:
    """Context without transforms of torch.func, which would have a part in the trace of a mod."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def carries_tangents(call: AttentionCall) -> bool:
    """Whether a call at a dual level differs from one without. In a trace, any may."""
    if torch.compiler.is_compiling() or in_transform():
        return True
    return any(_has_tangent(x) for _, x in _differentiable(call))


def _differentiable(call: AttentionCall) -> Iterator[tuple[str, Any]]:
    """The arguments that may have tangents, by name; q, k and v first."""
    x, masks = call.tensors, call.masks or NO_MASKS
    yield from (("q", x.q), ("k", x.k), ("v", x.v), ("learnable_sink", x.learnable_sink))
    if isinstance(masks.aux_tensors, (list, tuple)):
        for i, aux in enumerate(masks.aux_tensors):
            yield f"aux_tensors[{i}]", aux


def _has_tangent(x: Any) -> bool:
    is_real = isinstance(x, Tensor) and x.is_floating_point()
    return is_real and forward_ad.unpack_dual(x).tangent is not None


def attend_with_tangents(call: AttentionCall, return_max: bool) -> tuple[Tensor, ...]:
    """(out, lse, largest scores) of a call at a dual level, the first two with tangents if q, k or
    v have any. Raises NotImplementedError: transforms or arguments that have no tangents."""
    transforms = _transforms() or ("Jvp",)
    if "Vmap" in transforms:
        raise NotImplementedError(f"{NO_FORWARD_MODE} within torch.func.vmap (jacfwd)")
    if transforms.count("Jvp") > 1:
        raise NotImplementedError(f"{NO_FORWARD_MODE} at a second dual level (jvp within jvp)")
    if transforms[-1] != "Jvp":
        raise NotImplementedError(f"{NO_FORWARD_MODE} around {transforms[-1]}, only within it")
    found = [name for name, x in _differentiable(call) if _has_tangent(x)]
    if found or (call.masks or NO_MASKS).score_mod is not None:
        refuse_beside_tangents(call, [name for name in found if name not in ("q", "k", "v")])
    x, call = call.tensors, recorded(call)
    batch = x.q.shape[0] if packs_declared_documents(call) else None
    out, lse, _, largest = _attention(
        x.q, x.k, x.v, x.learnable_sink, *to_operator(call, batch, return_max)
    )
    return out, lse, largest


@torch.compiler.allow_in_graph
def _attention(*inputs: Any) -> Any:
    """`attention_fwd` of its arguments, with derivatives."""
    return _Attention.apply(*inputs)


class _Attention(Function):
    @staticmethod
    def forward(*inputs: Any) -> Any:
        return torch.ops.flash_mask_cute.attention_fwd(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        out, lse, *others = output
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        leaves, ctx.spec = pytree.tree_flatten(inputs)
        ctx.leaves = [None if isinstance(x, Tensor) else x for x in leaves]
        ctx.places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        saved = out, lse, *saveable([leaves[i] for i in ctx.places])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> Any:
        (q, k, v, sink, *arguments), (out, lse) = _restored(ctx)
        none = [None] * len(arguments)
        if dout is None and dlse is None:
            return None, None, None, None, *none
        needs_sink = ctx.needs_input_grad[3]
        results = out, lse, None, torch.zeros_like(out) if dout is None else dout, dlse
        # lse holds the sink for the backward
        inputs = q, k, v, sink if needs_sink else None, *results, [], *arguments
        dq, dk, dv, dsink = _Gradients.apply(*inputs)
        return dq, dk, dv, dsink if needs_sink else None, *none

    @staticmethod
    def jvp(ctx: Any, *given: Any) -> Any:
        inputs, results = _restored(ctx)
        tangents = [
            torch.zeros_like(x) if t is None else t
            for x, t in zip(inputs[:3], given[:3], strict=True)
        ]
        return *_Tangents.apply(*tangents, *results, *inputs), None, None


def _restored(ctx: Any) -> tuple[Any, tuple[Tensor, Tensor]]:
    """The inputs of a forward, and out and lse."""
    out, lse, *tensors = ctx.saved_tensors
    leaves = list(ctx.leaves)
    for i, x in zip(ctx.places, tensors, strict=True):
        leaves[i] = x
    return pytree.tree_unflatten(leaves, ctx.spec), (out, lse)


class _Once(Function):
    """Derivatives that have none themselves."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        return refuse_second_derivative()


class _Gradients(_Once):
    @staticmethod
    def forward(*inputs: Any) -> Any:
        dq, dk, dv, dsink, _ = torch.ops.flash_mask_cute.attention_bwd(*inputs)
        return dq, dk, dv, dsink

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return refuse_second_derivative()


class _Tangents(_Once):
    @staticmethod
    def forward(*inputs: Any) -> Any:
        return torch.ops.flash_mask_cute.attention_tangent(*inputs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("the tangent of attention has no gradient: detach it")


@torch.library.impl(_library, "attention_tangent", "CompositeExplicitAutograd")
def _attention_tangent(*inputs: Any) -> tuple[Tensor, Tensor]:
    refuse_dual_level()
    given = Tangents(*map(own_memory, inputs[:_NUM_GIVEN]))
    q, k, v, sink, *arguments = inputs[_NUM_GIVEN:]
    return tangent(call_of_operator(q, k, v, sink, arguments), given)


@torch.library.register_fake("flash_mask_cute::attention_tangent", lib=_library)
def _(tq: Tensor, tk: Tensor, tv: Tensor, out: Tensor, lse: Tensor, *_: Any) -> Any:
    return torch.empty_like(out), torch.empty_like(lse)
