"""The processing of scores in the Hopper backward, and where gradients of aux tensors are made."""

from dataclasses import replace
from typing import Any, NamedTuple

from cutlass import Int32

from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.row_blocks import RowBlocks
from flash_mask_cute.core.softmax import ScoreScales
from flash_mask_cute.mods.read_analysis import analyse_reads
from flash_mask_cute.mods.score_chain import ScoreChain
from flash_mask_cute.mods.walk_sums import StoredSums, WalkSums, walk_reads
from flash_mask_cute.sm90 import wgmma


class BwdScoreArgs(NamedTuple):
    """Processing of the scores, and the tensors that the modifier reads and has gradients for.

    aux_grads: of each wanted tensor, the sums of its gradient in fp32; with a fixed order of sums,
    the two tensors of `StoredSums`.
    """

    scales: ScoreScales
    aux_tensors: Any
    aux_grads: tuple | None


def make_chain(kernel: Any, score_args: BwdScoreArgs, lengths: Lengths) -> ScoreChain:
    """The chain of an MMA warpgroup. kernel: a `FlashAttentionBackwardSm90`."""
    traits, wants_aux = kernel.traits, kernel.wants_aux
    chain = ScoreChain(
        *score_args,
        wants_aux,
        kernel.score_mod,
        kernel.score_mod_bwd,
        traits.dtype,
        (traits.tile_m, traits.tile_n),
        wgmma.ELEMENTS,
        traits.first_key(),
        Int32(0),
    )
    if not wants_aux:
        return chain
    reads = analyse_reads(kernel.score_mod, score_args.aux_tensors, wants_aux)
    unordered = reads.unordered()
    if kernel.deterministic and unordered is not None:
        number, why = unordered
        raise ValueError(f"deterministic=True is not for aux_tensors[{number}], read {why}")
    # warpgroups that share keys have dS of a P in 16 bits only
    is_exact = not traits.shares_keys and score_args.scales.cap is None
    of_grads = reads.are_of_grads and is_exact
    walk = blocks = None
    # sums over a walk end with a head, and keys in common have a head's queries of each sequence
    of_walk = walk_reads(reads) if lengths.num_sequences is None else ()
    of_grads = of_grads and lengths.num_sequences is None
    if of_walk:
        assert score_args.aux_grads is not None
        targets = dict(zip(wants_aux, score_args.aux_grads, strict=True))
        found = [targets[read.number] for read in of_walk]
        if kernel.deterministic:
            slots = (reads.tensors[x.number].stored_sums(traits.tile_n) for x in of_walk)
            found = [StoredSums.create(*x, n) for x, n in zip(found, slots, strict=True)]
            of_keys = Lengths(lengths.cu_seqlens_k, None, None, None, lengths.seqlen_k, Int32(0))
            blocks = RowBlocks(of_keys, traits.tile_n)
        walk = WalkSums.create(of_walk, wgmma.ROWS_PER_THREAD, tuple(found))
    return replace(chain, of_grads=of_grads, walk=walk, blocks=blocks)
