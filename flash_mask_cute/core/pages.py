"""Keys and values in pages of a pool; a table gives the pages of each sequence.

Page number j of a sequence holds its keys from j * page_size on. Table entries behind a sequence's
end are never used. A number that is not a page is clamped to the nearest page.
"""

from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from flash_mask_cute.limits import LEAST_BOX


class PageRow(NamedTuple):
    """The place of keys: the page, the row in it, and the number of rows of the page in use."""

    page: Int32
    row: Int32
    in_use: Int32

    @staticmethod
    def none() -> "PageRow":
        """Some place, before the first one is known."""
        return PageRow(Int32(0), Int32(0), Int32(1))

    def of_lane(self, lane: Int32) -> "PageRow":
        """What a lane of this warp has."""
        return PageRow(*(cute.arch.shuffle_sync(word, lane) for word in self))


class BoxShape(Protocol):
    """A plan's facts: keys of a tile, columns of tiles and of tensors, blocks in flight."""

    head_dim: int
    head_dim_v: int
    tile_d: int
    tile_dv: int
    tile_n: int
    stages_kv: int


def why_no_boxes(plan: BoxShape, page_box: int) -> str | None:
    """The reason why a kernel cannot read pages by boxes of this many keys, or None."""
    if plan.tile_n % page_box:
        return f"page_box must divide tile_n={plan.tile_n}, got {page_box}"
    if page_box % LEAST_BOX == 0:
        return None
    if (plan.tile_d, plan.tile_dv) != (plan.head_dim, plan.head_dim_v):
        return (
            f"pages of a size that {LEAST_BOX} does not divide need head dimensions that tiles "
            f"have, got {plan.head_dim} and {plan.head_dim_v} for tiles of {plan.tile_d} and "
            f"{plan.tile_dv}"
        )
    if plan.stages_kv < 2:
        return f"pages of a size that {LEAST_BOX} does not divide need two stages of keys"
    return None


class Pages(NamedTuple):
    """table (batch, max_pages) int32; page_size: rows of a page; num_pages: of the pool. k, v: the
    pools (num_pages, page_size, heads, d), if rows are copied one by one."""

    table: cute.Tensor
    page_size: Int32
    num_pages: Int32
    k: cute.Tensor | None = None
    v: cute.Tensor | None = None

    @staticmethod
    def create(
        table: cute.Tensor | None, k: cute.Tensor, v: cute.Tensor, page_box: int | None
    ) -> "Pages | None":
        """Made from the arguments of a launch of a kernel with this `page_box`; k, v: the pools.

        :raises ValueError: there is a table without page_box, or page_box without a table
        """
        if (table is not None) != (page_box is not None):
            raise ValueError(f"mPageTable must fit the kernel's page_box, {page_box}")
        if table is None:
            return None
        pools = () if page_box % LEAST_BOX == 0 else (k, v)
        return Pages(table, Int32(k.shape[1]), Int32(k.shape[0]), *pools)

    @property
    def capacity(self) -> Int32:
        """The most keys of a sequence."""
        return self.table.shape[1] * self.page_size

    def entry(self, batch_idx: Int32, key: Int32) -> Int32:
        """What the table has for a key of a sequence with at least one key."""
        return self.table[batch_idx, cutlass.min(self._column(key), self.table.shape[1] - 1)]

    def number(self, entry: Int32) -> Int32:
        """The page of an entry of the table."""
        return cutlass.max(cutlass.min(entry, self.num_pages - 1), 0)

    def place(self, page: Int32, key: Int32, seqlen_k: Int32) -> PageRow:
        """The place of a key, in its page, of a sequence of seqlen_k keys."""
        first = self._column(key) * self.page_size
        in_use = cutlass.max(cutlass.min(seqlen_k - first, self.page_size), 1)
        return PageRow(page, key - first, in_use)

    def _column(self, key: Int32) -> Int32:
        # unsigned, which takes half as many instructions
        return Int32(Uint32(key) // Uint32(self.page_size))
