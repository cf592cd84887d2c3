"""What a forward's kernel may know of a choice of key blocks."""

from __future__ import annotations

from dataclasses import replace

from flash_mask_cute.call.choose.execution_plan import ExecutionPlan
from flash_mask_cute.call.choose.facts import CallFacts
from flash_mask_cute.mods.traits import find_reliance
from flash_mask_cute.runtime.dtypes import dtype_name


def has_equal_walks(facts: CallFacts) -> bool:
    """Whether queries of a decoding call chose much less than there is, so that walks are about as
    long in sequences of any length."""
    selected, shapes = facts.masks.selected, facts.shapes
    if selected is None:
        return False
    chosen = shapes.seqlen_q * selected.indices.shape[-1] * selected.block_size
    return 2 * chosen <= shapes.seqlen_k


def with_choice_facts(facts: CallFacts, plan: ExecutionPlan) -> ExecutionPlan:
    """The plan of a forward with what its kernel may know of a choice.

    The only query of a sequence decides for whole tiles of keys. Then the kernel reads its entries,
    and nothing is launched before it. A mask_mod that does not use the head is evaluated once for
    the heads that share a tile, of which there are many, since a choice packs them.
    """
    selected, mask_mod = facts.masks.selected, facts.masks.mask_mod
    problem, shapes, tile_n = plan.problem, facts.shapes, plan.fwd_choice.tiles.tile_n
    if selected is None:
        return plan
    is_whole = selected.block_size % tile_n == 0
    decides_alone = shapes.seqlen_q == 1 and not problem.varlen_q and mask_mod is None and is_whole
    shares_mask = False
    if problem.packed_heads > 1 and mask_mod is not None:
        shares_mask = not find_reliance(mask_mod, problem).head
    choice_dtype = dtype_name(selected.indices.dtype) if decides_alone else None
    problem = replace(problem, choice_dtype=choice_dtype, shares_mask=shares_mask)
    return replace(plan, problem=problem)
