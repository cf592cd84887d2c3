"""A cache of keys and values: checked, and viewed as attention takes it.

The checks are of plain tensors. The operators run them for others, and in a compiled graph. Errors
are those of `validate.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import Tensors
from flash_mask_cute.call.check.fp8 import refuse_scale
from flash_mask_cute.call.check.lengths import check_batch_vector, check_index_vector
from flash_mask_cute.call.check.pages import check_page_table
from flash_mask_cute.limits import MAX_PAGE_SIZE
from flash_mask_cute.runtime.checks import brief, check_dense, check_int, check_tensor
from flash_mask_cute.runtime.dtypes import FP8
from flash_mask_cute.runtime.named_tuples import replaced


class Cache(NamedTuple):
    """The arguments of `flash_attn_with_kvcache` that describe the cache.

    k, v: (entries, rows, heads_kv, d), or pools of pages with page_table (entries, max_pages).
    seqlens: (batch,) int32, rows in use with padding, or None: all. leftpad: (batch,) int32, rows
    of padding. batch_idx: (batch,) int32, entries of sequences. device: that of q. k_descale,
    v_descale: of k and v in fp8, (batch, heads_kv) or (entries, rows, heads_kv) fp32.
    """

    k: Tensor
    v: Tensor
    seqlens: Tensor | None
    leftpad: Tensor | None
    batch_idx: Tensor | None
    page_table: Tensor | None
    batch: int
    device: torch.device
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    @property
    def entries(self) -> int:
        """Sequences that the cache holds."""
        return (self.k if self.page_table is None else self.page_table).shape[0]

    @property
    def capacity(self) -> int:
        """Rows of a sequence."""
        return _capacity_of(self.k, self.page_table)


def _capacity_of(k: Tensor, page_table: Tensor | None) -> int:
    # in traced code: Dynamo of torch 2.9 does not evaluate properties of a NamedTuple
    rows = k.shape[1]
    return rows if page_table is None else rows * page_table.shape[1]


class CacheView(NamedTuple):
    """The form in which attention gets a cache: keys (batch, row, ...), or packed, or in pages."""

    k: Tensor
    v: Tensor
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    max_seqlen_k: int | None = None
    page_table: Tensor | None = None
    kv_batch_idx: Tensor | None = None
    leftpad_k: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None


def batch_of(q: object, cu_seqlens_q: Tensor | None) -> int:
    """Number of sequences of a call. Attention's own checks report other errors in q."""
    if not torch.compiler.is_compiling():
        check_dense("q", q)
        assert isinstance(q, Tensor)
        if cu_seqlens_q is not None:
            check_dense("cu_seqlens_q", cu_seqlens_q)
            if cu_seqlens_q.dim() != 1 or cu_seqlens_q.device != q.device:
                check_index_vector("cu_seqlens_q", cu_seqlens_q, q.device)
    assert isinstance(q, Tensor)
    if q.dim() != (4 if cu_seqlens_q is None else 3):
        raise ValueError(
            "q must have shape (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, "
            f"head_dim) beside cu_seqlens_q, got {tuple(q.shape)}"
        )
    if cu_seqlens_q is None:
        return q.shape[0]
    return max(cu_seqlens_q.numel() - 1, 0)


def refuse_given(accepted: tuple[Any, ...], **given: Any) -> None:
    """Refuse arguments that are supported only at `accepted` values, the default first."""
    for name, value in given.items():
        is_accepted = not isinstance(value, Tensor) and any(value is x for x in accepted)
        if not is_accepted and not (isinstance(value, int | float) and value in accepted):
            raise NotImplementedError(
                f"{name} is not supported, it must be {accepted[0]}, got {brief(value)}"
            )


def seqlens_of(cache_seqlens: Any, cache: Cache) -> Tensor | None:
    """cache_seqlens as a tensor (batch,), or None. `check_contents` checks a tensor."""
    if cache_seqlens is None or isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    length = check_int("cache_seqlens", cache_seqlens, "an int, an int32 tensor (batch,) or None")
    _check_length(length, _capacity_of(cache.k, cache.page_table))
    return torch.full((cache.batch,), length, dtype=torch.int32, device=cache.device)


