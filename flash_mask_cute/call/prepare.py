"""From a call to its prepared form: planned and compiled once, found again by its key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from flash_mask_cute.call.arguments import AttentionCall, PreparedBwd, PreparedFwd
from flash_mask_cute.call.backward import CpuBackward, EmptyBackward, KernelBackward
from flash_mask_cute.call.batch_sums import MakeSharedSums, compile_shared_sums
from flash_mask_cute.call.build_backward import BwdKernels, compile_bwd, compile_short
from flash_mask_cute.call.check.validate import refuse_transforms
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.facts import Backend
from flash_mask_cute.call.fixed_splits import fixed_splits_of
from flash_mask_cute.call.forward import (
    CpuForward,
    EmptyForward,
    KernelForward,
    build_fwd,
    compile_fwd,
)
from flash_mask_cute.call.plan import plan
from flash_mask_cute.call.problem import Mods
from flash_mask_cute.call.splits import CombinedForward
from flash_mask_cute.call.tables import MakeDifferenceTables, compile_difference_tables
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.mask_prep.mask_bits import MakeMaskBits, compile_mask_bits
from flash_mask_cute.runtime.cache import Compiled
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.target import Target


def prepare_fwd(call: AttentionCall, target: Target | None = None) -> PreparedFwd:
    """The prepared forward. target: as for `plan`, whose errors it raises."""
    refuse_transforms()
    return prepared_fwd(plan(call, target))


def prepared_fwd(plan: ExecutionPlan) -> PreparedFwd:
    """The prepared form of a planned forward, with kernels compiled or from the cache."""
    if plan.instead:
        *others, last = plan.instead
        return last.wrap(prepared_fwd(replace(plan, instead=tuple(others))))
    if plan.backend is Backend.CPU:
        return CpuForward(plan)
    if plan.backend is Backend.EMPTY:
        return EmptyForward(plan)
    combine: Any = None
    if plan.fixed_splits is not None:
        combine = fixed_splits_of(plan)
    elif plan.splits is not None:
        combine = CombinedForward.of_plan(plan)
    function = compiled_fwd(plan).function
    return KernelForward(plan, function, _mask_bits_maker(plan), combine, _tables_maker(plan))


def prepare_bwd(call: AttentionCall, target: Target | None = None) -> PreparedBwd:
    """As `prepare_fwd`, for a backward."""
    refuse_transforms()
    return prepared_bwd(plan(call, target))


def prepared_bwd(plan: ExecutionPlan) -> PreparedBwd:
    """As `prepared_fwd`, for a backward."""
    if plan.instead:
        *others, last = plan.instead
        return last.wrap(prepared_bwd(replace(plan, instead=tuple(others))))
    if plan.backend is Backend.CPU:
        return CpuBackward(plan)
    if plan.backend is Backend.EMPTY:
        return EmptyBackward(plan)
    makers: list[Any] = [_mask_bits_maker(plan), _tables_maker(plan)]
    if plan.shared is not None:
        function = compile_shared_sums(plan).function
        makers.append(MakeSharedSums(plan.shared, plan.shapes, function))
    return KernelBackward(plan, compiled_bwd(plan), *makers)


def compiled_fwd(plan: ExecutionPlan) -> Compiled:
    """The attention kernel of a planned forward."""
    return compile_fwd(plan.problem, plan.fwd_choice.tiles, plan.target, _kernel_mods(plan))


def built_fwd(plan: ExecutionPlan) -> Compiled:
    """The same kernel, compiled now and not kept. The caller holds `compile_lock`."""
    return build_fwd(plan.problem, plan.fwd_choice.tiles, plan.target, _kernel_mods(plan))


def compiled_bwd(plan: ExecutionPlan) -> BwdKernels:
    """The kernels of a planned backward."""
    if plan.shared is not None and plan.shared.short is not None:
        return compile_short(plan, plan.shared.short)
    facts = plan.gradients
    assert facts is not None
    mods = _kernel_mods(plan, facts.score_mod_bwd)
    return compile_bwd(plan.problem, plan.bwd_choice, plan.target, mods, facts)


def _kernel_mods(plan: ExecutionPlan, score_mod_bwd: Callable[..., Any] | None = None) -> Mods:
    """The callables that the attention kernel itself evaluates."""
    mods = replaced(plan.masks.mods, score_mod_bwd=score_mod_bwd)
    if plan.mask_bits is not None:
        mods = replaced(mods, mask_mod=None)
    if plan.tables is None:
        return mods
    from flash_mask_cute.mods.difference_reads import ModWithTables

    assert mods.score_mod is not None
    own = len(plan.problem.aux)
    reading = ModWithTables(mods.score_mod, own, plan.tables.reads, plan.tables.summed)
    others = (None if x is None else ModWithTables(x, own) for x in mods[1:])
    return Mods(reading, *others)


def _tables_maker(plan: ExecutionPlan) -> MakeDifferenceTables | None:
    """The kernel that fills tables of differences before attention."""
    score_mod, tables = plan.masks.score_mod, plan.tables
    if tables is None or score_mod is None or not tables.reads:
        return None
    return MakeDifferenceTables(tables, compile_difference_tables(plan, score_mod, tables).function)


def _mask_bits_maker(plan: ExecutionPlan) -> MakeMaskBits | None:
    """The kernel that stores the bits of a mask_mod before attention."""
    if plan.mask_bits is None:
        return None
    mask_mod, mask_bits = plan.masks.mask_mod, plan.mask_bits
    assert mask_mod is not None
    columns = arch_spec(plan.target).load_columns()
    function = compile_mask_bits(mask_mod, mask_bits.problem, plan.target, columns).function
    return partial(mask_bits.query_chunks, function)


def may_be_kept(prepared: PreparedFwd | PreparedBwd) -> bool:
    """Whether a prepared call may run later calls. On the CPU it may not, where every call checks
    the contents of cu_seqlens and seqused."""
    while (inner := getattr(prepared, "inner", None)) is not None:
        prepared = inner
    return not isinstance(prepared, CpuForward | CpuBackward)
