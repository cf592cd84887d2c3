"""Hostile calls on the CPU path: right, or refused by the name of an argument, and nothing else.

What fails begins with seed and number: `run_call(draw_call(seed, number), CPU)` calls that again.
"""

from __future__ import annotations

from collections import Counter

import pytest
from drawn_share import Draws
from hostile_runs import CPU, run_call
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
    outcomes = [
        run_call(draw_call(DRAWN.seed, number), CPU) for number in range(chunk, DRAWN.most, CHUNKS)
    ]
    wrong = [outcome.text for outcome in outcomes if outcome.kind == "wrong"]
    assert not wrong, f"{len(wrong)} of {len(outcomes)}:\n" + "\n".join(wrong[:8])
    kinds = Counter(outcome.kind for outcome in outcomes)
    if len(outcomes) >= 20:
        assert kinds["right"] >= len(outcomes) // 2, [x.text for x in outcomes if x.kind != "right"]
