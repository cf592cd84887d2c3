"""Machine code as a graph, and what a thread goes through from one place in it to another.

Instructions that stand in the code are not those that run: a loop's body has parts that are for
other cases, waits have slow ways, and products are rolled. The shortest way through given places is
what a thread runs that never waits.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LABEL = re.compile(r"^\s*(\.L\w+):")
CODE = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[T0-9]+)\s+)?([A-Z]\w*)(\.\S+)?\s*([^;]*);?"
)
TARGET = re.compile(r"\(?(\.L\w+|0x[0-9a-f]+)\)?\s*$")
JUMPS = ("BRA",)


class Instruction(NamedTuple):
    """opcode: UTCHMMA; kind: what follows it, as .2CTA. is_conditional: it may not take effect."""

    opcode: str
    kind: str
    operands: str
    is_conditional: bool


@dataclass(frozen=True)
class Code:
    """Instructions, and where each may go on: numbers of instructions."""

    instructions: tuple[Instruction, ...]
    following: tuple[tuple[int, ...], ...] = field(repr=False)

    @staticmethod
    def create(text: str) -> Code:
        """text: the disassembly of one kernel by nvdisasm or cuobjdump."""
        instructions: list[Instruction] = []
        places: dict[str, int] = {}
        for line in text.splitlines():
            if label := LABEL.match(line):
                places[label[1]] = len(instructions)
            elif found := CODE.match(line.split("(*")[0]):
                address, predicate, opcode, kind, operands = found.groups()
                places[f"0x{int(address, 16):x}"] = len(instructions)
                guarded = bool(predicate) or bool(re.match(r"!?U?P\d", operands))
                instructions.append(Instruction(opcode, kind or "", operands.strip(), guarded))
        following = []
        for i, x in enumerate(instructions):
            ways = {i + 1} if i + 1 < len(instructions) else set()
            if x.opcode in JUMPS or (x.opcode == "EXIT" and not x.is_conditional):
                target = TARGET.search(x.operands.replace("`", ""))
                ways = ways if x.is_conditional else set()
                if target and x.opcode in JUMPS:
                    name = target[1]
                    name = name if name.startswith(".") else f"0x{int(name, 16):x}"
                    ways = ways | ({places[name]} if name in places else set())
            following.append(tuple(sorted(ways)))
        return Code(tuple(instructions), tuple(following))

    def where(self, holds: Callable[[Instruction], bool]) -> list[int]:
        """Numbers of the instructions of which this holds."""
        return [i for i, x in enumerate(self.instructions) if holds(x)]

    def way(self, start: int, end: int) -> list[int]:
        """The instructions of the shortest way from `start` to `end`, both included; from a place
        to itself, around a loop, with the place once.

        Raises ValueError where there is none.
        """
        best = dict.fromkeys(self.following[start], 1)
        before = dict.fromkeys(self.following[start], start)
        open_ = [(1, i) for i in self.following[start]]
        heapq.heapify(open_)
        while open_:
            cost, i = heapq.heappop(open_)
            if i == end:
                way = [end]
                while (i := before[i]) != start:
                    way.append(i)
                return ([] if start == end else [start]) + way[::-1]
            if cost > best[i]:
                continue
            for j in self.following[i]:
                if cost + 1 < best.get(j, cost + 2):
                    best[j], before[j] = cost + 1, i
                    heapq.heappush(open_, (cost + 1, j))
        raise ValueError(f"no way from instruction {start} to {end}")

    def loop_through(self, places: Sequence[int]) -> list[int]:
        """The shortest way through all the places and back to the first one."""
        if len(places) == 1:
            return self.way(places[0], places[0])
        ways = [self.way(a, b)[:-1] for a, b in zip(places, [*places[1:], places[0]], strict=True)]
        return [i for way in ways for i in way]

    def inner_loops(self, way: Sequence[int]) -> Iterator[list[int]]:
        """The parts of a loop that lead back to their own beginning."""
        at = {i: n for n, i in enumerate(way)}
        for n, i in enumerate(way[:-1]):
            for j in self.following[i]:
                if j in at and 0 < at[j] <= n:
                    yield list(way[at[j] : n + 1])

    def count(self, way: Sequence[int]) -> Counter[str]:
        """How often each opcode occurs."""
        return Counter(self.instructions[i].opcode for i in way)


def part_of(firsts: Sequence[int], place: int) -> int:
    """Which part of the code that begins at one of `firsts` a place is in; -1 before them."""
    return bisect_right(firsts, place) - 1
