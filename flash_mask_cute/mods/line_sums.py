"""Gradients of aux tensor elements that stay the same along lines of a tile: sums over a warp.

An element that the query determines is the same along a column of scores, and one that the distance
of query and key determines is the same along a diagonal. So a thread sums along its parts of these
lines, the threads of a warp add up their parts, and each takes some lines: to find the element of a
line, the modifier is differentiated once, at any of its scores. Then the sums are added to memory
as `AuxSums` adds those of scores.
"""

from enum import Enum
from typing import NamedTuple, Protocol

from cutlass import Float32, Int32

from flash_mask_cute.mods.read_classes import Factor, ModReads


class Line(Enum):
    COLUMN = 0
    DIAGONAL = 1


class LineRead(NamedTuple):
    """A read whose element is the same along lines. term: its number among the terms that
    `differentiate` returns. number: of the tensor. factor: the derivative by the element."""

    term: int
    number: int
    line: Line
    factor: Factor


class LineGroup(NamedTuple):
    """Reads with the same sums: of gradients of scores, times a constant for each read; or of one
    read, times its derivative at each score."""

    line: Line
    reads: tuple[LineRead, ...]

    @property
    def is_constant(self) -> bool:
        return self.reads[0].factor.constant is not None


class Lines(Protocol):
    """The lines of a tile that a warp holds."""

    def num_parts(self, line: Line, cols: int) -> int:
        """Parts of lines of a thread that has this number of columns."""
        ...

    def part_of(self, line: Line, r: int, c: int) -> int:
        """The part to which a thread's score in row r and column c belongs."""
        ...

    def totals(self, line: Line, parts: list[Float32]) -> list[tuple[Float32, Int32]]:
        """The sums over the warp that this thread has, and of which lines: columns, counted from
        the tile's first one, or distances of columns from rows. A line is nobody else's."""
        ...


def line_reads(reads: ModReads, has_diagonals: bool) -> tuple[LineRead, ...]:
    """has_diagonals: the distance of two positions is the same along a diagonal."""
    found, term = [], 0
    for number, tensor in sorted(reads.tensors.items()):
        line = None
        if tensor.is_of_lines and (has_diagonals or not tensor.is_distance):
            line = Line.DIAGONAL if tensor.is_distance else Line.COLUMN
        for factor in tensor.factors:
            if line is not None:
                found.append(LineRead(term, number, line, factor))
            term += 1
    return tuple(found)


def line_groups(reads: tuple[LineRead, ...]) -> tuple[LineGroup, ...]:
    groups = []
    for line in Line:
        own = [x for x in reads if x.line is line]
        constant = tuple(x for x in own if x.factor.constant is not None)
        if constant:
            groups.append(LineGroup(line, constant))
        groups += [LineGroup(line, (x,)) for x in own if x.factor.constant is None]
    return tuple(groups)
