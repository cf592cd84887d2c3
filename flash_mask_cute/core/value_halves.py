"""Values of more columns than one CTA sums: the CTAs of a cluster have the same work tiles.

Each scores all keys of a tile, and multiplies its half of the columns of V. Each loads half of the
keys of a block, for both. Halves are as wide as a tile in shared memory. If that is more than half
of the columns, both CTAs have those in the middle, with the same results.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32

from flash_mask_cute.core import clusters


class ValueHalf(NamedTuple):
    """first_column: of the columns of V and O that this CTA has. rank: of the CTA in its cluster,
    and of its half of the keys of a block."""

    first_column: Int32
    rank: Int32

    @property
    def writes_rows(self) -> Boolean:
        """Whether this CTA writes what a row has once, such as its LSE."""
        return self.rank == 0


def of_cta(traits: Any, storage: Any) -> tuple[ValueHalf | None, clusters.Claims | None]:
    """The half of this CTA, and how one CTA claims work tiles for both; None if it has all columns.
    traits: of the kernel."""
    if traits.num_ctas == 1:
        return None, None
    rank = clusters.rank()
    half = ValueHalf(rank * traits.second_column, rank)
    barriers, word = storage.claims_barriers.data_ptr(), storage.claim.data_ptr()
    return half, clusters.Claims.create(barriers, word)


def sync_ctas(traits: Any) -> None:
    if traits.num_ctas == 1:
        cute.arch.sync_threads()
    else:
        clusters.sync()
