"""Tables of differences: which reads of a score_mod they answer, their sizes, and who fills them.

`mods/difference_reads.py` says what a table is. A launch before attention fills all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.call.execution_plan import DifferenceTables, ExecutionPlan, smem_bytes_of
from flash_mask_cute.call.facts import CallFacts
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.call.tiles.config import FwdChoice
from flash_mask_cute.limits import MOST_CTAS
from flash_mask_cute.mods.read_classes import (
    MOST_POSITION,
    DifferenceRead,
    DifferenceTerm,
    ReadClass,
    Span,
    SummedBy,
    SummedDifference,
    TensorReads,
)
from flash_mask_cute.mods.traits import difference_reads, find_reads
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import Compiled
from flash_mask_cute.runtime.compiler import by_facts, compile_object, options_of
from flash_mask_cute.runtime.target import Target

# Fewer scores take less time than the launch that fills the tables.
LEAST_SCORES = 2**22
# An element of a table takes as long as some scores.
SCORES_OF_ELEMENT = 8
# Of differences. Positions past the end of a sequence are less than a tile after it.
MARGIN = 256
# Positions whose functions the host evaluates, and differences of a table.
MOST_EVALUATED = 2**22
STEP_OF_SUMS = 256

# Who sums within grid rectangles, if dS in shared memory is what they sum: the first for whom there
# is most room.
WITHIN_RECTANGLES = (SummedBy.TURNS, SummedBy.MASKS, SummedBy.LINES)

Shape = tuple[int, int, int]


def with_tables(facts: CallFacts, plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with the tables of differences that score_mod reads, if there are any."""
    if (tables := _choose_tables(facts, plan)) is None:
        return plan
    problem = replace(plan.problem, **tables.problem_fields())
    return replace(plan, tables=tables, problem=problem)


