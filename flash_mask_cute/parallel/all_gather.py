"""Method "all_gather": a rank fetches all keys that its rows see, for one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_mask_cute.functional import flash_attn_func
from flash_mask_cute.parallel.key_exchange import KeyMessages, Shard, Sums
from flash_mask_cute.parallel.messages import Peers
from flash_mask_cute.parallel.routes import Routes, Settings

_WHAT = "method all_gather"


def attend_gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    learnable_sink: Tensor | None,
    peers: Peers,
    routes: Routes,
    settings: Settings,
) -> Tensor:
    """Attention of the own rows, with one launch of each kernel."""
    k, v = _Gathered.apply(k, v, peers, routes)
    return flash_attn_func(
        q,
        k,
        v,
        settings.softmax_scale,
        learnable_sink=learnable_sink,
        softcap=settings.softcap,
        deterministic=settings.deterministic,
        startend_row_indices=routes.whole,
    )


class _Gathered(torch.autograd.Function):
    """Keys and values that own rows see, rank by rank; the backward adds their gradients up."""

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, peers: Peers, routes: Routes
    ) -> tuple[Tensor, Tensor]:
        own = Shard(k, v)
        ctx.num_rows, ctx.peers, ctx.routes = k.shape[1], peers, routes
        parts = KeyMessages(own, peers, routes, _WHAT).send_keys().wait()
        parts[peers.rank] = own.rows(routes.sends[peers.rank])
        in_order = [parts[r] for r in range(peers.world)]
        return torch.cat([x.k for x in in_order], 1), torch.cat([x.v for x in in_order], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        peers, routes = ctx.peers, ctx.routes
        splits = (x.split(list(routes.receives), 1) for x in (dk, dv))
        parts = {r: Shard(*pair) for r, pair in enumerate(zip(*splits, strict=True))}
        own = parts.pop(peers.rank)
        # the keys themselves are not kept
        like = Shard(
            *(x.new_empty(()).expand(x.shape[0], ctx.num_rows, *x.shape[2:]) for x in (dk, dv))
        )
        arriving = KeyMessages(like, peers, routes, _WHAT).send_gradients(parts)
        sums = Sums(like)
        sums.add(routes.sends[peers.rank], own)
        for r, part in sorted(arriving.wait().items()):
            sums.add(routes.sends[r], part)
        return *sums.result(), None, None
