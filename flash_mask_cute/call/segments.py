"""Forwards whose sums are cut at fixed keys (`core/segments.py`): who computes the segments, and
what runs beside the kernel. Bits are the same by each way, so shapes alone choose.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.call.execution_plan import ExecutionPlan, Segments
from flash_mask_cute.call.facts import CallFacts
from flash_mask_cute.call.splits import (
    are_enough_tiles,
    by_rows,
    in_splits,
    new_splits,
    refuse_splits,
    splits_by_rows,
)
from flash_mask_cute.core.segments import BY_SEGMENTS, IN_TURN, ONE_SEGMENT
from flash_mask_cute.limits import OPEN_WINDOW
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.compiler import CACHE, by_facts, compile_object, options_of
from flash_mask_cute.runtime.fake_tensors import operand, strided, vector
from flash_mask_cute.runtime.target import Target

# bytes of partial results that a launch may leave to another one
MOST_BYTES = 256 << 20
# CTAs compute the segments of a tile in turn if it sees so few of them as a share of all
_FEW_SEEN = 0.5


def _choose_segments(facts: CallFacts, plan: ExecutionPlan) -> Segments:
    """Who computes the segments."""
    keys, window = facts.call.options.seqlen_k_per_split, facts.window.visible
    assert keys is not None
    problem, shapes, tiles = plan.problem, plan.shapes, plan.fwd_choice.tiles
    # a kernel counts in 32 bits, and no sequence has more keys
    num_blocks = min(keys, OPEN_WINDOW) // tiles.tile_n
    number = max(-(-shapes.seqlen_k // (num_blocks * tiles.tile_n)), 1)
    segments = Segments(ONE_SEGMENT, num_blocks, tiles.tile_n, number)
    if plan.out_dtype != problem.dtype:
        # which only a fold of another launch writes
        return segments._replace(kind=BY_SEGMENTS)
    if number == 1:
        return segments
    in_turn = segments._replace(kind=IN_TURN)
    if problem.needs_lse_low or problem.needs_max_scores or problem.has_seqused_q:
        # which the launch that folds neither has nor knows
        return in_turn
    if window is not None:
        seen = math.ceil((window + shapes.seqlen_q) / segments.keys) + 1
        if seen <= _FEW_SEEN * number:
            return in_turn
    is_many = are_enough_tiles(facts, problem, problem.packed_heads, tiles.tile_m)
    partial_rows = number * shapes.heads_q
    partial_rows *= shapes.total_q if problem.varlen_q else shapes.batch * shapes.seqlen_q
    is_large = 4 * partial_rows * (shapes.head_dim_v + 1) > MOST_BYTES
    return in_turn if is_many or is_large else segments._replace(kind=BY_SEGMENTS)


def with_segments(facts: CallFacts, plan: ExecutionPlan) -> ExecutionPlan:
    """The plan of a forward with the segments of its keys, for tiles that are chosen."""
    problem, shapes = plan.problem, plan.shapes
    if plan.out_dtype != problem.dtype:
        refuse_splits(problem, f"out in {plan.out_dtype} of q in {problem.dtype}")
    segments = _choose_segments(facts, plan)
    problem, splits = replace(problem, split=segments.kind), None
    if segments.kind == BY_SEGMENTS:
        splits = splits_by_rows(problem, shapes, segments.number)._replace(kind=BY_SEGMENTS)
    return replace(plan, problem=problem, segments=segments, splits=splits)


# -- beside the kernel -------------------------------------------------------------------------

FOLD_NAME = "fold"


class FoldFacts(NamedTuple):
    """Facts that determine the code of the kernel that folds segments.

    dtype, sink_dtype: names of torch dtypes, of the output and of a sink. has_low: segments have
    the rounding error of their LSE.
    """

    dtype: str
    head_dim_v: int
    has_lse: bool
    has_low: bool
    sink_dtype: str | None


def compile_fold(facts: FoldFacts, target: Target, cache: CompileCache = CACHE) -> Compiled:
    """The compiled kernel. `function` takes, by position: outputs of segments, their LSE, its
    rounding error or None, sink or None, out, lse or None (shapes: `kernels/fold.py`)."""
    return by_facts(FOLD_NAME, facts, build_fold, target, cache)


def build_fold(facts: FoldFacts, target: Target) -> Compiled:
    """Compile now."""
    from flash_mask_cute.kernels.fold import Fold

    arguments: list[Any] = [
        operand("float32", 5, facts.head_dim_v),
        strided(4, "float32"),
        strided(4, "float32") if facts.has_low else None,
        vector(facts.sink_dtype),
        operand(facts.dtype, 4, facts.head_dim_v),
        strided(3, "float32") if facts.has_lse else None,
        fake_tensors.stream(),
    ]
    return compile_object(Fold(facts.head_dim_v), arguments, options_of(target))


class FoldedForward:
    """Segments that any CTA computes: their scratch memory, and the launch that folds them.

    As `CombinedForward`.
    """

    __slots__ = ("_function", "_is_packed", "_num_blocks", "_splits", "is_wide")

    counts = True

    def __init__(self, plan: ExecutionPlan) -> None:
        assert plan.splits is not None and plan.segments is not None
        problem = plan.problem
        self._splits = plan.splits
        self._num_blocks = plan.segments.num_blocks
        self._is_packed = problem.varlen_q
        self.is_wide = plan.out_dtype != problem.dtype
        facts = FoldFacts(
            plan.out_dtype,
            problem.head_dim_v,
            problem.needs_lse,
            plan.splits.has_low,
            problem.sink_dtype,
        )
        self._function = compile_fold(facts, plan.target).function

    def new_partials(self, like: Tensor) -> tuple[Any, ...]:
        """Scratch memory, as the attention kernel takes it."""
        splits = self._splits
        return *new_splits(splits, like), None, splits.number, self._num_blocks

    def of_kernel(self, partials: tuple[Any, ...], q: Tensor) -> Tensor:
        """As `in_splits`."""
        return in_splits(partials[0], self._is_packed, q)

    def __call__(
        self, partials: tuple[Any, ...], out: Tensor, lse: Tensor | None, sink: Tensor | None
    ) -> None:
        """Fold the segments in the scratch memory."""
        of_out, of_lse, of_low, *_ = partials
        self._function(of_out, of_lse, of_low, sink, *by_rows(out, lse, self._is_packed))


class InTurnForward:
    """Segments that a CTA computes one after the other: the memory between two of them."""

    __slots__ = ("_num_blocks", "_shape")

    counts = True
    is_wide = False

    def __init__(self, plan: ExecutionPlan) -> None:
        assert plan.segments is not None
        tiles, head_dim_v = plan.fwd_choice.tiles, plan.problem.head_dim_v
        self._shape = plan.segments.memory_shape(tiles, head_dim_v, plan.target.num_sms)
        self._num_blocks = plan.segments.num_blocks

    def new_partials(self, like: Tensor) -> tuple[Any, ...]:
        """Scratch memory, as the attention kernel takes it."""
        return like.new_empty(self._shape, dtype=torch.float32), self._num_blocks

    def of_kernel(self, partials: tuple[Any, ...], q: Tensor) -> Tensor:
        raise NotImplementedError("an output wider than q is folded by another launch")

    def __call__(
        self, partials: tuple[Any, ...], out: Tensor, lse: Tensor | None, sink: Tensor | None
    ) -> None:
        """The kernel has done all."""


def segments_of(plan: ExecutionPlan) -> FoldedForward | InTurnForward | None:
    """For a forward whose sums have an order; None for a single segment."""
    assert plan.segments is not None
    if plan.problem.split == BY_SEGMENTS:
        return FoldedForward(plan)
    return None if plan.segments.number == 1 else InTurnForward(plan)
