"""Attention at a dual level: of torch.func.jvp, also within torch.func.grad, and of forward_ad.

torch.func wants a Function with `setup_context`, and hands wrapped tensors to it. So this one takes
the arguments of the operators (`torch_ops`), which are tensors, numbers and strings, and calls
these. A trace takes it as one node, since Dynamo would trace the forward without its jvp.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from flash_mask_cute.autograd import passes
from flash_mask_cute.autograd.torch_ops import (
    CALL_SCHEMA,
    call_of_operator,
    save_inputs,
    saved_inputs,
    to_operator,
)
from flash_mask_cute.call.arguments import NO_MASKS, AttentionCall
from flash_mask_cute.call.documents import packs_declared_documents
from flash_mask_cute.call.lookup import in_transform
from flash_mask_cute.call.tangent import NO_FORWARD_MODE, Tangents, refuse_beside_tangents, tangent
from flash_mask_cute.runtime.constant_result import assume_constant_result
from flash_mask_cute.runtime.plain_tensors import own_memory

_library = torch.library.Library("flash_mask_cute", "FRAGMENT")
_library.define(
    "attention_tangent(Tensor tq, Tensor tk, Tensor tv, Tensor out, Tensor lse, Tensor q, "
    f"Tensor k, Tensor v, Tensor? learnable_sink, {CALL_SCHEMA}) -> (Tensor tout, Tensor tlse)"
)


@assume_constant_result
def _transforms() -> tuple[str, ...]:
    """The transforms of torch.func around a call at a dual level, from the outermost inwards."""
    if "torch._dynamo" in sys.modules:
        # before a trace meets it, and not at import, which would take seconds
        torch.compiler.allow_in_graph(_attention)
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return tuple(x.key().name for x in stack) or ("Jvp",)


@assume_constant_result
def at_dual_level() -> bool:
    """Whether a tensor may have a tangent. Dynamo would guard the level, which only a trace has."""
    return forward_ad._current_level >= 0


def _with_tangents(call: AttentionCall) -> list[str]:
    """The names of the arguments that have a tangent."""
    x, aux_tensors = call.tensors, (call.masks or NO_MASKS).aux_tensors
    given: list[Any] = [("q", x.q), ("k", x.k), ("v", x.v), ("learnable_sink", x.learnable_sink)]
    if isinstance(aux_tensors, (list, tuple)):
        given += [(f"aux_tensors[{i}]", y) for i, y in enumerate(aux_tensors)]
    real = [(name, y) for name, y in given if isinstance(y, Tensor) and y.is_floating_point()]
    return [name for name, y in real if forward_ad.unpack_dual(y).tangent is not None]


def attend_with_tangents(call: AttentionCall, return_max: bool) -> tuple[Tensor, ...] | None:
    """(out, lse, largest scores) of a call at a dual level, with tangents of the first two if q, k
    or v have any; None if the level does not matter. Raises NotImplementedError: transforms or
    arguments that have no tangents."""
    found = _with_tangents(call)
    if not (found or in_transform() or torch.compiler.is_compiling()):
        return None
    transforms = _transforms()
    if "Vmap" in transforms:
        raise NotImplementedError(f"{NO_FORWARD_MODE} within torch.func.vmap (jacfwd)")
    if transforms.count("Jvp") > 1:
        raise NotImplementedError(f"{NO_FORWARD_MODE} at a second dual level (jvp within jvp)")
    if transforms[-1] != "Jvp":
        raise NotImplementedError(f"{NO_FORWARD_MODE} around {transforms[-1]}, only within it")
    if found or (call.masks or NO_MASKS).score_mod is not None:
        refuse_beside_tangents(call, [name for name in found if name not in ("q", "k", "v")])
    x, call = call.tensors, passes.recorded(call)
    batch = x.q.shape[0] if packs_declared_documents(call) else None
    arguments = to_operator(call, batch, return_max)
    out, lse, _, largest = _attention(x.q, x.k, x.v, x.learnable_sink, *arguments)
    return out, lse.float(), largest


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
        ctx.save_for_forward(*save_inputs(ctx, inputs, out, lse))

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> Any:
        (out, lse), (q, k, v, sink, *arguments) = saved_inputs(ctx)
        # lse holds the sink for the backward
        needs_sink = ctx.needs_input_grad[3]
        results = out, lse, None, torch.zeros_like(out) if dout is None else dout, dlse
        inputs = q, k, v, sink if needs_sink else None, *results, [], *arguments
        dq, dk, dv, dsink = _Once.apply("attention_bwd", passes.refuse_second_derivative, *inputs)
        return dq, dk, dv, dsink if needs_sink else None, *[None] * len(arguments)

    @staticmethod
    def jvp(ctx: Any, *given: Any) -> Any:
        (out, lse), inputs = saved_inputs(ctx)
        pairs = zip(inputs[:3], given[:3], strict=True)
        tangents = [torch.zeros_like(x) if t is None else t for x, t in pairs]
        inputs = [*tangents, out, lse, *inputs]
        return *_Once.apply("attention_tangent", _refuse_gradient, *inputs), None, None


def _refuse_gradient() -> Any:
    raise NotImplementedError("the tangent of attention has no gradient: detach it")


class _Once(Function):
    """The tensors that an operator returns, without derivatives."""

    @staticmethod
    def forward(name: str, refuse: Any, *inputs: Any) -> Any:
        found = getattr(torch.ops.flash_mask_cute, name)(*inputs)
        return tuple(x for x in found if isinstance(x, Tensor))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.refuse = inputs[1]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.refuse()

    jvp = backward


@torch.library.impl(_library, "attention_tangent", "CompositeExplicitAutograd")
def _attention_tangent(*inputs: Any) -> tuple[Tensor, Tensor]:
    passes.refuse_dual_level()
    *given, q, k, v, sink = inputs[:9]
    call = call_of_operator(q, k, v, sink, inputs[9:])
    return tangent(call, Tangents(*map(own_memory, given)))


@torch.library.register_fake("flash_mask_cute::attention_tangent", lib=_library)
def _(tq: Tensor, tk: Tensor, tv: Tensor, out: Tensor, lse: Tensor, *_: Any) -> Any:
    return torch.empty_like(out), torch.empty_like(lse)
