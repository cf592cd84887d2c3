"""Gradients of aux tensor elements that stay the same along lines of a tile: sums over a warp.

An element that the query determines is the same along a column of scores, and one that the distance
of query and key determines is the same along a diagonal. So a thread sums along its parts of these
lines, the threads of a warp add up their parts, and each takes some lines: to find the element of a
line, the modifier is differentiated once, at any of its scores.
"""

from enum import Enum
from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from flash_mask_cute.mods.read_classes import Cut, Factor, ModReads


class Line(Enum):
    COLUMN = 0
    DIAGONAL = 1


class LineRead(NamedTuple):
    """term: the number of the read among the terms that `differentiate` returns. number: of the
    tensor. factor: the derivative by the element."""

    term: int
    number: int
    line: Line
    factor: Factor
    cuts: tuple[Cut, ...]


class LineGroup(NamedTuple):
    """Reads with the same sums: of gradients of scores, times a constant for each read; or of one
    read, times its derivative at each score. cuts: of the lines; only with constants."""

    line: Line
    reads: tuple[LineRead, ...]
    cuts: tuple[Cut, ...] = ()

    @property
    def is_constant(self) -> bool:
        return self.reads[0].factor.constant is not None


class Lines(Protocol):
    """The lines of a tile that a warp holds. rows_of_warp: consecutive ones. more_cols: columns
    that moved scores have besides (`along_diagonals`)."""

    rows_of_warp: int
    more_cols: int

    def first_row(self) -> Int32:
        """The first row of this warp, among those of the warpgroup."""

    def num_parts(self, line: Line, cols: int) -> int:
        """Parts of lines of a thread that has this number of columns."""

    def part_of(self, line: Line, r: int, c: int) -> int:
        """The part to which a thread's score in row r and column c belongs."""

    def totals(
        self, line: Line, parts: list[Float32], are_moved: bool = False
    ) -> list[tuple[Float32, Int32]]:
        """The sums over the warp that this thread alone holds, and their lines: columns, counted
        from the tile's first one, or distances of columns from rows. are_moved: parts of what
        `along_diagonals` has moved."""

    def along_diagonals(self, scores: cute.Tensor) -> cute.Tensor:
        """A thread's scores, rows by columns, moved within their rows to the threads that sum their
        diagonals; zeros where a row has none."""

    def moved_cols(self, count: int) -> list[Int32]:
        """Where a thread's moved scores come from, in its first row; of zeros, places outside."""

    def in_order(self, parts: list[Float32]) -> list[Float32]:
        """The same of all diagonals, those of neighbours in neighbouring lanes, 32 at a time."""

    def diagonals(self, cols: int) -> list[Int32]:
        """Of `in_order`, distances of columns from rows; that of a neighbour where nothing is."""


def parts_between(
    lines: Lines,
    line: Line,
    moved: cute.Tensor,
    has_row: list[Boolean | None],
    has_col: list[Boolean],
) -> list[Float32]:
    """A thread's parts of the lines, of the moved scores of some rows and columns; None: of all."""
    parts = [Float32(0.0)] * lines.num_parts(line, len(has_col))
    for r, in_row in enumerate(has_row):
        for c, in_col in enumerate(has_col):
            i = lines.part_of(line, r, c)
            is_inside = in_col if in_row is None else in_row & in_col
            parts[i] = parts[i] + cutlass.select_(is_inside, moved[r, c], Float32(0.0))
    return parts


def line_reads(reads: ModReads, has_diagonals: bool) -> tuple[LineRead, ...]:
    """has_diagonals: the distance of two positions is the same along a diagonal."""
    found, term = [], 0
    for number, tensor in sorted(reads.tensors.items()):
        line = None
        if tensor.is_of_lines and (has_diagonals or not tensor.is_diagonal):
            line = Line.DIAGONAL if tensor.is_diagonal else Line.COLUMN
        for factor in tensor.factors:
            if line is not None:
                found.append(LineRead(term, number, line, factor, tensor.cuts))
            term += 1
    return tuple(found)


def line_groups(reads: tuple[LineRead, ...]) -> tuple[LineGroup, ...]:
    together: dict[tuple[Line, tuple[Cut, ...]], list[LineRead]] = {}
    alone = []
    for read in reads:
        if read.factor.constant is None:
            alone.append(LineGroup(read.line, (read,)))
        else:
            together.setdefault((read.line, read.cuts), []).append(read)
    return *(LineGroup(line, tuple(x), cuts) for (line, cuts), x in together.items()), *alone


def next_cut(cuts: tuple[Cut, ...], of_keys: bool, place: Int32, end: Int32) -> Int32:
    """The first cut after a place, or the end."""
    for cut in cuts:
        if cut.of_keys == of_keys:
            end = cutlass.min(end, (place // cut.size + 1) * cut.size)
    return end
