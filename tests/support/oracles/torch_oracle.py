"""Attention with torch's layouts in float64, by definition: with torch's alignments of causal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Dense(NamedTuple):
    out: Tensor
    lse: Tensor


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, bias: Tensor | None = None,
    scale: float | None = None, modify: Callable[[Tensor], Tensor] | None = None,
) -> Dense:  # fmt: skip
    """q (..., heads, L, E), k (..., heads_kv, S, E), v (..., heads_kv, S, Ev); visible and bias
    broadcast to (..., heads, L, S), and modify is a function of all scores. Rows that see nothing
    are 0, their LSE is -inf."""
    q, k, v = q.double(), k.double(), v.double()
    if q.dim() > 2 and k.shape[-3] not in (1, q.shape[-3]) and q.shape[-3] > 1:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.double()
    if modify is not None:
        scores = modify(scores)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    is_empty = (scores == -torch.inf).all(-1, keepdim=True)
    filled = scores.masked_fill(is_empty, 0.0)
    lse = filled.logsumexp(-1, keepdim=True)
    weights = (filled - lse).exp().masked_fill(is_empty, 0.0)
    return Dense(weights @ v, lse.masked_fill(is_empty, -torch.inf).squeeze(-1))


def band(
    seqlen_q: int, seqlen_k: int, left: int = -1, right: int = -1, at_end: bool = True
) -> Tensor:
    """(L, S): keys from left before to right behind a query's own; at_end: the last ones meet."""
    shift = seqlen_k - seqlen_q if at_end else 0
    rows, columns = torch.arange(seqlen_q)[:, None] + shift, torch.arange(seqlen_k)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        visible &= columns >= rows - left
    if right >= 0:
        visible &= columns <= rows + right
    return visible


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Sequence[int], ends_k: Sequence[int],
    window: tuple[int, int] = (-1, -1), scale: float | None = None,
) -> Dense:  # fmt: skip
    """q, k, v (total, heads, d), sequences between ends; lse (heads, total_q)."""
    outs, lses = [], []
    for i in range(len(ends_q) - 1):
        rows = slice(ends_q[i], ends_q[i + 1])
        keys = slice(ends_k[i], ends_k[i + 1])
        one = q[rows].transpose(0, 1), k[keys].transpose(0, 1), v[keys].transpose(0, 1)
        dense = dense_attention(*one, band(one[0].shape[1], one[1].shape[1], *window), scale=scale)
        outs.append(dense.out.transpose(0, 1))
        lses.append(dense.lse)
    return Dense(torch.cat(outs), torch.cat(lses, 1))
