"""`QStart`: what folding keeps, by brute force, and its forms for kernels and callers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from flash_mask_cute import flash_attn_func, flash_attn_with_kvcache
from flash_mask_cute.limits import AT_END
from flash_mask_cute.masks.q_start import EACH, NO_START, NUMBER, QStart, split_q_start
from flash_mask_cute.seqlen_info import SeqlenInfoQK

POSITIONS = torch.tensor([-3, 2], dtype=torch.int32)
ARGUMENTS: list[Any] = [None, 0, 2, -1, -5, "end", POSITIONS]


@pytest.mark.parametrize("argument", ARGUMENTS, ids=str)
@pytest.mark.parametrize("is_banded", [False, True])
@pytest.mark.parametrize("counts_rows", [False, True])
def test_folding_keeps_what_queries_see(argument: Any, is_banded: bool, counts_rows: bool) -> None:
    """Bands and masks that count rows see query 0 of every sequence where they did before."""
    q_starts, start = split_q_start(argument)
    for is_square, seqlen_q, seqlen_k, b in product((False, True), (1, 3), (1, 3, 5), (0, 1)):
        if is_square and seqlen_q != seqlen_k:
            continue
        folded = start.fold(is_banded, counts_rows, is_square)
        assert folded in (start, NO_START)
        lengths = SeqlenInfoQK.create(b, seqlen_q, seqlen_k)

        def effect(x: QStart, lengths: SeqlenInfoQK = lengths, b: int = b) -> tuple[int, int]:
            position = x.of_sequence(q_starts, b, lengths)
            shift = lengths.seqlen_k - lengths.seqlen_q if position is None else position
            return shift if is_banded else 0, (position or 0) if counts_rows else 0

        assert effect(folded) == effect(start)


def test_folding_drops_what_has_no_effect() -> None:
    number, end = QStart(NUMBER, 2), split_q_start("end")[1]
    first = QStart(NUMBER, 0)
    assert number.fold(is_banded=False, counts_rows=False, is_square=False) == NO_START
    assert end.fold(is_banded=True, counts_rows=False, is_square=False) == NO_START
    assert end.fold(is_banded=True, counts_rows=True, is_square=True) == NO_START
    assert first.fold(is_banded=True, counts_rows=True, is_square=True) == NO_START
    assert first.fold(is_banded=False, counts_rows=True, is_square=False) == NO_START


@pytest.mark.parametrize("argument", ARGUMENTS, ids=str)
def test_every_form_says_the_same(argument: Any) -> None:
    """The operator's arguments give the same type back, and the type gives the argument back."""
    q_starts, start = split_q_start(argument)
    assert (q_starts is argument) == (start.kind == EACH or argument is None)
    assert QStart.from_operator(start.operand(), q_starts) == start
    assert start.argument(q_starts) is argument
    assert start.is_given == (argument is not None)
    lengths = SeqlenInfoQK.create(1, 3, 7)
    position = start.of_sequence(q_starts, 1, lengths)
    operand = q_starts[1].item() if start.kind == EACH and q_starts is not None else start.operand()
    # as `core.lengths.Lengths` reads it
    assert position == (4 if operand == AT_END else operand)
    assert start.problem_fields().get("q_start") == {
        type(None): None, int: "number", str: "number", torch.Tensor: "each",
    }[type(argument)]  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "error", "text"),
    [
        ("start", ValueError, "q_start must be an int, \"end\", .* got 'start'"),
        (True, TypeError, r"q_start must be .* got True \(bool\)"),
        (2.0, TypeError, r"q_start must be .* got 2.0 \(float\)"),
        (-(1 << 29), ValueError, "q_start must be above -536870912 .* as an int, got -536870912"),
        (1 << 31, ValueError, "q_start must be above .* and below .* got 2147483648"),
    ],
)
def test_a_wrong_argument_is_named(argument: Any, error: type[Exception], text: str) -> None:
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(error, match=text):
        split_q_start(argument)
    with pytest.raises(error, match=text):
        flash_attn_func(q, q, q, q_start=argument)
    with pytest.raises(error, match=text):
        flash_attn_with_kvcache(q, q, q, q_start=argument)


def test_a_call_without_a_position_makes_nothing() -> None:
    """The warm path of most calls: two constants, and a key that compares by identity."""
    assert split_q_start(None) is split_q_start(None)
    assert split_q_start(None)[1] is NO_START
