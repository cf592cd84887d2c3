"""Calls of `context_parallel_attention` in the processes of a group, against one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flash_mask_cute import ColumnMask, builders, flash_attn_func
from flash_mask_cute.parallel import Plan, context_parallel_attention, plan

METHODS = ("all_gather", "ring", "ulysses")
SEQLEN = 512


def _per_head() -> ColumnMask:
    lengths = ([200, 40, 120, 152], [512])
    indices = [builders.causal_document(x).startend_row_indices for x in lengths]
    return ColumnMask(torch.cat(indices, 1), True, seqlen_q=SEQLEN)


MASKS: dict[str, Callable[[], ColumnMask | None]] = {
    "causal": lambda: builders.causal(SEQLEN),
    "causal documents": lambda: builders.causal_document([200, 40, 120, 152]),
    "documents": lambda: builders.document([200, 40, 120, 152]),
    "sink window": lambda: builders.sink_window(SEQLEN, 4, 80),
    "shared questions": lambda: builders.share_question([[80, 60, 60], [120, 192]]),
    "prefixes": lambda: builders.prefix_lm_document([200, 312], [80, 60]),
    "global window": lambda: builders.global_sliding_window(SEQLEN, 5, 60),
    "a mask for each head": _per_head,
    "a batch": lambda: builders.causal_document([[200, 312], [400, 112]]),
}


class ParallelCall(NamedTuple):
    """keywords: of both functions. has_sink: with a learnable_sink."""

    mask: ColumnMask | None
    plan: Plan
    method: str
    keywords: dict[str, Any] = {}
    has_sink: bool = False
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float64


class Errors(NamedTuple):
    """The largest differences from one process, over all ranks."""

    out: float
    gradients: float


def interleaved(seqlen: int, world: int) -> Plan:
    """The first and the last rows together, as causal masking alone asks for."""
    size = seqlen // (2 * world)
    return Plan(
        [
            [(r * size, (r + 1) * size), (seqlen - (r + 1) * size, seqlen - r * size)]
            if r + 1 < world
            else [(r * size, seqlen - r * size)]
            for r in range(world)
        ]
    )


def compare(call: ParallelCall, group: dist.ProcessGroup | None = None, seed: int = 0) -> Errors:
    """Run it in this process of a group, and the whole call alone."""
    rank = dist.get_rank(group)
    generator = torch.Generator().manual_seed(seed)
    batch = 1 if call.mask is None else call.mask.startend_row_indices.shape[0]
    seqlen, (heads_q, heads_kv), (dim, dim_v) = call.plan.seqlen, call.heads, call.head_dims

    def normal(heads: int, dim: int) -> Tensor:
        shape = (batch, seqlen, heads, dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(call.dtype)

    tensors = [normal(heads_q, dim), normal(heads_kv, dim), normal(heads_kv, dim_v)]
    dout = normal(heads_q, dim_v)
    sink = [torch.randn(heads_q, generator=generator).to(torch.float32)] if call.has_sink else []
    whole = [x.clone().requires_grad_() for x in (*tensors, *sink)]
    out = flash_attn_func(
        whole[0],
        whole[1],
        whole[2],
        startend_row_indices=call.mask,
        learnable_sink=whole[3] if sink else None,
        **call.keywords,
    )
    wanted = [out, *torch.autograd.grad(out, whole, dout)]
    own = [call.plan.shard(x, rank) for x in tensors] + sink
    own = [x.clone().requires_grad_() for x in own]
    part = context_parallel_attention(
        own[0],
        own[1],
        own[2],
        call.mask,
        call.plan,
        group,
        call.method,
        learnable_sink=own[3] if sink else None,
        **call.keywords,
    )
    found = [part, *torch.autograd.grad(part, own, call.plan.shard(dout, rank))]
    differences = []
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        right = y if i == 4 else call.plan.shard(y, rank)
        assert x.dtype == right.dtype and x.shape == right.shape
        differences.append(float((x.double() - right.double()).detach().abs().max()))
    worst = torch.tensor([differences[0], max(differences[1:])], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group)
    return Errors(*worst.tolist())


def run_table(rank: int) -> dict[tuple[int, str, str, str], Errors]:
    """Each mask with each method and two plans, in four processes and in groups of two, which
    share the masks among them. Only the first rank of a group returns errors."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    found = {}
    for number, (name, make) in enumerate(MASKS.items()):
        mask = make()
        for world, group in ((4, None), (2, pairs[rank // 2])):
            if world == 2 and number % 2 != rank // 2:
                continue
            plans = {"interleaved": interleaved(SEQLEN, world)}
            if SEQLEN % (128 * world) == 0:
                plans["by work"] = plan(mask, world, seqlen=SEQLEN)
            for label, rows in plans.items():
                for method in METHODS:
                    errors = compare(ParallelCall(mask, rows, method), group, number)
                    if dist.get_rank(group) == 0:
                        found[world, name, label, method] = errors
    return found