def _check_length(length: int, capacity: int) -> None:
    if not 0 <= length <= capacity:
        raise ValueError(
            f"cache_seqlens must lie between 0 and the {capacity} rows that the cache has for a "
            f"sequence, got {length}"
        )


def check_cache(cache: Cache, startend_row_indices: object) -> None:
    """Refuse arguments that contradict each other, and errors that attention's checks would report
    by other names."""
    k, v = cache.k, cache.v
    for name, tensor in (("k_cache", k), ("v_cache", v)):
        check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have shape (batch, rows, heads_kv, head_dim), or (pages, page_size, "
                f"heads_kv, head_dim) beside page_table, got {tuple(tensor.shape)}"
            )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k_cache and v_cache must agree in all but the last dimension, got {tuple(k.shape)} "
            f"and {tuple(v.shape)}"
        )
    if k.dtype is not v.dtype or not (cache.k_descale is cache.v_descale is None):
        _check_format(cache)
    if cache.page_table is not None:
        check_page_table(k, cache.page_table)
    for name, x in (("cache_batch_idx", cache.batch_idx), ("cache_leftpad", cache.leftpad)):
        if x is None:
            continue
        check_batch_vector(name, x, cache.batch, cache.device)
        if startend_row_indices is not None and cache.page_table is None:
            raise NotImplementedError(
                f"{name} is not supported beside startend_row_indices, got {brief(x)}"
            )
    if cache.page_table is None and cache.batch_idx is None and k.shape[0] != cache.batch:
        raise ValueError(
            f"k_cache must have batch {cache.batch}, as q has, or cache_batch_idx its entries, "
            f"got shape {tuple(k.shape)}"
        )


def _check_format(cache: Cache) -> None:
    """Check that both caches are in fp8, or none is, and that a scale has such a cache."""
    k, v = cache.k, cache.v
    if k.dtype.itemsize != v.dtype.itemsize and FP8 in (k.dtype, v.dtype):
        raise TypeError(
            "k_cache and v_cache must both be in float8_e4m3fn, or both in the dtype of q, got "
            f"{k.dtype} and {v.dtype}"
        )
    for name, tensor, descale in (("k", k, cache.k_descale), ("v", v, cache.v_descale)):
        if descale is not None and not (tensor.dtype == FP8 and isinstance(descale, Tensor)):
            refuse_scale(descale, f"{name}_cache", tensor)
            check_tensor(f"{name}_descale", descale)


def check_contents(cache: Cache) -> None:
    """Check the lengths, and the contents of vectors on the CPU. cache: by `check_cache`."""
    if cache.seqlens is not None:
        check_batch_vector("cache_seqlens", cache.seqlens, cache.batch, cache.device)
    if cache.device.type != "cpu":
        return
    entries, rows = cache.entries, cache.capacity
    if cache.seqlens is not None:
        for length in cache.seqlens.tolist():
            _check_length(length, cache.capacity)
    if cache.batch_idx is not None:
        for entry in cache.batch_idx.tolist():
            if not 0 <= entry < entries:
                raise ValueError(f"cache_batch_idx must lie in [0, {entries}), got {entry}")
    if cache.leftpad is not None:
        used = [rows] * cache.batch if cache.seqlens is None else cache.seqlens.tolist()
        for padding, length in zip(cache.leftpad.tolist(), used, strict=True):
            if not 0 <= padding <= length:
                raise ValueError(
                    f"cache_leftpad must lie between 0 and cache_seqlens ({length}), got {padding}"
                )


def refuse_gradients(reason: str, tensors: Tensors, **more: Tensor | None) -> None:
    """Raise NotImplementedError if autograd would record. reason: why gradients are unsupported.
    tensors, more: of a call over the cache, and others by name."""
    if not torch.is_grad_enabled():
        return
    x = tensors
    given = {"q": x.q, "k_cache": x.k, "v_cache": x.v, **more, "learnable_sink": x.learnable_sink}
    for name, tensor in given.items():
        # others are refused by their checks
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise NotImplementedError(
                f"{name} requires grad, and {reason}: use torch.no_grad(), or detach it"
            )


