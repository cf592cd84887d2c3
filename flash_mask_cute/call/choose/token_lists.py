"""Whether a backward of each query's choice of key blocks gathers the queries of each block.

Token lists have, for each key block, the queries that chose it. The kernel visits these queries
alone, with all heads of a group at once, so what neighbouring queries share does not matter. Calls
that this rule leaves out take the choice as bits, which all backward kernels read. `explain` tells
which of both it is, and why.
"""

from __future__ import annotations

from dataclasses import replace

from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.call.choose.arch import ArchSpec
from flash_mask_cute.call.choose.masks import ResolvedMasks
from flash_mask_cute.call.problem import AttentionProblem, FwdShapes
from flash_mask_cute.call.settings import given_fields
from flash_mask_cute.mask_prep.token_lists import CHUNK_ROWS, ListExtents, ListFacts
from flash_mask_cute.mods.traits import find_reliance

# as `BwdTraits` says: query heads of a group
GROUPS = (4, 8, 16, 32, 64)
# keys of a work tile, more of them first: each warpgroup has 64, or both have the same
TILES_N = (128, 64)
# a warpgroup sums half of the columns, in one part
_DIMS = "up to 64, or from 97 to 128"
# of a GPU, with what leaves it in time
L2_BYTES = 64 << 20
# so that 32 bits number entries
_MOST_ENTRIES = 1 << 31


def why_bits(
    call: AttentionCall,
    problem: AttentionProblem,
    shapes: FwdShapes,
    masks: ResolvedMasks,
    spec: ArchSpec,
) -> str | None:
    """The reason why a backward with a choice takes it as bits, or None: it takes token lists."""
    selected = masks.selected
    assert selected is not None
    group = shapes.heads_q // shapes.heads_kv if shapes.heads_kv else 0
    d, d_v = problem.head_dim, problem.head_dim_v
    entries = selected.by_entry.shape[2] * selected.by_entry.shape[3]
    if not problem.varlen_q:
        entries *= shapes.batch
    reasons = {
        f"on {spec.name}": not spec.backward.gathers_tokens,
        f"groups of {group} query heads, not {', '.join(map(str, GROUPS))}": group not in GROUPS,
        "a choice by query head": selected.heads not in (1, shapes.heads_kv),
        f"blocks of {selected.block_size} keys, fewer than {TILES_N[-1]}": (
            selected.block_size < TILES_N[-1]
        ),
        f"head dimensions {d}/{d_v}, not {_DIMS}": any(64 < x <= 96 or x > 128 for x in (d, d_v)),
        "a score_mod": problem.score_mod is not None,
        "column intervals of other heads than the choice's": not _share_columns(masks),
        "a mask_mod or column intervals beside a sink": (
            reads_lse(problem) and call.tensors.learnable_sink is not None
        ),
        "one batch entry of keys for all sequences": problem.common_kv,
        "config": bool(given_fields(call.config)),
        f"{entries} entries": entries >= _MOST_ENTRIES,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if (
        reason is None
        and masks.mask_mod is not None
        and find_reliance(masks.mask_mod, problem).head
    ):
        return "a mask_mod that uses its head"
    return reason


def _share_columns(masks: ResolvedMasks) -> bool:
    """Whether all heads with a list see the same of its keys by column intervals, if there are
    any."""
    if masks.column_mask is None or masks.selected is None:
        return True
    return masks.column_mask.startend_row_indices.shape[1] in (1, masks.selected.heads)


def reads_lse(problem: AttentionProblem) -> bool:
    """Whether only LSE tells which queries see something, so that others are in no list."""
    return problem.mask_mod is not None or problem.intervals is not None


def with_token_lists(
    call: AttentionCall,
    problem: AttentionProblem,
    shapes: FwdShapes,
    masks: ResolvedMasks,
    spec: ArchSpec,
) -> AttentionProblem:
    """The problem of a backward with a choice, which it takes as token lists if it can."""
    if why_bits(call, problem, shapes, masks, spec) is not None:
        return problem
    # a query in a list sees something
    group = shapes.heads_q // shapes.heads_kv
    assert masks.selected is not None
    tile_n = next(n for n in TILES_N if masks.selected.block_size % n == 0)
    return replace(problem, token_lists=tile_n, packed_heads=group, may_empty_rows=False)


def list_facts(problem: AttentionProblem) -> ListFacts:
    """What determines the code of the kernels that make lists."""
    return ListFacts(
        is_causal=problem.is_causal,
        has_window_left=problem.has_window_left,
        has_window_right=problem.has_window_right,
        varlen_q=problem.varlen_q,
        varlen_k=problem.varlen_k,
        has_seqused_q=problem.has_seqused_q,
        has_seqused_k=problem.has_seqused_k,
        q_start=problem.q_start,
        has_lse=reads_lse(problem),
        is_ordered=problem.deterministic,
    )


def list_extents(problem: AttentionProblem, shapes: FwdShapes, masks: ResolvedMasks) -> ListExtents:
    """What the sizes of the lists follow from."""
    selected = masks.selected
    assert selected is not None
    return ListExtents(
        batch=shapes.batch,
        rows=shapes.total_q if problem.varlen_q else shapes.seqlen_q,
        keys=shapes.total_k if problem.varlen_k else shapes.seqlen_k,
        most_keys=shapes.seqlen_k,
        heads=selected.heads,
        k=selected.indices.shape[-1],
        block_size=selected.block_size,
        tile_n=problem.token_lists,
        most_rows=shapes.seqlen_q,
        range_rows=_range_rows(shapes),
    )


def _range_rows(shapes: FwdShapes) -> int:
    """Queries at which lists are cut: as many as the L2 cache holds with all heads of a group, Q
    and dO in 16 bits and the sums of dQ in 32."""
    group = shapes.heads_q // shapes.heads_kv
    of_query = group * (2 * (shapes.head_dim + shapes.head_dim_v) + 4 * shapes.head_dim)
    return max(L2_BYTES // of_query // CHUNK_ROWS, 1) * CHUNK_ROWS