def _choose_tables(facts: CallFacts, plan: ExecutionPlan) -> DifferenceTables | None:
    problem, shapes = plan.problem, plan.shapes
    score_mod, aux_tensors = facts.masks.score_mod, facts.masks.aux_tensors
    if score_mod is None or aux_tensors is None or any(x.numel() == 0 for x in aux_tensors):
        return None
    if problem.q_start is not None:
        # a query may stand anywhere
        return None
    # a packed sequence may be longer than it is said to be
    lengths = (
        shapes.total_q if problem.varlen_q else shapes.seqlen_q,
        shapes.total_k if problem.varlen_k else shapes.seqlen_k,
    )
    keys = shapes.mean_seqlen_k if problem.varlen_k else shapes.seqlen_k
    scores = shapes.total_q * keys * shapes.heads_q
    if scores < LEAST_SCORES or max(lengths) > min(MOST_POSITION, MOST_EVALUATED):
        return None
    found: list[tuple[DifferenceRead, Shape]] = []
    few: list[tuple[DifferenceRead, int]] = []
    for read in difference_reads(score_mod, problem):
        most = most_difference(read.terms, *lengths)
        if most is None:
            continue
        batch = shapes.batch if read.by_batch else 1
        heads = shapes.heads_q if read.by_head else 1
        shape = batch, heads, 2 * (most + MARGIN) + 1
        if read.is_computed and math.prod(shape) * SCORES_OF_ELEMENT <= scores:
            found.append((read, shape))
        few.append((read, -(-(2 * most + 1) // STEP_OF_SUMS) * STEP_OF_SUMS))
    batch, heads = (max((shape[i] for _, shape in found), default=0) for i in range(2))
    if max(batch * len(found), heads) > MOST_CTAS:
        found = []
    summed: tuple[SummedDifference, ...] = ()
    if problem.wants_aux and few and problem.walks_by_head:
        wanted = find_reads(score_mod, problem, problem.wants_aux)
        # along diagonals from dS in shared memory
        has_dscores = wanted.is_shift and not problem.has_softcap
        ways: tuple[SummedBy, ...] = WITHIN_RECTANGLES if has_dscores else (SummedBy.LINES,)
        spare, may_loop = _spare_smem(plan)
        if not may_loop:
            ways = tuple(x for x in ways if not x.has_mma_warps)
        summed = _summed(wanted.tensors, few, lengths[1], ways, spare)
    if not found and not summed:
        return None
    reads, sizes = tuple(read for read, _ in found), tuple(shape for _, shape in found)
    dtypes = tuple(problem.aux[read.tensor][0] for read in reads)
    return DifferenceTables(reads, sizes, dtypes, summed)


def _spare_smem(plan: ExecutionPlan) -> tuple[int, bool]:
    """Bytes of shared memory for sums by difference, and whether MMA warps may sum."""
    choice, kernel = plan.choice, arch_spec(plan.target).backward
    if isinstance(choice, FwdChoice) or not kernel.has_limits:
        return 0, False
    limits = kernel.limits()
    return limits.SMEM_CAPACITY - choice.smem_bytes, limits.may_loop_over_scores(choice.tile_d)


def _summed(
    wanted: Mapping[int, TensorReads],
    reads: Sequence[tuple[DifferenceRead, int]],
    seqlen_k: int,
    ways: tuple[SummedBy, ...],
    spare_smem: int,
) -> tuple[SummedDifference, ...]:
    """The reads whose gradients are summed by difference, of as many tensors as fit. reads: with
    the sizes of their sums. ways: who may sum within grid rectangles; where MMA warps may not, they
    do not sum scores either."""
    found: list[list[SummedDifference]] = [[]]
    for within_rectangles in ways:
        more: list[SummedDifference] = []
        for number, tensor in wanted.items():
            own = [x for x in reads if x[0].tensor == number]
            if len(own) != len(tensor.factors):
                continue
            by = _summed_by(tensor, [x for x, _ in own], within_rectangles, seqlen_k)
            if by is SummedBy.SCORES and not any(x.has_mma_warps for x in ways):
                by = None
            new = [] if by is None else [SummedDifference(*x, by) for x in own]
            if smem_bytes_of([*more, *new]) <= spare_smem:
                more += new
        found.append(more)
    most = max(found, key=len)
    return tuple(most)


def _summed_by(
    tensor: TensorReads, own: Sequence[DifferenceRead], within_rectangles: SummedBy, seqlen_k: int
) -> SummedBy | None:
    """Who may sum the gradient of a tensor by difference. within_rectangles: who sums there."""
    terms = [term for read in own for term in read.terms]
    if tensor.read_class is not ReadClass.DIFFERENCE or any(x.divisor is None for x in terms):
        return None
    if tensor.is_within_rectangles:
        is_uniform = all(abs(SummedDifference(x, 0, within_rectangles).step) <= 1 for x in own)
        return within_rectangles if is_uniform or not within_rectangles.has_mask_warps else None
    is_free = tensor.has_constant_factors and not tensor.needs_score
    if tensor.is_diagonal or not is_free:
        return None
    return SummedBy.SCORES if all(_are_keys_distinct(x.terms, seqlen_k) for x in own) else None


def _are_keys_distinct(terms: Sequence[DifferenceTerm], length: int) -> bool:
    """Whether different keys have different differences from a query."""
    values = values_of([x for x in terms if x.is_key], length)
    return values.unique().numel() == length


def most_difference(terms: Sequence[DifferenceTerm], seqlen_q: int, seqlen_k: int) -> int | None:
    """The largest magnitude of a difference; None: a table of so many differences is too large."""
    low = high = 0
    for is_key, length in ((True, seqlen_k), (False, seqlen_q)):
        span = _span_of([x for x in terms if x.is_key == is_key], length)
        if span is None:
            return None
        low, high = low + span[0], high + span[1]
    most = max(-low, high)
    return most if 2 * most < MOST_EVALUATED else None


def _span_of(terms: Sequence[DifferenceTerm], length: int) -> Span | None:
    """The least and the greatest sum of functions of the same positions."""
    total, low, high = values_of(terms, length), 0, 0
    for term in terms:
        if term.divisor is None:
            if term.span is None:
                return None
            ends = sorted(x * term.factor for x in term.span)
            low, high = low + ends[0], high + ends[1]
    return low + int(total.min()), high + int(total.max())


def values_of(terms: Sequence[DifferenceTerm], length: int) -> torch.Tensor:
    """The sum of terms at each position, without those known by their span alone."""
    place = torch.arange(length, device="cpu")
    total = torch.zeros_like(place)
    for term in terms:
        if term.divisor is not None:
            total += place // term.divisor * term.factor
    return total


# -- the launch that fills them ----------------------------------------------------------------

NAME = "difference_tables"


class TableFacts(NamedTuple):
    """Facts that determine the code of the kernel. dtypes: of the tables."""

    score_mod: str | None
    aux: tuple[tuple[str, int], ...]
    reads: tuple[DifferenceRead, ...]
    dtypes: tuple[str, ...]


def compile_difference_tables(
    plan: ExecutionPlan, score_mod: Callable[..., Any], tables: DifferenceTables
) -> Compiled:
    """The compiled kernel, cached or new. `function` takes tuples: tables, and aux tensors."""

    def build(facts: TableFacts, target: Target) -> Compiled:
        from flash_mask_cute.mods.difference_tables_kernel import DifferenceTables as Kernel

        made = tuple(fake_tensors.rows(dtype, 3) for dtype in facts.dtypes)
        arguments = [made, fake_tensors.aux_tensors(facts.aux), fake_tensors.stream()]
        return compile_object(Kernel(score_mod, facts.reads), arguments, options_of(target))

    problem = plan.problem
    facts = TableFacts(problem.score_mod, problem.aux, tables.reads, tables.dtypes)
    return by_facts(NAME, facts, build, plan.target)


class MakeDifferenceTables:
    """Adds the tables of a plan to the aux tensors of a call. function: fills them."""

    def __init__(self, tables: DifferenceTables, function: Callable[..., Any]) -> None:
        self._shapes = tables.shapes
        self._dtypes = tuple(getattr(torch, name) for name in tables.dtypes)
        self._function = function

    def __call__(self, aux_tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        given = tuple(aux_tensors)
        made = zip(self._shapes, self._dtypes, strict=True)
        tables = tuple(given[0].new_empty(shape, dtype=dtype) for shape, dtype in made)
        self._function(tables, given)
        return *given, *tables
