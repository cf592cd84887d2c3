"""What tiles depend on of a score_mod, which only tracing it tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.packages import tells_what_to_install


class HasScoreMod(Protocol):
    """A problem with `score_mod` and `aux`, as in `AttentionProblem`."""

    @property
    def score_mod(self) -> str | None: ...

    @property
    def aux(self) -> tuple[tuple[str, int], ...]: ...


_known: dict[tuple[str | None, tuple[tuple[str, int], ...]], bool] = {}


def computes_functions(score_mod: Callable[..., Any], problem: HasScoreMod) -> bool:
    """Whether the score_mod of a problem computes tanh, exp2 or the like of a score
    (`core.mods.ScoreModTraits`).

    It is traced to find out, in some 20 ms, once for a callable and what its aux tensors are. One
    that cannot be traced does not: whoever compiles it says why it cannot.
    """
    key = problem.score_mod, problem.aux
    if key not in _known:
        with compile_lock():
            _known[key] = _trace(score_mod, problem)
    return _known[key]


@tells_what_to_install()
def _trace(score_mod: Callable[..., Any], problem: HasScoreMod) -> bool:
    import cutlass.cute as cute

    from flash_mask_cute.mods.calling import ScoreModTraits

    found: list[bool] = []

    @cute.jit
    def ask(aux_tensors: Any) -> None:
        found.append(ScoreModTraits.of(score_mod, aux_tensors).computes_functions)

    try:
        cute.compile(ask, fake_tensors.aux_tensors(problem), no_jit_engine=True)
    except Exception:
        return False
    return any(found)
