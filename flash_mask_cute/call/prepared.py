"""A call with everything resolved that its metadata decide; running one costs as little as can be.

A launch is made once for a combination of shapes, strides, dtypes and settings, and run with the
tensors of every later call that has the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import Extras, Masks
from flash_mask_cute.call.copies import (
    any_or_none,
    convert,
    output_conversion,
    split_scale,
    tma_strides,
)
from flash_mask_cute.call.masks import MaskArguments, ResolvedMasks
from flash_mask_cute.call.resolve import ResolvedFwd
from flash_mask_cute.cpu.forward import NEG_INF, flash_attn_fwd_cpu
from flash_mask_cute.mask_prep.mask_bits import NOT_STORED, Asked, StoreBits

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", lambda: False
)
_stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


Launch: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Extras, Masks | None], tuple[Tensor, Tensor | None]
]


class KernelLaunch:
    """Runs a compiled kernel on the current stream, after what stores bits for it if anything does.

    resolved: the call as the kernel sees it.
    """

    __slots__ = (
        "_conversions", "_function", "_has_aux", "_index", "_is_out_like_q", "_lse_like",
        "_mask_arguments", "_out_shape", "_scale", "_softcap", "_store_bits", "_window_left",
        "_window_right",
    )  # fmt: skip

    def __init__(
        self,
        resolved: ResolvedFwd,
        function: Callable[..., Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        store_bits: StoreBits | None = None,
    ) -> None:
        self._function = function
        self._store_bits = store_bits
        self._has_aux = bool(resolved.problem.aux)
        self._index = q.get_device()
        self._out_shape = resolved.out_shape
        self._is_out_like_q = (
            q.is_contiguous() and q.shape == resolved.out_shape and tma_strides(q) is None
        )
        self._lse_like = None
        if resolved.problem.needs_lse:
            self._lse_like = _float_on(q.device).expand(resolved.lse_shape)
        _, self._scale = split_scale(resolved.softmax_scale)
        self._window_left = resolved.window_left
        self._window_right = resolved.window_right
        self._softcap = resolved.softcap if resolved.problem.has_softcap else None
        self._mask_arguments = MaskArguments(
            resolved.problem, resolved.choice.tiles, resolved.shapes, resolved.block_size
        )
        of_inputs = resolved.input_conversions(q, k, v).values()
        self._conversions = any_or_none(*of_inputs, output_conversion(out))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, out, lse, lse_low = extras
        if out is None:
            # the same, but `empty_like` takes half the time, as for lse
            out = torch.empty_like(q) if self._is_out_like_q else q.new_empty(self._out_shape)
        else:
            count_writing(out)
        if lse is not None:
            count_writing(lse)
        elif self._lse_like is not None:
            lse = torch.empty_like(self._lse_like)
        result = out, lse
        index = self._index
        if index >= 0 and index != current_device():
            with torch.cuda.device(index):
                return self(q, k, v, extras._replace(out=out, lse=lse), masks)
        if self._conversions is not None:
            q, k, v, sink, out = convert((q, k, v, sink, out), self._conversions)
        lists = aux_tensors = columns = block_size = bits = None
        if masks is not None:
            lists, aux_tensors, columns, block_size, bits = self._mask_arguments(
                masks, cu_seqlens_k
            )
        store_bits = self._store_bits
        if store_bits is not None:
            asked = Asked(aux_tensors, bits, (cu_seqlens_q, cu_seqlens_k))
            bits, aux_tensors = None, aux_tensors if self._has_aux else None
        for stored, part, found in NOT_STORED if store_bits is None else store_bits.parts(q, asked):
            if found is not None:
                cu_seqlens_q = cu_seqlens_k = found
            self._function(
                q, k, v, out, lse, self._scale, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
                None, self._window_left, self._window_right, sink, lists, aux_tensors,
                self._softcap, tile_counter(q, index), columns, block_size, bits, stored, part,
                lse_low,
            )  # fmt: skip
            # so that the next part has its memory
            stored = None
        return result


class EmptyLaunch:
    """Fills the outputs of a problem without keys or without queries."""

    def __init__(self, resolved: ResolvedFwd) -> None:
        self._resolved = resolved

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        out, lse = self._resolved.outputs(q, extras)
        out.zero_()
        if extras.lse_low is not None:
            extras.lse_low.zero_()
        if lse is None:
            return out, lse
        if extras.learnable_sink is None or self._resolved.shapes.batch == 0:
            lse.fill_(NEG_INF)
            return out, lse
        lse_by_row = lse.transpose(-1, -2)
        lse_by_row.copy_(extras.learnable_sink)
        if extras.seqused_q is not None:
            unused = unused_rows(lse_by_row, extras.cu_seqlens_q, extras.seqused_q)
            lse_by_row.masked_fill_(unused[..., None], NEG_INF)
        return out, lse


class CpuLaunch:
    """Computes on CPU tensors, walking the tiles of the kernel's configuration."""

    def __init__(self, resolved: ResolvedFwd, masks: ResolvedMasks) -> None:
        self._resolved = resolved
        self._masks = masks

    @torch.no_grad()
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        call = self._resolved
        out, lse = call.outputs(q, extras)
        # rows that no sequence uses, which the path leaves alone
        out.zero_()
        if lse is not None:
            lse.fill_(NEG_INF)
        if extras.lse_low is not None:
            extras.lse_low.zero_()
        flash_attn_fwd_cpu(
            q,
            k,
            v,
            softmax_scale=call.softmax_scale,
            window_left=call.window_left,
            window_right=0 if call.problem.is_causal else call.window_right,
            softcap=call.softcap,
            learnable_sink=extras.learnable_sink,
            cu_seqlens_q=extras.cu_seqlens_q,
            cu_seqlens_k=extras.cu_seqlens_k,
            seqused_q=extras.seqused_q,
            seqused_k=extras.seqused_k,
            seqlen_q=call.shapes.seqlen_q,
            seqlen_k=call.shapes.seqlen_k,
            pack_gqa=call.problem.packed_heads,
            tile_m=call.choice.tiles.walk_m,
            tile_n=call.choice.tiles.tile_n,
            out=out,
            lse=lse,
            lse_low=extras.lse_low,
            **self._masks._asdict(),
            skip_blocks=call.choice.tiles.skip_blocks,
        )
        return out, lse


