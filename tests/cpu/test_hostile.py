"""Hostile calls on the CPU path: right, or refused by the name of an argument, and nothing else.

FLASH_MASK_HOSTILE_CALLS says how many (1000), FLASH_MASK_HOSTILE_SEED of which seed (0). A failure
begins with seed and number: `run_call(draw_call(seed, number), CPU)` makes that call again.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hostile_oracle import CPU
from hostile_runs import run_call
from random_hostile import MASK_MODS, SCORE_MODS, draw_call

CALLS = int(os.environ.get("FLASH_MASK_HOSTILE_CALLS", "1000"))
SEED = int(os.environ.get("FLASH_MASK_HOSTILE_SEED", "0"))
CHUNKS = 8
pytestmark = pytest.mark.usefixtures("one_thread")


def test_few_callables() -> None:
    mods = [mod.cute for table in (MASK_MODS, SCORE_MODS) for mod in table.values()]
    assert len(set(mods)) <= 20


@pytest.mark.shares(4)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_hostile_calls(chunk: int) -> None:
    outcomes = [run_call(draw_call(SEED, number), CPU) for number in range(chunk, CALLS, CHUNKS)]
    wrong = [outcome.text for outcome in outcomes if outcome.kind == "wrong"]
    assert not wrong, f"{len(wrong)} of {len(outcomes)}:\n" + "\n".join(wrong[:8])
    kinds = Counter(outcome.kind for outcome in outcomes)
    if len(outcomes) >= 20:
        assert kinds["right"] >= len(outcomes) // 2, [x.text for x in outcomes if x.kind != "right"]
