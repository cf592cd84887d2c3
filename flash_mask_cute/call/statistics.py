"""Statistics of P: what a call asks for, its plan, and what runs it.

P is exp(score - LSE), with the LSE of a forward, so one walk over Q K^T is enough, and ranges of
keys are independent of each other. A kernel writes sums of rows and key blocks to scratch memory,
which torch adds up in a fixed order where blocks span warps, heads that do not share a tile, or key
tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import AttentionCall, Masks, Tensors
from flash_mask_cute.call.aux_sums import values_of
from flash_mask_cute.call.check.validate import check_inputs
from flash_mask_cute.call.copies import convert, split_scale, with_conversions
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.facts import Backend, CallFacts
from flash_mask_cute.call.forward import compile_fwd, cpu_call, tile_counter
from flash_mask_cute.call.kernel_operands import FORWARD, STREAM
from flash_mask_cute.call.lookup import find_fwd, metadata
from flash_mask_cute.call.mask_arguments import MaskArguments
from flash_mask_cute.call.plan import kernel_problem, with_tiles
from flash_mask_cute.call.tiles.arch import ArchSpec
from flash_mask_cute.core.packed_heads import padded_group
from flash_mask_cute.cpu.call import CpuTiles
from flash_mask_cute.cpu.statistics import statistics_cpu
from flash_mask_cute.limits import MAX_HEAD_DIM
from flash_mask_cute.masks.q_start import EACH
from flash_mask_cute.masks.selected_blocks import SelectedBlocks
from flash_mask_cute.mods.fixed_point_sums import NUM_WORDS
from flash_mask_cute.runtime.checks import brief, check_bool, check_fp32, check_int
from flash_mask_cute.runtime.dtypes import FP8
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.recent import Recent
from flash_mask_cute.runtime.target import Target

# rows of a warp, whose sums a kernel adds up
_ROWS_OF_WARP = 16
_KEYS_OF_BLOCK, _QUERIES_STEP = (64, 128), 64
_MOST_SCRATCH_BYTES = 1 << 31
# key ranges of a work tile, and key blocks of one at least
_MOST_SPLITS, _LEAST_BLOCKS = 64, 4
_MOST_KEPT = 512


class AttentionStatistics(NamedTuple):
    """The results of `attention_statistics`, fp32; None where not asked for."""

    key_sums: Tensor | None = None
    entropy: Tensor | None = None
    block_sums: Tensor | None = None
    block_maxima: Tensor | None = None


class StatisticsRequest(NamedTuple):
    """names: in the order of `AttentionStatistics`. block_size: queries and keys of a block."""

    names: tuple[str, ...]
    block_size: tuple[int, int]
    deterministic: bool

    @staticmethod
    def of(reduce: Any, block_size: Any, deterministic: Any) -> StatisticsRequest:
        """Of the arguments of a call. Raises TypeError, ValueError, NotImplementedError."""
        known = AttentionStatistics._fields
        given = (reduce,) if isinstance(reduce, str) else reduce
        if not isinstance(given, Sequence) or not all(isinstance(x, str) for x in given):
            raise TypeError(f"reduce must be a name, or a list of names, got {brief(reduce)}")
        if not given:
            raise ValueError(f"reduce must have a name of {', '.join(known)}, got {reduce!r}")
        for name in given:
            if name not in known:
                raise NotImplementedError(f"reduce supports {', '.join(known)}, got {name!r}")
        if not isinstance(block_size, Sequence) or len(block_size) != 2:
            raise ValueError(f"block_size must be (queries, keys), got {block_size!r}")
        m, n = (check_int("block_size", x, "a pair of ints") for x in block_size)
        if (m != 1 and (m < 1 or m % _QUERIES_STEP)) or n not in _KEYS_OF_BLOCK:
            raise NotImplementedError(
                f"block_size supports 1 query or a multiple of {_QUERIES_STEP}, and "
                f"{' or '.join(map(str, _KEYS_OF_BLOCK))} keys, got {tuple(block_size)}"
            )
        check_bool("deterministic", deterministic)
        return StatisticsRequest(tuple(x for x in known if x in given), (m, n), deterministic)

    @property
    def of_blocks(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name.startswith("block"))


class StatisticsFacts(CallFacts):
    """Facts of a call for which the architecture's kernel of statistics is planned."""

    @property
    def spec(self) -> ArchSpec:
        spec = super().spec
        return spec if spec.statistics is None else replace(spec, forward=spec.statistics)


