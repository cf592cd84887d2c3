"""Which scores a thread of a backward holds."""

from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32


class Elements(Protocol):
    """The scores of a tile that a thread of a warpgroup holds, as rows (keys) and columns
    (queries). lanes_per_row: threads of a warp, one after another, that share a row."""

    num_rows: int
    lanes_per_row: int

    def row_of(self, thread: Int32, r: int) -> Int32:
        """The key of row r, counted from the warpgroup's first."""

    def first_col_of(self, thread: Int32) -> Int32:
        """The first query of a thread, counted from the warpgroup's first query."""

    def col_offset(self, c: int) -> int:
        """The distance of a thread's query c from its first query."""

    def is_set(self, bits: tuple, r: int, c: int) -> Boolean:
        """Whether the bit of a score is set in the bits of a thread."""

    def keep_pair(
        self, words: cute.Tensor, dtype: type, r: int, c: int, p: Float32, q: Float32
    ) -> None:
        """Round columns c and c + 1 of a row into the words of a 16-bit operand."""


class ListedQueries(NamedTuple):
    """The queries of a block whose rows are the heads of listed ones, `rows` for each of them, of
    which the first `heads` are heads. numbers (queries of the block,)."""

    rows: int
    heads: int
    numbers: cute.Tensor | None = None

    def at(self, group: Int32, first: Int32, offset: int) -> tuple[Int32, Int32]:
        """The query head and the query of column first + offset. group: of heads. first: a
        thread's, below 8. offset: of `Elements.col_offset`. Padding has the last head."""
        if self.rows >= 8:
            query, row = offset // self.rows, first + offset % self.rows
        else:
            query, row = (first + offset) // self.rows, (first + offset) % self.rows
        if self.heads < self.rows:
            row = cutlass.min(row, self.heads - 1)
        return group * self.heads + row, self.numbers[query]
