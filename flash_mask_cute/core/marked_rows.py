"""Rows of Q and dO that would reach sums in spite of probabilities of 0 (`row_blocks.marks_of`)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from flash_mask_cute.core.row_blocks import MARKS_PER_WORD
from flash_mask_cute.core.warp_scan import WARP


def any_mark(marks: cute.Tensor, tile_m: int, packed_heads: int = 1) -> Boolean:
    found = marks[0]
    for i in range(1, tile_m // MARKS_PER_WORD if packed_heads == 1 else cute.size(marks)):
        found = found | marks[i]
    return found != 0


def is_marked(marks: cute.Tensor, row: Int32, packed_heads: int = 1) -> Boolean:
    if packed_heads == 1:
        return (marks[row // MARKS_PER_WORD] >> (row % MARKS_PER_WORD)) & 1 != 0
    of_query = row % packed_heads
    word = marks[of_query // MARKS_PER_WORD, row // packed_heads]
    return (word >> (of_query % MARKS_PER_WORD)) & 1 != 0


@cute.jit
def clear_row(row: cute.Tensor) -> None:
    """Overwrite a row in shared memory with 0, by a warp."""
    for first in cutlass.range_constexpr(0, cute.size(row), WARP):
        col = first + cute.arch.lane_idx()
        if col < cute.size(row):
            row[col] = row.element_type(0.0)