def check_statistics(call: AttentionCall, lse: Any) -> None:
    """Check the arguments of a call, whose v is k. Raises TypeError, ValueError,
    NotImplementedError, naming argument and value."""
    x, masks = call.tensors, call.masks
    if getattr(x.k, "dtype", None) is FP8:
        raise NotImplementedError(f"attention_statistics does not support k in {FP8}")
    if masks is not None and isinstance(masks.block_sparse_tensors_torch, SelectedBlocks):
        raise NotImplementedError(
            "attention_statistics does not support block_sparse_tensors as SelectedBlocks, got "
            f"{brief(masks.block_sparse_tensors_torch)}"
        )
    check_inputs(call)
    *batch, queries, heads, _ = x.q.shape
    check_fp32("lse", lse, (*batch, heads, queries), x.q.device)


def plan_statistics(
    call: AttentionCall, request: StatisticsRequest, target: Target | None = None
) -> ExecutionPlan:
    """The plan of a checked call. target: as for `plan`."""
    found = CallFacts.of(call, target)
    facts = StatisticsFacts(**{x.name: getattr(found, x.name) for x in fields(found)})
    shapes, is_kernel, (m, n) = facts.shapes, facts.backend is Backend.KERNEL, request.block_size
    if is_kernel and (x := call.tensors.q).is_cuda:
        raise NotImplementedError(f"attention_statistics is not supported on {x.device} yet")
    if is_kernel and found.spec.statistics is None:
        raise NotImplementedError(f"attention_statistics is not supported on {found.spec.name}")
    if is_kernel and shapes.head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"attention_statistics supports head_dim up to {MAX_HEAD_DIM}, got {shapes.head_dim}"
        )
    group, packs = shapes.heads_q // shapes.heads_kv, None
    if padded_group(group) != group:
        packs = False  # rows of no head would count
    elif request.of_blocks and m == 1 < group and facts.may_pack:
        packs = True  # a tile then has all heads that a block sums over
    options = replaced(call.options, pack_gqa=packs, num_splits=1)
    facts = replace(facts, call=replaced(call, options=options))
    shared_kv = call.tensors.have_shared_keys
    problem = replace(kernel_problem(facts), bias_bits=0, shared_kv=shared_kv)
    plan = with_tiles(facts, problem)
    rows = min(plan.problem.packed_heads, _ROWS_OF_WARP) if m == 1 else _ROWS_OF_WARP
    problem = replace(
        plan.problem,
        statistics=request.names,
        statistics_block=(rows, min(n, plan.fwd_choice.tiles.tile_n), m == 1),
        deterministic=request.deterministic and "key_sums" in request.names,
    )
    plan = replace(plan, problem=problem)
    if not is_kernel:
        return plan
    scratch_bytes = 4 * math.prod(scratch_shape(plan, request))
    if request.of_blocks and scratch_bytes > _MOST_SCRATCH_BYTES:
        raise NotImplementedError(
            f"{request.of_blocks[0]} with block_size {(m, n)} would take {scratch_bytes} bytes of "
            f"scratch memory, more than {_MOST_SCRATCH_BYTES}: call it for fewer heads or queries"
        )
    return with_conversions(plan, call.tensors)


