"""A selection of key blocks: what a forward's kernel may know of it, and its description."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.facts import Backend, CallFacts
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.core.packed_heads import padded_group
from flash_mask_cute.limits import MAX_HEAD_DIM, MOST_BIT_BYTES
from flash_mask_cute.mask_prep.selected_bits import WORD, QueryTiles, row_bytes
from flash_mask_cute.masks.selected_blocks import SelectedBlocks, is_chosen
from flash_mask_cute.mods.traits import find_reliance
from flash_mask_cute.runtime.dtypes import dtype_name

# keys of the largest blocks that are gathered, and those of a single query; entries of that query,
# compared with each block of a tile, or with 1024 blocks in each of a lane's words
MOST_GATHERED, MOST_GATHERED_ALONE, MOST_COMPARED = 8, 32, 1024


def selects_few_keys(facts: CallFacts) -> bool:
    """Whether queries of a decoding call chose few of the keys, so that walks are about as long in
    sequences of any length."""
    selected, shapes = facts.masks.selected, facts.shapes
    if selected is None:
        return False
    chosen = shapes.seqlen_q * selected.indices.shape[-1] * selected.block_size
    return 2 * chosen <= shapes.seqlen_k


def with_selection_facts(facts: CallFacts, plan: ExecutionPlan) -> ExecutionPlan:
    """The plan of a forward with the fields of its problem about a selection.

    If a sequence has one query, the kernel reads its entries and nothing is launched before it, or
    `why_bits` says why not. A mask_mod that does not use the head is evaluated once for the heads
    that share a tile.
    """
    selected, mask_mod, problem = facts.masks.selected, facts.masks.mask_mod, plan.problem
    if selected is None:
        return plan
    gathers = 0 if why_whole_tiles(plan) else selected.block_size
    shares_mask = False
    if problem.packed_heads > 1 and mask_mod is not None:
        shares_mask = not find_reliance(mask_mod, problem).head
    problem = replace(
        problem,
        selection_dtype=None if why_bits(plan, gathers) else dtype_name(selected.indices.dtype),
        shares_mask=shares_mask,
        gathers=gathers,
    )
    return replace(plan, problem=problem)


def why_bits(plan: ExecutionPlan, gathers: int) -> str | None:
    """Why a forward takes a selection as bits, or None: it reads the entries of the only query."""
    selected, tiles = plan.masks.selected, plan.fwd_choice.tiles
    assert selected is not None
    entries = selected.indices.shape[-1]
    if not gathers and selected.block_size % tiles.tile_n:
        # a warp compares them with 1024 blocks at a time
        entries *= -(-selected.num_blocks(plan.shapes.seqlen_k) // WORD**2)
    reasons = {
        "more than one query": plan.shapes.seqlen_q != 1 or plan.problem.varlen_q,
        "mask_mod": plan.masks.mask_mod is not None,
        f"{entries} comparisons of entries": not 0 < entries <= MOST_COMPARED,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def why_whole_tiles(plan: ExecutionPlan) -> str | None:
    """Why a forward with a selection visits whole tiles of keys, or None: it gathers the keys of
    small blocks."""
    masks, problem, shapes, spec = plan.masks, plan.problem, plan.shapes, arch_spec(plan.target)
    selected = masks.selected
    assert selected is not None
    num_blocks, tile_n = selected.num_blocks(shapes.seqlen_k), plan.fwd_choice.tiles.tile_n
    most = MOST_GATHERED_ALONE if shapes.seqlen_q == 1 else MOST_GATHERED
    tiles = QueryTiles(plan.fwd_choice.tiles.tile_m, padded_group(problem.packed_heads))
    batch, heads, rows, k = selected.by_entry.shape
    of_tiles = batch * heads * tiles.number(rows, shapes.batch if problem.varlen_q else None)
    num_bytes = 4 * of_tiles * tiles.list_length(k, num_blocks, shapes.seqlen_q)
    reasons = {
        f"blocks of {selected.block_size} keys": selected.block_size > most,
        f"tiles of {tile_n} keys": tile_n % selected.block_size > 0,
        f"on {spec.name}": not spec.forward.gathers_keys,
        f"head_dim_v {problem.head_dim_v}": problem.head_dim_v > MAX_HEAD_DIM,
        "mask_mod": masks.mask_mod is not None,
        "score_mod": masks.score_mod is not None,
        "startend_row_indices": masks.column_mask is not None,
        "keys and values in fp8": problem.in_fp8,
        "skip_blocks=False": not plan.fwd_choice.tiles.skip_blocks,
        f"lists of {num_bytes} bytes": num_bytes > MOST_BIT_BYTES,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


# -- described ---------------------------------------------------------------------------------


def explain_selection(run: ExecutionPlan, cu_seqlens_q: Tensor | None) -> str:
    """What a forward makes of its selection; empty if it has none."""
    selected = run.masks.selected
    if selected is None:
        return ""
    tiles, heads = run.fwd_choice.tiles, run.problem.packed_heads
    parts = [f"tiles of {tiles.cluster_tile_m} rows walk over what their queries chose together"]
    if heads > 1:
        queries = tiles.cluster_tile_m // padded_group(heads)
        parts[0] = f"tiles of {queries} queries x {heads} heads walk over what these chose together"
    if run.problem.selection_dtype is not None:
        parts.append("the kernel reads the entries of the only query")
    elif run.backend is Backend.KERNEL:
        num_bytes = row_bytes(selected.by_entry.shape, selected.num_blocks(run.shapes.seqlen_k))
        why = why_bits(run, run.problem.gathers)
        parts.append(f"{num_bytes} bytes of bits, made by a launch in each direction: {why}")
    if run.problem.gathers:
        lists = "" if run.problem.selection_dtype else "a second launch makes lists; "
        parts.append(f"{lists}keys are gathered, {run.problem.keys_of_box} in a copy")
    elif selected.block_size <= MOST_GATHERED:
        parts.append(f"whole tiles of keys, not gathered ones: {why_whole_tiles(run)}")
    return "; ".join([*parts, _union(run, selected, cu_seqlens_q)])


def _union(run: ExecutionPlan, selected: SelectedBlocks, cu_seqlens_q: Tensor | None) -> str:
    """Blocks of queries and of tiles, by a selection on the CPU. Hidden ones count as well."""
    on_device = selected.indices.is_cuda or (cu_seqlens_q is not None and cu_seqlens_q.is_cuda)
    if on_device or run.shapes.is_empty:
        why = "the selection is on the device" if on_device else "there is nothing to compute"
        return f"blocks of a tile are unknown: {why}"
    by_entry, pack = selected.by_entry, padded_group(run.problem.packed_heads)
    num_blocks = selected.num_blocks(run.shapes.seqlen_k)
    tile_m = run.fwd_choice.tiles.cluster_tile_m
    starts = [0, by_entry.shape[2]] if cu_seqlens_q is None else cu_seqlens_q.tolist()
    rows = tiles = of_rows = of_any = of_every = 0
    for start, end in zip(starts[:-1], starts[1:], strict=True):
        for tile in range(-(-(end - start) * pack // tile_m)):
            first = start + tile * tile_m // pack
            stop = min(start + -(-(tile + 1) * tile_m // pack), end)
            chosen = is_chosen(by_entry[:, :, first:stop], 0, num_blocks)
            rows, tiles = rows + (stop - first), tiles + 1
            of_rows += int(chosen.sum())
            of_any += int(chosen.any(2).sum())
            of_every += int(chosen.all(2).sum())
    count = by_entry.shape[0] * by_entry.shape[1]
    if not of_rows:
        return "no query chose a block"
    of_query, of_tile = of_rows / (rows * count), of_any / (tiles * count)
    text = (
        f"{of_query:.1f} blocks a query, {of_tile:.1f} a tile ({of_tile / of_query:.2f} times as "
        f"many), {of_every / of_any:.0%} of these chosen by all its queries"
    )
    if of_tile > 2 * of_query:
        text += (
            "; advice: neighbouring queries share little, and a tile computes all that one of them "
            "chose. Larger blocks, selections that neighbours share, or more query heads for a KV "
            "head make it less"
        )
    return text
