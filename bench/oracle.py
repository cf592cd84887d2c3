"""Attention in torch: the arithmetic of the gates, and of the oracles of the tests.

It is told scores and nothing of masks, and nothing here uses the package that is measured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Attention(NamedTuple):
    """out (..., rows, d_v) in the dtype of v; lse (..., rows) and probabilities (..., rows, keys)
    in that of the scores."""

    out: Tensor
    lse: Tensor
    probabilities: Tensor


def attend(scores: Tensor, v: Tensor, sink: Tensor | None = None) -> Attention:
    """Of scores (..., rows, keys) of any size, -inf where hidden, and v (..., keys, d_v); keys may
    be 0. sink: a key without a value, () or (..., rows, 1). Rows without a term are 0, with an LSE
    of -inf and gradients of 0."""
    terms = scores
    if sink is not None or not scores.shape[-1]:
        first = scores.new_tensor(-torch.inf) if sink is None else sink.to(scores.dtype)
        terms = torch.cat([first.expand(*scores.shape[:-1], 1), scores], dim=-1)
    empty = terms.isneginf().all(dim=-1)
    largest = terms.detach().amax(dim=-1).masked_fill(empty, 0.0)
    # torch.logsumexp takes its derivative from its result, which may be too large for that
    shifted = terms - largest[..., None]
    log_total = torch.exp(shifted).sum(dim=-1).masked_fill(empty, 1.0).log()
    of_keys = shifted[..., terms.shape[-1] - scores.shape[-1] :]
    probabilities = torch.exp(of_keys - log_total[..., None])
    lse = (largest + log_total).masked_fill(empty, -torch.inf)
    return Attention(probabilities.to(v.dtype) @ v, lse, probabilities)
