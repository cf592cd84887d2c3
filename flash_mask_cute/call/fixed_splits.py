"""Forwards whose sums are cut at fixed keys (`core/fixed_splits.py`): who computes the fixed
splits, and what runs beside the kernel. Bits are the same by each way, so shapes alone choose.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.call.execution_plan import ExecutionPlan, FixedSplits
from flash_mask_cute.call.facts import CallFacts
from flash_mask_cute.call.splits import (
    CombinedForward,
    are_enough_tiles,
    refuse_splits,
    splits_by_rows,
)
from flash_mask_cute.core.fixed_splits import ONE_FIXED_SPLIT, PARALLEL_SPLITS, SEQUENTIAL_SPLITS
from flash_mask_cute.limits import OPEN_WINDOW
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import Compiled
from flash_mask_cute.runtime.compiler import by_facts, compile_object, options_of
from flash_mask_cute.runtime.fake_tensors import operand, strided, vector
from flash_mask_cute.runtime.target import Target

# bytes of partial results that a launch may leave to another one
MOST_BYTES = 256 << 20
# CTAs compute the fixed splits of a tile in turn if it sees so few of them as a share of all
_FEW_SEEN = 0.5


def _choose_fixed_splits(facts: CallFacts, plan: ExecutionPlan) -> FixedSplits:
    keys, window = facts.call.options.seqlen_k_per_split, facts.window.visible
    assert keys is not None
    problem, shapes, tiles = plan.problem, plan.shapes, plan.fwd_choice.tiles
    # a kernel counts in 32 bits, and no sequence has more keys
    num_blocks = min(keys, OPEN_WINDOW) // tiles.tile_n
    number = max(-(-shapes.seqlen_k // (num_blocks * tiles.tile_n)), 1)
    fixed_splits = FixedSplits(ONE_FIXED_SPLIT, num_blocks, tiles.tile_n, number)
    if plan.out_dtype != problem.dtype:
        # only the launch that reduces writes it
        return fixed_splits._replace(kind=PARALLEL_SPLITS)
    if number == 1:
        return fixed_splits
    sequential = fixed_splits._replace(kind=SEQUENTIAL_SPLITS)
    if problem.needs_lse_low or problem.needs_max_scores or problem.has_seqused_q:
        # the launch that reduces does not take these
        return sequential
    if window is not None:
        seen = math.ceil((window + shapes.seqlen_q) / fixed_splits.keys) + 1
        if seen <= _FEW_SEEN * number:
            return sequential
    is_many = are_enough_tiles(facts, problem, problem.packed_heads, tiles.tile_m)
    partial_rows = number * shapes.heads_q
    partial_rows *= shapes.total_q if problem.varlen_q else shapes.batch * shapes.seqlen_q
    is_large = 4 * partial_rows * (shapes.head_dim_v + 1) > MOST_BYTES
    return sequential if is_many or is_large else fixed_splits._replace(kind=PARALLEL_SPLITS)


def with_fixed_splits(facts: CallFacts, plan: ExecutionPlan) -> ExecutionPlan:
    """The plan of a forward with the fixed splits of its keys, for tiles that are chosen."""
    problem, shapes = plan.problem, plan.shapes
    if plan.out_dtype != problem.dtype:
        refuse_splits(problem, f"out in {plan.out_dtype} of q in {problem.dtype}")
    fixed_splits = _choose_fixed_splits(facts, plan)
    problem, splits = replace(problem, split=fixed_splits.kind), None
    if fixed_splits.kind == PARALLEL_SPLITS:
        splits = splits_by_rows(problem, shapes, fixed_splits.number)._replace(kind=PARALLEL_SPLITS)
    return replace(plan, problem=problem, fixed_splits=fixed_splits, splits=splits)


# -- beside the kernel -------------------------------------------------------------------------

REDUCE_NAME = "reduce_splits"


class ReduceFacts(NamedTuple):
    """Facts that determine the code of the kernel that reduces fixed splits, as `CombineFacts`."""

    dtype: str
    head_dim_v: int
    has_lse: bool
    has_low: bool
    sink_dtype: str | None


def build_reduce(facts: ReduceFacts, target: Target) -> Compiled:
    """Compile now. `function` takes, by position: outputs of fixed splits, their LSE, its rounding
    error or None, sink or None, out, lse or None (shapes: `kernels/reduce_splits.py`)."""
    from flash_mask_cute.kernels.reduce_splits import ReduceSplits

    arguments: list[Any] = [
        operand("float32", 5, facts.head_dim_v),
        strided(4, "float32"),
        strided(4, "float32") if facts.has_low else None,
        vector(facts.sink_dtype),
        operand(facts.dtype, 4, facts.head_dim_v),
        strided(3, "float32") if facts.has_lse else None,
        fake_tensors.stream(),
    ]
    return compile_object(ReduceSplits(facts.head_dim_v), arguments, options_of(target))


class SequentialSplits:
    """Fixed splits that a CTA computes one after the other: the memory between two of them."""

    counts = True
    is_wide = False

    def __init__(self, plan: ExecutionPlan) -> None:
        assert plan.fixed_splits is not None
        tiles, head_dim_v = plan.fwd_choice.tiles, plan.problem.head_dim_v
        self._shape = plan.fixed_splits.memory_shape(tiles, head_dim_v, plan.target.num_sms)
        self._num_blocks = plan.fixed_splits.num_blocks

    def new_partials(self, like: Tensor) -> tuple[Any, ...]:
        """Scratch memory, as the attention kernel takes it."""
        return like.new_empty(self._shape, dtype=torch.float32), self._num_blocks

    def __call__(
        self, partials: tuple[Any, ...], out: Tensor, lse: Tensor | None, sink: Tensor | None
    ) -> None:
        """The kernel has done all."""


def fixed_splits_of(plan: ExecutionPlan) -> CombinedForward | SequentialSplits | None:
    """For a forward whose sums have an order; None for a single fixed split."""
    problem, fixed_splits, splits = plan.problem, plan.fixed_splits, plan.splits
    assert fixed_splits is not None
    if splits is None:
        return None if fixed_splits.number == 1 else SequentialSplits(plan)
    of_out = plan.out_dtype, problem.head_dim_v, problem.needs_lse
    facts = ReduceFacts(*of_out, splits.has_low, problem.sink_dtype)
    function = by_facts(REDUCE_NAME, facts, build_reduce, plan.target).function
    return CombinedForward(plan, function, fixed_splits.num_blocks)
