"""New keys and values appended to a cache: checked, and written by a kernel or by torch. Errors of
checks are those of `check/validate.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import CallLengths, OptionalTensors
from flash_mask_cute.call.cache_writes import (
    check_entries_once,
    check_rotary_positions,
    check_rotary_rows,
    check_written_once,
)
from flash_mask_cute.call.check.fp8 import check_descale, ranks, refuse_other_format
from flash_mask_cute.call.check.kvcache import Cache
from flash_mask_cute.call.check.lengths import check_batch_vector, check_cu_seqlens, packed_lengths
from flash_mask_cute.call.check.pages import check_pages
from flash_mask_cute.call.copies import byte_conversion
from flash_mask_cute.cpu.append import Slots, append_rows, lengths_with_new, rotate, slots_of
from flash_mask_cute.limits import MAX_HEAD_DIM
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import Compiled
from flash_mask_cute.runtime.checks import (
    brief,
    check_device,
    check_outputs_apart,
    check_own_memory,
    check_tensor,
)
from flash_mask_cute.runtime.compiler import by_facts, compile_object, options_of
from flash_mask_cute.runtime.dtypes import FP8, dtype_name
from flash_mask_cute.runtime.target import Target

KERNEL_NAME = "append_kv"


class Append(NamedTuple):
    """New rows, and the cache (`Cache`) that they are written into.

    k, v: (batch, row, heads_kv, d), or (row, heads_kv, d) with cu_seqlens_k_new. q: (batch,
    seqlen_q, heads_q, d), or packed with cu_seqlens_q. cos, sin: (positions, pairs), which rotate
    the new keys and q. rotary_seqlens: (batch,) int32, the position of the first new key; None:
    cache_seqlens. interleaved, advances: see `AppendKV`.
    """

    k_cache: Tensor
    v_cache: Tensor
    k: Tensor
    v: Tensor
    q: Tensor
    cache_seqlens: Tensor
    leftpad: Tensor | None = None
    batch_idx: Tensor | None = None
    page_table: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    rotary_seqlens: Tensor | None = None
    interleaved: bool = True
    advances: bool = True
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    @property
    def in_fp8(self) -> bool:
        """Whether the new rows are quantised."""
        return self.k_cache.dtype == FP8

    @property
    def written_scales(self) -> tuple[Tensor | None, Tensor | None]:
        """The scales of rows, which the write sets for the new ones."""
        scales = self.k_descale, self.v_descale
        k, v = (x if n == 3 else None for x, n in zip(scales, ranks(*scales), strict=True))
        return k, v

    @property
    def batch(self) -> int:
        return self.cache_seqlens.shape[0]

    @property
    def capacity(self) -> int:
        """Rows of a sequence."""
        return self.cache(self.batch).capacity

    def cache(self, batch: int) -> Cache:
        """The cache before the write."""
        where = self.cache_seqlens, self.leftpad, self.batch_idx, self.page_table
        descales = self.k_descale, self.v_descale
        return Cache(self.k_cache, self.v_cache, *where, batch, self.q.device, *descales)


class AppendFacts(NamedTuple):
    """Facts that determine the kernel's code: names of dtypes, and the tensors that are given.

    dtype: of the new rows. scales: the ranks of k_descale and v_descale for caches in fp8, and None
    for caches in `dtype`.
    """

    dtype: str
    is_packed: bool
    has_leftpad: bool
    has_batch_idx: bool
    has_pages: bool
    rotary_dtype: str | None
    has_rotary_seqlens: bool
    is_packed_q: bool
    interleaved: bool
    advances: bool
    scales: tuple[int | None, int | None] | None = None

    @staticmethod
    def create(x: Append) -> AppendFacts:
        rotates = x.cos is not None
        return AppendFacts(
            dtype=dtype_name(x.k.dtype),
            is_packed=x.cu_seqlens_k_new is not None,
            has_leftpad=x.leftpad is not None,
            has_batch_idx=x.batch_idx is not None,
            has_pages=x.page_table is not None,
            rotary_dtype=None if x.cos is None else dtype_name(x.cos.dtype),
            has_rotary_seqlens=rotates and x.rotary_seqlens is not None,
            is_packed_q=rotates and x.cu_seqlens_q is not None,
            interleaved=not rotates or x.interleaved,
            advances=not rotates or x.advances,
            scales=ranks(x.k_descale, x.v_descale) if x.in_fp8 else None,
        )


def append(x: Append, target: Target | None = None) -> tuple[Tensor, Tensor]:
    """Write the new rows. Returns q, rotated if there is cos, and the number of keys of each
    sequence afterwards, int32 (batch,). Both are new tensors, except q without cos.

    x: checked by `check_append`. target: of the kernel for tensors on the CPU; None: the CPU path.
    """
    if target is None and not x.k_cache.is_cuda:
        return _append_on_cpu(x)
    total = torch.empty_like(x.cache_seqlens)
    rotary = None
    q = x.q
    if x.cos is not None:
        q = torch.empty_like(x.q, memory_format=torch.contiguous_format)
        rotary = (x.cos, x.sin, x.rotary_seqlens, x.q, q, x.cu_seqlens_q)
    of_kernel = target or Target.from_device(x.k_cache.device)
    function = by_facts(KERNEL_NAME, AppendFacts.create(x), build_append, of_kernel).function
    k_cache, v_cache = x.k_cache, x.v_cache
    written: tuple[Tensor, ...] = k_cache, v_cache
    if x.in_fp8:
        written += tuple(y for y in x.written_scales if y is not None)
        k_cache, v_cache = (byte_conversion(y)(y) for y in (k_cache, v_cache))
    torch._C._increment_version(written)
    where = x.cache_seqlens, total, x.leftpad, x.batch_idx, x.page_table
    cache = k_cache, v_cache, *where, x.k_descale, x.v_descale
    with torch.cuda.device_of(x.k_cache):
        function((x.k, x.v, x.cu_seqlens_k_new), cache, rotary)
    return q, total


@contextmanager
def restored_on_error(x: Append) -> Iterator[None]:
    """Context of a call that appends rows on the CPU: if it fails, the cache is as it was."""
    slots = _slots(x)
    written = [y for y in (x.k_cache, x.v_cache, *x.written_scales) if y is not None]
    before = [(cache, [cache[slot] for slot in slots]) for cache in written]
    try:
        yield
    except BaseException:
        for cache, saved in before:
            for slot, rows in zip(slots, saved, strict=True):
                cache[slot] = rows
        raise


def _append_on_cpu(x: Append) -> tuple[Tensor, Tensor]:
    infos, slots = _lengths(x), _slots(x)
    k, q = x.k, x.q
    if x.cos is not None:
        k = _rotated(x, k, x.cu_seqlens_k_new, advances=True)
        q = _rotated(x, q, x.cu_seqlens_q, x.advances)
    append_rows(k, x.k_cache, infos, slots, x.k_descale)
    append_rows(x.v, x.v_cache, infos, slots, x.v_descale)
    total = [info.seqlen_k for info in infos]
    return q, torch.tensor(total, dtype=torch.int32, device="cpu")


def _first_positions(x: Append) -> list[int]:
    """The position of the first new key of each sequence, and of its first query."""
    return (x.cache_seqlens if x.rotary_seqlens is None else x.rotary_seqlens).tolist()


def _rotated(x: Append, rows: Tensor, cu_seqlens: Tensor | None, advances: bool) -> Tensor:
    """A rotated copy of k or q."""
    assert x.cos is not None and x.sin is not None
    out = rows.clone()
    for b, start in enumerate(_first_positions(x)):
        own: Any = b
        if cu_seqlens is not None:
            own = slice(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))
        positions = torch.full((len(rows[own]),), start, device="cpu")
        if advances:
            positions += torch.arange(len(positions), device="cpu")
        out[own] = rotate(rows[own], x.cos, x.sin, positions, x.interleaved)
    return out


def _lengths(x: Append) -> list[Any]:
    seqlen_new = x.k.shape[1] if x.cu_seqlens_k_new is None else 0
    return lengths_with_new(x.cache_seqlens.tolist(), seqlen_new, x.cu_seqlens_k_new, x.leftpad)


def _slots(x: Append) -> list[Slots]:
    return slots_of(_lengths(x), x.k_cache.shape[1], x.batch_idx, x.page_table)


# -- checks -------------------------------------------------------------------------------------


def check_append(x: Append) -> None:
    """Refuse new rows that do not fit into the cache, and arguments that do not fit the rows."""
    device = x.k_cache.device
    check_tensor("q", x.q)
    if x.cu_seqlens_k_new is not None:
        check_cu_seqlens("cu_seqlens_k_new", x.cu_seqlens_k_new, device)
    for name, new, cache in (("k", x.k, x.k_cache), ("v", x.v, x.v_cache)):
        check_tensor(f"{name}_cache", cache)
        check_tensor(name, new)
        refuse_other_format(f"{name}_cache", cache, x.q.dtype)
        if cache.dtype == FP8:
            if new.dtype != x.q.dtype:
                raise TypeError(
                    f"{name} must have the dtype of q ({x.q.dtype}) beside {name}_cache in "
                    f"float8_e4m3fn, into which it is quantised, got {new.dtype}"
                )
        elif new.dtype != cache.dtype:
            raise TypeError(
                f"{name} must have the dtype of {name}_cache ({cache.dtype}), got {new.dtype}"
            )
        check_device(name, new, device)
        rank = 4 if x.cu_seqlens_k_new is None else 3
        rows = "(batch, seqlen_new, " if rank == 4 else "(total_new, "
        if new.dim() != rank or new.shape[-2:] != cache.shape[-2:]:
            raise ValueError(
                f"{name} must have shape {rows}{', '.join(map(str, cache.shape[-2:]))}) as "
                f"{name}_cache has heads and dimensions, got {tuple(new.shape)}"
            )
        check_own_memory(f"{name}_cache", cache)
    if x.k.shape[:-2] != x.v.shape[:-2]:
        raise ValueError(
            f"k and v must have as many rows, got {tuple(x.k.shape)} and {tuple(x.v.shape)}"
        )
    if x.cu_seqlens_k_new is not None:
        if len(x.cu_seqlens_k_new) != x.batch + 1:
            raise ValueError(
                f"cu_seqlens_k_new must have shape (batch + 1,) = ({x.batch + 1},), got "
                f"({len(x.cu_seqlens_k_new)},)"
            )
    elif x.k.shape[0] != x.batch:
        raise ValueError(f"k must have batch {x.batch}, as q has, got shape {tuple(x.k.shape)}")
    _check_rotary(x)
    read = {"q": x.q, "k": x.k, "v": x.v, "rotary_cos": x.cos, "rotary_sin": x.sin}
    written: dict[str, Tensor | None] = {"k_cache": x.k_cache, "v_cache": x.v_cache}
    if x.in_fp8:
        of_rows = _check_descales(x)
        written |= of_rows
        read |= {"k_descale": x.k_descale, "v_descale": x.v_descale} | dict.fromkeys(of_rows)
    check_outputs_apart(written, read)
    if device.type == "cpu":
        _check_contents(x)


def _check_descales(x: Append) -> dict[str, Tensor | None]:
    """Check the scales of caches in fp8. Returns those that are written, by name."""
    if (most := max(x.k.shape[-1], x.v.shape[-1])) > MAX_HEAD_DIM and x.k_cache.is_cuda:
        raise NotImplementedError(
            f"k_cache and v_cache in float8_e4m3fn have up to {MAX_HEAD_DIM} columns, got {most}"
        )
    of_rows: dict[str, Tensor | None] = {}
    for name, descale, cache in (("k", x.k_descale, x.k_cache), ("v", x.v_descale, x.v_cache)):
        if descale is not None:
            check_descale(descale, f"{name}_cache", cache, x.batch)
            if descale.dim() == 3:
                check_own_memory(f"{name}_descale", descale)
                of_rows[f"{name}_descale"] = descale
    return of_rows


def _check_rotary(x: Append) -> None:
    if (x.cos is None) != (x.sin is None):
        raise ValueError(
            f"rotary_cos and rotary_sin go together, got {brief(x.cos)} and {brief(x.sin)}"
        )
    if x.cos is None or x.sin is None:
        return
    for name, table in (("rotary_cos", x.cos), ("rotary_sin", x.sin)):
        check_tensor(name, table)
        check_device(name, table, x.k_cache.device)
        if table.dtype not in (x.k.dtype, torch.float32):
            raise TypeError(
                f"{name} must have dtype float32 or that of k ({x.k.dtype}), got {table.dtype}"
            )
        if table.dim() != 2 or not 0 < 2 * table.shape[-1] <= x.k.shape[-1]:
            raise ValueError(
                f"{name} must have shape (positions, rotary_dim / 2), with rotary_dim at most "
                f"{x.k.shape[-1]}, got {tuple(table.shape)}"
            )
    if x.cos.shape != x.sin.shape or x.cos.dtype != x.sin.dtype:
        raise ValueError(
            f"rotary_cos and rotary_sin must be alike, got {brief(x.cos)} and {brief(x.sin)}"
        )
    if x.rotary_seqlens is not None:
        check_batch_vector("rotary_seqlens", x.rotary_seqlens, x.batch, x.k_cache.device)
    rank, rows = (4, "batch, seqlen_q") if x.cu_seqlens_q is None else (3, "total_q")
    if x.q.dim() != rank:
        raise ValueError(f"q must have shape ({rows}, heads_q, head_dim), got {tuple(x.q.shape)}")
    if x.cu_seqlens_q is not None:
        check_cu_seqlens("cu_seqlens_q", x.cu_seqlens_q, x.k_cache.device)
    longest = x.k.shape[1] if x.cu_seqlens_k_new is None else 0
    if x.cu_seqlens_q is None and x.advances:
        longest = max(longest, x.q.shape[1])
    check_rotary_rows(len(x.cos), x.capacity if x.rotary_seqlens is None else None, longest)


def _check_contents(x: Append) -> None:
    """Check contents of CPU tensors: lengths, places and positions."""
    if x.cu_seqlens_k_new is not None:
        packed_lengths("cu_seqlens_k_new", x.cu_seqlens_k_new.tolist(), len(x.k))
    infos = _lengths(x)
    _check_room(x, infos)
    new = [info.seqlen_k_new for info in infos]
    if x.page_table is not None:
        check_written_once(_slots(x))
    elif x.batch_idx is not None:
        check_entries_once(x.batch_idx.tolist(), new)
    if x.cos is None:
        return
    queries = [x.q.shape[1]] * x.batch
    if x.cu_seqlens_q is not None:
        queries = packed_lengths("cu_seqlens_q", x.cu_seqlens_q.tolist(), len(x.q))
    by = "cache_seqlens" if x.rotary_seqlens is None else "rotary_seqlens"
    longest = (max(n, m if x.advances else min(m, 1)) for n, m in zip(new, queries, strict=True))
    starts = _first_positions(x)
    positions = [range(first, first + n) for first, n in zip(starts, longest, strict=True)]
    check_rotary_positions(len(x.cos), by, positions)


def _check_room(x: Append, infos: list[Any]) -> None:
    """Check that the new rows fit into the cache, and where they go."""
    for b, info in enumerate(infos):
        end = info.leftpad_k + info.seqlen_k
        if info.seqlen_k_og < 0 or end > x.capacity:
            raise ValueError(
                f"cache_seqlens must leave room for the new keys: sequence {b} has "
                f"{info.leftpad_k + info.seqlen_k_og} of {x.capacity} rows in use, got "
                f"{info.seqlen_k_new} more"
            )
    if x.page_table is not None:
        keys = [info.seqlen_k for info in infos]
        total = torch.tensor(keys, dtype=torch.int32, device="cpu")
        lengths = CallLengths(page_table=x.page_table, seqused_k=total)
        check_pages(x.k_cache, lengths, OptionalTensors(x.batch_idx, x.leftpad))


# -- the kernel ---------------------------------------------------------------------------------


def build_append(facts: AppendFacts, target: Target) -> Compiled:
    """Compile now. `function` takes tuples: fields of `NewRows`, `Cache`, `Rotary`."""
    from flash_mask_cute.kernels.append_kv import AppendKV

    def rows(rank: int) -> Any:
        return fake_tensors.strided(rank, facts.dtype)

    def scales(rank: int | None) -> Any:
        return None if rank is None else fake_tensors.strided(rank, "float32")

    vector = fake_tensors.int32_vector
    rank, rank_q = 3 if facts.is_packed else 4, 3 if facts.is_packed_q else 4
    cached = rows if facts.scales is None else fake_tensors.byte_rows
    rotary = None
    if facts.rotary_dtype is not None:
        tables = tuple(fake_tensors.strided(2, facts.rotary_dtype) for _ in range(2))
        queries = rows(rank_q), rows(rank_q), vector(facts.is_packed_q)
        rotary = (*tables, vector(facts.has_rotary_seqlens), *queries)
    arguments = [
        (rows(rank), rows(rank), vector(facts.is_packed)),
        (
            *(cached(4), cached(4), vector(True), vector(True), vector(facts.has_leftpad)),
            vector(facts.has_batch_idx),
            fake_tensors.strided(2) if facts.has_pages else None,
            *map(scales, facts.scales or (None, None)),
        ),
        rotary,
        fake_tensors.stream(),
    ]
    kernel = AppendKV(facts.interleaved, facts.advances)
    return compile_object(kernel, arguments, options_of(target))
