"""Statistics of P: what a call asks for, its plan, and what runs it.

A kernel writes sums of a few rows and keys. torch adds those of a block in a fixed order, where it
spans warps, key tiles, or heads that do not share a tile.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import AttentionCall, Masks, Tensors
from flash_mask_cute.call.aux_sums import values_of
from flash_mask_cute.call.copies import convert, with_conversions
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.facts import Backend, CallFacts
from flash_mask_cute.call.plan import kernel_problem, with_tiles
from flash_mask_cute.call.second_walk import SecondWalk, prepared
from flash_mask_cute.core.packed_heads import padded_group
from flash_mask_cute.cpu.statistics import statistics_cpu
from flash_mask_cute.limits import MAX_HEAD_DIM
from flash_mask_cute.mods.fixed_point_sums import NUM_WORDS
from flash_mask_cute.runtime.checks import check_bool, check_fp32
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.target import Target

# rows of a warp, whose sums a kernel adds up
_ROWS_OF_WARP, _ROWS_OF_WARPGROUP = 16, 64
_KEYS_OF_BLOCK, _QUERIES_STEP = (64, 128), 64
_MOST_SCRATCH_BYTES = 1 << 31
# of a range of keys
_LEAST_BLOCKS = 4
_OF_BLOCKS = "block_sums", "block_maxima"


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
        known, given = AttentionStatistics._fields, [reduce] if isinstance(reduce, str) else reduce
        if not isinstance(given, list | tuple) or not given:
            raise TypeError(f"reduce must be a name, or a list of names, got {reduce!r:.80}")
        for name in given:
            if name not in known:
                raise NotImplementedError(f"reduce supports {', '.join(known)}, got {name!r}")
        if not isinstance(block_size, list | tuple) or [type(x) for x in block_size] != [int, int]:
            raise ValueError(f"block_size must be two ints, (queries, keys), got {block_size!r}")
        m, n = block_size
        if m < 1 or (m > 1 and m % _QUERIES_STEP) or n not in _KEYS_OF_BLOCK:
            supported = f"1 query or a multiple of {_QUERIES_STEP}, and a number of keys out of"
            raise NotImplementedError(
                f"block_size supports {supported} {_KEYS_OF_BLOCK}, got {(m, n)}"
            )
        check_bool("deterministic", deterministic)
        return StatisticsRequest(tuple(x for x in known if x in given), (m, n), deterministic)


def plan_statistics(
    call: AttentionCall, lse: Any, request: StatisticsRequest, target: Target | None = None
) -> ExecutionPlan:
    """Check a call, whose v is k, and plan it. target: as for `plan`. Raises TypeError, ValueError,
    NotImplementedError, naming argument and value."""
    found, x = CallFacts.of(call, target), call.tensors
    *batch, queries, heads, head_dim = x.q.shape
    is_wide = x.q.dtype == torch.float64
    check_fp32("lse", lse, (*batch, heads, queries), x.q.device, or_wide=is_wide)
    is_kernel, (m, n) = found.backend is Backend.KERNEL, request.block_size
    refused = {
        f"k in {x.k.dtype}": x.k.dtype != x.q.dtype,
        "block_sparse_tensors as SelectedBlocks": found.masks.selected is not None,
        f"GPUs of {found.spec.name}": is_kernel and found.spec.statistics is None,
        f"head_dim above {MAX_HEAD_DIM}, got {head_dim}": is_kernel and head_dim > MAX_HEAD_DIM,
    }
    for what, is_given in refused.items():
        if is_given:
            raise NotImplementedError(f"attention_statistics does not support {what}")
    facts = replace(found, second_walk="statistics")
    of_blocks = [name for name in request.names if name in _OF_BLOCKS]
    group, packs = heads // facts.shapes.heads_kv, None
    if padded_group(group) != group:
        packs = False  # rows of no head would count
    elif of_blocks and m == 1 < group and facts.may_pack:
        packs = True  # a tile then has all heads that a block sums over
    options = replaced(call.options, pack_gqa=packs, num_splits=1)
    facts = replace(facts, call=replaced(call, options=options))
    problem = replace(kernel_problem(facts), bias_bits=0, shared_kv=x.have_shared_keys)
    plan = with_tiles(facts, problem)
    rows = min(plan.problem.packed_heads, _ROWS_OF_WARP) if m == 1 else _ROWS_OF_WARP
    problem = replace(
        plan.problem,
        statistics=request.names,
        statistics_block=(rows, min(n, plan.fwd_choice.tiles.tile_n), m == 1),
        deterministic=request.deterministic
        and "key_sums" in request.names
        and _terms_of_a_key(plan, request) > 2,
    )
    plan = replace(plan, problem=problem)
    scratch_bytes = 4 * math.prod(_parts_of_blocks(plan, request))
    if is_kernel and of_blocks and scratch_bytes > _MOST_SCRATCH_BYTES:
        raise NotImplementedError(
            f"{of_blocks[0]} with block_size {(m, n)} would take {scratch_bytes} bytes of "
            f"scratch memory, more than {_MOST_SCRATCH_BYTES}: call it for fewer heads or queries"
        )
    return with_conversions(plan, x) if is_kernel else plan


def _terms_of_a_key(plan: ExecutionPlan, request: StatisticsRequest) -> float:
    """How many sums a kernel adds to that of a key, at most. Those of two have no order."""
    of, problem, tiles = plan.shapes, plan.problem, plan.fwd_choice.tiles
    if problem.varlen_q or problem.shared_kv:
        return math.inf
    of_tile = tiles.tile_m // _ROWS_OF_WARPGROUP
    if request.names == ("key_sums",) and problem.score_mod is None:
        # once if keys are rows (`KeySums`)
        of_tile = 1 if tiles.tile_m == tiles.tile_n else of_tile
    heads = of.heads_q // (of.heads_kv * problem.packed_heads)
    return heads * -(-of.seqlen_q * problem.packed_heads // tiles.tile_m) * of_tile


def _parts_of_blocks(plan: ExecutionPlan, request: StatisticsRequest) -> tuple[int, ...]:
    """The sums that are written, which the CPU path makes of whole blocks: (batch, heads_kv, work
    tiles of a group, query blocks, sums of one, key blocks, sums of one). The batch is 1 if rows of
    all sequences follow each other."""
    of, (m, n), problem = plan.shapes, request.block_size, plan.problem
    batch, queries = (1, of.total_q) if problem.varlen_q and m == 1 else (of.batch, of.seqlen_q)
    tiles, rows, keys = 1, 1, 1
    if plan.backend is Backend.KERNEL:
        tiles = of.heads_q // (of.heads_kv * problem.packed_heads)
        rows = m * problem.packed_heads // problem.statistics_block[0]
        keys = n // problem.statistics_block[1]
    return batch, of.heads_kv, tiles, -(-queries // m), rows, -(-of.seqlen_k // n), keys


class PreparedStatistics(SecondWalk):
    """Runs calls of one plan, and adds up the parts of what a kernel wrote."""

    def __init__(self, plan: ExecutionPlan, request: StatisticsRequest) -> None:
        super().__init__(plan)
        self._request, self._num_splits = request, 1
        self._parts = _parts_of_blocks(plan, request)
        if self.is_kernel:
            shapes, tiles, pack = plan.shapes, plan.fwd_choice.tiles, plan.problem.packed_heads
            blocks = -(-shapes.seqlen_q * pack // tiles.tile_m) * shapes.batch
            # ranges of keys, where work tiles alone leave SMs idle
            splits = plan.target.num_sms // (blocks * shapes.heads_q // pack)
            self._num_splits = max(min(splits, shapes.seqlen_k // tiles.tile_n // _LEAST_BLOCKS), 1)

    @torch.no_grad()
    def __call__(self, x: Tensors, masks: Masks | None, lse: Tensor) -> AttentionStatistics:
        plan, (*batch, keys, heads, _), part = self.plan, x.k.shape, self._parts
        of_blocks = part[0], part[1] * part[2], part[3] * part[4], part[5] * part[6]
        sizes = (*batch, heads, keys), (self._num_splits, *lse.shape), of_blocks, of_blocks
        size_of = dict(zip(AttentionStatistics._fields, sizes, strict=True))
        dtype = torch.float32 if self.is_kernel else torch.float64
        sums = {name: x.q.new_zeros(size_of[name], dtype=dtype) for name in self._request.names}
        if self.is_kernel:
            if plan.problem.deterministic:
                words = NUM_WORDS, *size_of["key_sums"]
                sums["key_sums"] = x.q.new_zeros(words, dtype=torch.int64)
            q, k = convert((x.q, x.k), (plan.conversions["q"], plan.conversions["k"]))
            results = (sums.get(name) for name in AttentionStatistics._fields)
            partials = *results, self._num_splits, self._parts[2]
            self.launch(x, masks, q=q, k=k, lse=lse.contiguous(), partials=partials)
        elif plan.backend is Backend.CPU:
            statistics_cpu(self.cpu_call(x), lse, sums, self._request.block_size)
        return AttentionStatistics(**{name: self._result(name, y) for name, y in sums.items()})

    def _result(self, name: str, sums: Tensor) -> Tensor:
        problem = self.plan.problem
        if name in _OF_BLOCKS:
            if math.prod(self._parts[2::2]) > 1:  # a sum of one would be a copy
                reduced = torch.amax if name == "block_maxima" else torch.sum
                sums = reduced(sums.view(self._parts), (2, 4, 6))
            sums = sums[0] if problem.varlen_q and self._request.block_size[0] == 1 else sums
        elif name == "entropy":
            sums = sums.sum(0)
        elif self.is_kernel and problem.deterministic:
            sums = values_of(sums)
        return sums.float()


def run_statistics(
    call: AttentionCall, lse: Any, request: StatisticsRequest
) -> AttentionStatistics:
    """The statistics of a call, whose v is k. Raises as `plan_statistics`."""
    walk = prepared(
        *(call, (lse,), request),
        lambda: PreparedStatistics(plan_statistics(call, lse, request), request),
    )
    return walk(call.tensors, call.masks, lse)
