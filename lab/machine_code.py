"""Machine code as a graph, and what is found along its ways.

Instructions that stand in the code are not those that run: a loop's body has parts that are for
other cases, waits have slow ways, and products are rolled. The shortest way through given places is
what a thread runs that never waits.

A load from tensor memory (LDTM) is complete when its scoreboard is at 0, and a store (STTM) behind
FENCE.VIEW.ASYNC.T. A warp that arrives on an mbarrier before that gives away tensor memory that it
still reads, or has not written yet. `early_arrivals` finds such places. The compiler puts the waits
there for `tcgen05.wait`, so they can be missing although the PTX has it.

Nor does an arrival on an mbarrier of another CTA wait for loads from shared memory before it
(docs/facts/compiler.md). Loads before one on the CTA's own mbarrier are not judged: there it was
never wrong on hardware.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LABEL = re.compile(r"^\s*(\.L\w+):")
CODE = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[T0-9]+)\s+)?([A-Z]\w*)(\.\S+)?\s*([^;]*);?"
)
# control bits of an instruction, as `nvdisasm -hex` prints them: the upper of its two words
UPPER = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
WRITE_BARRIER, WAITS = 46, 52
NO_BARRIER = 7
TARGET = re.compile(r"\(?(\.L\w+|0x[0-9a-f]+)\)?\s*$")
JUMPS = ("BRA",)


class Instruction(NamedTuple):
    """opcode: UTCHMMA; kind: what follows it, as .2CTA. is_conditional: it may not take effect.

    Of the scoreboards of a warp: write_barrier, the one that counts until results are there, and
    waits, those that must be at 0 before the instruction; nothing where the text has no hex.
    """

    opcode: str
    kind: str
    operands: str
    is_conditional: bool
    address: str = ""
    write_barrier: int | None = None
    waits: frozenset[int] = frozenset()

    def with_control(self, upper: int) -> Instruction:
        barrier, mask = upper >> WRITE_BARRIER & 7, upper >> WAITS & 63
        return self._replace(
            write_barrier=None if barrier == NO_BARRIER else barrier,
            waits=frozenset(i for i in range(6) if mask >> i & 1),
        )


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
                told = opcode, kind or "", operands.strip(), guarded, address
                instructions.append(Instruction(*told))
            elif (upper := UPPER.match(line)) and instructions:
                instructions[-1] = instructions[-1].with_control(int(upper[1], 16))
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


# -- arrivals while memory is in use --------------------------------------------------------------

# in place of the scoreboard of a store
OF_FENCE = -1
LOADS = ("LDTM", "LDS", "LDSM")


class EarlyArrival(NamedTuple):
    """Addresses of an arrival and of the access that may not be complete then."""

    arrival: str
    access: str
    opcode: str

    def __str__(self) -> str:
        return f"SYNCS.ARRIVE at {self.arrival} while the {self.opcode} at {self.access} is open"


# A load without a scoreboard has the one of the next load of its kind; until then, that opcode.
Board = int | str


def _after(x: Instruction, place: int, open_: Mapping[int, Board]) -> dict[int, Board]:
    """{place of an access that may not be complete: its scoreboard} after an instruction."""
    left = {at: board for at, board in open_.items() if board not in x.waits}
    if x.opcode == "DEPBAR":
        # it waits until no more than so many are open
        found = re.match(r"SB(\d), 0x0\b", x.operands)
        left = {at: board for at, board in left.items() if not found or board != int(found[1])}
    if x.opcode == "FENCE" and x.kind == ".VIEW.ASYNC.T":
        left = {at: board for at, board in left.items() if board != OF_FENCE}
    if x.opcode == "STTM":
        left[place] = OF_FENCE
    if x.opcode in LOADS:
        own = x.opcode if x.write_barrier is None else x.write_barrier
        left = {at: own if board == x.opcode else board for at, board in left.items()}
        left[place] = own
    return left


def _arrives(x: Instruction) -> bool:
    return x.opcode == "SYNCS" and ".ARRIVE" in x.kind


def is_remote(x: Instruction) -> bool:
    """Whether it arrives on an mbarrier of another CTA."""
    return _arrives(x) and ".RED" in x.kind


def early_arrivals(code: Code) -> list[EarlyArrival]:
    """Arrivals of a warp on an mbarrier, on some way, while an LDTM of it is in flight, or between
    an STTM and its fence; on another CTA's mbarrier also while a load from shared memory is.

    code: with control bits. Raises ValueError where a load has none.
    """
    instructions = code.instructions
    loads = code.where(lambda x: x.opcode in LOADS)
    if loads and not any(x.waits for x in instructions):
        raise ValueError("the text has no control bits: nvdisasm -hex prints them")
    # an access may come to a place with one scoreboard or another
    states: dict[int, set[tuple[int, Board]]] = {0: set()}
    work, found = [0], set()
    while work:
        place = work.pop()
        x = instructions[place]
        reaching = states[place]
        after: set[tuple[int, Board]] = set()
        for item in [dict([pair]) for pair in reaching] or [{}]:
            after |= set(_after(x, place, item).items())
        if _arrives(x):
            for at, _ in after:
                y = instructions[at]
                if is_remote(x) or y.opcode in ("LDTM", "STTM"):
                    found.add(EarlyArrival(x.address, y.address, y.opcode))
        for following in code.following[place]:
            if following not in states or not after <= states[following]:
                states[following] = states.get(following, set()) | after
                work.append(following)
    return sorted(found)
