"""Backward attention on CPU tensors: the tiles that a kernel walks, one by one, in float64.

The outer loop is over key blocks, the inner one over query blocks: the transpose of the forward's
walk (`tiles.py`), which also decides which scores count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import Tensors
from flash_mask_cute.cpu.call import CpuCall
from flash_mask_cute.cpu.tiles import (
    NEG_INF,
    SequenceWalk,
    Tile,
    from_rows,
    heads_in_tile,
    sequence_walks,
)
from flash_mask_cute.limits import SINK_RTOL
from flash_mask_cute.mods.on_cpu import (
    add_aux_gradients,
    eval_score_mod,
    eval_score_mod_bwd,
    eval_score_mod_derivative,
)

_PullBack: TypeAlias = Callable[[Tensor], Tensor]
"""From gradients of modified scores to those of the scores, (queries, keys) each, or of all heads
of a tile (heads_kv, lanes, rows, keys)."""


def flash_attn_bwd_cpu(call: CpuCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsink); dsink is None without a learnable_sink.

    Arguments and results are those of `interface._flash_attn_bwd`; out and lse may have a higher
    precision. aux_sums: float64 tensors by index of the aux tensor, to which their gradients are
    added.

    Gradients are new contiguous tensors of the shapes and dtypes of q, k, v and the sink, summed in
    float64. q, out, dout, lse and dlse are not read in unused rows and in rows of no sequence. In
    rows that see nothing the values of q and dout do not matter, nor does dlse without a sink.
    Raises NotImplementedError, TypeError, ValueError: as `eval_mask_mod`; or a score_mod has no
    derivative."""
    x, pack_gqa = call.tensors, call.tiles.pack_gqa
    dq = x.q.new_zeros(x.q.shape)
    # several sequences may add to the same keys
    dk, dv = (y.new_zeros(y.shape, dtype=torch.float64) for y in (x.k, x.v))
    dsink = x.q.new_zeros(x.q.shape[-2:-1], dtype=torch.float64)
    for walk in sequence_walks(call):
        sink = walk.rows_of_sink(x.learnable_sink)
        rows = _Rows.create(x, walk)
        dq_rows, dk_rows, dv_rows = _sequence_gradients(call, rows, walk)
        dq[walk.slot_q] = from_rows(dq_rows, pack_gqa).to(dq.dtype)
        dk[walk.slot_k] += from_rows(dk_rows, 1)
        dv[walk.slot_k] += from_rows(dv_rows, 1)
        if sink is not None:
            dsink += from_rows(rows.sink_gradient(sink), pack_gqa).sum(dim=0)
    dk, dv = dk.to(x.k.dtype), dv.to(x.v.dtype)
    return dq, dk, dv, None if x.learnable_sink is None else dsink.to(x.learnable_sink.dtype)


class _Rows(NamedTuple):
    """Inputs of the backward for the queries of a sequence.

    q, dout (heads_kv, lanes, rows, .), lse, lse_low and delta (heads_kv, lanes, rows).

    In rows that see nothing, lse is inf, so exponentials of scores minus lse are 0; with a sink lse
    is unchanged. There lse_low is 0, delta is 0 except for dlse with a sink, and q and dout are 0,
    because 0 * NaN is NaN. Float64 loses lse_low in a sum with an lse of 1e17.
    """

    q: Tensor
    dout: Tensor
    lse: Tensor
    lse_low: Tensor
    delta: Tensor

    @staticmethod
    def create(tensors: Tensors, walk: SequenceWalk) -> _Rows:
        x, of = tensors, tensors.gradients
        assert x.out is not None and of.dout is not None and x.lse is not None
        q, out, dout, lse = (walk.rows_of_q(y) for y in (x.q, x.out, of.dout, x.lse.mT))
        sink = walk.rows_of_sink(x.learnable_sink)
        empty = sees_nothing = lse == NEG_INF
        if sink is not None:
            # marked as the kernel does; it could be a row that sees values of 0 and little else
            of_sink = (lse - sink).abs() <= SINK_RTOL * sink.abs().clamp(min=1.0)
            is_hostile = ~(q.isfinite().all(dim=-1) & dout.isfinite().all(dim=-1))
            sees_nothing = empty | (of_sink & (out == 0).all(dim=-1) & is_hostile)
        q, dout = (y.masked_fill(sees_nothing[..., None], 0.0) for y in (q, dout))
        delta = (dout * out).sum(dim=-1)
        if of.dlse is not None:
            delta = delta - walk.rows_of_q(of.dlse.mT)
        low = torch.zeros_like(lse)
        if x.lse_low is not None:
            low = walk.rows_of_q(x.lse_low.mT).masked_fill(empty, 0.0)
        return _Rows(q, dout, lse.masked_fill(empty, -NEG_INF), low, delta.masked_fill(empty, 0.0))

    def sink_gradient(self, sink: Tensor) -> Tensor:
        """Each row's part in the gradient of its head's sink, (heads_kv, lanes, rows) both."""
        return -torch.exp((sink - self.lse) - self.lse_low) * self.delta


