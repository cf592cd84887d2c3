"""Values of more columns than one CTA sums: the CTAs of a cluster have the same work tiles.

Each scores all keys of a tile, and multiplies its half of the columns of V. So a tile has one walk
and one place among splits. The first CTA writes what a row has once, such as its LSE. Halves are as
wide as a tile in shared memory. If that is more than half of the columns, both CTAs have those in
the middle, with the same results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cutlass import Boolean, Int32

    from flash_mask_cute.core.clusters import Claims

# columns of V that a CTA sums
MOST_COLUMNS = 256


def ctas_of_tile(head_dim_v: int) -> int:
    """CTAs on Hopper that compute a work tile of queries together."""
    return 1 if head_dim_v <= MOST_COLUMNS else 2


class ValueHalf(NamedTuple):
    """first_column: of the columns of V and O that this CTA has. rank: of the CTA in its cluster,
    and of its half of the keys of a block, if it loads those for both."""

    first_column: Int32
    rank: Int32

    @property
    def writes_rows(self) -> Boolean:
        """Whether this CTA writes what a row has once."""
        return self.first_column == 0


def of_cta(traits: Any, storage: Any) -> tuple[ValueHalf | None, Claims | None]:
    """The half of this CTA, and how one CTA claims work tiles for both; None if it has all columns.

    traits: of the kernel: head_dim_v, num_ctas, and tile_dv, the columns of a half. storage: shared
    memory of the CTA.
    """
    if traits.num_ctas == 1:
        return None, None
    # what the host imports needs no compiler
    from flash_mask_cute.core import clusters

    rank = clusters.rank()
    half = ValueHalf(rank * (traits.head_dim_v - traits.tile_dv), rank)
    barriers, word = storage.claims_barriers.data_ptr(), storage.claim.data_ptr()
    return half, clusters.Claims.create(barriers, word)


def sync_ctas(traits: Any) -> None:
    """Wait for all threads that compute a work tile together."""
    import cutlass.cute as cute

    from flash_mask_cute.core import clusters

    if traits.num_ctas == 1:
        cute.arch.sync_threads()
    else:
        clusters.sync()
