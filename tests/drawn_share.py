"""One share of tests that are many and slow, where a run has not the time for all of them.

FLASH_MASK_SIM_SEED, a number, says which share; without it, or with "all", every test runs. The
cases of a function are dealt out to its shares in turn. So each of them runs once in as many runs
as there are shares, if their seeds follow each other.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from zlib import crc32

import pytest

SEED = "FLASH_MASK_SIM_SEED"
# Of the tests that run kernels on the software GPU; others have a mark `shares`.
SIMULATOR_SHARES = 16


def seed() -> int | None:
    """None: every test."""
    value = os.environ.get(SEED, "all")
    if value == "all":
        return None
    if not value.isdecimal():
        raise pytest.UsageError(f"{SEED}={value} is neither a number nor 'all'")
    return int(value)


def is_in_share(function: str, position: int, shares: int, seed: int) -> bool:
    """position: of the case among those of its function. Functions begin at different shares."""
    return (position + crc32(function.encode()) + seed) % shares == 0


def shares_of(item: pytest.Item) -> int:
    """Of how many shares a run takes one, of tests like this; 1: all of them."""
    mark = item.get_closest_marker("shares")
    if mark is not None:
        return int(mark.args[0])
    return SIMULATOR_SHARES if "simulator" in getattr(item, "fixturenames", ()) else 1


def left_out(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """What is not in the share."""
    found = []
    seen: Counter[str] = Counter()
    for item in items:
        function = item.nodeid.partition("[")[0]
        if not is_in_share(function, seen[function], shares_of(item), seed):
            found.append(item)
        seen[function] += 1
    return found
