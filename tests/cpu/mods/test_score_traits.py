"""Whether a score_mod computes functions of scores, by tracing it; no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32, Int32

from flash_mask_cute import explain
from flash_mask_cute.call.problem import AttentionProblem
from flash_mask_cute.mods import traits
from flash_mask_cute.mods.calling import ScoreModTraits
from flash_mask_cute.mods.traits import computes_functions
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.utils import scalar_to_ssa

PROBLEM = AttentionProblem("bfloat16", 128, 128, is_causal=True)


def _capped(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return cute.math.tanh(score * 0.05, fastmath=True) * 20.0


def _biased(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score + aux[0][h[0], k[0]]


def _untraceable(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    raise RuntimeError("not today")


@pytest.mark.parametrize(
    ("mod", "expected"),
    [
        (_capped, True),
        (_biased, False),
        (
            lambda score, b, h, q, k, aux: (
                score + cute.math.tanh(aux[0][h[0], k[0]] + 0.0 * score, fastmath=True)
            ),
            True,
        ),
        (
            lambda score, b, h, q, k, aux: (
                score + cute.math.tanh(aux[0][h[0], k[0]], fastmath=True)
            ),
            False,
        ),
        (_untraceable, False),
    ],
)
def test_what_is_computed_of_a_score(mod: Any, expected: bool) -> None:
    problem = replace(PROBLEM, score_mod=callable_key(mod), aux=(("float32", 2),))
    assert computes_functions(mod, problem) is expected


@cute.jit
def _branches(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    kept = score
    if k[0] < 7:
        kept = score * 0.5
    return kept


@pytest.mark.parametrize(
    ("mod", "expected"),
    [
        (_capped, True),
        (lambda score, b, h, q, k, aux: score - aux[0][h[0], q[0]] * (q - k).to(Float32), True),
        (
            lambda score, b, h, q, k, aux: cute.where(
                k < scalar_to_ssa(7, Int32), score, score * 0.5
            ),
            True,
        ),
        (lambda score, b, h, q, k, aux: 0.25, True),
        (_biased, False),
        (lambda score, b, h, q, k, aux: score + (q[0] - k[0]) * 0.5, False),
        (lambda score, b, h, q, k, aux: cute.full((1,), score[0] * 2.0, Float32), False),
        (_branches, False),
        (lambda score, b, h, q, k, aux: score - score.reduce(cute.ReductionOp.MAX, 0.0, 0), False),
    ],
)
def test_which_callables_take_rows(mod: Any, expected: bool) -> None:
    """Those that read no element of scores and keys."""
    problem = replace(PROBLEM, aux=(("float32", 2),))
    found = []

    @cute.jit
    def ask(aux_tensors: Any) -> None:
        found.append(ScoreModTraits.create(mod, aux_tensors))

    with compile_lock():
        cute.compile(ask, fake_tensors.aux_tensors(problem.aux), no_jit_engine=True)
    assert found[0].takes_rows is expected


def test_a_callable_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def trace(find: Any, aux: Any) -> Any:
        asked.append(aux)
        return (True, 0), ""

    monkeypatch.setattr(traits, "_found", {})
    monkeypatch.setattr(traits, "_traced", trace)
    for name in ("float32", "float32", "bfloat16"):
        problem = replace(PROBLEM, score_mod=callable_key(_biased), aux=((name, 2),))
        assert computes_functions(_biased, problem)
    assert len(asked) == 2


@pytest.mark.usefixtures("explained_without_compiling")
@pytest.mark.parametrize(
    ("arguments", "tiles"),
    [
        ({"score_mod": _capped}, (192, 80)),
        ({"softcap": 20.0}, (192, 80)),
        ({"score_mod": _biased, "aux_tensors": [torch.zeros(2, 8192)]}, (128, 128)),
    ],
    ids=["capped", "softcap", "biased"],
)
def test_tiles_of_a_call(arguments: dict[str, Any], tiles: tuple[int, int]) -> None:
    q = torch.zeros(1, 8192, 2, 128, dtype=torch.bfloat16)
    found = explain(q, q, q, causal=True, **arguments)
    assert (found.tiles.tile_m, found.tiles.tile_n) == tiles
