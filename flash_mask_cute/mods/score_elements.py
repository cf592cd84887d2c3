"""Which scores a thread of a backward holds."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from flash_mask_cute.core.cta import thread_in_warpgroup
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.mods.calling import ScorePlace


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


@dataclass(frozen=True)
class Places:
    """Where the scores of a thread are.

    tiles: (tile_m, tile_n). first_key, first_query: this warpgroup's first key in the work tile and
    first query in the block. listed: where blocks have listed queries; head_idx is then a group of
    heads.
    """

    tiles: cutlass.Constexpr[tuple[int, int]]
    elements: cutlass.Constexpr[Elements]
    first_key: Int32
    first_query: Int32
    listed: ListedQueries | None = None

    def of_queries(self, numbers: cute.Tensor) -> "Places":
        """Those of a block of listed queries."""
        return replace(self, listed=self.listed._replace(numbers=numbers))

    def first(self, block: tuple[Work, Int32, Int32], first_col: int) -> tuple[Int32, Int32]:
        """The first query and the first key of a warpgroup's scores, from a thread's column on."""
        work, _, m_block = block
        tile_m, tile_n = self.tiles
        q_idx = m_block * tile_m + self.first_query + self.elements.col_offset(first_col)
        return q_idx, work.block * tile_n + self.first_key

    def at(self, work: Work, head_idx: Int32, m_block: Int32, r: int, c: int) -> ScorePlace:
        """The place of a thread's score."""
        tile_m, tile_n = self.tiles
        thread = thread_in_warpgroup()
        k_idx = work.block * tile_n + self.first_key + self.elements.row_of(thread, r)
        first_col, offset = self.elements.first_col_of(thread), self.elements.col_offset(c)
        if self.listed is None:
            q_idx = m_block * tile_m + self.first_query + first_col + offset
        else:
            head_idx, q_idx = self.listed.at(head_idx, first_col, offset)
        # positions past the ends are hidden, but the callable may index tensors with them
        q_idx, k_idx = cutlass.min(q_idx, work.seqlen_q - 1), cutlass.min(k_idx, work.seqlen_k - 1)
        return ScorePlace(work.batch_idx, head_idx, work.position(q_idx), k_idx)
