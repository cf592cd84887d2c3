"""Combination of partial results by torch: on the CPU, and the gradients on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def combine_by_torch(out_partial: Tensor, lse_partial: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse), in float32 or wider, of out_partial (splits, ..., d) and lse_partial (splits,
    ...). Where lse_partial is -inf, out_partial may be anything."""
    weights, lse = _weights(lse_partial)
    out = torch.where(weights[..., None] > 0, out_partial.to(weights.dtype), 0.0)
    return (weights[..., None] * out).sum(dim=0), lse


def combine_gradients(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of out_partial and lse_partial, in their dtypes. The weight of a split is also the
    derivative of lse with respect to its lse_partial."""
    weights, _ = _weights(lse_partial)
    by_lse = torch.zeros_like(weights)
    by_out = torch.zeros_like(out_partial)
    if dout is not None:
        dout = dout.to(weights.dtype)
        by_out = (weights[..., None] * dout).to(out_partial.dtype)
        splits = torch.where(weights[..., None] > 0, out_partial.to(weights.dtype), 0.0)
        by_lse = weights * ((splits - out.to(weights.dtype)) * dout).sum(dim=-1)
    if dlse is not None:
        by_lse = by_lse + weights * dlse
    return by_out, by_lse.to(lse_partial.dtype)


def _weights(lse_partial: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the splits, 0 where nothing was seen; and lse of all splits."""
    wide = lse_partial.to(torch.promote_types(lse_partial.dtype, torch.float32))
    lse = torch.logsumexp(wide, dim=0) if len(wide) else wide.sum(dim=0) - torch.inf
    # not by lse, which far from 0 does not hold how many splits there are
    largest = wide.amax(dim=0) if len(wide) else lse
    weights = torch.exp(wide - largest.masked_fill(largest == -torch.inf, 0.0))
    return weights / weights.sum(dim=0).masked_fill(largest == -torch.inf, 1.0), lse
