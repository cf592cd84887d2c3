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


def column_parts(cols: int) -> tuple[int, ...]:
    """How two warpgroups share the columns of a tile: the widths of the parts of each.

    Both have a part of the same width side by side, then both the next one. No part crosses a
    multiple of 64, which keeps it inside the blocks that shared memory is swizzled in.

    :param cols: 32 or a multiple of 64
    """
    return (64,) * (cols // 128) + ((cols % 128 // 2,) if cols % 128 else ())
