"""Method "ulysses": rows are exchanged for heads, and a call has all rows of some heads.

The method of DeepSpeed Ulysses (Jacobs et al. 2023). Every mask works as on one device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_mask_cute.functional import flash_attn_func
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.parallel.messages import Messages, Peers
from flash_mask_cute.parallel.planning import Plan
from flash_mask_cute.parallel.routes import Settings


def check_heads(heads_q: int, heads_kv: int, world: int) -> None:
    """Raise ValueError for heads that ranks cannot have in equal shares."""
    if heads_q % world or (heads_kv % world and world % heads_kv):
        raise ValueError(
            f"method='ulysses' gives each of {world} ranks as many heads: heads_q must be a "
            f"multiple of {world}, got {heads_q}, and heads_kv a multiple or a divisor, got "
            f"{heads_kv}"
        )


def attend_by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    learnable_sink: Tensor | None,
    peers: Peers,
    plan: Plan,
    settings: Settings,
    mask: ColumnMask | None,
) -> Tensor:
    """Attention of the own rows."""
    rank, world = peers.rank, peers.world
    if k.shape[2] % world:
        # each head of keys goes to several ranks
        k, v = (x.repeat_interleave(world // x.shape[2], 2) for x in (k, v))
    q, k, v = _Exchanged.apply(peers, True, q, k, v)
    places = plan.places(q.device)
    q, k, v = (x.index_select(1, places) for x in (q, k, v))
    if learnable_sink is not None:
        learnable_sink = learnable_sink.chunk(world)[rank]
    out = flash_attn_func(
        q,
        k,
        v,
        settings.softmax_scale,
        settings.band.causal,
        settings.band.window,
        learnable_sink,
        settings.softcap,
        deterministic=settings.deterministic,
        startend_row_indices=None if mask is None else _of_heads(mask, rank, world),
    )
    (own,) = _Exchanged.apply(peers, False, out.index_select(1, plan.order(out.device)))
    return own


def _of_heads(mask: ColumnMask, rank: int, world: int) -> ColumnMask:
    """The mask of a rank's heads."""
    indices = mask.startend_row_indices
    heads = indices.shape[1]
    if heads == 1:
        return mask
    if heads % world:
        indices = indices.repeat_interleave(world // heads, 1)
    return replace(mask, startend_row_indices=indices.chunk(world, 1)[rank])


class _Exchanged(torch.autograd.Function):
    """Own rows of all heads for the rows of all ranks of some heads, or back."""

    @staticmethod
    def forward(ctx: Any, peers: Peers, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.peers, ctx.to_heads = peers, to_heads
        return _exchange(peers, to_heads, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_exchange(ctx.peers, not ctx.to_heads, gradients)


def _exchange(peers: Peers, to_heads: bool, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """(batch, row, heads, ...): scatter dimension `split` over ranks, and gather the other one."""
    split, joined = (2, 1) if to_heads else (1, 2)
    world, rank = peers.world, peers.rank
    shares = [x.chunk(world, split) for x in tensors]
    others = [r for r in range(world) if r != rank]
    sent = {r: torch.cat([x[r].reshape(-1) for x in shares]) for r in others}
    sizes = [x[rank].numel() for x in shares]
    what = f"{'rows' if to_heads else 'heads'}, method ulysses"
    lengths = dict.fromkeys(others, sum(sizes))
    received = Messages(peers, sent, lengths, tensors[0], what).wait()
    results = []
    parts = {r: flat.split(sizes) for r, flat in received.items()}
    for i, of_tensor in enumerate(shares):
        shape = of_tensor[rank].shape
        in_order = [of_tensor[rank] if r == rank else parts[r][i].view(shape) for r in range(world)]
        results.append(torch.cat(in_order, joined))
    return tuple(results)
