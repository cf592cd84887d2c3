"""Runs on the software GPU that it has nothing to say against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def quiet_run(
    simulator: ModuleType, seed: int | None = 1, launches: int | None = None
) -> Iterator[None]:
    """What is called inside launches so many kernels, or any number but none, without warnings.

    seed: asynchronous work completes at random later points, with warps shuffled; None: at once.
    """
    simulator.OPTIONS.pop("delay", None)
    if seed is not None:
        simulator.OPTIONS["delay"] = seed
    simulator.RESULTS.clear()
    yield
    found = len(simulator.RESULTS)
    assert found == (launches or found) and found, f"{found} launches"
    for result in simulator.RESULTS:
        assert not result["warnings"], f"delay {seed}: {result}"