def scratch_shape(plan: ExecutionPlan, request: StatisticsRequest) -> tuple[int, ...]:
    """The sums that a kernel writes for blocks: (batch, heads_kv, work tiles of a group, query
    blocks, sums of one, key blocks, sums of one). The batch is 1 for packed rows."""
    shapes, (m, n) = plan.shapes, request.block_size
    rows, keys, _ = plan.problem.statistics_block
    pack = plan.problem.packed_heads
    batch, queries = shapes.batch, shapes.seqlen_q
    if plan.problem.varlen_q and m == 1:
        batch, queries = 1, shapes.total_q
    heads = shapes.heads_kv, shapes.heads_q // (shapes.heads_kv * pack)
    return batch, *heads, -(-queries // m), m * pack // rows, -(-shapes.seqlen_k // n), n // keys


def number_of_splits(plan: ExecutionPlan) -> int:
    """Key ranges of each work tile: several where work tiles alone leave SMs idle."""
    shapes, tiles, sms = plan.shapes, plan.fwd_choice.tiles, plan.target.num_sms
    pack = plan.problem.packed_heads
    blocks = -(-shapes.seqlen_q * pack // tiles.tile_m)
    count = blocks * shapes.batch * shapes.heads_q // pack
    most = min(shapes.seqlen_k // tiles.tile_n // _LEAST_BLOCKS, _MOST_SPLITS)

    def waves(splits: int) -> float:
        """Of the SMs, in units of the work."""
        return math.ceil(count * splits / sms) * sms / (count * splits)

    return min(range(1, max(most, 1) + 1), key=lambda splits: (round(waves(splits), 1), splits))


class CpuStatistics:
    """Computes on CPU tensors; of no queries or keys, all is 0."""

    def __init__(self, plan: ExecutionPlan, request: StatisticsRequest) -> None:
        self._plan, self._request = plan, request

    @torch.no_grad()
    def __call__(self, x: Tensors, masks: Masks | None, lse: Tensor) -> AttentionStatistics:
        plan, names, (m, n) = self._plan, self._request.names, self._request.block_size
        shapes = plan.shapes
        rows = tuple(x.q.shape[:-2]) if m == 1 else (shapes.batch, -(-shapes.seqlen_q // m))
        of_blocks = (*rows, shapes.heads_kv, -(-shapes.seqlen_k // n))
        sizes = x.k.shape[:-1], x.q.shape[:-1], of_blocks, of_blocks
        size_of = dict(zip(AttentionStatistics._fields, sizes, strict=True))
        sums = {name: x.q.new_zeros(size_of[name], dtype=torch.float64) for name in names}
        if plan.backend is Backend.CPU:
            tiles = CpuTiles(*plan.walk_tile, plan.problem.packed_heads)
            statistics_cpu(cpu_call(plan, x, tiles), lse, sums, (m, n))
        heads = {name: -2 if name.startswith("block") else -1 for name in names}
        return AttentionStatistics(
            **{
                name: y.movedim(heads[name], heads[name] - 1).float().contiguous()
                for name, y in sums.items()
            }
        )


class KernelStatistics:
    """Runs a compiled kernel on the current stream, and adds up what it wrote."""

    def __init__(self, plan: ExecutionPlan, request: StatisticsRequest) -> None:
        self._plan, self._request = plan, request
        self._num_splits = number_of_splits(plan)
        tiles, mods = plan.fwd_choice.tiles, plan.masks.mods
        self._function = compile_fwd(plan.problem, tiles, plan.target, mods).function
        of_masks = plan.problem, plan.shapes, plan.masks.block_size, plan.walk_tile
        self._mask_arguments = MaskArguments(*of_masks, plan.reads_lists)

    def __call__(self, x: Tensors, masks: Masks | None, lse: Tensor) -> AttentionStatistics:
        if x.q.is_cuda:
            with torch.cuda.device(x.q.device):
                return self._run(x, masks, lse)
        return self._run(x, masks, lse)

    def _run(self, x: Tensors, masks: Masks | None, lse: Tensor) -> AttentionStatistics:
        plan, names, of = self._plan, self._request.names, x.lengths
        problem, scratch = plan.problem, scratch_shape(plan, self._request)
        lanes = scratch[1] * scratch[2]
        of_blocks = scratch[0], lanes, scratch[3] * scratch[4], scratch[5] * scratch[6]
        *batch, keys, heads, _ = x.k.shape
        sizes = (*batch, heads, keys), (self._num_splits, *lse.shape), of_blocks, of_blocks
        size_of = dict(zip(AttentionStatistics._fields, sizes, strict=True))
        sums = {name: x.q.new_zeros(size_of[name], dtype=torch.float32) for name in names}
        if problem.deterministic:
            words = NUM_WORDS, *size_of["key_sums"]
            sums["key_sums"] = x.q.new_zeros(words, dtype=torch.int64)
        q, k = convert((x.q, x.k), (plan.conversions["q"], plan.conversions["k"]))
        arguments: dict[str, Any] = {"q": q, "k": k, "lse": lse.contiguous()}
        arguments |= of._asdict()
        if masks is not None:
            of_masks = self._mask_arguments(masks, of.cu_seqlens_k, of.cu_seqlens_q)
            named = "lists", "aux_tensors", "columns", "block_size", "bits"
            arguments |= zip(named, of_masks, strict=True)
        start = plan.q_start
        arguments |= {
            "scale": split_scale(plan.softmax_scale)[1],
            "window_left": plan.window_left,
            "window_right": plan.window_right,
            "softcap": plan.softcap if problem.has_softcap else None,
            "counter": tile_counter(x.q, -1 if x.q.device.index is None else x.q.device.index),
            "q_start": of.q_starts if start.kind == EACH else start.operand(),
            "partials": (
                *(sums.get(name) for name in AttentionStatistics._fields),
                *(self._num_splits, scratch[2]),
            ),
        }
        given = (arguments.get(row.argument) for row in FORWARD if row.argument != STREAM)
        self._function(*given)
        return AttentionStatistics(
            **{name: self._result(name, y, scratch) for name, y in sums.items()}
        )

    def _result(self, name: str, sums: Tensor, scratch: tuple[int, ...]) -> Tensor:
        if name == "key_sums":
            return values_of(sums).float() if self._plan.problem.deterministic else sums
        if name == "entropy":
            return sums.sum(0) if self._num_splits > 1 else sums[0]
        by_block = sums.view(scratch)
        parts = 2, 4, 6
        found = by_block.amax(parts) if name == "block_maxima" else by_block.sum(parts)
        return (
            found[0] if self._plan.problem.varlen_q and self._request.block_size[0] == 1 else found
        )


_kept: dict[Any, KernelStatistics] = Recent(_MOST_KEPT)


def prepare_statistics(
    call: AttentionCall, lse: Any, request: StatisticsRequest, target: Target | None = None
) -> CpuStatistics | KernelStatistics:
    """What runs a call: checked, planned and compiled. target: as for `plan`."""
    check_statistics(call, lse)
    plan = plan_statistics(call, request, target)
    kind = KernelStatistics if plan.backend is Backend.KERNEL else CpuStatistics
    return kind(plan, request)


def run_statistics(
    call: AttentionCall, lse: Any, request: StatisticsRequest
) -> AttentionStatistics:
    """The statistics of a call, whose v is k. Raises as `check_statistics` and
    `plan_statistics`."""
    _, key = find_fwd({}, call)
    found: CpuStatistics | KernelStatistics | None = None
    if key is not None and isinstance(lse, Tensor):
        key = key, metadata(lse), request
        found = _kept.get(key)
    if found is None:
        found = prepare_statistics(call, lse, request)
        if isinstance(found, KernelStatistics) and key is not None:
            _kept[key] = found
    return found(call.tensors, call.masks, lse)
