"""How the query heads of a KV head share a tile."""

from __future__ import annotations


def padded_group(heads: int) -> int:
    """Tile rows of one position when `heads` query heads share a tile. A power of two, so that a
    tile holds whole positions."""
    return 1 << (heads - 1).bit_length()


def rows_of_listed(heads: int, dim: int) -> int:
    """Tile rows of a listed query with all heads of a group (`query_lists`): as `padded_group`, and
    at least two, whose statistics are copied in whole units of 16 bytes; 8 beside more than 224
    columns, which leave room for the numbers of so few queries."""
    return max(padded_group(heads), 2 if dim <= 224 else 8)


class PackedHeads:
    """How the query heads of a KV head share a tile, for plans.

    packed_heads: rows of a position, `padded_group` of the heads; 1: heads do not share a tile.
    heads_there: the number of rows of a position that are heads, the first ones; None: all.
    """

    packed_heads: int
    heads_there: int | None

    @property
    def spread_rows(self) -> int | None:
        """Query rows of a box of TMA, if as many rows of the tile behind them have no queries.
        None: boxes lie side by side."""
        return None

    @property
    def group_size(self) -> int:
        """Query heads of a KV head that share a tile."""
        return self.packed_heads if self.heads_there is None else self.heads_there

    @property
    def is_padded(self) -> bool:
        """Whether a tile has padding rows of no head, which must not be stored."""
        return self.group_size != self.packed_heads
