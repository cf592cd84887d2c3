"""Compile the kernel that fills tables of differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flash_mask_cute.call.choose.execution_plan import DifferenceTables
from flash_mask_cute.call.problem import AttentionProblem
from flash_mask_cute.mods.read_classes import DifferenceRead
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.compiler import CACHE, compile_object, options_of
from flash_mask_cute.runtime.target import Target

NAME = "difference_tables"


def compile_difference_tables(
    score_mod: Callable[..., Any],
    problem: AttentionProblem,
    tables: DifferenceTables,
    target: Target,
    cache: CompileCache = CACHE,
) -> Compiled:
    """The compiled kernel, from the cache or built now. `function` takes the tables and the aux
    tensors, as tuples."""
    facts = problem.score_mod, problem.aux, tables.reads, tables.dtypes
    return cache.get(
        NAME,
        lambda: dict(zip(("score_mod", "aux", "reads", "dtypes"), facts, strict=True)),
        lambda: build_difference_tables(score_mod, problem, tables.reads, target),
        arch=target.arch,
        options=options_of(target),
        token=facts,
    )


def build_difference_tables(
    score_mod: Callable[..., Any],
    problem: AttentionProblem,
    reads: tuple[DifferenceRead, ...],
    target: Target,
) -> Compiled:
    """Compile now."""
    from flash_mask_cute.mods.difference_tables_kernel import DifferenceTables as Kernel

    tables = tuple(fake_tensors.rows(problem.aux[read.tensor][0], 3) for read in reads)
    arguments = [tables, fake_tensors.aux_tensors(problem), fake_tensors.stream()]
    return compile_object(Kernel(score_mod, reads), arguments, options_of(target))
