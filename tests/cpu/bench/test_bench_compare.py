"""Commits in turns: who is timed when, what a side's process answers, what is called slower."""

from __future__ import annotations

import pytest

from bench import compare
from bench.compare import HERE, Failed

BASE = "base"


class FakeProcess:
    """Takes `ms` a call times a factor that drifts with each burst of any process."""

    def __init__(
        self, label: str, ms: float, log: list[tuple[str, object]], drift: float = 1.01
    ) -> None:
        self.label, self.ms, self.log, self.drift = label, ms, log, drift

    def prepare(self, name: str) -> None:
        self.log.append((self.label, name))

    def first(self, least: int) -> float:
        if self.ms < 0:
            raise Failed(f"{self.label}: Refused: wrong")
        return self.burst(least, min(2, least))

    def burst(self, count: int, untimed: int) -> float:
        self.log.append((self.label, (count, untimed)))
        bursts = sum(isinstance(told, tuple) for _, told in self.log)
        return self.ms * self.drift**bursts


def test_sides_take_turns_with_bursts_of_one_size() -> None:
    log: list[tuple[str, object]] = []
    sides = {BASE: [FakeProcess(BASE, 4.0, log)], HERE: [FakeProcess(HERE, 5.0, log)]}
    found = compare.compare("d128-full-8k", sides, 4, 0.2, 3)
    assert log[:4] == [
        (BASE, "d128-full-8k"),
        (HERE, "d128-full-8k"),
        (BASE, (3, 2)),
        (HERE, (3, 2)),
    ]
    # as many calls as fit in a burst of the slower side, an eighth before them
    count = round(200 / (5.0 * 1.01**2))
    turns = [BASE, HERE, HERE, BASE, BASE, HERE, HERE, BASE]
    assert log[4:] == [(label, (count, count // 8)) for label in turns]
    # drift of the clocks goes into both sides, now one first and now the other
    assert found.ratio(BASE) == pytest.approx(1.25, rel=1e-3)
    assert found.ratios(BASE) == pytest.approx([1.2625, 1.25 / 1.01, 1.2625, 1.25 / 1.01])
    assert found.apart(BASE) == 0


# What a machine without a GPU changes before it serves.
