"""What a forward's kernel may know of a choice of key blocks."""

from __future__ import annotations

from dataclasses import replace

from flash_mask_cute.call.choose.masks import ResolvedMasks
from flash_mask_cute.call.problem import AttentionProblem, FwdShapes
from flash_mask_cute.mods.traits import find_reliance
from flash_mask_cute.runtime.dtypes import dtype_name


def has_equal_walks(shapes: FwdShapes, masks: ResolvedMasks) -> bool:
    """Whether queries of a decoding call chose much less than there is, so that walks are about as
    long in sequences of any length."""
    selected = masks.selected
    if selected is None:
        return False
    chosen = shapes.seqlen_q * selected.indices.shape[-1] * selected.block_size
    return 2 * chosen <= shapes.seqlen_k


def with_choice_facts(
    problem: AttentionProblem, shapes: FwdShapes, masks: ResolvedMasks, tile_n: int
) -> AttentionProblem:
    """The problem of a forward with a choice, for tiles of tile_n keys.

    The only query of a sequence decides for whole tiles of keys. Then the kernel reads its entries,
    and nothing is launched before it. A mask_mod that does not use the head is evaluated once for
    the heads that share a tile, of which there are many, since a choice packs them.
    """
    selected, mask_mod = masks.selected, masks.mask_mod
    if selected is None:
        return problem
    is_whole = selected.block_size % tile_n == 0
    decides_alone = shapes.seqlen_q == 1 and not problem.varlen_q and mask_mod is None and is_whole
    shares_mask = False
    if problem.packed_heads > 1 and mask_mod is not None:
        shares_mask = not find_reliance(mask_mod, problem).head
    choice_dtype = dtype_name(selected.indices.dtype) if decides_alone else None
    return replace(problem, choice_dtype=choice_dtype, shares_mask=shares_mask)
