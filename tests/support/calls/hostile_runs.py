"""Runs a hostile call, forward and gradients, and says what came of it."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

import torch
from hostile_oracle import LARGE_LSE, Bound, check_forward, check_gradients, right
from random_hostile import HostileCall, Wrapped
from torch.utils._pytree import tree_map_only

from flash_mask_cute import flash_attn_func, flash_attn_varlen_func
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

REFUSALS = (TypeError, ValueError, NotImplementedError, IndexError)
# How messages call arguments that every call has, their parts, and what the host calls name else.
_NAMES = {
    *("q", "k", "v", "out", "dout", "lse", "dlse"),
    *("heads_q", "heads_kv", "head_dim", "head_dim_v", "mask_block_idx", "full_block_idx"),
    *("window_size_left", "window_size_right", "block_sparse_tensors_torch"),
}


class Outcome(NamedTuple):
    kind: Literal["right", "refused", "wrong"]
    text: str


def run_call(call: HostileCall, by: Bound) -> Outcome:
    """Through autograd, or through the two host calls."""
    try:
        try:
            results = _by_autograd(call) if call.by_autograd else _by_host_calls(call)
        except REFUSALS as error:
            return _refusal(call, error)
        if call.slip is not None:
            return Outcome("wrong", f"{call.describe()}: {call.slip} was not refused")
        out, lse, gradients = results
        expected, by = right(call), by.under(call)
        check_forward(call, expected, out, lse, by)
        # the host call of the backward knows lse alone, which tells too little of a larger one
        if call.by_autograd or expected.largest_lse < LARGE_LSE:
            check_gradients(call, expected, gradients, by)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        return Outcome("wrong", f"{call.describe()}: {said}")
    return Outcome("right", "")


def _refusal(call: HostileCall, error: Exception) -> Outcome:
    text = str(error)
    given = {name for name, value in call.keywords.items() if value is not None}
    names = _NAMES | given | ({call.slip} if call.slip else set())
    said = f"{type(error).__name__}: {text}".partition("\n")[0]
    if any(re.search(rf"\b{re.escape(name)}\b", text) for name in names):
        return Outcome("refused", said)
    return Outcome("wrong", f"{call.describe()}: refused, and no argument of it named: {said}")


Results = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor | None]]


def _by_autograd(call: HostileCall) -> Results:
    keywords = call.keywords | {"q": call.q, "k": call.k, "v": call.v}
    for name in ("q", "k", "v", "learnable_sink"):
        if keywords[name] is not None:
            keywords[name] = keywords[name].detach()
    for name in call.wrapped:
        keywords[name] = tree_map_only(torch.Tensor, Wrapped, keywords[name])
    sink = keywords["learnable_sink"]
    leaves = [keywords["q"], keywords["k"], keywords["v"], *([] if sink is None else [sink])]
    for x in leaves:
        if x.is_floating_point():
            x.requires_grad_()
    has_lengths = call.frame.packed or call.frame.used
    function: Any = flash_attn_varlen_func if has_lengths else flash_attn_func
    out, lse = function(return_lse=True, **keywords)
    found = torch.autograd.grad((out, lse), leaves, (call.dout, call.dlse))
    results = out.detach(), lse.detach(), *found
    out, lse, *gradients = (x.plain if isinstance(x, Wrapped) else x for x in results)
    return out, lse, dict(zip(("dq", "dk", "dv", "dsink"), gradients, strict=False))


def _by_host_calls(call: HostileCall) -> Results:
    keywords = dict(call.keywords)
    left, right_side = (None if side == -1 else side for side in keywords.pop("window_size"))
    keywords |= {"window_size_left": left, "window_size_right": right_side}
    if "block_sparse_tensors" in keywords:
        keywords["block_sparse_tensors_torch"] = keywords.pop("block_sparse_tensors")
    tensors = call.q, call.k, call.v
    out, lse = _flash_attn_fwd(*tensors, out=call.out, **keywords)
    assert lse is not None
    sink = keywords["learnable_sink"]
    dsink = None if sink is None else torch.full_like(sink, float("nan"))
    dq, dk, dv = _flash_attn_bwd(
        *tensors, out, call.dout, lse, dlse=call.dlse, dsink=dsink, **keywords
    )
    return out, lse, {"dq": dq, "dk": dk, "dv": dv, "dsink": dsink}
