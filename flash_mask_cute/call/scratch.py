"""The scratch memory that the kernels of a backward share, by its plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from flash_mask_cute.call.build_backward import num_row_blocks
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.kernel_operands import num_stats, stats_words
from flash_mask_cute.call.problem import AttentionProblem
from flash_mask_cute.call.query_lists import list_extents, list_facts
from flash_mask_cute.mods.fixed_point_sums import NUM_WORDS

Shape = tuple[int, ...]


class BwdScratch(NamedTuple):
    """Shapes of tensors of 4-byte elements that each call allocates.

    stats: LSE and delta of query rows, and more (`core/row_blocks.py`). dq_sums: dQ in fp32.
    semaphores: turns of the CTAs that add to dQ. sink_parts: sums of the sink's gradient.
    dk_parts, dv_parts: sums of dK and dV, where several CTAs have the same keys. lists: query
    lists, and the memory for making them.
    """

    stats: Shape
    dq_sums: Shape | None
    semaphores: Shape | None
    sink_parts: Shape | None
    dk_parts: Shape | None
    dv_parts: Shape | None
    lists: Shape | None = None

    @staticmethod
    def of(plan: ExecutionPlan) -> BwdScratch:
        """plan: of a backward that runs kernels."""
        choice, problem, shapes, facts = plan.bwd_choice, plan.problem, plan.shapes, plan.gradients
        assert facts is not None
        tile_m = choice.tiles.tile_m
        if problem.query_lists:
            return _by_query_lists(plan)
        rows = shapes.total_q if problem.varlen_q else shapes.seqlen_q
        blocks = shapes.heads_q, num_row_blocks(rows, shapes.batch, problem.varlen_q, tile_m)
        words = stats_words(tile_m, num_stats(problem), problem.may_empty_rows)
        short = None if plan.shared is None else plan.shared.short
        adds_dq = not problem.is_wide if short is None else short.several_keys
        has_turns = adds_dq and short is None and not choice.tiles.clears_dq
        parts_k = parts_v = None
        if choice.tiles.splits_group:
            keys = shapes.total_k if problem.varlen_k else shapes.seqlen_k
            entries = 1 if problem.shared_kv else shapes.batch
            key_blocks = num_row_blocks(keys, entries, problem.varlen_k, choice.tile_n)
            parts = shapes.heads_kv * choice.group_splits, key_blocks
            parts_k = *parts, choice.tile_n * choice.tile_d
            parts_v = *parts, choice.tile_n * choice.tile_dv
        return BwdScratch(
            stats=(*blocks, words),
            dq_sums=(*blocks, tile_m * choice.tile_d) if adds_dq else None,
            semaphores=(blocks[0], blocks[1] * choice.ctas_of_tile) if has_turns else None,
            sink_parts=blocks if facts.sink_dtype else None,
            dk_parts=parts_k,
            dv_parts=parts_v,
        )

    @property
    def num_bytes(self) -> int:
        return _num_bytes(*self)

    @property
    def partial_sums_bytes(self) -> int:
        return _num_bytes(self.dk_parts, self.dv_parts)


def _by_query_lists(plan: ExecutionPlan) -> BwdScratch:
    """Heads of a group are rows of a query, and key tiles have one part of sums."""
    choice, problem, shapes = plan.bwd_choice, plan.problem, plan.shapes
    tile_m, facts = choice.tiles.tile_m, list_facts(problem)
    extents = list_extents(problem, shapes, plan.masks)
    tokens = tile_m // problem.listed_rows
    of_rows = num_stats(problem), problem.may_empty_rows, problem.listed_rows
    blocks = num_row_blocks(extents.rows, shapes.batch, problem.varlen_q, tokens)
    parts = shapes.heads_kv, extents.num_tiles(facts)
    return BwdScratch(
        stats=(shapes.heads_kv, blocks, stats_words(tile_m, *of_rows)),
        dq_sums=(shapes.heads_kv, blocks, tile_m * choice.tile_d),
        semaphores=None,
        sink_parts=(shapes.heads_q, blocks)
        if plan.gradients and plan.gradients.sink_dtype
        else None,
        dk_parts=(*parts, choice.tile_n * choice.tile_d),
        dv_parts=(*parts, choice.tile_n * choice.tile_dv),
        lists=(extents.num_words(facts),),
    )


def aux_sums_bytes(problem: AttentionProblem, sizes: Sequence[int], batch: int) -> int:
    """Of the sums of the gradients of aux tensors. sizes: elements of each aux tensor."""

    def of_element(i: int) -> int:
        if i in problem.exact_aux:
            return 8 * NUM_WORDS
        return 4 * batch if i in problem.entry_aux else 4

    return sum(sizes[i] * of_element(i) for i in problem.wants_aux)


def _num_bytes(*shapes: Shape | None) -> int:
    return sum(4 * math.prod(shape) for shape in shapes if shape is not None)
