"""What torch makes of a mod at every position: the oracle of lowered mods."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from flash_mask_cute.flex import LoweredMod
from flash_mask_cute.mods.on_cpu import eval_mask_mod, eval_score_mod

BATCH, HEADS = 2, 4


def places(*extents: int) -> list[Tensor]:
    """int32 indices of as many dimensions, each along its own."""
    return [
        torch.arange(n, dtype=torch.int32).view([-1 if i == j else 1 for j in range(len(extents))])
        for i, n in enumerate(extents)
    ]


def by_torch(mod: Callable[..., Tensor], shape: tuple[int, ...], score: Tensor | None) -> Tensor:
    """mod at each of (batch, heads, queries, keys), one position after the other by vmap."""
    call: Any = mod
    lead = () if score is None else (0,)
    for axis in reversed(range(4)):
        dims = [None] * 4
        dims[axis] = 0  # type: ignore[call-overload]
        call = torch.vmap(call, in_dims=(*lead, *dims), out_dims=0)
    given = [torch.arange(n, dtype=torch.int32) for n in shape]
    with TransformGetItemToIndex():
        return call(*given) if score is None else call(score, *given)


def by_cute(lowered: LoweredMod, shape: tuple[int, ...], score: Tensor | None) -> Tensor:
    """The same of a lowered mod, compiled for the CPU."""
    rows, cols = (torch.arange(n, dtype=torch.int32) for n in shape[2:])
    aux = [x.detach() for x in lowered.aux_tensors] or None
    heads = []
    for b in range(shape[0]):
        for h in range(shape[1]):
            if score is None:
                heads.append(eval_mask_mod(lowered.mod, aux, b, h, rows, cols))
            else:
                heads.append(eval_score_mod(lowered.mod, score[b, h], aux, b, h, rows, cols))
    return torch.stack(heads).view(shape)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """out and LSE of (batch, heads, length, dim), written out; mods take whole tensors here."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    score = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    place = [x.long() for x in places(*score.shape)]
    if score_mod is not None:
        score = score_mod(score, *place)
    if mask_mod is not None:
        score = score.masked_fill(~mask_mod(*place), -math.inf)
    weights = score.softmax(-1).nan_to_num(0.0)
    return weights @ v, score.logsumexp(-1)
