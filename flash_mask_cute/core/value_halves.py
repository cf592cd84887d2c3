"""Values of more columns than one CTA sums: the CTAs of a cluster have the same work tiles.

Each scores all keys of a tile, and multiplies its half of the columns of V. So a tile has one walk
and one place among splits, and the second reader of a key finds it in the L2 cache. The first CTA
writes what a row has once, such as its LSE. Halves are as wide as a tile in shared memory. If that
is more than half of the columns, both CTAs have those in the middle, with the same results.
"""

from typing import NamedTuple

from cutlass import Boolean, Int32

from flash_mask_cute.core import clusters


class ValueHalf(NamedTuple):
    """first_column: of the columns of V and O that this CTA has."""

    first_column: Int32

    @staticmethod
    def of_cta(head_dim_v: int, tile_dv: int) -> "ValueHalf":
        """tile_dv: columns of a half."""
        return ValueHalf(clusters.rank() * (head_dim_v - tile_dv))

    @property
    def writes_rows(self) -> Boolean:
        """Whether this CTA writes what a row has once."""
        return self.first_column == 0
