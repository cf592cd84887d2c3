"""Whether the batch entries of a head take turns in a backward.

The entries of a batch may read the same table of pairs, which has an element for each query and
key of a head. If the table does not fit the L2 cache, and batch entries pass one after another, it
is read from memory for each of them
(docs/facts/hopper_backward.md#gradients-of-tables).
"""

from __future__ import annotations

from dataclasses import replace

from flash_mask_cute.call.choose.execution_plan import ExecutionPlan
from flash_mask_cute.call.choose.facts import CallFacts
from flash_mask_cute.mods.read_classes import ReadClass
from flash_mask_cute.mods.traits import find_reads

# of a table that the L2 cache does not keep
LEAST_BYTES = 2**25


def with_entry_order(facts: CallFacts, plan: ExecutionPlan) -> ExecutionPlan:
    """The plan of a backward with `entries_first` filled in."""
    score_mod, aux_tensors = facts.masks.score_mod, facts.masks.aux_tensors
    problem, shapes = plan.problem, plan.shapes
    if facts.is_forward or not facts.spec.backward.owns_shared:
        return plan
    if score_mod is None or aux_tensors is None:
        return plan
    if problem.varlen_q or problem.varlen_k or problem.token_lists or shapes.batch < 2:
        return plan
    large = tuple(
        i
        for i, x in enumerate(aux_tensors)
        if x.is_floating_point() and x.numel() * x.itemsize >= LEAST_BYTES
    )
    if not large:
        return plan
    reads = find_reads(score_mod, problem, large).tensors.values()
    is_shared = any(x.read_class is ReadClass.PLACES and not x.is_once for x in reads)
    return replace(plan, problem=replace(problem, entries_first=is_shared))
