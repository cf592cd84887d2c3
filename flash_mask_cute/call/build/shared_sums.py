"""Compile the kernels that walk over batch entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flash_mask_cute.call.build.kernel_operands import BACKWARD
from flash_mask_cute.call.choose.config import BwdChoice
from flash_mask_cute.call.choose.execution_plan import SharedSums
from flash_mask_cute.call.choose.shared_sums import entry_traits, short_traits
from flash_mask_cute.call.problem import AttentionProblem
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.compiler import CACHE, compile_object, options_of
from flash_mask_cute.runtime.fake_tensors import strided
from flash_mask_cute.runtime.target import Target

NAME, SHORT_NAME = "bwd_shared", "bwd_short"


def compile_shared_sums(
    score_mod: Callable[..., Any] | None,
    problem: AttentionProblem,
    choice: BwdChoice,
    shared: SharedSums,
    target: Target,
    cache: CompileCache = CACHE,
) -> Compiled:
    """The compiled kernel, from the cache or built now. `function` takes q, k, v, dout and stats as
    the main kernel does, the sums and the aux tensors, as tuples, the scale, the number of
    parts, both sides of the window, and mask bits. For short sequences, dq or sums of dq, dk and dv
    follow stats, the scale of dq the scale, and there are no mask bits; of no tensors there is
    None."""
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
    build, name = build_shared_sums, NAME
    if shared.short is not None:
        build, name = build_short, SHORT_NAME
        facts["tile"] = tuple(shared.short)
    return cache.get(
        name,
        lambda: facts,
        lambda: build(score_mod, problem, choice, shared, target),
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
    """Compile the kernel that sums gradients of aux tensors now."""
    import cutlass

    from flash_mask_cute.sm90.flash_bwd_shared import SharedGradientsSm90, SharedTraits

    traits = SharedTraits(
        fake_tensors.cutlass_dtype(problem.dtype),
        *(problem.head_dim, problem.head_dim_v, choice.tiles.tile_m, problem.may_empty_rows),
    )
    assert score_mod is not None
    flags = problem.is_causal, problem.is_local
    kernel = SharedGradientsSm90(traits, score_mod, shared.numbers, shared.once, *flags)
    # this kernel reads no tables of differences
    problem = replace(problem, tables=())
    of = {row.argument: row.fake(problem, choice) for row in BACKWARD}
    arguments = [
        *(of[name] for name in ("q", "k", "v", "dout", "stats")),
        *(_sums(problem, shared), of["aux_tensors"], of["scale"]),
        *(cutlass.Int32(1), of["stream"]),
        *(of["window_left"], of["window_right"], of["mask_bits"]),
    ]
    return compile_object(kernel, arguments, options_of(target))


def build_short(
    score_mod: Callable[..., Any] | None,
    problem: AttentionProblem,
    choice: BwdChoice,
    shared: SharedSums,
    target: Target,
) -> Compiled:
    """Compile the kernel of short sequences now."""
    import cutlass

    from flash_mask_cute.sm90.flash_bwd_entries import EntryBackwardSm90
    from flash_mask_cute.sm90.flash_bwd_short import ShortBackwardSm90

    assert shared.short is not None
    has_sums, is_causal = bool(shared.numbers), problem.is_causal
    kernel: Any
    if shared.short.several_keys:
        assert score_mod is not None
        of_entries = entry_traits(problem, shared.short, has_sums)
        kernel = EntryBackwardSm90(of_entries, score_mod, shared.numbers, is_causal)
    else:
        traits = short_traits(problem, shared.short, choice, has_sums)
        kernel = ShortBackwardSm90(traits, score_mod, shared.numbers, shared.once, is_causal)
    # gradients may have other strides than their tensors
    of, like = ({row.argument: row.fake(problem, choice) for row in BACKWARD} for _ in range(2))
    target_of_dq = "dq_accum" if shared.short.several_keys else "q"
    arguments = [
        *(of[name] for name in ("q", "k", "v", "dout", "stats")),
        *(like[name] for name in (target_of_dq, "k", "v")),
        *(_sums(problem, shared) or None, of["aux_tensors"], of["scale"], of["scale"]),
        *(cutlass.Int32(1), of["stream"], of["window_left"], of["window_right"]),
    ]
    return compile_object(kernel, arguments, options_of(target))


def _sums(problem: AttentionProblem, shared: SharedSums) -> tuple[Any, ...]:
    def sums_of(i: int) -> Any:
        _, rank = problem.aux[i]
        if i in shared.exact:
            return strided(rank + 1, "int64")
        return strided(rank + int(i in shared.once), "float32")

    return tuple(map(sums_of, shared.numbers))
