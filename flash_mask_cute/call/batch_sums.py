"""Kernels that walk over batch entries, and the order of sums of gradients of aux tensors.

`sm90/flash_bwd_shared.py` sums gradients of scores over the batch. So a table that scores of all
batch entries share gets an addition for each query and key, and not for each score. Where an entry
is one tile, `sm90/flash_bwd_short.py` computes all other gradients as well, and so does
`sm90/flash_bwd_entries.py` where its queries are few and scores read a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.call.aux_sums import new_sums
from flash_mask_cute.call.execution_plan import ExecutionPlan, SharedSums, ShortTile
from flash_mask_cute.call.facts import CallFacts
from flash_mask_cute.call.forward import count_writing
from flash_mask_cute.call.kernel_operands import BACKWARD, sums_of_aux
from flash_mask_cute.call.problem import AttentionProblem, FwdShapes
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.call.tiles.config import BwdChoice
from flash_mask_cute.mods.fixed_point_sums import MOST_ENTRIES
from flash_mask_cute.mods.read_classes import MOST_POSITION, ReadClass, SummedBy, TensorReads
from flash_mask_cute.mods.traits import find_reads
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import Compiled
from flash_mask_cute.runtime.compiler import CACHE, compile_object, options_of
from flash_mask_cute.runtime.target import Target

# queries and keys of a tile (`sm90/flash_bwd_shared.py`)
TILE = 128
# With one entry, no two scores add to an element.
LEAST_BATCH = 2
MOST_PARTS = 32
# Of a part, where several scores of an entry add to an element. With fewer, the main kernel, which
# sums along lines, is faster.
LEAST_ENTRIES = 16
# In wider heads, the main kernel sums along lines in less time: 2500 clocks for 128 queries and
# keys, against 1300 of this kernel at d=32 and 5200 at d=128.
MOST_DIM_BEFORE_LINES = 32
# Short sequences of all heads for each SM. With fewer, a CTA of the main kernel does as much.
LEAST_SHORT = 4
# Keys of a tile where an entry has several tiles, and the most columns of its heads.
KEYS_OF_ENTRIES, MOST_COLUMNS_OF_ENTRIES = 64, 64
# Estimates: clocks of a batch entry of a tile, entries that take as long as the beginning and end
# of a CTA, and clocks in which an SM writes and reads a byte of a part's sums.
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
    score_mod, kernel = plan.masks.score_mod, arch_spec(target).backward
    if not kernel.has_entry_kernels or _has_lengths_or_lists(problem):
        return None
    has_few = shapes.batch * shapes.heads_q < LEAST_SHORT * target.num_sms
    has_groups = shapes.heads_q != shapes.heads_kv
    if has_few or has_groups or problem.reads_mask_bits:
        return None
    numbers = problem.wants_aux
    once: tuple[int, ...] = ()
    if score_mod is not None:
        reads = find_reads(score_mod, problem, problem.wants_aux)
        if not reads.is_batch_invariant_bias or not set(reads.shared) >= set(numbers):
            return None
        once = reads.shared_once
    exact = tuple(i for i in numbers if i in problem.exact_aux and i not in once)
    sizes = kernel.entry_traits().short.tile_of(shapes.seqlen_q, shapes.seqlen_k)
    if sizes is not None:
        shared = SharedSums(numbers, 1, once, exact, ShortTile(*sizes))
        traits = traits_of(problem, plan.bwd_choice, shared, target)
        if traits.fits:
            ctas = target.num_sms * traits.ctas_of_sm
            return shared._replace(parts=min(max(ctas // shapes.heads_q, 1), shapes.batch))
    if score_mod is None or once or problem.deterministic:
        return None
    return _choose_entries(plan)


def _choose_entries(plan: ExecutionPlan) -> SharedSums | None:
    problem, shapes, choice = plan.problem, plan.shapes, plan.bwd_choice
    of_kernel = arch_spec(plan.target).backward.entry_traits().entries
    queries = of_kernel.queries_of(shapes.seqlen_q, shapes.seqlen_k)
    tiles = -(-shapes.seqlen_k // KEYS_OF_ENTRIES) * shapes.heads_q
    # the kernel numbers entries of tiles in 32 bits
    if queries is None or tiles * shapes.batch >= 2**30:
        return None
    tile = ShortTile(queries, KEYS_OF_ENTRIES, True)
    shared = SharedSums(problem.wants_aux, plan.target.num_sms, (), (), tile)
    traits = traits_of(problem, choice, shared, plan.target)
    # as the postprocess reads the sums of dQ
    is_alike = (choice.tiles.tile_m, choice.tile_d) == (traits.block_m, traits.cols[0])
    fits = traits.fits and is_alike and max(traits.cols) <= MOST_COLUMNS_OF_ENTRIES
    return shared if fits else None


def traits_of(
    problem: AttentionProblem, choice: BwdChoice, shared: SharedSums, target: Target
) -> Any:
    """The `SharedTraits`, `ShortTraits` or `EntryTraits` of the kernel that makes the sums."""
    of_kernels, tile = arch_spec(target).backward.entry_traits(), shared.short
    dtype = fake_tensors.cutlass_dtype(problem.dtype)
    of_problem = dtype, problem.head_dim, problem.head_dim_v
    has_marks, has_score_mod = problem.may_empty_rows, problem.score_mod is not None
    if tile is None:
        return of_kernels.shared(*of_problem, choice.tiles.tile_m, has_marks)
    is_banded = problem.is_causal or problem.is_local
    flags = {"sums": bool(shared.numbers), "has_marks": has_marks, "is_banded": is_banded}
    if tile.several_keys:
        return of_kernels.entries(*of_problem, tile.tile_m, has_score_mod=True, **flags)
    return of_kernels.short(
        *(*of_problem, tile.tile_m, tile.tile_n, choice.tiles.tile_m),
        has_score_mod=has_score_mod,
        adds=has_score_mod or is_banded,
        **flags,
    )


# Classes where the main kernel adds scores, or lines of scores, one by one.
_ADDED_BY_SCORE = (ReadClass.DIFFERENCE, ReadClass.PLACES, ReadClass.OTHER)


def _is_possible(plan: ExecutionPlan) -> bool:
    """Whether the kernel that sums gradients of aux tensors alone can compute the scores."""
    problem, choice = plan.problem, plan.bwd_choice
    if not arch_spec(plan.target).backward.has_entry_kernels or choice.tile_n != TILE:
        return False
    if _has_lengths_or_lists(problem):
        return False
    return bool(traits_of(problem, choice, SharedSums((), 1, ()), plan.target).fits)


def _has_lengths_or_lists(problem: AttentionProblem) -> bool:
    """Whether sequences differ in length, or in masks whose bits are not stored."""
    others = (
        *(problem.varlen_q, problem.varlen_k, problem.has_seqused_q, problem.has_seqused_k),
        *(problem.has_softcap, problem.has_lists, problem.has_bits, problem.has_selected),
        *(problem.shared_kv, problem.tables, problem.summed, problem.query_lists),
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


# -- sums in a fixed order ---------------------------------------------------------------------


def sums_in_order(
    call: AttentionCall, score_mod: Callable, problem: AttentionProblem, wants_aux: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The aux tensors with sums of integers, whose order does not matter, and those with a sum for
    each batch entry."""
    reads = find_reads(score_mod, problem, wants_aux)
    entry_aux: tuple[int, ...] = ()
    multi_reader = reads.multi_reader
    if call.options.q_start.is_given:
        # queries before position 0 are all at 0, and read the same elements
        multi_reader = reads.of_any
    elif not problem.varlen_q and call.tensors.q.shape[0] <= MOST_ENTRIES:
        entry_aux = tuple(i for i in multi_reader if reads.tensors[i].read_once_an_entry)
    return tuple(i for i in multi_reader if i not in entry_aux), entry_aux


