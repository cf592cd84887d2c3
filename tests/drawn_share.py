"""One share of tests that are many and slow, where a run has not the time for all of them.

FLASH_MASK_SIM_SEED, a number, says which share; without it, or with "all", every test runs. The
cases of a function are dealt out to shares in turn. So each of them runs once in as many runs as
there are shares, if their seeds follow each other.

Of a function with the mark `daily`, each share has some cases: those whose turn it is. Of modules
that run kernels on the software GPU, each has a case in one of EACH_MODULE shares at least.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import pytest

SEED = "FLASH_MASK_SIM_SEED"


class Deal(NamedTuple):
    """How cases of a function are dealt out: to so many shares, so many neighbours together."""

    shares: int
    together: int = 1


# Of the tests that run kernels on the software GPU. Neighbours share kernels, and compiling one
# takes ten times as long as running it. There are as many shares as leave time for daily cases.
ON_SIMULATOR = Deal(60, together=4)
EACH_MODULE = 3
# Of other tests, those in folders of mods and of torch's doors: most of them trace or compile.
HALVES = re.compile(r"cpu/(autograd|flex|integrations|mods)/")
HALF, ALL = Deal(2), Deal(1)


class Draws(NamedTuple):
    """What a module draws, in its variable DRAWN: so many, of a seed, by default of the day. What
    fails is printed as the command that runs it again (`tests/conftest.py`). most: -1 of all."""

    name: str
    most: int
    seed: int
    what: str

    @classmethod
    def of(cls, name: str, most: int, seed: int | None = None, what: str = "DRAWS") -> Draws:
        """By variables FLASH_MASK_name_what, a number or "all", and FLASH_MASK_name_SEED."""
        given = os.environ.get(f"FLASH_MASK_{name}_{what}", str(most))
        today = int(time.time()) // 86400 if seed is None else seed
        number = int(os.environ.get(f"FLASH_MASK_{name}_SEED", today))
        return cls(name, -1 if given == "all" else int(given), number, what)

    def __str__(self) -> str:
        most = "all" if self.most < 0 else self.most
        name = f"FLASH_MASK_{self.name}"
        return f"{name}_SEED={self.seed} {name}_{self.what}={most}"


def seed() -> int | None:
    """None: every test."""
    value = os.environ.get(SEED, "all")
    if value == "all":
        return None
    if not value.isdecimal():
        raise pytest.UsageError(f"{SEED}={value} is neither a number nor 'all'")
    return int(value)


def is_in_share(function: str, position: int, deal: Deal, seed: int) -> bool:
    """position: of the case among those of its function. Functions begin at different shares."""
    return (position // deal.together + crc32(function.encode()) + seed) % deal.shares == 0


def is_daily(position: int, cases: int, most: int, seed: int) -> bool:
    """Whether a case is among the `most` of this seed; all come in turn."""
    return (position - seed * most) % cases < most


def deal_of(item: pytest.Item) -> Deal:
    """A mark `shares` says it, for tests that do not run on the software GPU."""
    mark = item.get_closest_marker("shares")
    if mark is not None:
        return Deal(*mark.args)
    if "simulator" in getattr(item, "fixturenames", ()):
        return ON_SIMULATOR
    return HALF if HALVES.search(item.nodeid) else ALL


def left_out(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """What is not in the share."""
    drawn, of_modules = set(), defaultdict(list)
    seen: Counter[str] = Counter()
    functions = [item.nodeid.partition("[")[0] for item in items]
    cases = Counter(functions)
    for item, function in zip(items, functions, strict=True):
        daily, position = item.get_closest_marker("daily"), seen[function]
        seen[function] += 1
        deal, module = deal_of(item), function.partition("::")[0]
        if daily is not None:
            (most,) = daily.args
            is_drawn = is_daily(position, cases[function], most, seed)
        else:
            is_drawn = is_in_share(function, position, deal, seed)
        if deal == ON_SIMULATOR:
            of_modules[module].append((is_drawn, item))
        if is_drawn:
            drawn.add(item)
    for module, told in of_modules.items():
        is_turn = (crc32(module.encode()) + seed) % EACH_MODULE == 0
        if is_turn and not any(is_drawn for is_drawn, _ in told):
            drawn.add(told[crc32(f"{module} {seed}".encode()) % len(told)][1])
    return [item for item in items if item not in drawn]
