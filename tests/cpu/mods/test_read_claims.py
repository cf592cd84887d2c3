"""What the analysis of reads claims, against the reads at all places of a small grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32
from evaluated_reads import EvaluatedReads, evaluate_reads
from read_claims import check_claims, check_drawn_claims
from test_read_classes import DRAWN

from flash_mask_cute.mods.read_classes import ReadClass

TABLE, IDS = torch.arange(64.0), torch.arange(60, dtype=torch.int32)


def reads_of(mod: Callable[..., Any]) -> EvaluatedReads:
    """Of a mod that gets the score and its place as scalars, with two learned tensors and IDS."""

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return mod(score[0], b[0], h[0], q[0], k[0], aux)

    return evaluate_reads(score_mod, [TABLE, TABLE, IDS], (0, 1))


def _clipped(x: Any) -> Any:
    return cutlass.max(cutlass.min(x, 20), -20) + 20


@pytest.mark.parametrize(
    "before",
    [
        lambda q, k: q,
        lambda q, k: q // 16,
        lambda q, k: k // 16,
        lambda q, k: cutlass.max(q - k, 0),
    ],
    ids=["query", "rows", "rows-of-keys", "difference"],
)
@pytest.mark.parametrize(
    "difference", [lambda q, k: q - k, lambda q, k: k // 16 - q // 16], ids=["places", "rows"]
)
def test_what_is_read_before_does_not_turn_a_difference(
    before: Callable[..., Any], difference: Callable[..., Any]
) -> None:
    found = reads_of(
        lambda s, b, h, q, k, aux: s + aux[0][before(q, k)] + aux[1][_clipped(difference(q, k))]
    )
    assert found.told.tensors[1].read_class is ReadClass.DIFFERENCE
    assert found.differences
    check_claims(found, "")


# Functions of the score that have no derivative, and so leave that of the modified score alone.
OF_SCORE: dict[str, Callable[[Any], Any]] = {
    "sign": lambda s: cutlass.select_(s > 0.0, Int32(1), Int32(0)),
    "whole": lambda s: Int32(cute.math.floor(s)) & 7,
}


@pytest.mark.parametrize("name", OF_SCORE)
@pytest.mark.parametrize(
    "index",
    [lambda x, h, q, k: x, lambda x, h, q, k: x + k, lambda x, h, q, k: x + _clipped(q - k)],
    ids=["head", "key", "difference"],
)
def test_an_index_that_depends_on_the_score_is_other(name: str, index: Callable[..., Any]) -> None:
    of_score = OF_SCORE[name]
    found = reads_of(lambda s, b, h, q, k, aux: s + aux[0][index(of_score(s), h, q, k)] + aux[1][h])
    assert found.told.tensors[0].read_class is ReadClass.OTHER
    assert found.told.tensors[1].read_class is ReadClass.HEAD
    assert not found.differences
    check_claims(found, name)


@pytest.mark.parametrize(("place", "expected"), [(1, "key"), (2, "other")], ids=["head", "query"])
def test_numbers_of_a_tensor_that_a_branch_chose(place: int, expected: str) -> None:
    @cute.jit
    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        numbers = aux[1]
        if (b, h, q, k)[place][0] > 1:
            numbers = aux[2]
        return score + aux[0][numbers[k[0]]]

    found = evaluate_reads(score_mod, [TABLE, IDS, IDS.flip(0)], (0,))
    assert found.told.tensors[0].read_class.value == expected
    check_claims(found, "")


# -- random ones --------------------------------------------------------------------------------


def test_drawn() -> None:
    for i in range(max(DRAWN.most // 4, 1)):
        check_drawn_claims(DRAWN.seed * 1000 + i)
