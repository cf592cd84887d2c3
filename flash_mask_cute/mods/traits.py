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


class HasAux(Protocol):
    """A problem with `aux`, as in `AttentionProblem`."""

    @property
    def aux(self) -> tuple[tuple[str, int], ...]: ...


class HasScoreMod(HasAux, Protocol):
    """A problem with `score_mod` and `aux`, as in `AttentionProblem`."""

    @property
    def score_mod(self) -> str | None: ...


class HasMaskMod(HasAux, Protocol):
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


def _trace_difference_reads(
    score_mod: Callable[..., Any], problem: HasScoreMod
) -> tuple[DifferenceRead, ...]:
    def find(aux_tensors: Any) -> tuple[DifferenceRead, ...]:
        from flash_mask_cute.mods.difference_reads import find_difference_reads

        return find_difference_reads(score_mod, aux_tensors)

    return _traced(find, problem, ())


def _trace_reads(
    score_mod: Callable[..., Any], problem: HasScoreMod, wants_aux: tuple[int, ...]
) -> ModReads:
    no_derivative = ""

    def find(aux_tensors: Any) -> ModReads:
        from flash_mask_cute.mods.read_analysis import analyse_reads

        nonlocal no_derivative
        try:
            return analyse_reads(score_mod, aux_tensors, wants_aux)
        except NotImplementedError as error:
            no_derivative = str(error)
            raise

    if (found := _traced(find, problem, None)) is not None:
        return found
    why = no_derivative or "score_mod cannot be traced"
    reads = dict.fromkeys(wants_aux, TensorReads(ReadClass.OTHER, why))
    return ModReads(reads, no_derivative=no_derivative)


def _trace_score_mod(score_mod: Callable[..., Any], problem: HasScoreMod) -> bool:
    def find(aux_tensors: Any) -> bool:
        from flash_mask_cute.mods.calling import ScoreModTraits

        return ScoreModTraits.create(score_mod, aux_tensors).computes_functions

    return _traced(find, problem, False)


def _trace_bias_bits(score_mod: Callable[..., Any], problem: HasScoreMod) -> int:
    def find(aux_tensors: Any) -> int:
        from flash_mask_cute.mods.calling import ScoreModTraits
        from flash_mask_cute.mods.table_rows import shared_bits

        return shared_bits(ScoreModTraits.create(score_mod, aux_tensors).row_reads, aux_tensors)

    return _traced(find, problem, 0)


@tells_what_to_install()
def _trace_mask_mod(mask_mod: Callable[..., Any], problem: HasMaskMod) -> Reliance:
    from flash_mask_cute.mods.calling import Reliance

    found: list[Reliance] = []

    def evaluate(aux_tensors: Any, batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> None:
        found.append(Reliance.create(mask_mod, batch_idx, head_idx, q_idx, kv_idx, aux_tensors))

    places = *fake_tensors.int32_pair(), *fake_tensors.int32_pair()
    _trace(evaluate, fake_tensors.aux_tensors(problem.aux), *places)
    return found[0] if found else Reliance(batch=True, head=True, query=True)


@tells_what_to_install()
def _traced(find: Callable[[Any], V], problem: HasScoreMod, otherwise: K) -> V | K:
    """What `find` makes of the aux tensors in a trace; otherwise: if it fails."""
    found: list[V] = []

    def evaluate(aux_tensors: Any) -> None:
        found.append(find(aux_tensors))

    _trace(evaluate, fake_tensors.aux_tensors(problem.aux))
    return found[0] if found else otherwise


def _trace(evaluate: Callable[..., None], *arguments: Any) -> None:
    """Trace a function for the host. What it keeps shows whether the trace finished."""
    import cutlass.cute as cute

    with contextlib.suppress(Exception), compiler_streams():
        cute.compile(cute.jit(evaluate), *arguments, no_jit_engine=True)
