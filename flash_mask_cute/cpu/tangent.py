"""Forward mode of attention on CPU tensors, over the tiles of the forward, in float64.

With dS = scale * (tQ K^T + Q tK^T), the tangent of the LSE is mu = sum of P dS over the keys of a
row, and that of O is the sum of (P dS) V + P tV, minus mu O. P comes from the LSE, which is
float32 beside 16 bits. Its rounding error is a factor of the row, so sums are divided by that of P.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.cpu.call import CpuCall
from flash_mask_cute.cpu.tiles import NEG_INF, SequenceWalk, from_rows, sequence_walks


class Tangents(NamedTuple):
    """Tangents of q, k and v, and the results of the forward; each is like q, k, v, out or lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def flash_attn_tangent_cpu(call: CpuCall, given: Tangents) -> tuple[Tensor, Tensor]:
    """The tangents of out and of lse, as new tensors like these: 0 in rows that see nothing, in
    unused rows, and in rows of no sequence. A learnable sink has no tangent. Raises
    NotImplementedError, TypeError, ValueError: as `eval_mask_mod`."""
    tout, tlse = torch.zeros_like(given.out), torch.zeros_like(given.lse)
    for walk in sequence_walks(call):
        of_rows = _sequence_tangents(call, given, walk)
        for target, rows in zip((tout, tlse.mT), of_rows, strict=True):
            target[walk.slot_q] = from_rows(rows, call.tiles.pack_gqa).to(target.dtype)
    return tout, tlse


def _sequence_tangents(call: CpuCall, given: Tangents, walk: SequenceWalk) -> tuple[Tensor, Tensor]:
    """Of one batch entry: tO (heads_kv, lanes, rows, d_v) and the tangent of its LSE."""
    x, scale = call.tensors, walk.softmax_scale
    q, tq, lse = map(walk.rows_of_q, (x.q, given.q, given.lse.mT))
    k, v, tk, tv = map(walk.rows_of_k, (x.k, x.v, given.k, given.v))
    sink = walk.rows_of_sink(x.learnable_sink)
    # any finite number will do for rows that see nothing
    lse = lse.masked_fill(lse == NEG_INF, 0.0)
    total = torch.zeros_like(lse) if sink is None else torch.exp(sink - lse)
    # O is summed again, since it was rounded
    tout, out = (q.new_zeros((*q.shape[:-1], v.shape[-1])) for _ in range(2))
    mu = torch.zeros_like(lse)
    for m_block in range(walk.num_m_blocks):
        rows = walk.rows(m_block)
        for n_block in walk.n_blocks(m_block):
            heads, visible = walk.visible(walk.tile(m_block, n_block))
            if heads.any():
                keys = walk.keys(n_block)
                of_q, of_tq, of_k, of_tk = q[..., rows, :], tq[..., rows, :], k.mT[..., keys], tk.mT
                scores = (of_q @ of_k * scale).masked_fill(~visible, NEG_INF)
                p = torch.exp(scores - lse[..., rows, None])
                ds = (of_tq @ of_k + of_q @ of_tk[..., keys]).masked_fill(~visible, 0.0) * scale
                total[..., rows] += p.sum(dim=-1)
                mu[..., rows] += (p * ds).sum(dim=-1)
                out[..., rows, :] += p @ v[..., keys, :]
                tout[..., rows, :] += (p * ds) @ v[..., keys, :] + p @ tv[..., keys, :]
    total = total.masked_fill(total == 0.0, 1.0)
    return (tout - (mu / total)[..., None] * out) / total[..., None], mu / total
