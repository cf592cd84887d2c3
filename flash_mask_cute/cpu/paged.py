"""Paged keys and values on the CPU: gathered before attention."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_pages(
    pool: Tensor,
    page_table: Tensor,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
) -> Tensor:
    """(batch, max_pages * page_size, heads, d) from a pool (pages, page_size, heads, d); the first
    key of each sequence is in row 0.

    page_table: int32 (batch, max_pages), or (rows, max_pages) with kv_batch_idx (batch,). Entries
    of unused pages may be anything. leftpad_k (batch,): rows of pages before the first key.
    """
    if kv_batch_idx is not None:
        page_table = page_table[kv_batch_idx.long()]
    batch, max_pages = page_table.shape
    if not pool.shape[0]:
        return pool.new_zeros((batch, max_pages * pool.shape[1], *pool.shape[2:]))
    rows = pool[page_table.long().clamp(0, pool.shape[0] - 1)].flatten(1, 2)
    if leftpad_k is None or not batch:
        return rows
    padded = zip(rows, leftpad_k.tolist(), strict=True)
    return torch.stack([x.roll(-padding, dims=0) for x, padding in padded])
