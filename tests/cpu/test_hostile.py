"""Hostile calls on the CPU path: right, or refused by the name of an argument, and nothing else.

What fails begins with seed and number: `run_call(draw_call(seed, number), CPU)` calls that again.
"""

from __future__ import annotations

import pytest
from drawn_share import Draws
from hostile_runs import CPU, assert_none_is_wrong
from random_hostile import MASK_MODS, SCORE_MODS, draw_call

DRAWN = Draws.of("HOSTILE", 1000, 0, "CALLS")

CHUNKS = 8
pytestmark = pytest.mark.usefixtures("one_thread")


def test_few_callables() -> None:
    mods = [mod.cute for table in (MASK_MODS, SCORE_MODS) for mod in table.values()]
    assert len(set(mods)) <= 20


@pytest.mark.shares(8)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_hostile_calls(chunk: int) -> None:
    numbers = range(chunk, DRAWN.most, CHUNKS)
    assert_none_is_wrong((draw_call(DRAWN.seed, number) for number in numbers), CPU)
