"""Whether a backward of each query's selection of key blocks gathers the queries of each block.

Query lists have, for each key block, the queries that chose it. The kernel visits these queries
alone, with all heads of a group at once. Other calls take the selection as bits, which all backward
kernels read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flash_mask_cute.call.facts import CallFacts
from flash_mask_cute.call.masks import ResolvedMasks
from flash_mask_cute.call.problem import AttentionProblem, FwdShapes
from flash_mask_cute.core.packed_heads import padded_group, rows_of_listed
from flash_mask_cute.limits import MOST_CTAS
from flash_mask_cute.mask_prep.query_lists import CHUNK_ROWS, ListExtents, ListFacts
from flash_mask_cute.mods.traits import find_reliance

# rows of a block of queries, and query heads of a group at most
ROWS = MOST_HEADS = 64
# keys of a work tile: each warpgroup has 64, or both the same, as always in heads above OWN_DIM
TILES_N, OWN_DIM = (128, 64), 128
# least and most bytes of the rows in a range of queries, which should mostly stay in the L2 cache
L2_BYTES, MOST_BYTES = 16 << 20, 64 << 20
# blocks of queries that a work tile should visit in a range, where selections are random
LEAST_VISITS = 8
# so that 32 bits number entries, and sums of dQ of a KV head
_MOST_NUMBERED = 1 << 31


def why_bits(facts: CallFacts, problem: AttentionProblem) -> str | None:
    """Why a backward with a selection takes it as bits, or None: it takes query lists."""
    selected, shapes, spec = facts.masks.selected, facts.shapes, facts.spec
    assert selected is not None
    group = shapes.heads_q // shapes.heads_kv if shapes.heads_kv else 0
    d, d_v = problem.head_dim, problem.head_dim_v
    entries = selected.by_entry.shape[2] * selected.by_entry.shape[3]
    if not problem.varlen_q:
        entries *= shapes.batch
    # the last row block of each sequence may be padded
    rows = shapes.total_q if problem.varlen_q else shapes.batch * shapes.seqlen_q
    of_query, tile_d = rows_of_listed(group, max(d, d_v)), 64 if d <= 64 else -(-d // 128) * 128
    sums, fills = (rows + shapes.batch * ROWS) * of_query * tile_d, padded_group(group) / of_query
    reasons = {
        f"on {spec.name}": not spec.backward.gathers_queries,
        "sums in a fixed order": problem.deterministic,
        f"groups of {group} query heads, more than {MOST_HEADS}": group > MOST_HEADS,
        f"a selection by {selected.heads} heads, more than {MOST_CTAS}": selected.heads > MOST_CTAS,
        "a selection by query head": selected.heads not in (1, shapes.heads_kv),
        f"blocks of {selected.block_size} keys, fewer than {TILES_N[-1]}": (
            selected.block_size < TILES_N[-1]
        ),
        f"groups of {group} query heads beside {max(d, d_v)} columns": fills < 0.5,
        "one batch entry of keys for all sequences": problem.shared_kv,
        "config": facts.has_config,
        f"{entries} entries": entries >= _MOST_NUMBERED,
        f"{sums} sums of dQ of a KV head": sums >= _MOST_NUMBERED,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _heads_of_masks(problem: AttentionProblem, shapes: FwdShapes, masks: ResolvedMasks) -> int:
    """The number of groups of neighbouring heads by which masks differ: 1, heads_kv or heads_q."""
    heads = 1
    if masks.column_mask is not None:
        heads = masks.column_mask.startend_row_indices.shape[1]
    if masks.mask_mod is not None and find_reliance(masks.mask_mod, problem).head:
        heads = shapes.heads_q
    return heads


def with_query_lists(facts: CallFacts, problem: AttentionProblem) -> AttentionProblem:
    """The problem of a backward with a selection, which it takes as query lists if it can."""
    call, shapes, masks = facts.call, facts.shapes, facts.masks
    if masks.selected is None or why_bits(facts, problem) is not None:
        return problem
    selected, group = masks.selected, shapes.heads_q // shapes.heads_kv
    is_wide = max(problem.head_dim, problem.head_dim_v) > OWN_DIM
    tile_n = next(n for n in TILES_N[is_wide:] if selected.block_size % n == 0)
    hides = problem.mask_mod is not None or problem.intervals is not None
    heads = _heads_of_masks(problem, shapes, masks) if hides else 1
    # Where LSE of one head shows which queries see nothing, these are in no list. LSE of a sink
    # does not show it, nor does one of modified scores: a score_mod may make those of a head -inf.
    is_modified = problem.score_mod is not None
    has_sink = call.tensors.learnable_sink is not None
    lse_shows = heads in (1, selected.heads) and not (has_sink or is_modified)
    return replace(
        problem,
        query_lists=tile_n,
        packed_heads=group,
        may_empty_rows=problem.may_empty_rows and (hides or is_modified) and not lse_shows,
        masks_by_head=heads not in (1, shapes.heads_kv),
    )


def list_facts(problem: AttentionProblem) -> ListFacts:
    """Facts that determine the code of the kernels that make lists."""
    may_hide = problem.mask_mod is not None or problem.intervals is not None
    own: dict[str, Any] = {"has_lse": may_hide and not problem.may_empty_rows}
    names = (name for name in ListFacts._fields if name not in own)
    return ListFacts(**{name: getattr(problem, name) for name in names}, **own)


def list_extents(problem: AttentionProblem, shapes: FwdShapes, masks: ResolvedMasks) -> ListExtents:
    """Extents that determine the sizes of the lists."""
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
        tile_n=problem.query_lists,
        most_rows=shapes.seqlen_q,
        range_rows=_range_rows(problem, shapes, masks),
    )


def _range_rows(problem: AttentionProblem, shapes: FwdShapes, masks: ResolvedMasks) -> int:
    """Queries at which lists are cut: as many as the L2 cache holds, with Q and dO in 16 bits and
    the sums of dQ in 32; more if lists of a range would be very short."""
    group, selected = shapes.heads_q // shapes.heads_kv, masks.selected
    assert selected is not None
    of_query = 2 * group * (shapes.head_dim + shapes.head_dim_v)
    of_query += 4 * problem.listed_rows * shapes.head_dim
    blocks = shapes.seqlen_k / selected.block_size
    visited = LEAST_VISITS * ROWS // problem.listed_rows
    rows = visited * blocks / max(selected.indices.shape[-1], 1)
    rows = min(max(rows, L2_BYTES // of_query), MOST_BYTES // of_query)
    return max(int(rows) // CHUNK_ROWS, 1) * CHUNK_ROWS
