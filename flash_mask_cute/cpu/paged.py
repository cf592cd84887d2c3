"""Paged keys and values on the CPU: gathered before attention."""

from __future__ import annotations

from torch import Tensor


def gather_pages(pool: Tensor, page_table: Tensor) -> Tensor:
    """(batch, max_pages * page_size, heads, d) from a pool (pages, page_size, heads, d).

    page_table: int32 (batch, max_pages). Entries of unused pages may be anything.
    """
    if not pool.shape[0]:
        batch, max_pages = page_table.shape
        return pool.new_zeros((batch, max_pages * pool.shape[1], *pool.shape[2:]))
    return pool[page_table.long().clamp(0, pool.shape[0] - 1)].flatten(1, 2)
