"""Whether a call's `mask_mod` is evaluated once for all heads, and how.

It is if its values do not depend on the head and there is room for them. They take a bit for each
pair of a query and a key, and a word for each tile. For large inputs, documents that are found in
the bits are computed as packed sequences.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from flash_mask_cute.call.copies import with_conversions
from flash_mask_cute.call.documents import as_rows, as_rows_bwd, can_pack, packing
from flash_mask_cute.call.execution_plan import ExecutionPlan, Instead
from flash_mask_cute.call.facts import CallFacts
from flash_mask_cute.call.problem import AttentionProblem, FwdShapes
from flash_mask_cute.call.tile_choice import choose_tiles
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.call.tiles.config import BwdChoice
from flash_mask_cute.mask_prep.documents import DOCUMENT_STRIDE, max_documents
from flash_mask_cute.mask_prep.mask_bits import (
    BitTiles,
    DocumentBitsPlan,
    EntryBitsPlan,
    MaskBitsPlan,
    MaskBitsProblem,
    SequenceBitsPlan,
    Window,
    most_tiles,
)
from flash_mask_cute.mods.traits import find_reliance
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.target import Target

# heads that share the bits: with fewer, a second kernel is not worth its launch
MIN_HEADS = 4
# queries of a block, by which a call's size is estimated
QUERY_BLOCK = 128


class Limits(NamedTuple):
    """Sizes of calls between which mask bits pay.

    max_pairs: of a query and a key, for which a launch may have bits: one entry of 32K tokens, 16
    of 8K. min_tiles: the least work tiles of a chunk of a call for each SM, because its last ones
    leave SMs idle. min_tiles_packed: blocks of QUERY_BLOCK queries, over all heads and entries, for
    each SM; with fewer, the seven launches that look for documents would cost more than they gain
    (an estimate: 20 us of a call).
    """

    max_pairs: int = 1 << 30
    min_tiles: float = 8
    min_tiles_packed: float = 32


LIMITS = Limits()


def reading_mask_bits(problem: AttentionProblem) -> AttentionProblem:
    """The problem of a kernel that reads stored results of the callable and block lists."""
    return replace(
        problem,
        mask_mod=None,
        aux=() if problem.score_mod is None else problem.aux,
        has_lists=False,
        has_full_lists=False,
        has_bits=False,
        reads_mask_bits=True,
    )


def packed_sequences(
    shapes: FwdShapes, problem: AttentionProblem
) -> tuple[FwdShapes, AttentionProblem]:
    """The same, if documents are sequences."""
    sequences, rows = shapes.batch * max_documents(shapes.seqlen_q), shapes.batch * shapes.seqlen_q
    shapes = replaced(shapes, batch=sequences, total_q=rows, total_k=rows)
    return shapes, replace(problem, varlen_q=True, varlen_k=True)


def _shares_mask_bits(plan: ExecutionPlan) -> bool:
    """Whether all heads of a call may read the same mask bits, if memory suffices."""
    problem, shapes, masks, target = plan.problem, plan.shapes, plan.masks, plan.target
    lists = masks.block_lists
    return (
        masks.mask_mod is not None
        # whose launches would read bits in two orders
        and not (isinstance(plan.choice, BwdChoice) and problem.is_wide)
        and masks.selected is None
        and arch_spec(target).reads_mask_bits
        and shapes.heads_q >= MIN_HEADS
        and problem.packed_heads == 1
        and problem.q_start is None
        and not problem.causal_each
        and not (problem.has_seqused_q or problem.has_seqused_k)
        and problem.varlen_q == problem.varlen_k
        and (lists is None or lists.mask_block_cnt.shape[1] == 1)
        and not find_reliance(masks.mask_mod, problem).head
    )


def with_mask_bits(facts: CallFacts, plan: ExecutionPlan, limits: Limits) -> ExecutionPlan:
    """The plan with the evaluation of its mask_mod before attention, if that pays. A kernel that
    reads bits may have other tiles than one that evaluates the callable."""
    problem = plan.problem
    # the mask_mod of few queries is evaluated while keys come from memory
    is_decoding = not (plan.splits is problem.page_box is None)
    if is_decoding or not _shares_mask_bits(plan):
        return plan
    reading = plan.with_choice(choose_tiles(facts, reading_mask_bits(problem)))
    mask_bits = _choose_mask_bits(reading, can_pack(facts.call), limits)
    if mask_bits is None:
        return plan
    problem = reading_mask_bits(reading.problem)
    reading = replace(reading, problem=problem, mask_bits=mask_bits, without_bits=plan)
    if not isinstance(mask_bits, DocumentBitsPlan):
        return reading
    instead = Instead(facts.call, packing(facts, mask_causal=None))
    reading = replace(reading, instead=(instead,))
    shapes, problem = packed_sequences(reading.shapes, problem)
    tensors = facts.call.tensors
    rows = as_rows(tensors) if facts.is_forward else as_rows_bwd(tensors)
    return with_conversions(replace(reading, shapes=shapes, problem=problem), rows)


def _choose_mask_bits(plan: ExecutionPlan, can_pack: bool, limits: Limits) -> MaskBitsPlan | None:
    """The plan for bits that all heads share; None: no room. plan: of a kernel that reads bits."""
    problem, shapes, masks = plan.problem, plan.shapes, plan.masks
    tiles, target = plan.bit_tiles, plan.target
    if isinstance(plan.choice, BwdChoice) and plan.choice.tiles.cta_pair:
        # a part of a walk may lie after its sequence, which places do not show
        can_pack = False
        if problem.varlen_k:
            return None
    window: Window = plan.window_left, plan.window_right
    if window == (None, None):
        window = None
    mask_mod, lists = masks.mask_mod, masks.block_lists
    assert mask_mod is not None
    bits_problem = MaskBitsProblem(
        tiles,
        problem.aux,
        has_bits=lists is not None,
        is_causal=problem.is_causal,
        has_window_left=problem.has_window_left,
        has_window_right=problem.has_window_right,
    )
    if problem.varlen_q:
        return _choose_for_sequences(shapes, bits_problem, window, limits)
    lists_differ = lists is not None and lists.mask_block_cnt.shape[0] > 1
    entries = shapes.batch if lists_differ or find_reliance(mask_mod, problem).batch else 1
    blocks = _num_blocks(shapes, tiles)
    per_launch = _blocks_per_launch(plan, entries, limits)
    if per_launch is None:
        return None
    lines = tiles.lines, tiles.words
    if can_pack and _may_hold_documents(problem, shapes, target, limits):
        seqlen = shapes.seqlen_q
        most = most_tiles(tiles, seqlen * seqlen, seqlen, seqlen, max_documents(seqlen))
        step = room = entries * most
        if per_launch < blocks:
            step = limits.max_pairs // (tiles.tile_m * tiles.tile_n)
            room = step + -(-seqlen // tiles.tile_n)
        bits_problem = replace(bits_problem, form="documents")
        extents = entries, shapes.batch, seqlen, most, step
        return DocumentBitsPlan((1, 1, room, *lines), bits_problem, window, *extents)
    shape = (entries, per_launch, -(-shapes.seqlen_k // tiles.tile_n), *lines)
    seqlens = shapes.seqlen_q, shapes.seqlen_k
    return EntryBitsPlan(shape, bits_problem, window, blocks, seqlens)


def _choose_for_sequences(
    shapes: FwdShapes, bits_problem: MaskBitsProblem, window: Window, limits: Limits
) -> SequenceBitsPlan | None:
    """The choice for packed queries and keys."""
    tiles, pairs = bits_problem.tiles, shapes.total_q * shapes.seqlen_k
    most = most_tiles(tiles, pairs, shapes.total_q, shapes.total_k, shapes.batch)
    # short sequences leave most of a tile empty
    if pairs > limits.max_pairs or most * tiles.tile_m * tiles.tile_n > 2 * limits.max_pairs:
        return None
    bits_problem = replace(bits_problem, form="sequences")
    shape = (1, 1, most, tiles.lines, tiles.words)
    return SequenceBitsPlan(shape, bits_problem, window, shapes.batch)


def _may_hold_documents(
    problem: AttentionProblem, shapes: FwdShapes, target: Target, limits: Limits
) -> bool:
    """Whether a call is large enough to search for documents, and needs no positions in them."""
    work_tiles = shapes.batch * shapes.heads_q * (shapes.seqlen_q // QUERY_BLOCK)
    return (
        shapes.seqlen_q == shapes.seqlen_k > DOCUMENT_STRIDE
        and problem.score_mod is None
        and problem.intervals is None
        and work_tiles >= limits.min_tiles_packed * target.num_sms
    )


def _num_blocks(shapes: FwdShapes, tiles: BitTiles) -> int:
    return -(-shapes.seqlen_q // tiles.tile_m)


def _blocks_per_launch(plan: ExecutionPlan, entries: int, limits: Limits) -> int | None:
    """Query blocks of a launch (a forward may be cut into several); None: no room for bits."""
    shapes, tiles = plan.shapes, plan.bit_tiles
    blocks = _num_blocks(shapes, tiles)
    if entries * shapes.seqlen_q * shapes.seqlen_k <= limits.max_pairs:
        return blocks
    most = limits.max_pairs // (entries * shapes.seqlen_k * tiles.tile_m)
    if tiles.by_key or most == 0:
        return None
    per_launch = -(-blocks // -(-blocks // most))
    tiles_per_launch = per_launch * shapes.heads_q * shapes.batch
    return per_launch if tiles_per_launch >= limits.min_tiles * plan.target.num_sms else None
