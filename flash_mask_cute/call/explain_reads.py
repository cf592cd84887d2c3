"""Description of the gradients of aux tensors: the class of each, and what its gradient costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from flash_mask_cute.call.choose.arch import arch_spec
from flash_mask_cute.call.choose.execution_plan import ExecutionPlan, SharedSums
from flash_mask_cute.call.choose.shared_sums import choose_shared_sums
from flash_mask_cute.mods.read_classes import MOST_POSITION, ReadClass, SummedBy, TensorReads
from flash_mask_cute.mods.traits import find_reads

# What a gradient costs, by the class of its tensor. Additions to one element wait for each other.
_COSTS_OF_SUMS = {
    ReadClass.HEAD: "an addition to memory for each 16 keys and head",
    ReadClass.KEY: "an addition to memory for each key and head",
    ReadClass.QUERY: "an addition to memory for each 16 keys and a query",
}
_COST_OF_DIAGONALS = (
    "an addition to memory for each distance in 16 keys and 16 to 64 queries, fewer if neighbours "
    "agree"
)
_BY_DIFFERENCE = "sums in shared memory, and an addition to memory for each difference, "
_COSTS_BY_DIFFERENCE = {
    SummedBy.SCORES: _BY_DIFFERENCE + "16 keys and head",
    SummedBy.LINES: _BY_DIFFERENCE + "16 keys and head",
    SummedBy.MASKS: _BY_DIFFERENCE + "64 keys and head",
    SummedBy.TURNS: _BY_DIFFERENCE + "head and warp, of ten that sum for 128 keys",
}
_COSTS = {
    ReadClass.HEAD: "an addition to memory for each 32 queries and 16 keys",
    ReadClass.KEY: "an addition to memory for each 8 queries and a key",
    ReadClass.QUERY: "an addition to memory for each score",
    ReadClass.DIFFERENCE: "an addition to memory for each score, fewer if neighbours agree",
    ReadClass.PLACES: "an addition to memory for each score",
    ReadClass.OTHER: "an addition to memory for each score, fewer if neighbours agree",
    ReadClass.UNREAD: "nothing, for it is 0",
}


class AuxGradient(NamedTuple):
    """The gradient of an aux tensor through score_mod.

    number: of the tensor. is_wanted: it requires grad. cost: of its gradient, in words.
    """

    number: int
    reads: TensorReads
    is_wanted: bool
    cost: str

    def __str__(self) -> str:
        kind = self.reads.read_class
        text = "is not read" if kind is ReadClass.UNREAD else f"is read by {kind.value}"
        if more := self.reads.difference or self.reads.why:
            text += f" ({more})"
        costs = "its gradient costs" if self.is_wanted else "a gradient would cost"
        return f"aux_tensors[{self.number}] {text}; {costs} {self.cost}"


def explain_reads(
    run: ExecutionPlan, aux_tensors: Sequence[Tensor] | None
) -> tuple[AuxGradient, ...]:
    """Of the tensors that require grad; if there are none, of each floating-point tensor that
    score_mod reads, as if it alone did. run: the plan of the backward."""
    score_mod = run.masks.score_mod
    if score_mod is None or aux_tensors is None or run.problem.score_mod_bwd is not None:
        return ()
    shared = () if run.shared is None else run.shared.numbers
    wanted = tuple(sorted((*run.problem.wants_aux, *shared)))
    if wanted:
        together = find_reads(score_mod, run.problem, wanted)
        return tuple(_reads_of(run, i, x, True, run.shared) for i, x in together.tensors.items())
    found = []
    for i, tensor in enumerate(aux_tensors):
        if tensor.dtype.is_floating_point:
            alone = find_reads(score_mod, run.problem, (i,)).tensors[i]
            if alone.read_class is not ReadClass.UNREAD:
                wanting = replace(run, problem=replace(run.problem, wants_aux=(i,)))
                shared_then = choose_shared_sums(wanting, may_be_short=run.is_short)
                found.append(_reads_of(run, i, alone, False, shared_then))
    return tuple(found)


def _reads_of(
    run: ExecutionPlan, number: int, reads: TensorReads, is_wanted: bool, shared: SharedSums | None
) -> AuxGradient:
    is_long = max(run.shapes.seqlen_q, run.shapes.seqlen_k) > MOST_POSITION
    if is_long and reads.read_class is ReadClass.DIFFERENCE:
        reads = TensorReads(ReadClass.OTHER, f"sequences are longer than {MOST_POSITION}")
    costs = _COSTS
    if arch_spec(run.target).backward.orders_aux and run.problem.walks_by_head:
        costs = _COSTS | _COSTS_OF_SUMS
        if reads.is_diagonal and reads.is_of_lines and run.problem.q_start is None:
            sizes = " and ".join(str(size) for size in sorted({cut.size for cut in reads.cuts}))
            between = f", between multiples of {sizes}" if sizes else ""
            costs |= {ReadClass.DIFFERENCE: _COST_OF_DIAGONALS + between}
    for summed in () if run.tables is None else run.tables.summed:
        if summed.read.tensor == number:
            costs = costs | {ReadClass.DIFFERENCE: _COSTS_BY_DIFFERENCE[summed.by]}
    cost = costs[reads.read_class]
    if shared is not None and number in shared.numbers:
        cost = "a kernel that computes scores again, " if shared.short is None else ""
        cost += (
            "with one owner for each element"
            if number in shared.once
            else "an addition to memory for each query and key"
        )
        if shared.short is not None and shared.short.several_keys:
            # parts are CTAs
            cost += " of a part of the batch"
        elif shared.parts > 1:
            cost += f" in each of {shared.parts} parts of the batch"
    if number in run.problem.exact_aux or (shared is not None and number in shared.exact):
        cost += ", each as two of integers, in any order"
    return AuxGradient(number, reads, is_wanted, cost)
