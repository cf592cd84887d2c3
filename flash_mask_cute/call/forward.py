"""Forwards: the kernel of a problem, compiled without real tensors, and prepared calls.

A prepared call is made once for a combination of shapes, strides, dtypes and options. It holds all
decisions that follow from these, and runs every later call with the same ones, by the kernel or on
the CPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import NO_OPTIONAL, Masks, OptionalTensors, Tensors
from flash_mask_cute.call.copies import any_or_none, convert, split_scale
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.kernel_operands import FORWARD, fakes
from flash_mask_cute.call.mask_arguments import MaskArguments
from flash_mask_cute.call.problem import AttentionProblem, Mods
from flash_mask_cute.call.splits import CombinedForward
from flash_mask_cute.call.tables import MakeDifferenceTables
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.call.tiles.config import BwdTiles, FwdTiles
from flash_mask_cute.cpu.call import CpuCall, CpuMasks, CpuTiles
from flash_mask_cute.cpu.forward import flash_attn_fwd_cpu
from flash_mask_cute.cpu.paged import keys_in_rows
from flash_mask_cute.cpu.tiles import NEG_INF
from flash_mask_cute.mask_prep.mask_bits import NO_MASK_BITS, MakeMaskBits, MaskInputs
from flash_mask_cute.masks.q_start import EACH
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.compiler import CACHE, compile_object, options_of
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.target import Target

NO_MODS = Mods()


def compile_fwd(
    problem: AttentionProblem,
    tiles: FwdTiles,
    target: Target,
    mods: Mods = NO_MODS,
    cache: CompileCache = CACHE,
) -> Compiled:
    """The compiled kernel, from the cache or built now. mods: the callables of problem's keys.

    `function` takes the operands of the table `FORWARD` but the stream, by position; None for what
    the problem does not have. q_start: a tensor, or a number, where -1 is the end.
    """
    name = arch_spec(target).of(problem).forward.cache_name
    return cached_attention(
        name, problem, tiles, target, lambda: build_fwd(problem, tiles, target, mods), cache
    )


def cached_attention(
    name: str,
    problem: AttentionProblem,
    tiles: FwdTiles | BwdTiles,
    target: Target,
    build: Callable[[], Compiled],
    cache: CompileCache,
) -> Compiled:
    """The attention kernel `name` with these tiles, from the cache or built now."""
    return cache.get(
        name,
        lambda: {"problem": asdict(problem), "tiles": asdict(tiles), "num_sms": target.num_sms},
        build,
        arch=target.arch,
        options=options_of(target),
        token=(problem, tiles, target),
    )


def build_fwd(
    problem: AttentionProblem,
    tiles: FwdTiles,
    target: Target,
    mods: Mods = NO_MODS,
) -> Compiled:
    """Compile now. `meta`: smem_bytes, and what `compile_object` reports."""
    from flash_mask_cute.rules.intervals import Intervals

    of_arch = arch_spec(target).of(problem).forward.of(problem.head_dim_v, tiles.tile_n)
    kernel = of_arch.load_class()(
        fake_tensors.cutlass_dtype(problem.dtype),
        problem.head_dim,
        problem.head_dim_v,
        qhead_per_kvhead=problem.packed_heads,
        is_causal=problem.is_causal,
        is_local=problem.is_local,
        pack_gqa=problem.packed_heads > 1,
        mask_mod=mods.mask_mod,
        score_mod=mods.score_mod,
        has_aux_tensors=bool(problem.aux),
        intervals=None if problem.intervals is None else Intervals(*problem.intervals),
        num_sms=target.num_sms,
        split=problem.split,
        page_box=problem.keys_of_box,
        shared_kv=problem.shared_kv,
        **problem.rare_options,
        **of_arch.options(tiles),
    )
    smem_bytes = kernel.traits.smem_bytes
    arguments = fakes(FORWARD, problem, tiles)
    return compile_object(kernel, arguments, options_of(target), smem_bytes=smem_bytes)


# -- prepared forwards -------------------------------------------------------------------------

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", lambda: False
)
_stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


class KernelForward:
    """Runs a compiled kernel on the current stream, after that of mask bits, if any."""

    def __init__(
        self,
        plan: ExecutionPlan,
        function: Callable[..., None],
        make_mask_bits: MakeMaskBits | None = None,
        combine: CombinedForward | None = None,
        make_tables: MakeDifferenceTables | None = None,
    ) -> None:
        self._function = function
        self._make_tables = make_tables
        self._combine = combine
        self._make_mask_bits = make_mask_bits
        self._has_aux = bool(plan.problem.aux)
        self._index = -1 if plan.device.index is None else plan.device.index
        self._out_shape = plan.out_shape
        self._is_out_like_q = plan.is_out_like_q
        self._lse_like = None
        if plan.problem.needs_lse:
            self._lse_like = _float_on(plan.device).expand(plan.lse_shape)
        _, self._scale = split_scale(plan.softmax_scale)
        self._window_left = plan.window_left
        self._window_right = plan.window_right
        self._q_start = plan.q_start.operand()
        self._reads_q_starts = plan.q_start.kind == EACH
        self._optional_of = _picker(plan.problem) if plan.problem.optional else None
        self._softcap = plan.softcap if plan.problem.has_softcap else None
        self._mask_arguments = MaskArguments(plan)
        converted = "q", "k", "v", "learnable_sink", "out"
        self._conversions = any_or_none(*(plan.conversions[name] for name in converted))

    def __call__(
        self, tensors: Tensors, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v, sink, lengths, optional, out, lse, lse_low, max_scores, _ = tensors
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, q_starts = lengths
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
                return self(replaced(tensors, out=out, lse=lse), masks)
        if self._conversions is not None:
            q, k, v, sink, out = convert((q, k, v, sink, out), self._conversions)
        lists = aux_tensors = columns = block_size = bits = None
        if masks is not None:
            lists, aux_tensors, columns, block_size, bits = self._mask_arguments(
                masks, cu_seqlens_k, cu_seqlens_q
            )
        make_mask_bits = self._make_mask_bits
        if make_mask_bits is not None:
            mask_inputs = MaskInputs(aux_tensors, bits, (cu_seqlens_q, cu_seqlens_k))
            bits, aux_tensors = None, aux_tensors if self._has_aux else None
        if aux_tensors is not None and self._make_tables is not None:
            aux_tensors = self._make_tables(aux_tensors)
        combine = self._combine
        partials, of_kernel = None, out
        if combine is not None:
            partials = combine.new_partials(q)
            if combine.is_wide:
                of_kernel = combine.of_kernel(partials, q)
        counter = tile_counter(q, index) if combine is None or combine.counts else None
        optional_of = self._optional_of
        for mask_bits, query_chunk, found in (
            NO_MASK_BITS if make_mask_bits is None else make_mask_bits(q, mask_inputs)
        ):
            if found is not None:
                cu_seqlens_q = cu_seqlens_k = found
            self._function(
                q, k, v, of_kernel, lse, self._scale, cu_seqlens_q, cu_seqlens_k, seqused_q,
                seqused_k, page_table, self._window_left, self._window_right, sink, lists,
                aux_tensors, self._softcap, counter, columns, block_size, bits, mask_bits,
                query_chunk, lse_low, max_scores,
                q_starts if self._reads_q_starts else self._q_start, partials,
                *(NO_OPTIONAL if optional_of is None else optional_of((*optional, None))),
            )  # fmt: skip
            # freed, so that the next chunk can have the same memory
            mask_bits = None
        if combine is not None and partials is not None:
            combine(partials, out, lse, sink)
        return result


def _picker(problem: AttentionProblem) -> Callable[[tuple[Tensor | None, ...]], tuple[Any, ...]]:
    """A function that picks from (*OptionalTensors, None) the fields that the kernel reads."""
    fields = OptionalTensors._fields
    return itemgetter(*(i if problem.has(name) else len(fields) for i, name in enumerate(fields)))


class EmptyForward:
    """Fills the outputs of a problem without keys or without queries."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self._new_outputs = NewOutputs(plan)
        self._has_batch = plan.shapes.batch > 0

    def __call__(
        self, tensors: Tensors, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        out, lse = self._new_outputs.of_empty_rows(tensors)
        if lse is None or tensors.learnable_sink is None or not self._has_batch:
            return out, lse
        lse_by_row = lse.transpose(-1, -2)
        lse_by_row.copy_(tensors.learnable_sink)
        of = tensors.lengths
        if of.seqused_q is not None:
            unused = unused_rows(lse_by_row, of.cu_seqlens_q, of.seqused_q)
            lse_by_row.masked_fill_(unused[..., None], NEG_INF)
        return out, lse


class CpuForward:
    """Computes on CPU tensors, walking the tiles of the kernel's configuration."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self._plan = plan
        self._new_outputs = NewOutputs(plan)

    @torch.no_grad()
    def __call__(
        self, tensors: Tensors, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        plan, x = self._plan, tensors
        # the CPU path does not write rows that no sequence uses
        out, lse = self._new_outputs.of_empty_rows(x)
        x = keys_in_rows(x)
        num_splits = 1 if plan.splits is None else plan.splits.number
        tiles = CpuTiles(
            *plan.walk_tile,
            plan.problem.packed_heads,
            plan.choice.tiles.skip_blocks,
            # sums in float64 need no order
            None if plan.problem.is_ordered else plan.problem.split,
            num_splits,
        )
        flash_attn_fwd_cpu(cpu_call(plan, replaced(x, out=out, lse=lse), tiles))
        return out, lse


def cpu_call(plan: ExecutionPlan, tensors: Tensors, tiles: CpuTiles) -> CpuCall:
    """A planned call on CPU tensors."""
    return CpuCall(
        tensors,
        CpuMasks(*plan.masks),
        tiles,
        plan.shapes.seqlen_q,
        plan.shapes.seqlen_k,
        plan.softmax_scale,
        plan.softcap,
        plan.window_left,
        window_right=0 if plan.problem.is_causal else plan.window_right,
        q_start=plan.q_start,
    )


class NewOutputs:
    """The caller's out and lse, or new uninitialised tensors."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self.out_shape = plan.out_shape
        self.lse_shape = plan.lse_shape if plan.problem.needs_lse else None

    def __call__(self, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
        q, out, lse = tensors.q, tensors.out, tensors.lse
        if out is None:
            out = q.new_empty(self.out_shape)
        if lse is None and self.lse_shape is not None:
            lse = q.new_empty(self.lse_shape, dtype=torch.float32)
        return out, lse

    def of_empty_rows(self, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
        """The same, with all outputs as a row without keys has them."""
        out, lse = self(tensors)
        values = (out, 0.0), (lse, NEG_INF), (tensors.lse_low, 0.0), (tensors.max_scores, NEG_INF)
        for output, value in values:
            if output is not None:
                output.fill_(value)
        return out, lse


# -- what a kernel needs beside the caller's tensors --------------------------------------------

_counters: dict[tuple[int, int], Tensor] = {}
# of each device, counters that nobody has yet from some number on
_new_counters: dict[int, tuple[Tensor, Iterator[int]]] = {}
_COUNTERS = 1 << 14


def tile_counter(q: Tensor, index: int) -> Tensor:
    """Two zeros on q's device, zeros again after the kernel. Launches that overlap get others."""
    if index < 0:
        return q.new_zeros((2,), dtype=torch.int32)
    if _is_capturing():
        # A captured launch may overlap any other when its graph is replayed. Zeros of the graph's
        # own would be a launch before each decoding step.
        counter = _new_counter(index)
        return q.new_zeros((2,), dtype=torch.int32) if counter is None else counter
    key = index, _stream_of(index)
    counter = _counters.get(key)
    if counter is None:
        counter = _new_counter(index)
        if counter is None:
            # the first of these, whichever thread's are kept
            counters = _to_keep(_zeros, q.device)
            _new_counters[index], counter = (counters, itertools.count(1)), counters[0]
        _counters[key] = counter
    return counter


def _new_counter(index: int) -> Tensor | None:
    """One that no launch has had, if any is left."""
    if index not in _new_counters:
        return None
    counters, numbers = _new_counters[index]
    number = next(numbers)
    return counters[number] if number < _COUNTERS else None


def _to_keep(make: Callable[[torch.device], Tensor], device: torch.device) -> Tensor:
    """A tensor that outlives the call, made in a separate thread.

    torch.compile runs a graph once before it captures it. It treats the caller thread's allocations
    in that run as the graph's, and refuses to let any of them be kept.
    """
    with ThreadPoolExecutor(max_workers=1) as other:
        return other.submit(make, device).result()


@functools.cache
def _float_on(device: torch.device) -> Tensor:
    return _to_keep(lambda where: torch.empty((), dtype=torch.float32, device=where), device)


def _zeros(device: torch.device) -> Tensor:
    counters = torch.zeros((_COUNTERS, 2), dtype=torch.int32, device=device)
    # the caller's stream is another one
    torch.cuda.current_stream(device).synchronize()
    return counters


def count_writing(*tensors: Tensor) -> None:
    """Tell torch that a kernel writes to tensors, so that backwards that saved them notice."""
    torch._C._increment_version(tensors)


def unused_rows(lse_by_row: Tensor, cu_seqlens_q: Tensor | None, seqused_q: Tensor) -> Tensor:
    """Boolean, (batch, seqlen_q) or (total_q,): true for rows past seqused_q."""
    row = torch.arange(lse_by_row.shape[-2], device=lse_by_row.device)
    if cu_seqlens_q is None:
        return row >= seqused_q[:, None]
    owner = torch.searchsorted(cu_seqlens_q[1:].long(), row, right=True)
    owner = owner.clamp_(max=len(seqused_q) - 1)
    return row - cu_seqlens_q[owner] >= seqused_q[owner]
