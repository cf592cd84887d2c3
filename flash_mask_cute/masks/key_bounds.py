"""Smallest and largest interval edges of each block of keys, by torch operations.

On a GPU `kernels/key_block_bounds.py` computes them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def num_key_blocks(seqlen_k: int, tile_n: int, cu_seqlens_k: Tensor | None) -> int:
    """Blocks of bounds for so many keys: of a packed batch, as many as it may have."""
    if cu_seqlens_k is None:
        return (seqlen_k + tile_n - 1) // tile_n
    return seqlen_k // tile_n + cu_seqlens_k.shape[0] - 1


def bounds_by_torch(
    indices: Tensor, tile_n: int, cu_seqlens_k: Tensor | None, num_blocks: int
) -> Tensor:
    """What `ColumnMask.bounds` describes: each block lists its keys, the last one repeated."""
    seqlen_k = indices.shape[2]
    block = torch.arange(num_blocks, device=indices.device)
    lane = torch.arange(tile_n, device=indices.device)
    if cu_seqlens_k is None:
        keys = block[:, None] * tile_n + lane
    else:
        starts = cu_seqlens_k.long()
        num_sequences = len(starts) - 1
        first = starts[:-1] // tile_n + torch.arange(num_sequences, device=indices.device)
        owner = (torch.searchsorted(first, block, right=True) - 1).clamp_(min=0)
        keys = (starts[owner] + (block - first[owner]) * tile_n)[:, None] + lane
        keys = torch.minimum(keys, starts[owner + 1, None] - 1).clamp_(min=0)
    low, high = torch.aminmax(indices[:, :, keys.clamp_(max=seqlen_k - 1)], dim=3)
    return torch.stack((low, high), dim=-1).flatten(-2).transpose(2, 3)
