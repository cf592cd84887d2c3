"""Keys and values of a cache on the CPU: converted from fp8 and gathered before attention."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import Tensors


def keys_in_rows(x: Tensors) -> Tensors:
    """A call with keys and values as its sequences have them, in the dtype of q."""
    if x.k.dtype == x.q.dtype and x.lengths.page_table is None:
        return x
    k, v = _in_rows(x.k, x.optional.k_descale, x), _in_rows(x.v, x.optional.v_descale, x)
    return x._replace(k=k, v=v)


def _in_rows(cache: Tensor, descale: Tensor | None, x: Tensors) -> Tensor:
    dtype, page_table = x.q.dtype, x.lengths.page_table
    by_head = descale is not None and descale.dim() == 2
    if cache.dtype != dtype:
        # exact, and NaN stays NaN
        cache = cache.float()
        if descale is not None and not by_head:
            cache *= descale[..., None]
    rows = cache
    if page_table is not None:
        rows = gather_pages(cache, page_table, x.optional.kv_batch_idx, x.optional.leftpad_k)
    if descale is not None and by_head:
        rows = rows * descale[:, None, :, None]
    return rows.to(dtype)


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