def why_unordered(target: Target, have_shared_keys: bool) -> str | None:
    """Why gradients of aux tensors have no fixed order of sums, in words; None if they have one."""
    if have_shared_keys:
        return (
            "gradients of aux tensors are summed in no fixed order where k and v are one batch "
            "entry for several sequences"
        )
    if arch_spec(target).backward.orders_aux:
        return None
    return f"gradients of aux tensors are summed in no fixed order on {arch_spec(target).name}"


def why_unordered_on(device: torch.device, have_shared_keys: bool) -> str | None:
    """`why_unordered` on a device, before a call is planned."""
    target = Target.from_device(device) if device.type == "cuda" else Target.default()
    return why_unordered(target, have_shared_keys)


# -- compiled and launched ---------------------------------------------------------------------

NAME, SHORT_NAME = "bwd_shared", "bwd_short"


def compile_shared_sums(plan: ExecutionPlan) -> Compiled:
    """The compiled kernel, from the cache or built now. `MakeSharedSums` calls its `function`."""
    problem, choice, shared, target = plan.problem, plan.bwd_choice, plan.shared, plan.target
    assert shared is not None
    facts = {
        "dtype": problem.dtype,
        "head_dims": (problem.head_dim, problem.head_dim_v),
        "tile_m": choice.tiles.tile_m,
        "score_mod": problem.score_mod,
        "aux": problem.aux,
        "sums": (shared.numbers, shared.once, shared.exact),
        "is_causal": problem.is_causal,
        "window": (problem.has_window_left, problem.has_window_right),
        "reads_mask_bits": problem.reads_mask_bits,
        "may_empty_rows": problem.may_empty_rows,
    }
    if shared.short is not None:
        facts["tile"] = tuple(shared.short)
    return CACHE.get(
        NAME if shared.short is None else SHORT_NAME,
        lambda: facts,
        lambda: build_shared_sums(plan.masks.score_mod, problem, choice, shared, target),
        arch=target.arch,
        options=options_of(target),
        token=tuple(facts.values()),
    )


