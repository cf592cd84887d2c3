"""Checks of paged keys and values, and the extents that follow from a page table.

Errors are those of `validate.py`. A CUDA tensor is never read; on the CPU the numbers of the pages
that are in use are checked by value.
"""

from __future__ import annotations

import math

import torch

from flash_mask_cute.limits import LEAST_BOX, MAX_PAGE_SIZE
from flash_mask_cute.runtime.checks import brief, check_device, check_tensor


def paged_shape(k: torch.Tensor, page_table: torch.Tensor) -> tuple[int, ...]:
    """(batch, keys, heads, head_dim) of a pool of pages (pages, page_size, heads, head_dim)."""
    batch, max_pages = page_table.shape
    _, page_size, heads, dim = k.shape
    return batch, max_pages * page_size, heads, dim


def page_box_of(page_size: int, tile_n: int) -> int:
    """Keys that kernels with tile_n keys per tile read from such pages at a time.

    These are the keys that lie side by side in each page, wherever a tile begins.
    """
    return math.gcd(page_size, tile_n)


def describe_pages(page_size: int, page_box: int, tile_n: int) -> str:
    """How a kernel copies keys from pages, in words. page_box: see `page_box_of`."""
    if page_box % LEAST_BOX:
        how = f"row by row, for {LEAST_BOX} does not divide the page size"
    elif page_box == tile_n:
        how = "by TMA, a whole tile in a box"
    else:
        how = f"by TMA, in boxes of {page_box} keys"
    return f"of {page_size} keys, copied {how}"


def check_page_table(k: torch.Tensor, page_table: object) -> None:
    """Check a page table, without its contents, and the pages of a pool of 4 dimensions.

    Raises:
        TypeError, ValueError: naming argument and value.
    """
    check_tensor("page_table", page_table)
    assert isinstance(page_table, torch.Tensor)
    if page_table.dtype != torch.int32:
        raise TypeError(f"page_table must have dtype int32, got {page_table.dtype}")
    if page_table.dim() != 2:
        raise ValueError(
            f"page_table must have shape (batch, max_pages), got {tuple(page_table.shape)}"
        )
    check_device("page_table", page_table, k.device)
    page_size = k.shape[1]
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise ValueError(
            f"k and v must have pages of 1 to {MAX_PAGE_SIZE} keys beside page_table, (pages, "
            f"page_size, heads, head_dim), got page_size {page_size} of shape {tuple(k.shape)}"
        )


def check_pages(
    k: torch.Tensor,
    page_table: object,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
) -> None:
    """Check a page table against the pools of k and v, whose equal shapes are known.

    Raises:
        TypeError, ValueError: naming argument and value.
    """
    check_page_table(k, page_table)
    assert isinstance(page_table, torch.Tensor)
    if cu_seqlens_k is not None:
        raise ValueError(
            "cu_seqlens_k must be None beside page_table, which says where the keys of a sequence "
            f"lie; give seqused_k for their number, got {brief(cu_seqlens_k)}"
        )
    num_pages, page_size = k.shape[:2]
    if page_table.device.type == "cpu":
        _check_numbers(page_table, seqused_k, num_pages, page_size)


def _check_numbers(
    page_table: torch.Tensor, seqused_k: torch.Tensor | None, num_pages: int, page_size: int
) -> None:
    """Check the numbers of the pages in use. Too large lengths are refused with the other
    lengths."""
    used = page_table
    if isinstance(seqused_k, torch.Tensor) and seqused_k.shape == page_table.shape[:1]:
        columns = torch.arange(page_table.shape[1], device="cpu")
        in_use = columns * page_size < seqused_k[:, None].to("cpu")
        used = torch.where(in_use, page_table, 0)
        if not num_pages and not in_use.any():
            return
    wrong = (used < 0) | (used >= num_pages)
    if wrong.any():
        sequence, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"page_table must lie in [0, {num_pages}) where pages are in use, got "
            f"{int(page_table[sequence, column])} for page {column} of sequence {sequence}"
        )
