"""Whether the backward of a score_mod reads a large table of pairs that all batch entries share.

Such a table has an element for each query and key, and does not stay in any cache if batch entries
pass one after another. So the entries of a head take turns (`core/tile_scheduler.py`), and half of
a block's elements are read while S is computed.
"""

from __future__ import annotations

from dataclasses import replace

from flash_mask_cute.call.choose.arch import arch_spec
from flash_mask_cute.call.choose.masks import ResolvedMasks
from flash_mask_cute.call.problem import AttentionProblem, FwdShapes
from flash_mask_cute.mods.read_classes import ReadClass
from flash_mask_cute.mods.traits import find_reads
from flash_mask_cute.runtime.target import Target


def with_pair_tables(
    problem: AttentionProblem, shapes: FwdShapes, masks: ResolvedMasks, target: Target
) -> AttentionProblem:
    """The problem of a backward with `adds_pairs` filled in."""
    score_mod, aux_tensors = masks.score_mod, masks.aux_tensors
    if score_mod is None or aux_tensors is None or not arch_spec(target).backward.owns_shared:
        return problem
    others = problem.varlen_q, problem.varlen_k, problem.has_softcap, problem.token_lists
    absent = problem.score_mod_bwd, problem.q_start
    if any(others) or any(x is not None for x in absent) or shapes.batch < 2:
        return problem
    scores = max(shapes.seqlen_q * shapes.seqlen_k, 1)
    large = tuple(
        i for i, x in enumerate(aux_tensors) if x.is_floating_point() and x.numel() >= scores
    )
    if not large:
        return problem
    reads = find_reads(score_mod, problem, large)
    are_shared = (
        x.read_class is ReadClass.PLACES and not x.is_once for x in reads.tensors.values()
    )
    return replace(problem, adds_pairs=reads.adds_alike and any(are_shared))
