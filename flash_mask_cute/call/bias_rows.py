"""Whether rows of tables stay in shared memory from one batch entry to the next.

They do (`sm90/cached_bias.py`) if a score_mod reads them by head, query and key, entries are many
and have the same lengths, and walks are about equally long: the order of work tiles then ignores
their length.
"""

from __future__ import annotations

from dataclasses import replace

from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.facts import CallFacts
from flash_mask_cute.call.problem import AttentionProblem
from flash_mask_cute.mods.read_classes import ReadClass
from flash_mask_cute.mods.traits import bias_bits, find_reads, find_reliance

# The least entries that share loaded rows, and the least query blocks of QUERY_BLOCK rows for each
# SM; the first one loads.
LEAST_BATCH, LEAST_TILES, QUERY_BLOCK = 16, 4, 128
# So few queries fill smaller tiles better.
SHORT_QUERIES = 64
# Of elements of a score: more would be spilled. Beside wider heads there is no room.
MOST_BITS, MOST_DIM = 32, 64


def with_bias_bits(facts: CallFacts, problem: AttentionProblem) -> AttentionProblem:
    """The problem of a forward with `bias_bits` filled in."""
    masks, score_mod = facts.masks, facts.masks.score_mod
    if score_mod is None or not facts.spec.forward.caches_bias or not _has_many(facts):
        return problem
    is_wide = max(problem.head_dim, problem.head_dim_v) > MOST_DIM
    if is_wide or facts.has_tiles:
        return problem
    varying = (
        *(problem.varlen_q, problem.varlen_k, problem.has_seqused_q, problem.has_seqused_k),
        *(problem.is_causal, problem.is_local, problem.has_lists, problem.has_bits),
        *(problem.has_selected, problem.shared_kv, bool(problem.optional)),
    )
    pages = facts.call.tensors.lengths.page_table
    absent = problem.intervals, problem.q_start, problem.split, pages
    if any(varying) or any(x is not None for x in absent):
        return problem
    if masks.mask_mod is not None and find_reliance(masks.mask_mod, problem).query:
        return problem
    bits = bias_bits(score_mod, problem)
    return replace(problem, bias_bits=bits) if bits <= MOST_BITS else problem


def _has_many(facts: CallFacts) -> bool:
    shapes, target = facts.shapes, facts.target
    tiles = shapes.batch * shapes.heads_q * -(-shapes.seqlen_q // QUERY_BLOCK)
    are_many = shapes.batch >= LEAST_BATCH and tiles >= LEAST_TILES * target.num_sms
    return are_many and shapes.seqlen_q > SHORT_QUERIES


# -- the order of batch entries in a backward --------------------------------------------------

# Batch entries may read the same table, with an element for each query and key of a head. If the
# L2 cache does not keep it, it is read from memory for each entry, one after another
# (docs/facts/hopper_backward.md#gradients-of-tables). So the entries of a head take turns.
LEAST_BYTES = 2**25


def with_entry_order(facts: CallFacts, plan: ExecutionPlan) -> ExecutionPlan:
    """The plan of a backward with `entries_first` filled in."""
    score_mod, aux_tensors = facts.masks.score_mod, facts.masks.aux_tensors
    problem, shapes = plan.problem, plan.shapes
    if facts.is_forward or not facts.spec.backward.has_entry_kernels:
        return plan
    if score_mod is None or aux_tensors is None:
        return plan
    if problem.varlen_q or problem.varlen_k or problem.query_lists or shapes.batch < 2:
        return plan
    large = tuple(
        i
        for i, x in enumerate(aux_tensors)
        if x.is_floating_point() and x.numel() * x.itemsize >= LEAST_BYTES
    )
    if not large:
        return plan
    reads = find_reads(score_mod, problem, large).tensors.values()
    is_shared = any(x.read_class is ReadClass.PLACES and not x.read_once for x in reads)
    return replace(plan, problem=replace(problem, entries_first=is_shared))
