"""Sums along columns and diagonals of accumulators, over the 16 rows of a warp.

Lane 4 g + t has row g, and row g + 8, and of each 8 columns those numbered 2 t and 2 t + 1. So a
column is in eight lanes. A diagonal of 8 x 8 scores has one score in each of eight lanes, whose
columns differ: the lanes of a row first exchange their values, so that lane t then has distances
2 t and 2 t + 1 of column from row, modulo 8.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flash_mask_cute.core.cta import thread_in_warpgroup
from flash_mask_cute.mods.line_sums import Line
from flash_mask_cute.sm90 import wgmma


class AccumulatorLines:
    """`Lines` of accumulators."""

    rows_of_warp = 16
    more_cols = 2

    def first_row(self) -> Int32:
        warp = cute.arch.make_warp_uniform(thread_in_warpgroup() // cute.arch.WARP_SIZE)
        return warp * self.rows_of_warp

    def num_parts(self, line: Line, cols: int) -> int:
        return cols if line is Line.COLUMN else cols + 2 * (wgmma.ROWS_PER_THREAD - 1)

    def part_of(self, line: Line, r: int, c: int) -> int:
        return c if line is Line.COLUMN else c + 2 * (wgmma.ROWS_PER_THREAD - 1 - r)

    def totals(
        self, line: Line, parts: list[Float32], are_moved: bool = False
    ) -> list[tuple[Float32, Int32]]:
        lane = cute.arch.lane_idx()
        first = wgmma.first_col_of(lane)
        if line is Line.COLUMN:
            sums, number = _over_rows(lane, parts)
        else:
            sums, number = _over_rows(lane, parts if are_moved else _distances(lane, parts))
            # number 0 is 8 columns before the distance of column 0 from the thread's last row
            first -= 8 * wgmma.ROWS_PER_THREAD + self.first_row()
        found = []
        for i, total in enumerate(sums):
            c = number + i
            found.append((total, first + (c // 2) * 8 + c % 2))
        return found

    def along_diagonals(self, scores: cute.Tensor) -> cute.Tensor:
        rows, cols = cute.size(scores, mode=[0]), cute.size(scores, mode=[1])
        moved = cute.make_rmem_tensor((rows, cols + self.more_cols), Float32)
        for r in range(rows):
            values = _distances(cute.arch.lane_idx(), [scores[r, c] for c in range(cols)])
            for i, value in enumerate(values):
                moved[r, i] = value
        return moved

    def moved_cols(self, count: int) -> list[Int32]:
        lane = cute.arch.lane_idx()
        first = wgmma.first_col_of(lane) + lane // 4 - 8
        return [first + (i // 2) * 8 + i % 2 for i in range(count)]

    def in_order(self, parts: list[Float32]) -> list[Float32]:
        """Sums over the warp along its diagonals, 32 neighbours at a time (`diagonals`)."""
        lane = cute.arch.lane_idx()
        values = _distances(lane, parts)
        # two of each eight that four lanes have together
        count = 4 * len(values)
        sums, _ = _over_rows(lane, values)
        found = []
        for first in range(0, count, cute.arch.WARP_SIZE):
            number = first + lane
            source, place = number % 8 // 2, number // 8 * 2 + number % 2
            for mask, half in _halves(len(values)):
                is_second = place >= half
                source += cutlass.select_(is_second, Int32(mask), Int32(0))
                place -= cutlass.select_(is_second, Int32(half), Int32(0))
            total = Float32(0.0)
            for i, x in enumerate(sums):
                other = cute.arch.shuffle_sync(x, source)
                total = cutlass.select_((place == i) & (number < count), other, total)
            found.append(total)
        return found

    def diagonals(self, cols: int) -> list[Int32]:
        """This lane's distances of columns from rows in `in_order`. The first one and those behind
        the last have no scores; in their place is a neighbour."""
        count = 4 * (self.num_parts(Line.DIAGONAL, cols) + 2)
        numbers = []
        for start in range(0, count, cute.arch.WARP_SIZE):
            number = cutlass.min(cutlass.max(start + cute.arch.lane_idx(), 1), count - 1)
            numbers.append(number - self.rows_of_warp - self.first_row())
        return numbers


LINES = AccumulatorLines()


def _distances(lane: Int32, parts: list[Float32]) -> list[Float32]:
    """The values of a lane's distances, in ascending eights. parts: two columns of each."""
    row, quad = lane // 4, lane - lane % 4
    is_odd = row % 2 == 1
    sources = [quad + (lane + (row + e) // 2) % 4 for e in range(2)]
    moved = []
    for first in range(0, len(parts), 2):
        even, odd = parts[first : first + 2]
        sent = cutlass.select_(is_odd, odd, even), cutlass.select_(is_odd, even, odd)
        moved += [cute.arch.shuffle_sync(x, i) for x, i in zip(sent, sources, strict=True)]
    nothing = [Float32(0.0)] * 2
    moved = [*nothing, *moved, *nothing]
    # columns that were taken from the beginning of an eight belong to the eight before
    wraps = [wgmma.first_col_of(lane) + e + row >= 8 for e in range(2)]
    return [cutlass.select_(wraps[i % 2], moved[i + 2], moved[i]) for i in range(len(moved) - 2)]


def _over_rows(lane: Int32, values: list[Float32]) -> tuple[list[Float32], Int32]:
    """Sums over lanes of rows with the same columns, one in each lane; its first one's number."""
    number = Int32(0)
    for mask, half in _halves(len(values)):
        values = [*values, Float32(0.0)][: 2 * half]
        is_second = (lane & mask) != 0
        kept, sent = [], []
        for x, y in zip(values[:half], values[half:], strict=True):
            kept.append(cutlass.select_(is_second, y, x))
            sent.append(cutlass.select_(is_second, x, y))
        received = [cute.arch.shuffle_sync_bfly(x, mask) for x in sent]
        values = [x + y for x, y in zip(kept, received, strict=True)]
        number += cutlass.select_(is_second, Int32(half), Int32(0))
    return values, number


def _halves(count: int) -> list[tuple[int, int]]:
    """Bits of a lane, and how many of so many values lanes without the bit keep."""
    found = []
    for mask in (16, 8, 4):
        count = (count + 1) // 2
        found.append((mask, count))
    return found