def view_of(cache: Cache, total: Tensor | None) -> CacheView:
    """The view of a cache. total: keys of each sequence without padding, if new ones were written;
    None: cache.seqlens with padding."""
    used = cache.seqlens if total is None else total
    in_fp8, in_order = cache.k.dtype == FP8, cache.leftpad is None and cache.batch_idx is None
    if in_order:
        if in_fp8 and used is None:
            used = _all_rows(cache)
    elif total is None and (cache.leftpad is not None or cache.page_table is None):
        used = _all_rows(cache) if used is None else used
        if cache.leftpad is not None:
            used = used - cache.leftpad
    if in_fp8 and cache.page_table is None and not in_order:
        # not packed, as below, because scales of packed keys could be those of sequences or rows
        cache = _as_pages(cache)
    view = CacheView(
        *(cache.k, cache.v, None, used, None, cache.page_table, cache.batch_idx, cache.leftpad),
        *(cache.k_descale, cache.v_descale),
    )
    if in_order or cache.page_table is not None:
        return view
    view = replaced(view, kv_batch_idx=None, leftpad_k=None)
    entries, rows = cache.k.shape[:2]
    if cache.k.device.type == "cpu":
        return replaced(view, k=_gathered(cache.k, cache), v=_gathered(cache.v, cache))
    # Every entry begins somewhere in one packed tensor, and seqused_k gives its length.
    _refuse_gaps(cache)
    starts = cache.batch_idx
    if starts is None:
        starts = torch.arange(cache.batch, dtype=torch.int32, device=cache.k.device)
    starts = starts * rows
    if cache.leftpad is not None:
        starts = starts + cache.leftpad
    starts = torch.nn.functional.pad(starts, (0, 1), value=entries * rows)
    k, v = cache.k.flatten(0, 1), cache.v.flatten(0, 1)
    return replaced(view, k=k, v=v, cu_seqlens_k=starts, max_seqlen_k=rows)


def _all_rows(cache: Cache) -> Tensor:
    """The lengths of sequences that have all rows."""
    rows = _capacity_of(cache.k, cache.page_table)
    return torch.full((cache.batch,), rows, dtype=torch.int32, device=cache.k.device)


def _as_pages(cache: Cache) -> Cache:
    """A contiguous cache as a pool of pages: each entry has as many, in order."""
    entries, rows = cache.k.shape[:2]
    _refuse_gaps(cache)
    page_size = next(n for n in range(min(max(rows, 1), MAX_PAGE_SIZE), 0, -1) if rows % n == 0)
    pages_of_entry = rows // page_size

    def in_pages(x: Tensor) -> Tensor:
        return x.unflatten(1, (pages_of_entry, page_size)).flatten(0, 1)

    def scale_in_pages(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.dim() != 3 else in_pages(x)

    table = torch.arange(entries * pages_of_entry, dtype=torch.int32, device=cache.k.device)
    return replaced(
        cache,
        k=in_pages(cache.k),
        v=in_pages(cache.v),
        page_table=table.view(entries, pages_of_entry),
        k_descale=scale_in_pages(cache.k_descale),
        v_descale=scale_in_pages(cache.v_descale),
    )


def _refuse_gaps(cache: Cache) -> None:
    """Refuse a contiguous cache whose entries do not follow each other in memory."""
    entries, rows = cache.k.shape[:2]
    for name, x in (("k_cache", cache.k), ("v_cache", cache.v)):
        if entries > 1 and x.stride(0) != rows * x.stride(1):
            raise NotImplementedError(
                f"{name} must have entries that follow each other in memory beside cache_batch_idx "
                f"or cache_leftpad, got strides {x.stride()} for shape {tuple(x.shape)}"
            )


def _gathered(x: Tensor, cache: Cache) -> Tensor:
    """(batch, row, heads, d), the first key of each sequence in row 0."""
    if cache.batch_idx is not None:
        x = x[cache.batch_idx.long()]
    if cache.leftpad is None:
        return x
    rows = torch.arange(x.shape[1], device=x.device) + cache.leftpad[:, None]
    return x[torch.arange(cache.batch, device=x.device)[:, None], rows % max(x.shape[1], 1)]
