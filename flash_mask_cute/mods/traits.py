"""Traits of a callable that only tracing shows, and that the choice of a kernel needs.

A callable is traced alone, in a function for the host that never runs. This takes about 20 ms, once
for a callable and the facts about its aux tensors. If it cannot be traced, nothing is claimed;
compiling a kernel with it then reports the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from flash_mask_cute.mods.read_classes import (
    DifferenceRead,
    ModReads,
    ReadClass,
    TensorReads,
)
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.compiler import compiler_streams
from flash_mask_cute.runtime.packages import tells_what_to_install
from flash_mask_cute.runtime.recent import Recent

if TYPE_CHECKING:
    from flash_mask_cute.mods.calling import Reliance


class HasScoreMod(fake_tensors.HasAux, Protocol):
    """A problem with `score_mod` and `aux`, as in `AttentionProblem`."""

    @property
    def score_mod(self) -> str | None: ...


class HasMaskMod(fake_tensors.HasAux, Protocol):
    """A problem with `mask_mod` and `aux`, as in `AttentionProblem`."""

    @property
    def mask_mod(self) -> str | None: ...


K = TypeVar("K")
V = TypeVar("V")
# a `callable_key`, and `AttentionProblem.aux`
_Key: TypeAlias = tuple[str | None, tuple[tuple[str, int], ...]]

_functions: dict[_Key, bool] = Recent(4096)
_reliance: dict[_Key, Reliance] = Recent(4096)
_reads: dict[tuple[_Key, tuple[int, ...]], ModReads] = Recent(4096)
_bias_bits: dict[_Key, int] = Recent(4096)
_difference_reads: dict[_Key, tuple[DifferenceRead, ...]] = Recent(4096)


def computes_functions(score_mod: Callable[..., Any], problem: HasScoreMod) -> bool:
    """Whether the score_mod of a problem computes tanh, exp2 or the like of a score
    (`mods.calling.ScoreModTraits`). False if it cannot be traced."""
    key = problem.score_mod, problem.aux
    return _remembered(_functions, key, partial(_trace_score_mod, score_mod, problem))


def find_reliance(mask_mod: Callable[..., Any], problem: HasMaskMod) -> Reliance:
    """Whether the mask_mod of a problem uses its batch entry, its head and its query
    (`mods.calling.Reliance`). All, if it cannot be traced."""
    key = problem.mask_mod, problem.aux
    return _remembered(_reliance, key, partial(_trace_mask_mod, mask_mod, problem))


def find_reads(
    score_mod: Callable[..., Any], problem: HasScoreMod, wants_aux: Sequence[int]
) -> ModReads:
    """The classes of reads of the aux tensors with numbers in wants_aux, floating-point ones, by
    the score_mod of a problem.

    All are OTHER if it cannot be traced or differentiated; `why` has the reason.
    """
    wanted = tuple(wants_aux)
    key = (problem.score_mod, problem.aux), wanted
    return _remembered(_reads, key, partial(_trace_reads, score_mod, problem, wanted))


def bias_bits(score_mod: Callable[..., Any], problem: HasScoreMod) -> int:
    """Bits of a score, of all elements that the score_mod of a problem reads in rows of keys
    (`mods.table_rows`), if these are the same for all batch entries. Else 0, and if it cannot be
    traced."""
    key = problem.score_mod, problem.aux
    return _remembered(_bias_bits, key, partial(_trace_bias_bits, score_mod, problem))


def difference_reads(
    score_mod: Callable[..., Any], problem: HasScoreMod
) -> tuple[DifferenceRead, ...]:
    """Reads by a score_mod that difference tables can answer; None if it is not traceable."""
    key = problem.score_mod, problem.aux
    trace = partial(_trace_difference_reads, score_mod, problem)
    return _remembered(_difference_reads, key, trace)


def _remembered(memo: dict[K, V], key: K, trace: Callable[[], V]) -> V:
    """What a trace finds, or found before."""
    found = memo.get(key)
    if found is None:
        with compile_lock():
            found = memo[key] = trace()
    return found


@tells_what_to_install()
def _trace_difference_reads(
    score_mod: Callable[..., Any], problem: HasScoreMod
) -> tuple[DifferenceRead, ...]:
    from flash_mask_cute.mods.difference_reads import find_difference_reads

    found: list[tuple[DifferenceRead, ...]] = []

    def evaluate(aux_tensors: Any) -> None:
        found.append(find_difference_reads(score_mod, aux_tensors))

    _trace(evaluate, fake_tensors.aux_tensors(problem))
    return found[0] if found else ()


@tells_what_to_install()
def _trace_reads(
    score_mod: Callable[..., Any], problem: HasScoreMod, wants_aux: tuple[int, ...]
) -> ModReads:
    from flash_mask_cute.mods.read_analysis import analyse_reads

    found: list[ModReads] = []
    why = "score_mod cannot be traced"

    def evaluate(aux_tensors: Any) -> None:
        nonlocal why
        try:
            found.append(analyse_reads(score_mod, aux_tensors, wants_aux))
        except NotImplementedError as error:
            why = str(error)
            raise

    _trace(evaluate, fake_tensors.aux_tensors(problem))
    if found:
        return found[0]
    return ModReads(dict.fromkeys(wants_aux, TensorReads(ReadClass.OTHER, why)))


@tells_what_to_install()
def _trace_score_mod(score_mod: Callable[..., Any], problem: HasScoreMod) -> bool:
    from flash_mask_cute.mods.calling import ScoreModTraits

    found: list[bool] = []

    def evaluate(aux_tensors: Any) -> None:
        found.append(ScoreModTraits.create(score_mod, aux_tensors).computes_functions)

    _trace(evaluate, fake_tensors.aux_tensors(problem))
    return any(found)


@tells_what_to_install()
def _trace_bias_bits(score_mod: Callable[..., Any], problem: HasScoreMod) -> int:
    from flash_mask_cute.mods.calling import ScoreModTraits
    from flash_mask_cute.mods.table_rows import shared_bits

    found: list[int] = []

    def evaluate(aux_tensors: Any) -> None:
        reads = ScoreModTraits.create(score_mod, aux_tensors).row_reads
        found.append(shared_bits(reads, aux_tensors))

    _trace(evaluate, fake_tensors.aux_tensors(problem))
    return max(found, default=0)


@tells_what_to_install()
def _trace_mask_mod(mask_mod: Callable[..., Any], problem: HasMaskMod) -> Reliance:
    from flash_mask_cute.mods.calling import Reliance

    found: list[Reliance] = []

    def evaluate(aux_tensors: Any, batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> None:
        found.append(Reliance.create(mask_mod, batch_idx, head_idx, q_idx, kv_idx, aux_tensors))

    places = *fake_tensors.int32_pair(), *fake_tensors.int32_pair()
    _trace(evaluate, fake_tensors.aux_tensors(problem), *places)
    return found[0] if found else Reliance(batch=True, head=True, query=True)


def _trace(evaluate: Callable[..., None], *arguments: Any) -> None:
    """Trace a function for the host. What it keeps shows whether the trace finished."""
    import cutlass.cute as cute

    with contextlib.suppress(Exception), compiler_streams():
        cute.compile(cute.jit(evaluate), *arguments, no_jit_engine=True)
