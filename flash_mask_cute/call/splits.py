"""Forwards that compute their work tiles in splits: which, and what combines the results.

*By rows*: each work tile in a number of splits, as `BlockInfo` cuts it. *Stream-K*: all key blocks
in equal stream-K chunks, one for each CTA (`core/stream_k.py`). The caller requests a number
(`num_splits`), or the library chooses (0, the default): for plain decoding by its estimated cost
(`tiles/decode_costs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.call.execution_plan import ExecutionPlan, Splits
from flash_mask_cute.call.facts import CallFacts
from flash_mask_cute.call.problem import AttentionProblem, FwdShapes
from flash_mask_cute.call.selection import selects_few_keys
from flash_mask_cute.call.tiles.decode_costs import DecodingWork
from flash_mask_cute.core.fixed_splits import ONE_FIXED_SPLIT
from flash_mask_cute.core.packed_heads import padded_group
from flash_mask_cute.core.stream_k import (
    BY_ROWS,
    BY_STREAM_K,
    DECODE_ROWS,
    MAX_COLUMNS,
    PARTIAL_TILES_PER_CHUNK,
    PENDING_WORDS,
    are_busy,
)
from flash_mask_cute.limits import STRIDE_STEP, ctas_of_tile
from flash_mask_cute.masks.q_start import END
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import Compiled
from flash_mask_cute.runtime.compiler import by_facts, compile_object, options_of
from flash_mask_cute.runtime.dtypes import dtype_name
from flash_mask_cute.runtime.fake_tensors import operand, strided
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.target import Target

# before tiles are known: keys of a block, and query rows of a work tile of more than DECODE_ROWS
_KEYS, _ROWS = 128, 128
# walks of fewer blocks are not worth a combination: of decoding, and of more queries than that
_LEAST_BLOCKS, _LEAST_BLOCKS_OF_MANY = 4, 32
# work tiles of decoding, in units of SMs, from which on the last wave weighs little
_MANY_WAVES = 8
# Equal work tiles that fill so much of their waves are faster as a whole: of 512 on 132 SMs, 0.97
# of the stream of a H100 against 0.94 (docs/serving.md).
_FULL_WAVES = 0.95


def aligned_chunks(tiles: int, heads: int, num_ctas: int, tile_m: int) -> int:
    """CTAs that get chunks: num_ctas, or a few less if the equal work tiles of each head, `tiles`,
    then fill whole chunks."""
    most = num_ctas // heads
    if tile_m <= DECODE_ROWS:
        for of_head in range(most, 0, -1):
            if not are_busy(of_head * heads, num_ctas):
                break
            if tiles % of_head == 0:
                return num_ctas if of_head == most else of_head * heads
    return num_ctas


def refuse_splits(problem: AttentionProblem, what: str) -> None:
    """Refuse results that splits do not write. what: asks for splits. Raises NotImplementedError:
    lse_low or max_scores are asked for, too."""
    results = {"lse_low": "gradients by score_mod", "max_scores": "return_max_logit"}
    for name, result in results.items():
        if getattr(problem, f"needs_{name}"):
            raise NotImplementedError(
                f"{what} is not supported together with {result} ({name}), which splits do not have"
            )


def with_split(facts: CallFacts, problem: AttentionProblem) -> AttentionProblem:
    """The problem of a forward with its way of computing work tiles in splits, if any.

    A kernel writes `out` in the dtype of q, and splits of it in float32. So an `out` in float32 is
    combined from splits by rows, at least one. (In stream-K, a kernel writes `out` itself where a
    work tile lies in one chunk.)

    A single query sees the same keys without causal masking, and a kernel without masks does less.
    So later steps ask the facts, and not the problem, whether the call is causal.
    """
    x = facts.call.tensors
    # tiles say later how fixed splits are computed (`with_fixed_splits`)
    split: str | None = ONE_FIXED_SPLIT
    if not facts.is_ordered:
        split = {0: BY_STREAM_K, 1: None}.get(_number_of_splits(facts, problem), BY_ROWS)
    if split in (None, BY_STREAM_K) and x.out is not None and x.out.dtype != x.q.dtype:
        refuse_splits(problem, f"out in {x.out.dtype} of q in {x.q.dtype}")
        split = BY_ROWS
    if split is None and not facts.decodes_whole:
        return problem
    is_at_end = problem.q_start is None or facts.call.options.q_start.kind == END
    sees_all = facts.shapes.seqlen_q == 1 and not problem.varlen_q and is_at_end
    return replace(problem, split=split, is_causal=problem.is_causal and not sees_all)


def _number_of_splits(facts: CallFacts, problem: AttentionProblem) -> int:
    """Splits of each work tile, 1 for one pass, and 0 for equal stream-K chunks (BY_STREAM_K).
    Raises NotImplementedError: num_splits is requested together with lse_low or max_scores."""
    num_splits, shapes, window = facts.call.options.num_splits, facts.shapes, facts.window.visible
    if num_splits > 1:
        refuse_splits(problem, f"num_splits={num_splits}")
    if num_splits > 0:
        return num_splits
    if facts.has_config or problem.needs_lse_low or problem.needs_max_scores:
        return 1
    keys = shapes.seqlen_k if window is None else min(shapes.seqlen_k, window + shapes.seqlen_q)
    is_decoding = facts.decode_rows <= DECODE_ROWS
    if keys < _KEYS * (_LEAST_BLOCKS if is_decoding else _LEAST_BLOCKS_OF_MANY):
        return 1
    packed_heads = shapes.heads_q // shapes.heads_kv if facts.may_pack else 1
    costs = facts.spec.forward.decode_costs
    if costs is not None and is_decoding and _has_known_cost(facts, problem):
        may_differ = problem.has_seqused_k and shapes.batch > 1
        if (selected := facts.masks.selected) is not None:
            may_differ = False
            keys = min(keys, max(selected.indices.shape[-1] * selected.block_size, _KEYS))
        work = DecodingWork(
            tiles=shapes.batch * shapes.heads_q // packed_heads,
            keys=keys,
            head_dim=(shapes.head_dim + shapes.head_dim_v) / 2,
            rows=shapes.batch * shapes.seqlen_q * shapes.heads_q,
            itemsize=1 if problem.in_fp8 else 2,
        )
        return costs.cheapest(work, facts.target.num_sms, may_differ)
    tile_m = DECODE_ROWS if is_decoding else _ROWS
    return 1 if are_enough_tiles(facts, problem, packed_heads, tile_m) else 0


def _has_known_cost(facts: CallFacts, problem: AttentionProblem) -> bool:
    """Whether `DecodeCosts` are fitted to a decoding call, or it is of few chosen keys."""
    masks = facts.masks
    others = masks.score_mod, masks.mask_mod, masks.column_mask, masks.block_lists
    if problem.is_wide or problem.varlen_q or any(x is not None for x in others):
        return False
    if masks.selected is not None:
        return facts.shapes.seqlen_q == 1 and selects_few_keys(facts)
    return not (problem.in_fp8 or problem.varlen_k)


def are_enough_tiles(
    facts: CallFacts, problem: AttentionProblem, packed_heads: int, tile_m: int
) -> bool:
    """Whether work tiles of tile_m rows, with so many heads in a tile, keep all SMs busy without
    splits."""
    shapes, group = facts.shapes, padded_group(packed_heads)
    num_sms = _tiles_at_once(facts.target, problem)
    rows = shapes.seqlen_q * group
    is_decoding = rows <= DECODE_ROWS
    tiles = math.ceil(rows / tile_m) * shapes.batch
    if problem.varlen_q:
        tiles = min(tiles, shapes.total_q * group // tile_m + shapes.batch)
    tiles *= shapes.heads_q // packed_heads
    most = num_sms * _MANY_WAVES if is_decoding else num_sms
    if tiles >= most:
        return True
    varying = problem.varlen_q or problem.varlen_k or problem.has_seqused_k
    are_equal = selects_few_keys(facts) or not varying
    return are_equal and tiles >= _FULL_WAVES * num_sms * math.ceil(tiles / num_sms)


def _tiles_at_once(target: Target, problem: AttentionProblem) -> int:
    """Work tiles that run at a time."""
    return max(target.num_sms // ctas_of_tile(problem.head_dim_v), 1)


def with_splits(facts: CallFacts, plan: ExecutionPlan) -> ExecutionPlan:
    """The plan of a forward with the scratch of its splits, for tiles that are chosen."""
    if plan.problem.split is None:
        return plan
    if plan.problem.split == BY_STREAM_K:
        return replace(plan, splits=_splits_by_stream_k(plan))
    number = max(_number_of_splits(facts, plan.problem), 1)
    return replace(plan, splits=splits_by_rows(plan.problem, plan.shapes, number))


def splits_by_rows(problem: AttentionProblem, shapes: FwdShapes, number: int) -> Splits:
    """number: splits of each work tile."""
    rows = (1, shapes.total_q) if problem.varlen_q else (shapes.batch, shapes.seqlen_q)
    lse_shape = (number, *rows, shapes.heads_q)
    has_low = problem.score_mod is not None
    return Splits(BY_ROWS, number, (*lse_shape, shapes.head_dim_v), lse_shape, has_low)


def _splits_by_stream_k(plan: ExecutionPlan) -> Splits:
    """A chunk for each CTA at most, or for each pair of CTAs."""
    problem, shapes = plan.problem, plan.shapes
    num_ctas = _tiles_at_once(plan.target, problem)
    rows = tile_m = plan.fwd_choice.tiles.tile_m
    if not problem.varlen_q:
        of_sequence = shapes.seqlen_q * padded_group(problem.packed_heads)
        rows, tiles = min(rows, of_sequence), shapes.batch * math.ceil(of_sequence / tile_m)
        heads = shapes.heads_q // problem.packed_heads
        num_ctas = aligned_chunks(tiles, heads, num_ctas, tile_m)
    lse_shape = PARTIAL_TILES_PER_CHUNK * num_ctas, rows
    has_low = problem.score_mod is not None
    return Splits(BY_STREAM_K, num_ctas, (*lse_shape, shapes.head_dim_v), lse_shape, has_low)


# -- the combination ---------------------------------------------------------------------------

COMBINE_NAME = "combine"
# Of a work tile of so few rows, four warps combine a row: its splits are many, and CTAs are not.
_FEW_ROWS = 16


class CombineFacts(NamedTuple):
    """Facts that determine the code of the combination kernel (`Combine`).

    partial_dtype, dtype: of the splits' outputs and of the output. tile_m: rows of a work tile in
    stream-K; None: splits lie by rows. has_low: splits have the rounding error of their LSE.
    """

    partial_dtype: str
    dtype: str
    head_dim_v: int
    has_lse: bool
    tile_m: int | None = None
    packed_heads: int = 1
    group: int = 1
    warps_per_row: int = 1
    has_low: bool = False


def compile_combine(facts: CombineFacts, target: Target) -> Compiled:
    """The compiled kernel. `function` takes, by position: partial outputs, partial LSE, its
    rounding error or None, pending or None, out, lse or None (shapes: `kernels/combine.py`)."""
    return by_facts(COMBINE_NAME, facts, build_combine, target)


def build_combine(facts: CombineFacts, target: Target) -> Compiled:
    """Compile now."""
    from flash_mask_cute.kernels.combine import Combine

    kernel = Combine(
        facts.head_dim_v, facts.tile_m, facts.packed_heads, facts.group, facts.warps_per_row
    )
    by_stream_k = facts.tile_m is not None
    arguments: list[Any] = [
        operand(facts.partial_dtype, 3 if by_stream_k else 5, facts.head_dim_v),
        strided(2 if by_stream_k else 4, "float32"),
        strided(2 if by_stream_k else 4, "float32") if facts.has_low else None,
        strided(2) if by_stream_k else None,
        operand(facts.dtype, 4, facts.head_dim_v),
        strided(3, "float32") if facts.has_lse else None,
        fake_tensors.stream(),
    ]
    return compile_object(kernel, arguments, options_of(target))


class CombinedForward:
    """What a forward in splits needs beside its kernel: scratch memory, and the combination.
    function: of `compile_combine`, or of `build_reduce` for fixed splits of num_blocks key blocks
    each. is_wide: out is wider than q, and the attention kernel takes `of_kernel` in its place."""

    def __init__(
        self, plan: ExecutionPlan, function: Callable[..., Any], num_blocks: int | None = None
    ) -> None:
        assert plan.splits is not None
        self._splits = plan.splits
        self._is_packed = plan.problem.varlen_q
        self._by_stream_k = plan.problem.split == BY_STREAM_K
        self._fixed = () if num_blocks is None else (num_blocks,)
        self.is_wide = plan.out_dtype != plan.problem.dtype
        self._function = function

    @staticmethod
    def of_plan(plan: ExecutionPlan) -> CombinedForward:
        """For splits by rows or by stream-K."""
        assert plan.splits is not None
        problem, has_low = plan.problem, plan.splits.has_low
        of_out = plan.out_dtype, problem.head_dim_v, problem.needs_lse
        facts = CombineFacts("float32", *of_out, has_low=has_low)
        if problem.split == BY_STREAM_K:
            facts = replaced(
                facts,
                tile_m=plan.fwd_choice.tiles.tile_m,
                packed_heads=padded_group(problem.packed_heads),
                group=problem.packed_heads,
                warps_per_row=4 if plan.splits.lse_shape[1] <= _FEW_ROWS else 1,
            )
        return CombinedForward(plan, compile_combine(facts, plan.target).function)

    @property
    def counts(self) -> bool:
        """Whether CTAs of the attention kernel take work tiles from a counter."""
        return not self._by_stream_k

    def new_partials(self, like: Tensor) -> tuple[Any, ...]:
        """Scratch memory, as the attention kernel takes it."""
        splits = self._splits
        out = like.new_empty(splits.out_shape, dtype=torch.float32)
        lse = like.new_empty(splits.lse_shape, dtype=torch.float32)
        low = torch.empty_like(lse) if splits.has_low else None
        if not self._by_stream_k:
            return out, lse, low, None, splits.number, *self._fixed
        pending = like.new_empty((splits.number, PENDING_WORDS), dtype=torch.int32)
        return out, lse, low, pending, None

    def of_kernel(self, partials: tuple[Any, ...], q: Tensor) -> Tensor:
        """A tensor in the dtype of q and the shape of out, in the memory of the splits' outputs.
        The kernel reads its shape, and writes splits only."""
        of_out = partials[0][0, 0] if self._is_packed else partials[0][0]
        return of_out.view(q.dtype)[..., : of_out.shape[-1]]

    def __call__(
        self, partials: tuple[Any, ...], out: Tensor, lse: Tensor | None, sink: Tensor | None
    ) -> None:
        """Combine the splits in the scratch memory. The sink is part of the first one, but where
        splits are fixed."""
        of_out, of_lse, of_low, pending, *_ = partials
        more = sink if self._fixed else pending
        if lse is not None:
            # by rows, as the kernel takes it
            lse = lse.transpose(-1, -2)
        if self._is_packed:
            out, lse = out.unsqueeze(0), None if lse is None else lse.unsqueeze(0)
        self._function(of_out, of_lse, of_low, more, out, lse)


def check_combine(out_partial: Tensor, out_dtype: torch.dtype) -> None:
    """Refuse partial results that the kernel cannot combine, which torch combines on the CPU."""
    for name, dtype in (("out_partial", out_partial.dtype), ("out_dtype", out_dtype)):
        if dtype == torch.float64:
            raise TypeError(f"{name} must be float32, bfloat16 or float16 on a GPU, got {dtype}")
    columns = out_partial.shape[-1]
    if columns % STRIDE_STEP or not 0 < columns <= MAX_COLUMNS:
        raise NotImplementedError(
            f"out_partial must have a head_dim that is a multiple of {STRIDE_STEP} up to "
            f"{MAX_COLUMNS} on a GPU, got {columns} of shape {tuple(out_partial.shape)}"
        )


def combine_partials(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor,
    lse: Tensor | None,
    target: Target | None = None,
) -> None:
    """Combine splits that lie by rows, on the current stream.

    Shapes: out_partial (splits, batch, row, head, d) or (splits, row, head, d), lse_partial the
    same without d, out and lse the same without the splits; lse and lse_partial fp32, the others
    fp32, bf16 or fp16, any strides. A row whose splits are all empty, LSE -inf, gets 0 and -inf.
    """
    if out.numel() == 0:
        return
    if not _can_copy(out):
        combined = torch.empty_like(out, memory_format=torch.contiguous_format)
        combine_partials(out_partial, lse_partial, combined, lse, target)
        out.copy_(combined)
        return
    if out.dim() == 3:
        out_partial, lse_partial = out_partial.unsqueeze(1), lse_partial.unsqueeze(1)
        out, lse = out.unsqueeze(0), None if lse is None else lse.unsqueeze(0)
    facts = CombineFacts(
        dtype_name(out_partial.dtype), dtype_name(out.dtype), out.shape[-1], lse is not None
    )
    if not _can_copy(out_partial):
        out_partial = out_partial.clone(memory_format=torch.contiguous_format)
    function = compile_combine(facts, target or Target.from_device(out.device)).function
    with torch.cuda.device_of(out):
        function(out_partial, lse_partial, None, None, out, lse)


def _can_copy(tensor: Tensor) -> bool:
    """Whether the kernel can copy its rows: they start on 16 bytes."""
    steps = all(x % STRIDE_STEP == 0 for x in tensor.stride()[:-1])
    is_aligned = tensor.data_ptr() % fake_tensors.BASE_ALIGNMENT == 0
    return tensor.stride(-1) == 1 and steps and is_aligned
