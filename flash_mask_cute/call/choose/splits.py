"""The choice whether a forward computes its work tiles in splits, and the destination of splits.

*By rows*: each work tile in the number of splits that the caller requests (`num_splits` of 2 and
more), as `BlockInfo` cuts it. *By slots*: all key blocks in equal shares, one for each CTA
(`core/shares.py`); the library chooses this if the choice is its own (`num_splits` 0, the default).
One split is one pass, without a combination.
"""

from __future__ import annotations

import math
from dataclasses import replace

from flash_mask_cute.call.choose.execution_plan import ExecutionPlan, Splits
from flash_mask_cute.call.choose.facts import CallFacts
from flash_mask_cute.call.choose.selected import has_equal_walks
from flash_mask_cute.call.problem import AttentionProblem, FwdShapes
from flash_mask_cute.core.packed_heads import padded_group
from flash_mask_cute.core.segments import ONE_SEGMENT
from flash_mask_cute.core.shares import (
    BY_ROWS,
    BY_SLOTS,
    DECODE_ROWS,
    SLOTS_PER_SHARE,
    are_busy,
)
from flash_mask_cute.limits import ctas_of_tile
from flash_mask_cute.masks.q_start import END
from flash_mask_cute.runtime.target import Target

# keys of a block, and query rows of a work tile of more than DECODE_ROWS, where the tiles are not
# known yet
_KEYS, _ROWS = 128, 128
# walks of fewer blocks are not worth a combination: of decoding, and of more queries than that
_LEAST_BLOCKS, _LEAST_BLOCKS_OF_MANY = 4, 32
# work tiles of decoding, in units of SMs, from which on the last wave weighs little
_MANY_WAVES = 8
# Equal work tiles that fill so much of their waves are faster as a whole: of 512 on 132 SMs, 0.97
# of the stream of a H100 against 0.94 (docs/serving.md).
_FULL_WAVES = 0.95


def aligned_shares(tiles: int, heads: int, num_ctas: int, tile_m: int) -> int:
    """CTAs that have shares: num_ctas, or a few less if each head has a line of its own, with so
    many work tiles, and equal tiles then fill whole shares."""
    most = num_ctas // heads
    if tile_m <= DECODE_ROWS:
        for of_head in range(most, 0, -1):
            if not are_busy(of_head * heads, num_ctas):
                break
            if tiles % of_head == 0:
                return num_ctas if of_head == most else of_head * heads
    return num_ctas


def refuse_splits(problem: AttentionProblem, what: str) -> None:
    """Refuse results that splits do not have. what: of the call asks for splits.

    Raises:
        NotImplementedError: lse_low or max_scores are asked for, too.
    """
    for name in ("lse_low", "max_scores"):
        if getattr(problem, f"needs_{name}"):
            raise NotImplementedError(
                f"{what} is not supported together with {name}: of splits, out and lse are combined"
            )


def with_split(facts: CallFacts, problem: AttentionProblem) -> AttentionProblem:
    """The problem of a forward with its way of computing work tiles in splits, if any.

    A kernel writes `out` in the dtype of q, and splits of it in float32. So an `out` in float32 is
    combined from splits, from a single one if no more are requested. Splits by slots do not serve
    for that: a kernel writes `out` itself where a work tile has one share.

    A single query sees the same keys without causal masking, and a kernel without masks does less.
    So later steps ask the facts, and not the problem, whether the call is causal.
    """
    x = facts.call.tensors
    # tiles say later how segments are computed (`with_segments`)
    split = ONE_SEGMENT if facts.is_ordered else _choose_split(facts, problem)
    if split in (None, BY_SLOTS) and x.out is not None and x.out.dtype != x.q.dtype:
        refuse_splits(problem, f"out in {x.out.dtype} of q in {x.q.dtype}")
        split = BY_ROWS
    if split is None and not facts.decodes_whole:
        return problem
    is_at_end = problem.q_start is None or facts.call.options.q_start.kind == END
    sees_all = facts.shapes.seqlen_q == 1 and not problem.varlen_q and is_at_end
    return replace(problem, split=split, is_causal=problem.is_causal and not sees_all)


def _choose_split(facts: CallFacts, problem: AttentionProblem) -> str | None:
    """BY_ROWS, BY_SLOTS, or None: one pass.

    Tiles that the caller chose are for one pass, unless the caller also asks for splits.

    Raises:
        NotImplementedError: num_splits is requested together with lse_low or max_scores.
    """
    num_splits, shapes, window = facts.call.options.num_splits, facts.shapes, facts.window.visible
    if num_splits > 1:
        refuse_splits(problem, f"num_splits={num_splits}")
        return BY_ROWS
    if num_splits == 1:
        return None
    if facts.has_config or problem.needs_lse_low or problem.needs_max_scores:
        return None
    keys = shapes.seqlen_k if window is None else min(shapes.seqlen_k, window + shapes.seqlen_q)
    is_decoding = facts.decode_rows <= DECODE_ROWS
    if keys < _KEYS * (_LEAST_BLOCKS if is_decoding else _LEAST_BLOCKS_OF_MANY):
        return None
    packed_heads = shapes.heads_q // shapes.heads_kv if facts.may_pack else 1
    tile_m = DECODE_ROWS if is_decoding else _ROWS
    return None if are_enough_tiles(facts, problem, packed_heads, tile_m) else BY_SLOTS


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
    are_equal = has_equal_walks(facts) or not varying
    return are_equal and tiles >= _FULL_WAVES * num_sms * math.ceil(tiles / num_sms)


def _tiles_at_once(target: Target, problem: AttentionProblem) -> int:
    """Work tiles that run at a time."""
    return max(target.num_sms // ctas_of_tile(problem.head_dim_v), 1)


def with_splits(facts: CallFacts, plan: ExecutionPlan) -> ExecutionPlan:
    """The plan of a forward with the scratch of its splits, for tiles that are chosen."""
    if plan.problem.split is None:
        return plan
    if plan.problem.split == BY_SLOTS:
        return replace(plan, splits=_splits_by_slots(plan))
    number = max(facts.call.options.num_splits, 1)
    return replace(plan, splits=splits_by_rows(plan.problem, plan.shapes, number))


def splits_by_rows(problem: AttentionProblem, shapes: FwdShapes, number: int) -> Splits:
    """number: splits of each work tile."""
    rows = (1, shapes.total_q) if problem.varlen_q else (shapes.batch, shapes.seqlen_q)
    lse_shape = (number, *rows, shapes.heads_q)
    has_low = problem.score_mod is not None
    return Splits(BY_ROWS, number, (*lse_shape, shapes.head_dim_v), lse_shape, has_low)


def _splits_by_slots(plan: ExecutionPlan) -> Splits:
    """A share for each CTA at most, or for each pair of CTAs."""
    problem, shapes = plan.problem, plan.shapes
    num_ctas = _tiles_at_once(plan.target, problem)
    rows = tile_m = plan.fwd_choice.tiles.tile_m
    if not problem.varlen_q:
        of_sequence = shapes.seqlen_q * padded_group(problem.packed_heads)
        rows, tiles = min(rows, of_sequence), shapes.batch * math.ceil(of_sequence / tile_m)
        heads = shapes.heads_q // problem.packed_heads
        num_ctas = aligned_shares(tiles, heads, num_ctas, tile_m)
    lse_shape = SLOTS_PER_SHARE * num_ctas, rows
    has_low = problem.score_mod is not None
    return Splits(BY_SLOTS, num_ctas, (*lse_shape, shapes.head_dim_v), lse_shape, has_low)