def build_shared_sums(
    score_mod: Callable[..., Any] | None,
    problem: AttentionProblem,
    choice: BwdChoice,
    shared: SharedSums,
    target: Target,
) -> Compiled:
    """Compile the kernel that sums gradients of aux tensors, or that of short sequences, now."""
    import cutlass

    kernels, short = arch_spec(target).backward.entry_kernels(), shared.short
    of_sums = traits_of(problem, choice, shared, target), score_mod, shared.numbers
    if short is None:
        kernel = kernels.shared(*of_sums, shared.once, problem.is_causal, problem.is_local)
        # this kernel reads no tables of differences
        problem = replace(problem, tables=())
    elif short.several_keys:
        kernel = kernels.entries(*of_sums, problem.is_causal)
    else:
        kernel = kernels.short(*of_sums, shared.once, problem.is_causal)
    # gradients may have other strides than their tensors
    of, like = ({row.argument: row.fake(problem, choice) for row in BACKWARD} for _ in range(2))
    arguments = [of[name] for name in ("q", "k", "v", "dout", "stats")]
    sums = sums_of_aux(problem, shared.numbers, shared.exact, shared.once)
    number = cutlass.Int32(1)
    if short is None:
        arguments += [sums, of["aux_tensors"], of["scale"], number, of["stream"]]
        more = of["window_left"], of["window_right"], of["mask_bits"]
    else:
        target_of_dq = "dq_accum" if short.several_keys else "q"
        arguments += [like[name] for name in (target_of_dq, "k", "v")]
        arguments += [sums, of["aux_tensors"], of["scale"], of["scale"], number]
        more = of["stream"], of["window_left"], of["window_right"]
    return compile_object(kernel, [*arguments, *more], options_of(target))


class MakeSharedSums:
    """Makes the sums of a plan, and all gradients of short sequences."""

    def __init__(self, shared: SharedSums, shapes: FwdShapes, function: Callable[..., Any]) -> None:
        self.shared, self._function = shared, function
        self._count = shapes.heads_q * shapes.seqlen_q * shapes.seqlen_k

    def __call__(
        self,
        daux: Sequence[Tensor | None],
        operands: tuple[Tensor | None, ...],
        gradients: tuple[Tensor, ...],
        aux_tensors: Sequence[Tensor] | None,
        scales: tuple[float, float],
        *more: Any,
    ) -> dict[int, Tensor]:
        """The sums by number of the tensor, with the parts as the first dimension, or as
        `new_sums` makes them. Those of one part are made in the gradient itself, if possible.
        operands: q, k, v, dout, stats; gradients: dq or sums of dq, dk, dv; scales: of scores and
        dk, and of dq; more: both sides of the window, and mask bits."""
        numbers, parts, once, exact, short = self.shared
        others = tuple(i for i in numbers if i not in once)
        sums = new_sums(daux, others, torch.float32, exact)
        for i in once:
            gradient = daux[i]
            assert gradient is not None
            # no two scores read the same element, so as many scores read all
            is_written = gradient.numel() == self._count
            if self.shared.is_in_place(gradient):
                # a table of all pairs is larger than everything else
                count_writing(gradient)
                sums[i] = (gradient if is_written else gradient.zero_())[None]
                continue
            new = gradient.new_empty if is_written else gradient.new_zeros
            sums[i] = new((parts, *gradient.shape), dtype=torch.float32)
        in_order = tuple(sums[i] for i in numbers)
        aux = tuple(aux_tensors or ())
        if short is None:
            self._function(*operands, in_order, aux, scales[0], parts, *more)
        else:
            given = (*operands, *gradients, in_order or None, aux or None, *scales, parts)
            self._function(*given, *more[:2])
        return sums


# -- described: the class of each aux tensor, and what its gradient costs ----------------------

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
    """The gradient of an aux tensor through score_mod. is_wanted: the tensor requires grad."""

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
    """The gradients of the tensors that require grad. If none does, those of all floating-point
    tensors that score_mod reads, as if each alone did. run: the plan of the backward."""
    score_mod = run.masks.score_mod
    if score_mod is None or aux_tensors is None or run.problem.score_mod_bwd is not None:
        return ()
    shared = () if run.shared is None else run.shared.numbers
    wanted = tuple(sorted((*run.problem.wants_aux, *shared)))
    if wanted:
        together = find_reads(score_mod, run.problem, wanted)
        return tuple(_reads_of(run, i, x, is_wanted=True) for i, x in together.tensors.items())
    found = []
    for i, tensor in enumerate(aux_tensors):
        if tensor.dtype.is_floating_point:
            alone = find_reads(score_mod, run.problem, (i,)).tensors[i]
            if alone.read_class is not ReadClass.UNREAD:
                wanting = replace(run, problem=replace(run.problem, wants_aux=(i,)))
                then = choose_shared_sums(wanting, may_be_short=run.is_short)
                found.append(_reads_of(replace(run, shared=then), i, alone, is_wanted=False))
    return tuple(found)


def _reads_of(run: ExecutionPlan, number: int, reads: TensorReads, is_wanted: bool) -> AuxGradient:
    shared = run.shared
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
