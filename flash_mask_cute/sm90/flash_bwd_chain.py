"""The processing of scores in the Hopper backward, and where gradients of aux tensors are made."""

from dataclasses import replace
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.score_gradients import BwdScoreArgs
from flash_mask_cute.mods.diagonals import UniformDiagonals
from flash_mask_cute.mods.difference_sums import DifferenceSums, summed_reads
from flash_mask_cute.mods.line_gradients import AuxElements, LineGradients
from flash_mask_cute.mods.line_sums import Line, line_groups, line_reads
from flash_mask_cute.mods.read_analysis import analyse_reads
from flash_mask_cute.mods.score_chain import ScoreChain
from flash_mask_cute.mods.score_elements import ListedQueries, Places
from flash_mask_cute.mods.walk_sums import WalkSums, walk_reads
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_bwd_traits import BwdTraits
from flash_mask_cute.sm90.line_sums import LINES
from flash_mask_cute.sm90.warpgroups import mma_warp


def make_chain(
    kernel: Any, score_args: BwdScoreArgs, lengths: Lengths, sums: cute.Tensor | None
) -> ScoreChain:
    """Of an MMA warpgroup. kernel: a `FlashAttentionBackwardSm90`. sums: `BwdSmem.sums`."""
    traits, wants_aux = kernel.traits, kernel.wants_aux
    reads, others = None, set()
    if wants_aux:
        reads = analyse_reads(kernel.score_mod, score_args.aux_tensors, wants_aux)
        others = {x.number for x in summed_reads(kernel.score_mod, reads, of_masks=True)}
        others -= {x.number for x in summed_reads(kernel.score_mod, reads, of_masks=False)}
        wants_aux = tuple(i for i in wants_aux if i not in others)
        score_args = score_args.of(kernel.wants_aux, wants_aux)
    listed = None
    if traits.tells_queries:
        listed = ListedQueries(traits.packed_heads, traits.group_size)
    tiles = traits.tile_m, traits.tile_n
    places = Places(tiles, wgmma.ELEMENTS, traits.first_key(), Int32(0), listed)
    aux = AuxElements(kernel.score_mod, wants_aux, score_args.aux_tensors, score_args.aux_grads)
    chain = ScoreChain(
        score_args.scales,
        aux,
        kernel.score_mod_bwd,
        traits.dtype,
        places,
        LineGradients((), LINES, places, aux),
        is_exact=bool(others) and traits.shares_keys,
    )
    if not wants_aux:
        return chain
    reads = reads._replace(tensors={i: reads.tensors[i] for i in wants_aux})
    targets = dict(zip(wants_aux, score_args.aux_grads or (), strict=True))
    # warpgroups that share keys have dS of a P in 16 bits only
    is_exact = not traits.shares_keys and score_args.scales.cap is None
    # sums over a walk end with a head; keys in common have a head's queries of each sequence, and
    # listed queries have all heads at once and no lines
    has_heads = lengths.num_sequences is None and not traits.by_query_lists
    # positions before 0 become 0, with other distances
    has_diagonals = lengths.q_start is None
    by_difference = None
    if sums is not None and has_heads and has_diagonals:
        by_read = summed_reads(kernel.score_mod, reads, of_masks=False)
        if by_read:
            of_warp = words_of_warp(sums, 0, mma_warp(), traits.sums_of_warp)
            of_reads = by_read, score_args.aux_tensors, tuple(targets[x.number] for x in by_read)
            by_difference = DifferenceSums.create(kernel.score_mod, *of_reads, of_warp)
    summed = {x.number for x in by_difference.reads} if by_difference is not None else ()
    are_easy = all(
        i in summed or (x.is_easy and (has_diagonals or not x.is_diagonal))
        for i, x in reads.tensors.items()
    )
    of_grads = reads.is_shift and are_easy and is_exact and has_heads
    walk, of_walk = None, walk_reads(reads) if has_heads else ()
    if of_walk:
        found = tuple(targets[read.number] for read in of_walk)
        walk = WalkSums.create(of_walk, wgmma.ROWS_PER_THREAD, found)
    groups = line_groups(line_reads(reads, has_diagonals)) if has_heads else ()
    uniform = tuple(
        UniformDiagonals.create(group, tuple(targets[x.number] for x in group.reads))
        for group in (groups if of_grads else ())
        if group.line is Line.DIAGONAL and not group.cuts
    )
    return replace(
        chain,
        of_grads=of_grads,
        walk=walk,
        by_difference=by_difference,
        along=LineGradients(groups, LINES, places, aux, by_difference, uniform),
        once=tuple(i for i, x in reads.tensors.items() if x.read_once_an_entry),
    )


def parts_of_products(traits: BwdTraits, chain: ScoreChain) -> tuple[int, int]:
    """In how many parts of its columns S of a block is computed, and dP."""
    num_parts = traits.num_score_parts(chain.num_by_parts)
    # the registers do not hold S of a whole block beside the sums of gradients
    if traits.splits_keys or chain.keeps_grads:
        return num_parts, num_parts
    # nor dP beside S if elements are found score by score, or if no branch separates the parts
    is_mixed = traits.shares_keys and chain.adds_after_walk
    return 1, num_parts if chain.adds_by_score or is_mixed else 1


def words_of_warp(sums: cute.Tensor, start: int, warp: Int32, words: int) -> cute.Tensor:
    """Those of a warp in `BwdSmem.sums`. start: of the words of warps of its kind."""
    return cute.make_tensor(sums.iterator + (start + warp * words), cute.make_layout(words))