# -- what a kernel needs beside the caller's tensors --------------------------------------------

_counters: dict[tuple[int, int], Tensor] = {}


def tile_counter(q: Tensor, index: int) -> Tensor:
    """Two zeros on q's device, the current one, which the kernel leaves as zeros; launches that may
    overlap get their own."""
    # A captured launch may overlap any other when its graph is replayed.
    if index < 0 or _is_capturing():
        return q.new_zeros((2,), dtype=torch.int32)
    key = index, _stream_of(index)
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = _to_keep(_new_counter, q.device)
    return counter


def _to_keep(make: Callable[[torch.device], Tensor], device: torch.device) -> Tensor:
    """A tensor that outlives the call, made in a thread of its own.

    torch.compile runs a graph once before it captures it, takes what the caller's thread allocates
    meanwhile for the graph's, and refuses to see any of it kept.
    """
    with ThreadPoolExecutor(max_workers=1) as other:
        return other.submit(make, device).result()


@functools.cache
def _float_on(device: torch.device) -> Tensor:
    return _to_keep(lambda where: torch.empty((), dtype=torch.float32, device=where), device)


def _new_counter(device: torch.device) -> Tensor:
    counter = torch.zeros((2,), dtype=torch.int32, device=device)
    # the caller's stream is another one
    torch.cuda.current_stream(device).synchronize()
    return counter


def count_writing(*tensors: Tensor) -> None:
    """Tell torch, which sees nothing of what a kernel writes, that tensors of the caller change: so
    that a backward which saved them finds out."""
    torch._C._increment_version(tensors)


def unused_rows(lse_by_row: Tensor, cu_seqlens_q: Tensor | None, seqused_q: Tensor) -> Tensor:
    """Boolean, (batch, seqlen_q) or (total_q,): which rows lie past seqused_q."""
    row = torch.arange(lse_by_row.shape[-2], device=lse_by_row.device)
    if cu_seqlens_q is None:
        return row >= seqused_q[:, None]
    owner = torch.searchsorted(cu_seqlens_q[1:].long(), row, right=True)
    owner = owner.clamp_(max=len(seqused_q) - 1)
    return row - cu_seqlens_q[owner] >= seqused_q[owner]


# -- the key of a launch ------------------------------------------------------------------------
