"""Numbering of whole tiles of query rows over all sequences of a launch.

The backward keeps a few values per query row in scratch tensors. Their last mode is a whole tile,
so any tile can be copied in one piece. Packed sequences start anywhere. Each of them gets its own
row blocks by counting from cu_seqlens_q[b] // tile_m + b. This leaves at most one block per
sequence unused, and needs no prefix sum.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.walk_ring import Block
from flash_mask_cute.core.work_ring import Work


class RowBlocks(NamedTuple):
    """Row blocks of tile_m query positions of one head."""

    lengths: Lengths
    tile_m: int

    def first_of(self, batch_idx: Int32, offset_q: Int32) -> Int32:
        """The first row block of a sequence that starts at row offset_q of packed tensors."""
        if const_expr(self.lengths.cu_seqlens_q is not None):
            return offset_q // self.tile_m + batch_idx
        return batch_idx * cute.ceil_div(self.lengths.seqlen_q, self.tile_m)

    def of(self, work: Work, block: Block) -> Int32:
        """The row block of a query block. work: with the lengths of its sequence."""
        return block.index + self.first_of(work.batch_idx, work.offset_q)


def num_row_blocks(rows: int, num_sequences: int, is_packed: bool, tile_m: int) -> int:
    """Of a head. rows: seqlen_q, or total_q if sequences are packed."""
    if is_packed:
        return rows // tile_m + num_sequences
    return num_sequences * -(-rows // tile_m)


# bits of a word of marks, and words in 16 bytes, which are copied in one piece
MARKS_PER_WORD, WORDS_PER_COPY = 32, 4


def mark_words(tile_m: int) -> int:
    """int32 words with a bit for each row of a row block, rounded up to whole copies."""
    return -(-tile_m // (MARKS_PER_WORD * WORDS_PER_COPY)) * WORDS_PER_COPY


def stats_words(tile_m: int, num_stats: int, has_marks: bool, packed_heads: int = 1) -> int:
    """fp32 words of a row block's statistics: LSE and delta of each row, the reference of each row
    if num_stats is 3, and `mark_words` if there are marks. Where a query's packed heads are
    neighbouring rows, those of each query lie together, in whole copies."""
    if packed_heads == 1:
        return num_stats * tile_m + (mark_words(tile_m) if has_marks else 0)
    words = num_stats * packed_heads + (mark_words_of_query(packed_heads) if has_marks else 0)
    return tile_m // packed_heads * -(-words // WORDS_PER_COPY) * WORDS_PER_COPY


def mark_words_of_query(packed_heads: int) -> int:
    """int32 words with a bit for each packed head of a query."""
    return -(-packed_heads // MARKS_PER_WORD)


def marks_of(stats: cute.Tensor, tile_m: int, num_stats: int, packed_heads: int = 1) -> cute.Tensor:
    """The words of the marks in a row block's statistics: bit r % 32 of word r // 32 is row r's; of
    packed heads (word, query), with a bit for each head of a query.

    A marked row belongs to a query that sees nothing, and its Q or dO is not finite.
    """
    if packed_heads == 1:
        marks, layout = stats.iterator + num_stats * tile_m, cute.make_layout(mark_words(tile_m))
    else:
        queries = tile_m // packed_heads
        of_query = stats_words(packed_heads, num_stats, True, packed_heads)
        marks = stats.iterator + num_stats * packed_heads
        shape = mark_words_of_query(packed_heads), queries
        layout = cute.make_layout(shape, stride=(1, of_query))
    return cute.recast_tensor(cute.make_tensor(marks, layout), Int32)


def by_lanes(groups: int) -> cute.Layout:
    """(4, lane, column group, warp): sums of a key block, in each group value by value."""
    return cute.make_layout((4, 32, groups, 8), stride=(32, 1, 128, 128 * groups))


def by_queries(packed_heads: int, width: int, cols: int = 0) -> cute.Layout:
    """(2 columns, 2 rows 8 apart, lane, column group, warp): sums of dQ of 64 rows, in accumulators
    of `width` columns of two warpgroups, so that those of a query's packed heads lie together.
    cols: columns of all sums of a query, which these are a part of; 0: of no others."""
    groups = width // 8
    # sums of a query, both warpgroups'
    query, warps, of_warp = (cols or 2 * width) * packed_heads, (4,), (2 * width * 16,)
    if packed_heads >= 16:
        in_group, halves, lanes = 128, 2, (4, 64)
    elif packed_heads == 8:
        in_group, halves, lanes = 64, query, (2, 32)
    else:
        of_warp = 16 // packed_heads
        in_group, halves, lanes = 8 * packed_heads, of_warp // 2 * query, (2, query)
    lanes_of_query = min(4 * packed_heads, 16)
    if packed_heads <= 16:
        of_warp = (16 // packed_heads * query,)
    elif packed_heads == 32 and cols > 2 * width:
        warps, of_warp = (2, 2), (*of_warp, query)
    return cute.make_layout(
        (2, 2, (lanes_of_query, 32 // lanes_of_query), groups, (*warps, 2)),
        stride=(1, halves, lanes, in_group, (*of_warp, groups * in_group)),
    )


def column_parts(cols: int) -> tuple[int, ...]:
    """The split of a tile's columns between two warpgroups: the widths of the parts of each.

    Two parts of the same width, one for each warpgroup, lie side by side, followed by the next two.
    Shared memory is swizzled in blocks of 64 columns, or of 32 if 64 do not divide the tile's
    columns. A part consists of whole blocks, or lies in one.

    :param cols: a multiple of 32
    """
    rest = cols % 128 // 2
    return (64,) * (cols // 128) + tuple(width for width in (32, 16) if rest & width)


# columns of each half of dQ in a part of the sums in lane order of a pair of CTAs
PART_OF_HALF = 16


class ColumnPart(NamedTuple):
    """Columns of products: from `first` on, `width` for each of `sharers` warpgroups."""

    first: int
    width: int
    sharers: int = 2

    @property
    def num_cols(self) -> int:
        return self.width * self.sharers

    @property
    def end(self) -> int:
        return self.first + self.num_cols


def shared_parts(cols: int) -> tuple[ColumnPart, ...]:
    parts, first = [], 0
    for width in column_parts(cols):
        parts.append(ColumnPart(first, width))
        first += 2 * width
    return tuple(parts)


def uneven_parts(cols: int) -> tuple[ColumnPart, ColumnPart]:
    """A wider and a narrower part of a tile's columns, of one warpgroup each, as nearly equal as
    blocks of swizzled memory permit (`column_parts`). cols: a multiple of 32."""
    block = next(block for block in (64, 32, 16) if cols % block == 0 and cols > block)
    wider = -(-cols // (2 * block)) * block
    return ColumnPart(0, wider, 1), ColumnPart(wider, cols - wider, 1)


def dq_columns(cols: int, num_ctas: int) -> int:
    """The columns of dQ that each of `num_ctas` CTAs sums: for two, half, in multiples of 32."""
    return cols if num_ctas == 1 else -(-cols // 64) * 32


def are_uneven(cols: int, num_ctas: int) -> bool:
    """Whether the warpgroups of a CTA have `uneven_parts` of the columns, not `shared_parts`: in
    two CTAs, if a warpgroup would have several shared parts of dQ."""
    return num_ctas > 1 and len(column_parts(dq_columns(cols, num_ctas))) > 1


# columns of dQ that all fit into a thread's registers
MAX_TURN_COLS = 96


def alternating_sums(cols: int, num_ctas: int) -> bool:
    """Whether a warpgroup sums all columns of dQ of every second block of 64 rows: if halves would
    be several products for each warpgroup, which read dS once each."""
    return num_ctas == 1 and 64 < cols <= MAX_TURN_COLS


def dq_parts(cols: int, num_ctas: int, in_halves: bool = False) -> tuple[ColumnPart, ...]:
    """The split of dQ's columns if a block has 64 rows, in the order of the sums in scratch memory.

    :param cols: a multiple of 32, for two CTAs 160, 192 or 256; with `alternating_sums` one of 16
    :param num_ctas: CTAs that sum dQ together. The parts of the second CTA mirror the first's,
        without those that the first one has, too.
    :param in_halves: each of two warpgroups sums half of the columns in one product
    """
    if in_halves:
        return (ColumnPart(0, cols // 2),)
    if alternating_sums(cols, num_ctas):
        return (ColumnPart(0, cols, 1),)
    own = dq_columns(cols, num_ctas)
    parts = uneven_parts(own) if are_uneven(cols, num_ctas) else shared_parts(own)
    if num_ctas == 1:
        return parts
    mirrored = (part._replace(first=cols - part.end) for part in parts)
    return (*parts, *(part for part in mirrored if part.first >= own))
