"""Calls as users make them and as the host bundles them, and their plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases import Case
from inputs import Inputs, make_inputs
from torch import Tensor

from flash_mask_cute import flash_attn_func, flash_attn_varlen_func
from flash_mask_cute.call.arguments import NO_MASKS, AttentionCall, Direction, keywords_of
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.mask_bits import Limits
from flash_mask_cute.call.plan import plan
from flash_mask_cute.runtime.target import Target

LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"


def forward_call(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> AttentionCall:
    return AttentionCall.from_arguments(Direction.FORWARD, q, k, v, **keywords)


def backward_call(*operands: Tensor, **keywords: Any) -> AttentionCall:
    """operands: q, k, v, out, dout, lse."""
    return AttentionCall.from_arguments(Direction.BACKWARD, *operands, **keywords)


def arguments_of(call: AttentionCall) -> dict[str, Any]:
    """All arguments of the host call, by name."""
    masks, q_starts = call.masks or NO_MASKS, call.tensors.lengths.q_starts
    given = call.tensors.by_name() | masks._asdict() | call.options._asdict()
    given |= call.backward._asdict()
    given |= {"q_start": call.options.q_start.argument(q_starts), "config": call.config}
    causal_per_seq = call.tensors.optional.causal_per_seq
    if causal_per_seq is not None:
        given["causal"] = causal_per_seq
    return {name: given[name] for name in keywords_of(call.direction)}


def call_of(
    given: Case | Inputs, direction: Direction = Direction.FORWARD, **more: Any
) -> AttentionCall:
    """The call of a case. more: other keywords. out, dout and lse of a backward are 0."""
    inputs = make_inputs(given) if isinstance(given, Case) else given
    qkv = inputs.q, inputs.k, inputs.v
    if direction is Direction.FORWARD:
        return forward_call(*qkv, **(inputs.keywords | more))
    out = inputs.q.new_zeros((*inputs.q.shape[:-1], inputs.v.shape[-1]))
    lse = torch.zeros(out.shape[:-1], device=out.device).mT
    return backward_call(*qkv, out, out.clone(), lse, **(inputs.bwd_keywords | more))


def public_keywords(inputs: Inputs) -> tuple[dict[str, Any], bool]:
    """Those of a public function but for q, k and v, and whether it is the one with lengths."""
    given = dict(inputs.keywords)
    given["window_size"] = given.pop("window_size_left"), given.pop("window_size_right")
    if "block_sparse_tensors_torch" in given:
        given["block_sparse_tensors"] = given.pop("block_sparse_tensors_torch")
    has_lengths = any(given.get(name) is not None for name in LENGTHS)
    return {n: x for n, x in given.items() if has_lengths or n not in LENGTHS}, has_lengths


def function_of(inputs: Inputs) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The public function of q, k and v that gives out and lse, and its other keywords."""
    given, has_lengths = public_keywords(inputs)
    return flash_attn_varlen_func if has_lengths else flash_attn_func, given | {"return_lse": True}


def attend_of(inputs: Inputs) -> Callable[..., tuple[Tensor, Tensor]]:
    function, given = function_of(inputs)
    return lambda q, k, v: function(q, k, v, **given)


def planned(
    given: Case | Inputs | AttentionCall,
    target: Target | None = None,
    limits: Limits | None = None,
    **of_call: Any,
) -> ExecutionPlan:
    """The plan of a call, or of that of a case. of_call: as `call_of` takes them."""
    call = given if isinstance(given, AttentionCall) else call_of(given, **of_call)
    return plan(call, target, limits)
