"""Numbering of whole tiles of query rows over all sequences of a launch.

The backward keeps a few things per query row in scratch tensors whose last mode is a whole tile, so
that any tile of them can be copied in one piece. Packed sequences start anywhere; each of them gets
row blocks of its own by counting from cu_seqlens_q[b] // tile_m + b, which leaves at most one block
per sequence unused and needs no prefix sum.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_mask_cute.core.lengths import Lengths


class RowBlocks(NamedTuple):
    """Row blocks of tile_m query positions of one head."""

    lengths: Lengths
    tile_m: int

    def first_of(self, batch_idx: Int32, offset_q: Int32) -> Int32:
        """The first row block of a sequence that starts at row offset_q of packed tensors."""
        if const_expr(self.lengths.cu_seqlens_q is not None):
            return offset_q // self.tile_m + batch_idx
        return batch_idx * cute.ceil_div(self.lengths.seqlen_q, self.tile_m)


def num_row_blocks(rows: int, num_sequences: int, is_packed: bool, tile_m: int) -> int:
    """How many row blocks a head has.

    :param rows: seqlen_q, or, where sequences are packed, total_q
    """
    if is_packed:
        return rows // tile_m + num_sequences
    return num_sequences * -(-rows // tile_m)


# bits of a word of marks, and words in 16 bytes, which are copied in one piece
MARKS_PER_WORD, WORDS_PER_COPY = 32, 4


def mark_words(tile_m: int) -> int:
    """int32 words with a bit for each row of a row block, in whole copies."""
    return -(-tile_m // (MARKS_PER_WORD * WORDS_PER_COPY)) * WORDS_PER_COPY


def stats_words(tile_m: int, num_stats: int, has_marks: bool) -> int:
    """fp32 words of a row block's statistics: LSE of each row, delta of each row, where num_stats
    is 3 the reference of each row, and, where there are marks, `mark_words`."""
    return num_stats * tile_m + (mark_words(tile_m) if has_marks else 0)


def marks_of(stats: cute.Tensor, tile_m: int, num_stats: int) -> cute.Tensor:
    """The words of the marks in a row block's statistics: bit r % 32 of word r // 32 is row r's.

    A marked row is one of a query that sees nothing, of which Q or dO are not finite: the zeros
    that they are multiplied with would not keep them from being seen.
    """
    marks = stats.iterator + num_stats * tile_m
    words = cute.make_tensor(marks, cute.make_layout(mark_words(tile_m)))
    return cute.recast_tensor(words, Int32)


def column_parts(cols: int) -> tuple[int, ...]:
    """How two warpgroups share the columns of a tile: the widths of the parts of each.

    Both have a part of the same width side by side, then both the next one. Shared memory is
    swizzled in blocks of 64 columns, or of 32 where 64 do not divide the tile's; a part is made of
    whole blocks, or lies in one.

    :param cols: a multiple of 32
    """
    rest = cols % 128 // 2
    return (64,) * (cols // 128) + tuple(width for width in (32, 16) if rest & width)


class ColumnPart(NamedTuple):
    """Columns that two warpgroups share: `width` of each, the first one's from `first` on."""

    first: int
    width: int


def dq_parts(cols: int, num_ctas: int) -> tuple[ColumnPart, ...]:
    """How the columns of dQ are shared where a block has 64 rows, in the order in which their sums
    lie in scratch memory.

    :param cols: a multiple of 32, for two CTAs 192 or 256
    :param num_ctas: CTAs that sum dQ together. The second one's parts mirror the first one's.
    """
    parts, first = [], 0
    for width in column_parts(cols // num_ctas):
        parts.append(ColumnPart(first, width))
        first += 2 * width
    if num_ctas > 1:
        parts += [ColumnPart(cols - part.first - 2 * part.width, part.width) for part in parts]
    return tuple(parts)
