"""What a kernel that walks over batch entries computes, and in how many parts of the batch.

`sm90/flash_bwd_shared.py` sums gradients of scores over the batch. So a table that scores of all
batch entries share gets an addition for each query and key, and not for each score. Where an entry
is one tile, `sm90/flash_bwd_short.py` computes all other gradients as well, and so does
`sm90/flash_bwd_entries.py` where its queries are few and scores read a table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flash_mask_cute.call.choose.arch import arch_spec
from flash_mask_cute.call.choose.config import BwdChoice
from flash_mask_cute.call.choose.execution_plan import ExecutionPlan, SharedSums, ShortTile
from flash_mask_cute.call.choose.facts import CallFacts
from flash_mask_cute.call.problem import AttentionProblem, FwdShapes
from flash_mask_cute.mods.read_classes import ReadClass
from flash_mask_cute.mods.traits import find_reads

if TYPE_CHECKING:
    from flash_mask_cute.sm90.flash_bwd_entries_traits import EntryTraits
    from flash_mask_cute.sm90.flash_bwd_short_traits import ShortTraits

# queries and keys of a tile (`sm90/flash_bwd_shared.py`)
TILE = 128
# With one entry, no two scores add to an element.
LEAST_BATCH = 2
MOST_PARTS = 32
# Of a part, where several scores of an entry add to an element: with fewer, the main kernel sums
# along lines and walks in less time.
LEAST_ENTRIES = 16
# Of wider heads, the main kernel sums along lines in less time: 2500 clocks of 128 queries and keys
# by the main kernel, 1300 by this one at d=32 and 5200 at d=128.
MOST_DIM_BEFORE_LINES = 32
# Short sequences of all heads for each SM, to walk over: with fewer, the main kernel has as much to
# do for a CTA.
LEAST_SHORT = 4
# Keys of a tile where an entry has several, and columns of heads that it may have.
KEYS_OF_ENTRIES, MOST_COLUMNS_OF_ENTRIES = 64, 64
# Estimates: clocks of a batch entry of a tile, entries that a CTA's beginning and end take as long
# as, and clocks for which an SM writes and reads a byte of a part's sums.
ENTRY_CLOCKS, ENTRIES_OF_ENDS, BYTE_CLOCKS = 1300, 3, 1 / 10


def with_shared_sums(facts: CallFacts, plan: ExecutionPlan) -> ExecutionPlan:
    """The plan of a backward with the kernel that walks over batch entries, if there is one."""
    if facts.is_forward:
        return plan
    shared = choose_shared_sums(plan, may_be_short=not facts.has_config)
    if shared is None:
        return plan
    problem = replace(plan.problem, **shared.problem_fields(plan.problem))
    return replace(plan, shared=shared, problem=problem)


def choose_shared_sums(plan: ExecutionPlan, may_be_short: bool) -> SharedSums | None:
    """None: the main kernel sums all gradients. may_be_short: the caller asked for no tiles."""
    if may_be_short:
        short = _choose_short(plan)
        if short is not None:
            return short
    problem, shapes, target = plan.problem, plan.shapes, plan.target
    score_mod = plan.masks.score_mod
    if score_mod is None or not problem.wants_aux or not _is_possible(plan):
        return None
    reads = find_reads(score_mod, problem, problem.wants_aux)
    if shapes.batch < LEAST_BATCH or not reads.shared:
        return None
    parts, once = num_parts(shapes, target.num_sms), reads.shared_once
    if not once:
        parts = max(min(parts, shapes.batch // LEAST_ENTRIES), 1)
    numbers = once
    if shapes.batch >= LEAST_ENTRIES * parts:
        has_lines = max(problem.head_dim, problem.head_dim_v) > MOST_DIM_BEFORE_LINES
        slow = (
            i
            for i in reads.shared
            if reads.tensors[i].read_class in _ADDED_BY_SCORE
            and not (has_lines and reads.tensors[i].is_of_lines)
        )
        numbers = tuple(sorted({*once, *slow}))
    exact = tuple(i for i in numbers if i in problem.exact_aux and i not in once)
    return SharedSums(numbers, parts, once, exact) if numbers else None


def _choose_short(plan: ExecutionPlan) -> SharedSums | None:
    """The kernel of short sequences; None: it cannot compute the call, or there are few of them."""
    problem, shapes, target = plan.problem, plan.shapes, plan.target
    score_mod = plan.masks.score_mod
    from flash_mask_cute.sm90.flash_bwd_short_traits import MOST_ROWS, QUERY_TILES

    if not arch_spec(target).backward.owns_shared or _has_lengths_or_lists(problem):
        return None
    has_few = shapes.batch * shapes.heads_q < LEAST_SHORT * target.num_sms
    has_groups = shapes.heads_q != shapes.heads_kv
    if has_few or has_groups or problem.reads_mask_bits:
        return None
    numbers = problem.wants_aux
    once: tuple[int, ...] = ()
    if score_mod is not None:
        reads = find_reads(score_mod, problem, problem.wants_aux)
        if not reads.adds_alike or not set(reads.shared) >= set(numbers):
            return None
        once = reads.shared_once
    exact = tuple(i for i in numbers if i in problem.exact_aux and i not in once)
    if max(shapes.seqlen_q, shapes.seqlen_k) <= MOST_ROWS:
        tile = ShortTile(
            next(rows for rows, _ in QUERY_TILES if rows >= shapes.seqlen_q),
            -(-shapes.seqlen_k // 16) * 16,
        )
        traits = short_traits(problem, tile, plan.bwd_choice, bool(numbers))
        if traits.fits:
            ctas = target.num_sms * traits.ctas_of_sm
            parts = min(max(ctas // shapes.heads_q, 1), shapes.batch)
            return SharedSums(numbers, parts, once, exact, tile)
    if score_mod is None or once or problem.deterministic:
        return None
    return _choose_entries(plan)


def _choose_entries(plan: ExecutionPlan) -> SharedSums | None:
    problem, shapes, choice = plan.problem, plan.shapes, plan.bwd_choice
    numbers = problem.wants_aux
    from flash_mask_cute.sm90.flash_bwd_entries_traits import MOST_QUERIES, QUERIES_OF_BOTH

    queries = -(-shapes.seqlen_q // QUERIES_OF_BOTH) * QUERIES_OF_BOTH
    tiles = -(-shapes.seqlen_k // KEYS_OF_ENTRIES) * shapes.heads_q
    # the kernel numbers entries of tiles in 32 bits
    if max(queries, shapes.seqlen_k) > MOST_QUERIES or tiles * shapes.batch >= 2**30:
        return None
    traits = entry_traits(problem, ShortTile(queries, KEYS_OF_ENTRIES, True), bool(numbers))
    # as the postprocess reads the sums of dQ
    is_alike = (choice.tiles.tile_m, choice.tile_d) == (traits.block_m, traits.cols[0])
    if not (traits.fits and is_alike and max(traits.cols) <= MOST_COLUMNS_OF_ENTRIES):
        return None
    tile = ShortTile(queries, KEYS_OF_ENTRIES, True)
    return SharedSums(numbers, plan.target.num_sms, (), (), tile)


def entry_traits(problem: AttentionProblem, tile: ShortTile, has_sums: bool) -> EntryTraits:
    """As `short_traits`, of a tile with some of the keys."""
    from flash_mask_cute.runtime.fake_tensors import cutlass_dtype
    from flash_mask_cute.sm90.flash_bwd_entries_traits import EntryTraits

    return EntryTraits(
        cutlass_dtype(problem.dtype),
        *(problem.head_dim, problem.head_dim_v, tile.tile_m),
        has_score_mod=True,
        sums=has_sums,
        has_marks=problem.may_empty_rows,
        is_banded=problem.is_causal or problem.is_local,
    )


def short_traits(
    problem: AttentionProblem, tile: ShortTile, choice: BwdChoice, has_sums: bool
) -> ShortTraits:
    """has_sums: gradients of aux tensors are wanted."""
    from flash_mask_cute.runtime.fake_tensors import cutlass_dtype
    from flash_mask_cute.sm90.flash_bwd_short_traits import ShortTraits

    has_score_mod = problem.score_mod is not None
    return ShortTraits(
        cutlass_dtype(problem.dtype),
        *(problem.head_dim, problem.head_dim_v, tile.tile_m, tile.tile_n, choice.tiles.tile_m),
        has_score_mod=has_score_mod,
        adds=has_score_mod or problem.is_causal or problem.is_local,
        sums=has_sums,
        has_marks=problem.may_empty_rows,
        is_banded=problem.is_causal or problem.is_local,
    )


# Classes of which the main kernel adds scores, or lines of scores, one by one.
_ADDED_BY_SCORE = (ReadClass.DIFFERENCE, ReadClass.PLACES, ReadClass.OTHER)


def _is_possible(plan: ExecutionPlan) -> bool:
    """Whether the kernel can compute the scores of a problem."""
    problem, choice = plan.problem, plan.bwd_choice
    if not arch_spec(plan.target).backward.owns_shared or choice.tile_n != TILE:
        return False
    if _has_lengths_or_lists(problem):
        return False
    from flash_mask_cute.runtime.fake_tensors import cutlass_dtype
    from flash_mask_cute.sm90.flash_bwd_shared import SharedTraits

    dims = problem.head_dim, problem.head_dim_v
    traits = SharedTraits(
        cutlass_dtype(problem.dtype), *dims, choice.tiles.tile_m, problem.may_empty_rows
    )
    return traits.fits


def _has_lengths_or_lists(problem: AttentionProblem) -> bool:
    """Whether sequences have lengths of their own, or a mask hides other scores of each of them,
    unless its bits are stored."""
    others = (
        *(problem.varlen_q, problem.varlen_k, problem.has_seqused_q, problem.has_seqused_k),
        *(problem.has_softcap, problem.has_lists, problem.has_bits, problem.has_selected),
        *(problem.common_kv, problem.tables, problem.summed, problem.token_lists),
    )
    absent = problem.intervals, problem.mask_mod, problem.score_mod_bwd, problem.q_start
    return any(others) or any(x is not None for x in absent)


def num_parts(shapes: FwdShapes, num_sms: int) -> int:
    """The parts of the batch by which the kernel is estimated to take least time."""
    tiles = shapes.heads_q * -(-shapes.seqlen_q // TILE) * -(-shapes.seqlen_k // TILE)
    num_bytes = 8 * shapes.heads_q * shapes.seqlen_q * shapes.seqlen_k

    def clocks(parts: int) -> float:
        waves = -(-tiles * parts // num_sms)
        entries = -(-shapes.batch // parts) + ENTRIES_OF_ENDS
        return waves * entries * ENTRY_CLOCKS + parts * num_bytes / num_sms * BYTE_CLOCKS

    return min(range(1, min(shapes.batch, MOST_PARTS) + 1), key=clocks)
