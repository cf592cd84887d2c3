"""Traits of a callable that only tracing shows, and that the choice of a kernel needs.

A callable is traced alone, in a function for the host that never runs. This takes about 20 ms, once
for a callable and the facts about its aux tensors. If it cannot be traced, nothing is claimed;
compiling a kernel with it then reports the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

from flash_mask_cute.mods.read_classes import (
    DifferenceRead,
    ModReads,
    ReadClass,
    Reliance,
    TensorReads,
)
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.compiler import compiler_streams
from flash_mask_cute.runtime.packages import tells_what_to_install
from flash_mask_cute.runtime.recent import Recent


class HasMods(Protocol):
    """The `callable_key` of each mod, and the (dtype, rank) of each aux tensor, as in
    `AttentionProblem`."""

    @property
    def score_mod(self) -> str | None: ...
    @property
    def mask_mod(self) -> str | None: ...
    @property
    def aux(self) -> tuple[tuple[str, int], ...]: ...


V = TypeVar("V")
# What a trace found, None if it failed, and the text of its NotImplementedError.
_found: dict[Hashable, tuple[Any, str]] = Recent(16384)


def computes_functions(score_mod: Callable[..., Any], problem: HasMods) -> bool:
    """Whether the score_mod of a problem computes tanh, exp2 or the like of a score
    (`mods.calling.ScoreModTraits`). False if it cannot be traced."""
    return _score_traits(score_mod, problem)[0]


def bias_bits(score_mod: Callable[..., Any], problem: HasMods) -> int:
    """Bits of a score, of all elements that the score_mod of a problem reads in rows of keys
    (`mods.table_rows`), if these are the same for all batch entries. Else 0, and if it cannot be
    traced."""
    return _score_traits(score_mod, problem)[1]


def _score_traits(score_mod: Callable[..., Any], problem: HasMods) -> tuple[bool, int]:
    def find(aux_tensors: Any) -> tuple[bool, int]:
        from flash_mask_cute.mods.calling import ScoreModTraits
        from flash_mask_cute.mods.table_rows import shared_bits

        traits = ScoreModTraits.create(score_mod, aux_tensors)
        return traits.computes_functions, shared_bits(traits.row_reads, aux_tensors)

    found, _ = _traced_once("score_traits", problem.score_mod, problem.aux, find)
    return found or (False, 0)


def find_reliance(mask_mod: Callable[..., Any], problem: HasMods) -> Reliance:
    """Whether the mask_mod of a problem uses its batch entry, its head and its query. All, if it
    cannot be traced."""

    def find(aux_tensors: Any) -> Reliance:
        from flash_mask_cute.mods.calling import reliance_of

        return reliance_of(mask_mod, aux_tensors)

    found, _ = _traced_once("reliance", problem.mask_mod, problem.aux, find)
    return found or Reliance(batch=True, head=True, query=True)


def find_reads(
    score_mod: Callable[..., Any], problem: HasMods, wants_aux: Sequence[int]
) -> ModReads:
    """The classes of reads of the aux tensors with numbers in wants_aux, floating-point ones, by
    the score_mod of a problem.

    All are OTHER if it cannot be traced or differentiated; `why` has the reason.
    """
    wanted = tuple(wants_aux)

    def find(aux_tensors: Any) -> ModReads:
        from flash_mask_cute.mods.read_analysis import analyse_reads

        return analyse_reads(score_mod, aux_tensors, wanted)

    found, refusal = _traced_once(("reads", wanted), problem.score_mod, problem.aux, find)
    if found is not None:
        return found
    unknown = TensorReads(ReadClass.OTHER, refusal or "score_mod cannot be traced")
    return ModReads(dict.fromkeys(wanted, unknown), no_derivative=refusal)


def difference_reads(score_mod: Callable[..., Any], problem: HasMods) -> tuple[DifferenceRead, ...]:
    """Reads by a score_mod that difference tables can answer; none if it cannot be traced."""

    def find(aux_tensors: Any) -> tuple[DifferenceRead, ...]:
        from flash_mask_cute.mods.difference_reads import find_difference_reads

        return find_difference_reads(score_mod, aux_tensors)

    found, _ = _traced_once("difference_reads", problem.score_mod, problem.aux, find)
    return found or ()


def _traced_once(
    what: Hashable, mod: str | None, aux: Any, find: Callable[[Any], V]
) -> tuple[V | None, str]:
    """`_traced`, once for what is asked about a mod, given by its key."""
    key = what, mod, aux
    found = _found.get(key)
    if found is None:
        with compile_lock():
            found = _found[key] = _traced(find, aux)
    return found


@tells_what_to_install()
def _traced(find: Callable[[Any], V], aux: Any) -> tuple[V | None, str]:
    """What `find` makes of the aux tensors in a trace; None if it fails, and the text of a
    NotImplementedError."""
    import cutlass.cute as cute

    found: list[V] = []
    refusal = ""

    def evaluate(aux_tensors: Any) -> None:
        nonlocal refusal
        try:
            found.append(find(aux_tensors))
        except NotImplementedError as error:
            refusal = str(error)
            raise

    with contextlib.suppress(Exception), compiler_streams():
        cute.compile(cute.jit(evaluate), fake_tensors.aux_tensors(aux), no_jit_engine=True)
    return (found[0], "") if found else (None, refusal)
