"""`plan`: all decisions about a call that follow from metadata, before attention is compiled.

`plan` calls its steps in order. Each takes the facts of the call and the problem or plan, and
returns that, changed or not. Only documents are found on the device here (`call_by_documents`).
"""

from __future__ import annotations

from dataclasses import replace

from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.call.batch_sums import sums_in_order, with_shared_sums
from flash_mask_cute.call.bias_rows import with_bias_bits, with_entry_order
from flash_mask_cute.call.check.pages import page_box_of
from flash_mask_cute.call.copies import has_shared_kv, sink_conversion, with_conversions
from flash_mask_cute.call.documents import call_by_documents
from flash_mask_cute.call.execution_plan import ExecutionPlan, GradientFacts
from flash_mask_cute.call.facts import Backend, CallFacts
from flash_mask_cute.call.fixed_splits import with_fixed_splits
from flash_mask_cute.call.fp8 import call_in_16_bits, with_few_rows
from flash_mask_cute.call.mask_bits import LIMITS, Limits, with_mask_bits
from flash_mask_cute.call.problem import (
    AttentionProblem,
    GivenTensor,
    may_empty_rows,
    sink_dtype,
)
from flash_mask_cute.call.query_lists import with_query_lists
from flash_mask_cute.call.refusals import (
    check_on_any_device,
    refuse_large_selection,
    refuse_on_gpu,
)
from flash_mask_cute.call.selection import with_selection_facts
from flash_mask_cute.call.splits import with_split, with_splits
from flash_mask_cute.call.tables import with_tables
from flash_mask_cute.call.tile_choice import choose_tiles
from flash_mask_cute.call.tiles.config import BwdChoice, FwdChoice
from flash_mask_cute.core.stream_k import DECODE_ROWS
from flash_mask_cute.limits import ctas_of_tile
from flash_mask_cute.mods.traits import computes_functions
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.dtypes import FP8, dtype_name
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.target import Target


def plan(
    call: AttentionCall, target: Target | None = None, limits: Limits | None = None
) -> ExecutionPlan:
    """Check a call, and plan its execution.

    target: of the kernels; None: that of q's device, and the CPU path for a CPU tensor. limits:
    instead of `LIMITS`. Raises TypeError, ValueError, NotImplementedError, naming argument and
    value."""
    facts = CallFacts.of(call, target)
    if (other := call_by_documents(facts) or call_in_16_bits(facts)) is not None:
        found = plan(other.call, target, limits)
        return replace(found, instead=(*found.instead, other))
    found = with_tiles(facts, kernel_problem(facts))
    if found.backend is Backend.CPU:
        return found
    refuse_on_gpu(facts, found.problem)
    found = with_conversions(found, call.tensors)
    if found.backend is Backend.EMPTY:
        return found
    refuse_large_selection(facts)
    if (once := call_in_one_pass(facts, found)) is not None:
        in_one_pass = plan(once, target, limits)
        if in_one_pass.mask_bits is not None:
            return in_one_pass
    found = with_mask_bits(facts, found, limits or LIMITS)
    found = with_shared_sums(facts, found)
    return found if found.is_short else with_tables(facts, with_entry_order(facts, found))


def kernel_problem(facts: CallFacts) -> AttentionProblem:
    """What a kernel is compiled for, as far as tiles do not decide it."""
    problem = _fwd_problem(facts) if facts.is_forward else _bwd_problem(facts)
    # Rows of masks may begin anywhere in a tile then, and lists are bits. A backward has made bits
    # of its lists before.
    problem = replace(problem, **facts.start.problem_fields())
    check_on_any_device(facts, problem)
    if facts.is_forward:
        return with_bias_bits(facts, with_split(facts, problem))
    return with_query_lists(facts, with_empty_rows(facts, problem))


def with_tiles(facts: CallFacts, problem: AttentionProblem) -> ExecutionPlan:
    """The plan of a kernel that evaluates all masks itself."""
    found = new_plan(facts, problem, choose_tiles(facts, problem))
    if not facts.is_forward:
        return found
    found = with_page_box(facts, with_selection_facts(facts, with_few_rows(found)))
    return with_fixed_splits(facts, found) if facts.is_ordered else with_splits(facts, found)


def _problem(facts: CallFacts) -> AttentionProblem:
    """The part of a call's problem that both directions share, without packing."""
    call, window = facts.call, facts.window
    x, of = call.tensors, call.tensors.lengths
    problem = AttentionProblem(
        dtype=dtype_name(x.q.dtype),
        head_dim=x.q.shape[-1],
        head_dim_v=x.v.shape[-1],
        is_causal=window.is_causal,
        has_window_left=window.left is not None,
        has_window_right=window.right is not None,
        varlen_q=of.cu_seqlens_q is not None,
        varlen_k=of.cu_seqlens_k is not None,
        has_seqused_q=of.seqused_q is not None,
        has_seqused_k=of.seqused_k is not None,
        has_softcap=call.options.softcap != 0,
        needs_lse=False,
        shared_kv=has_shared_kv(call),
    )
    return replace(problem, **facts.masks.problem_fields())


