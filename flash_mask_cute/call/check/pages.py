"""Checks of paged keys and values, and the extents that follow from a page table.

Errors are those of `validate.py`. A CUDA tensor is never read; on the CPU the numbers of the pages
that are in use are checked by value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import CallLengths, OptionalTensors
from flash_mask_cute.call.check.lengths import check_batch_vector, check_index_vector
from flash_mask_cute.limits import LEAST_BOX, MAX_PAGE_SIZE
from flash_mask_cute.runtime.checks import brief, check_device, check_tensor


def paged_shape(
    k: Tensor, page_table: Tensor, kv_batch_idx: Tensor | None = None
) -> tuple[int, ...]:
    """(batch, keys, heads, head_dim) of a pool of pages (pages, page_size, heads, head_dim)."""
    batch, max_pages = page_table.shape
    if kv_batch_idx is not None:
        batch = len(kv_batch_idx)
    _, page_size, heads, dim = k.shape
    return batch, max_pages * page_size, heads, dim


def page_box_of(page_size: int, tile_n: int, has_leftpad: bool = False) -> int:
    """Keys that lie side by side in a page wherever a tile of tile_n keys begins, which kernels
    read at a time. With padding a sequence begins anywhere in a page."""
    return 1 if has_leftpad else math.gcd(page_size, tile_n)


def describe_pages(page_size: int, page_box: int, tile_n: int) -> str:
    """How a kernel copies keys from pages, in words. page_box: see `page_box_of`."""
    if page_box % LEAST_BOX and math.gcd(page_size, tile_n) % LEAST_BOX == 0:
        how = "row by row, for leftpad_k lets a sequence begin anywhere in a page"
    elif page_box % LEAST_BOX:
        how = f"row by row, for {LEAST_BOX} does not divide the page size"
    elif page_box == tile_n:
        how = "by TMA, a whole tile in a box"
    else:
        how = f"by TMA, in boxes of {page_box} keys"
    return f"of {page_size} keys, copied {how}"


def check_page_table(k: Tensor, page_table: object) -> None:
    """Check a page table, without its contents, and the page size of a pool of 4 dimensions."""
    check_tensor("page_table", page_table)
    assert isinstance(page_table, Tensor)
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


def check_pages(k: Tensor, lengths: CallLengths, optional: OptionalTensors) -> None:
    """Check a page table against the pool of k, and where sequences lie in it."""
    page_table, seqused_k = lengths.page_table, lengths.seqused_k
    kv_batch_idx, leftpad_k = optional.kv_batch_idx, optional.leftpad_k
    check_page_table(k, page_table)
    assert isinstance(page_table, Tensor)
    if lengths.cu_seqlens_k is not None:
        raise ValueError(
            "cu_seqlens_k must be None beside page_table, which says where the keys of a sequence "
            f"lie; give seqused_k for their number, got {brief(lengths.cu_seqlens_k)}"
        )
    if kv_batch_idx is not None:
        check_index_vector("kv_batch_idx", kv_batch_idx, k.device)
    if leftpad_k is not None:
        batch, *_ = paged_shape(k, page_table, kv_batch_idx)
        check_batch_vector("leftpad_k", leftpad_k, batch, k.device)
        if seqused_k is None:
            raise ValueError(
                f"leftpad_k needs seqused_k, the number of keys after it, got {brief(leftpad_k)} "
                "and None"
            )
    if page_table.device.type == "cpu":
        if kv_batch_idx is not None:
            page_table = _rows_of_table(page_table, kv_batch_idx)
        if leftpad_k is not None:
            _check_leftpad(leftpad_k, seqused_k, page_table.shape[1] * k.shape[1])
        _check_numbers(page_table, seqused_k, leftpad_k, k.shape)


def refuse_without_pages(**where: object) -> None:
    """Refuse arguments that say where sequences lie in a page table."""
    for name, given in where.items():
        if given is not None:
            raise ValueError(f"{name} needs page_table, got {brief(given)} and page_table None")


def _rows_of_table(page_table: Tensor, kv_batch_idx: Tensor) -> Tensor:
    for row in kv_batch_idx.tolist():
        if not 0 <= row < len(page_table):
            raise ValueError(
                f"kv_batch_idx must lie in [0, {len(page_table)}), rows of page_table, got {row}"
            )
    return page_table[kv_batch_idx.long()]


def _check_leftpad(leftpad_k: Tensor, seqused_k: object, capacity: int) -> None:
    if not isinstance(seqused_k, Tensor) or seqused_k.shape != leftpad_k.shape:
        return  # refused with the other lengths
    for padding, length in zip(leftpad_k.tolist(), seqused_k.tolist(), strict=True):
        if not 0 <= padding <= capacity - length:
            raise ValueError(
                f"leftpad_k must lie between 0 and the {capacity} rows of a sequence without its "
                f"{length} keys, got {padding}"
            )


def _check_numbers(
    page_table: Tensor, seqused_k: Tensor | None, leftpad_k: Tensor | None, pool: torch.Size
) -> None:
    """Check the numbers of the pages in use. Lengths are checked elsewhere."""
    used, (num_pages, page_size, *_) = page_table, pool
    is_read = isinstance(seqused_k, Tensor) and seqused_k.device == page_table.device
    if seqused_k is not None and is_read and seqused_k.shape == page_table.shape[:1]:
        first_rows = torch.arange(page_table.shape[1], device="cpu") * page_size
        begin = torch.zeros_like(seqused_k) if leftpad_k is None else leftpad_k
        begin, end = begin[:, None].to("cpu"), (begin + seqused_k)[:, None].to("cpu")
        in_use = (first_rows < end) & (first_rows + page_size > begin)
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
