"""Method "ring": the keys of one other rank at a time, and the next ones on their way meanwhile.

In step s a rank holds the keys that the rank s back sent it. Results of the steps are merged by
their LSE, in float32 or wider. The backward of a step takes LSE and output of the whole row. So it
needs no results of the steps, and keys are sent again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd
from flash_mask_cute.parallel.key_exchange import KeyMessages, Shard, Sums
from flash_mask_cute.parallel.messages import Peers
from flash_mask_cute.parallel.routes import Routes, Settings
from flash_mask_cute.serving import flash_attn_combine

_WHAT = "method ring"


class Ring(torch.autograd.Function):
    """Attention of the own rows."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        peers: Peers,
        routes: Routes,
        settings: Settings,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=wide)
        own = Shard(k, v)
        for source, keys in _steps(own, KeyMessages(own, peers, routes, _WHAT), peers, routes):
            mask = routes.masks[source]
            if mask is None:
                continue
            part, part_lse = _flash_attn_fwd(
                q,
                keys.k,
                keys.v,
                softmax_scale=settings.softmax_scale,
                softcap=settings.softcap,
                startend_row_indices=mask,
                out=torch.empty_like(out),
                lse=torch.empty_like(lse),
            )
            assert part_lse is not None
            parts, of_parts = torch.stack((out, part)), torch.stack((lse, part_lse))
            out, of_rows = flash_attn_combine(parts, of_parts.mT)
            assert of_rows is not None
            lse = of_rows.mT.contiguous()
        if sink is not None:
            out, lse = _with_sink(out, lse, sink)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sink, result, lse)
        ctx.peers, ctx.routes, ctx.settings = peers, routes, settings
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        peers, routes, settings = ctx.peers, ctx.routes, ctx.settings
        own, rank = Shard(k, v), peers.rank
        messages = KeyMessages(own, peers, routes, _WHAT)
        dq = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        sums, returning = Sums(own), []
        for step, (source, keys) in enumerate(_steps(own, messages, peers, routes)):
            mask = routes.masks[source]
            part = keys
            if mask is not None:
                of_rows, *of_keys = _flash_attn_bwd(
                    q,
                    keys.k,
                    keys.v,
                    out,
                    dout,
                    lse,
                    softmax_scale=settings.softmax_scale,
                    softcap=settings.softcap,
                    startend_row_indices=mask,
                    deterministic=settings.deterministic,
                )
                dq += of_rows
                part = Shard(*of_keys)
            if source == rank:
                sums.add(routes.sends[rank], part)
            else:
                returning.append(messages.send_gradients({source: part}, step))
        for arriving in returning:
            for r, part in arriving.wait().items():
                sums.add(routes.sends[r], part)
        dsink = None
        if sink is not None and ctx.needs_input_grad[3]:
            dsink = _sink_gradient(out, dout, lse, sink)
        return dq.to(q.dtype), *sums.result(), dsink, None, None, None


def _steps(
    own: Shard, messages: KeyMessages, peers: Peers, routes: Routes
) -> Iterator[tuple[int, Shard]]:
    """Each rank and its keys, in the order of the steps; those of the next one are on their way."""
    rank, world = peers.rank, peers.world
    keys = own.rows(routes.sends[rank])
    for step in range(1, world):
        following = messages.send_keys(step)
        yield (rank - step + 1) % world, keys
        (keys,) = following.wait().values()
    yield (rank + 1) % world, keys


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """With one more logit of each head, that has no value."""
    total = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    return out * (lse - total).exp().mT[..., None], total


def _sink_gradient(out: Tensor, dout: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Of the own rows."""
    delta = (out.double() * dout.double()).sum(-1).mT
    weight = (sink.double()[:, None] - lse.double()).exp()
    return -(weight * delta).sum((0, 2)).to(sink.dtype)