def _fwd_problem(facts: CallFacts) -> AttentionProblem:
    call, masks, problem = facts.call, facts.masks, _problem(facts)
    x = call.tensors
    sink = x.learnable_sink
    problem = replace(
        problem,
        sink_dtype=None if sink is None else dtype_name(sink_dtype(sink)),
        needs_lse=facts.needs_lse,
        needs_max_scores=x.max_scores is not None,
        optional=tuple(
            GivenTensor(name, dtype_name(y.dtype), y.dim())
            for name, y in x.optional._asdict().items()
            if y is not None and (name != "causal_per_seq" or facts.causal_each)
        ),
        in_fp8=x.k.dtype == FP8,
    )
    if masks.score_mod is None:
        return problem
    return replace(
        problem,
        score_functions=computes_functions(masks.score_mod, problem),
        needs_lse_low=x.lse_low is not None,
    )


def _bwd_problem(facts: CallFacts) -> AttentionProblem:
    call, masks, problem = facts.call, facts.masks, _problem(facts)
    score_mod_bwd, daux = call.backward.score_mod_bwd, call.tensors.gradients.daux
    exact_aux: tuple[int, ...] = ()
    entry_aux: tuple[int, ...] = ()
    wants_aux: tuple[int, ...] = ()
    if daux is not None and masks.score_mod is not None:
        wants_aux = tuple(i for i, x in enumerate(daux) if x is not None)
        if wants_aux and call.backward.deterministic:
            exact_aux, entry_aux = sums_in_order(call, masks.score_mod, problem, wants_aux)
    return replace(
        problem,
        score_mod_bwd=None if score_mod_bwd is None else callable_key(score_mod_bwd),
        has_lists=False,
        has_full_lists=False,
        has_bits=problem.has_lists,
        wants_aux=wants_aux,
        exact_aux=exact_aux,
        entry_aux=entry_aux,
        deterministic=call.backward.deterministic,
    )


def with_empty_rows(facts: CallFacts, problem: AttentionProblem) -> AttentionProblem:
    seqlens = facts.shapes.seqlen_q, facts.shapes.seqlen_k
    return replace(problem, may_empty_rows=may_empty_rows(problem, seqlens, facts.window.sides))


def new_plan(
    facts: CallFacts, problem: AttentionProblem, choice: FwdChoice | BwdChoice
) -> ExecutionPlan:
    """The plan of a kernel with these tiles, without what they decide."""
    call, scale, out = facts.call, facts.call.options.softmax_scale, facts.call.tensors.out
    gradients, sink = None, call.tensors.learnable_sink
    if not facts.is_forward:
        if not problem.may_empty_rows and call.tensors.gradients.dsink is None:
            sink = None
        gradients = GradientFacts.of(call, problem, sink)
    found = ExecutionPlan(
        direction=call.direction,
        backend=facts.backend,
        target=facts.target,
        device=call.tensors.q.device,
        shapes=facts.shapes,
        problem=problem,
        choice=choice,
        masks=facts.masks,
        softmax_scale=facts.shapes.head_dim**-0.5 if scale is None else float(scale),
        window_left=facts.window.left,
        window_right=facts.window.right,
        softcap=float(call.options.softcap),
        q_start=facts.start,
        gradients=gradients,
        conversions={"learnable_sink": sink_conversion(sink)},
        out_dtype=problem.dtype if out is None else dtype_name(out.dtype),
    )
    return found.with_choice(choice)


def with_page_box(facts: CallFacts, plan: ExecutionPlan) -> ExecutionPlan:
    x, problem = facts.call.tensors, plan.problem
    if x.lengths.page_table is None:
        return plan
    tile_n = plan.fwd_choice.tiles.tile_n
    # of keys that two CTAs share, each loads boxes
    keys = problem.gathers or tile_n // ctas_of_tile(problem.head_dim_v)
    box = page_box_of(x.k.shape[1], keys, problem.has("leftpad_k"))
    return replace(plan, problem=replace(problem, page_box=box))


def call_in_one_pass(facts: CallFacts, plan: ExecutionPlan) -> AttentionCall | None:
    """The call without splits, if the library chose them where mask bits for all heads may be worth
    more: decoding waits for keys, more queries wait for the mask_mod."""
    options = facts.call.options
    by_library = plan.splits is not None and options.num_splits == 0 and plan.fixed_splits is None
    rows = facts.shapes.seqlen_q * plan.problem.packed_heads
    if not by_library or facts.masks.mask_mod is None or rows <= DECODE_ROWS:
        return None
    return replaced(facts.call, options=replaced(options, num_splits=1))
