"""The choice how the segments of a forward's keys are computed (`core/segments.py`).

Bits are the same by each way, so shapes alone choose.
"""

from __future__ import annotations

import math
from dataclasses import replace

from flash_mask_cute.call.choose.execution_plan import ExecutionPlan, Segments
from flash_mask_cute.call.choose.facts import CallFacts
from flash_mask_cute.call.choose.splits import are_enough_tiles, refuse_splits, splits_by_rows
from flash_mask_cute.core.segments import BY_SEGMENTS, IN_TURN, ONE_SEGMENT
from flash_mask_cute.limits import OPEN_WINDOW

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
