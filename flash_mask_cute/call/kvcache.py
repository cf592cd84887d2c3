"""A cache of keys and values: checked, and viewed as attention takes it.

Dynamo cannot trace the checks. In a compiled graph the operators run them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.call.lengths import check_batch_vector
from flash_mask_cute.call.pages import check_page_table
from flash_mask_cute.runtime.checks import brief, check_int, check_tensor


class Cache(NamedTuple):
    """The arguments of `flash_attn_with_kvcache` that describe the cache.

    k, v: (entries, rows, heads_kv, d), or pools of pages with page_table (batch, max_pages).
    seqlens: (batch,) int32, rows in use with padding, or None: all. leftpad: (batch,) int32, rows
    of padding. batch_idx: (batch,) int32, entries of sequences. batch: sequences of the call.
    """

    k: Tensor
    v: Tensor
    seqlens: Tensor | None
    leftpad: Tensor | None
    batch_idx: Tensor | None
    page_table: Tensor | None
    batch: int

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
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    max_seqlen_k: int | None
    page_table: Tensor | None


def batch_of(q: object, cu_seqlens_q: Tensor | None) -> int:
    """Number of sequences of a call; attention's own checks report errors in q."""
    if not torch.compiler.is_compiling():
        check_tensor("q", q)
        if cu_seqlens_q is not None:
            check_tensor("cu_seqlens_q", cu_seqlens_q)
    assert isinstance(q, Tensor)
    if cu_seqlens_q is None:
        return q.shape[0] if q.dim() else 0
    return max(cu_seqlens_q.numel() - 1, 0)


def refuse_given(defaults: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> None:
    """Refuse known arguments that are supported only at their defaults.

    defaults: by name, the given value and the values that mean nothing.

    Raises:
        NotImplementedError: naming argument and value.
    """
    for name, (given, accepted) in defaults.items():
        is_accepted = not isinstance(given, Tensor) and any(given is x for x in accepted)
        if not is_accepted and not (isinstance(given, int | float) and given in accepted):
            raise NotImplementedError(
                f"{name} is not supported, it must be {accepted[0]}, got {brief(given)}"
            )


def seqlens_of(cache_seqlens: Any, cache: Cache) -> Tensor | None:
    """cache_seqlens as a tensor (batch,), or None.

    Raises:
        TypeError, ValueError: naming the value.
    """
    if cache_seqlens is None:
        return None
    batch, device = cache.batch, cache.k.device
    capacity = _capacity_of(cache.k, cache.page_table)
    if isinstance(cache_seqlens, Tensor):
        if torch.compiler.is_compiling():
            return cache_seqlens
        check_batch_vector("cache_seqlens", cache_seqlens, batch, device)
        values = cache_seqlens.tolist() if device.type == "cpu" else []
        for length in values:
            _check_length(length, capacity)
        return cache_seqlens
    length = check_int("cache_seqlens", cache_seqlens, "an int, an int32 tensor (batch,) or None")
    _check_length(length, capacity)
    return torch.full((batch,), length, dtype=torch.int32, device=device)


def _check_length(length: int, capacity: int) -> None:
    if not 0 <= length <= capacity:
        raise ValueError(
            f"cache_seqlens must lie between 0 and the {capacity} rows that the cache has for a "
            f"sequence, got {length}"
        )


def check_cache(cache: Cache, startend_row_indices: object) -> None:
    """Refuse arguments that contradict each other, and errors that attention's checks would not
    name.

    Raises:
        TypeError, ValueError, NotImplementedError: naming argument and value.
    """
    if torch.compiler.is_compiling():
        return
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
    if cache.page_table is not None:
        check_page_table(k, cache.page_table)
    where = {"cache_batch_idx": cache.batch_idx, "cache_leftpad": cache.leftpad}
    given = {name: x for name, x in where.items() if x is not None}
    for name, x in given.items():
        check_batch_vector(name, x, cache.batch, k.device)
        if cache.page_table is not None:
            raise NotImplementedError(
                f"{name} is not supported beside page_table, which says where the keys of a "
                f"sequence lie, got {brief(x)}"
            )
        if startend_row_indices is not None:
            raise NotImplementedError(
                f"{name} is not supported beside startend_row_indices, got {brief(x)}"
            )
    if cache.page_table is None and cache.batch_idx is None and k.shape[0] != cache.batch:
        raise ValueError(
            f"k_cache must have batch {cache.batch}, as q has, or cache_batch_idx tells entries, "
            f"got shape {tuple(k.shape)}"
        )


def check_contents(cache: Cache) -> None:
    """Check the contents of vectors on the CPU, lengths included.

    Raises:
        ValueError: naming the value.
    """
    if torch.compiler.is_compiling() or cache.k.device.type != "cpu":
        return
    entries, rows = cache.k.shape[:2]
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


def refuse_gradients(reason: str, **tensors: Tensor | None) -> None:
    """Raise NotImplementedError if autograd would record. reason: why gradients are unsupported."""
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x is not None and x.requires_grad:
            raise NotImplementedError(
                f"{name} requires grad, and {reason}: use torch.no_grad(), or detach it"
            )


def view_of(cache: Cache, total: Tensor | None) -> CacheView:
    """The view of a cache. total: keys of each sequence without padding, if new ones were written;
    None: as the cache has them."""
    used = cache.seqlens if total is None else total
    if cache.leftpad is None and cache.batch_idx is None:
        return CacheView(cache.k, cache.v, None, used, None, cache.page_table)
    entries, rows = cache.k.shape[:2]
    if total is None:
        if used is None:
            used = torch.full((cache.batch,), rows, dtype=torch.int32, device=cache.k.device)
        if cache.leftpad is not None:
            used = used - cache.leftpad
    if cache.k.device.type == "cpu":
        k, v = (_gathered(x, cache) for x in (cache.k, cache.v))
        return CacheView(k, v, None, used, None, None)
    # Every entry begins somewhere in one packed tensor, and its length is told.
    for name, x in (("k_cache", cache.k), ("v_cache", cache.v)):
        if entries > 1 and x.stride(0) != rows * x.stride(1):
            raise NotImplementedError(
                f"{name} must have entries that follow each other in memory beside cache_batch_idx "
                f"or cache_leftpad, got strides {x.stride()} for shape {tuple(x.shape)}"
            )
    starts = cache.batch_idx
    if starts is None:
        starts = torch.arange(cache.batch, dtype=torch.int32, device=cache.k.device)
    starts = starts * rows
    if cache.leftpad is not None:
        starts = starts + cache.leftpad
    starts = torch.nn.functional.pad(starts, (0, 1), value=entries * rows)
    k, v = cache.k.flatten(0, 1), cache.v.flatten(0, 1)
    return CacheView(k, v, starts, used, rows, None)


def _gathered(x: Tensor, cache: Cache) -> Tensor:
    """(batch, row, heads, d), the first key of each sequence in row 0."""
    entries = range(cache.batch) if cache.batch_idx is None else cache.batch_idx.tolist()
    padding = [0] * cache.batch if cache.leftpad is None else cache.leftpad.tolist()
    of_sequences = [x[e].roll(-p, dims=0) for e, p in zip(entries, padding, strict=True)]
    return torch.stack(of_sequences) if of_sequences else x[:0]