def _sequence_gradients(
    call: CpuCall, row_values: _Rows, walk: SequenceWalk
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of one batch entry."""
    k, v = walk.rows_of_k(call.tensors.k), walk.rows_of_k(call.tensors.v)
    dq, dk, dv = (torch.zeros_like(x) for x in (row_values.q, k, v))
    for n_block in range(walk.num_n_blocks):
        keys = walk.keys(n_block)
        for m_block in walk.m_blocks(n_block):
            rows = walk.rows(m_block)
            tile = walk.tile(m_block, n_block)
            heads, visible = walk.visible(tile)
            if not heads.any():
                continue
            q, dout = row_values.q[..., rows, :], row_values.dout[..., rows, :]
            lse, low, delta = (x[..., rows, None] for x in row_values[2:])
            capped = walk.capped_scores(q, k[..., keys, :])
            modified, pull_back = capped, None
            if call.masks.score_mod is not None:
                modified, pull_back = _chain_tile(call, walk, capped, tile, heads)
            probabilities = torch.exp((modified.masked_fill(~visible, NEG_INF) - lse) - low)
            dscores = probabilities * (dout @ v[..., keys, :].mT - delta)
            if pull_back is not None:
                dscores = pull_back(dscores)
            # a hidden score may have a derivative that is not finite
            dscores = dscores.masked_fill(~visible, 0.0)
            if walk.softcap:
                dscores = dscores * (1 - (capped / walk.softcap).square())
            dscores = dscores * walk.softmax_scale
            dq[..., rows, :] += dscores @ k[..., keys, :]
            # the lanes of a KV head are heads that read the same keys
            dk[..., keys, :] += (dscores.mT @ q).sum(dim=1, keepdim=True)
            dv[..., keys, :] += (probabilities.mT @ dout).sum(dim=1, keepdim=True)
    return dq, dk, dv


def _chain_tile(
    call: CpuCall, walk: SequenceWalk, scores: Tensor, tile: Tile, heads: Tensor
) -> tuple[Tensor, _PullBack]:
    """Modified scores (heads_kv, lanes, rows, keys) of these heads; derivatives."""
    modified = scores.clone()
    parts = []
    for head in heads_in_tile(tile, heads):
        place = call.masks.aux_tensors, walk.batch_idx, head.head_idx, head.q_idx, head.k_idx
        values, pull_back = _chain_head(call, head.part(scores), *place)
        head.part(modified).copy_(values)
        parts.append((head, pull_back))

    def pull_back_tile(grads: Tensor) -> Tensor:
        grads = grads.clone()
        for head, pull_back in parts:
            head.part(grads).copy_(pull_back(head.part(grads)))
        return grads

    return modified, pull_back_tile


def _chain_head(call: CpuCall, scores: Tensor, *place: Any) -> tuple[Tensor, _PullBack]:
    """Modified scores of one head and their derivative, by the user's function or by our own."""
    score_mod, score_mod_bwd, aux_sums = call.masks.score_mod, call.score_mod_bwd, call.aux_sums
    assert score_mod is not None
    if score_mod_bwd is not None:
        modified = eval_score_mod(score_mod, scores, *place)
        return modified, lambda grads: eval_score_mod_bwd(score_mod_bwd, grads, scores, *place)
    try:
        modified, derivative = eval_score_mod_derivative(score_mod, scores, *place)
    except NotImplementedError:
        if aux_sums:
            # fails, too, with a text that knows of these gradients: score_mod_bwd has none
            add_aux_gradients(score_mod, aux_sums, (scores, scores), *place)
        raise

    def pull_back(grads: Tensor) -> Tensor:
        if aux_sums:
            add_aux_gradients(score_mod, aux_sums, (grads, scores), *place)
        return grads * derivative

    return modified, pull_back
