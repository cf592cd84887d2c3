"""Keys and values in pages of a pool; a table gives the pages of each sequence.

Page number j of a sequence holds its rows from j * page_size on. Its keys are these rows, from the
first one on that is not padding. Table entries after a sequence's end are never used. A number
that is not a page, or not a row of the table, is clamped to the nearest one.
"""

from typing import NamedTuple

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
        return PageRow(*(cute.arch.shuffle_sync(word, lane) for word in self))


def why_no_boxes(tile_n: int, page_box: int) -> str | None:
    """The reason why a kernel cannot read pages by boxes of this many keys, or None."""
    if tile_n % page_box:
        return f"page_box must divide tile_n={tile_n}, got {page_box}"
    return None


class Pages(NamedTuple):
    """table (batch, max_pages) int32; page_size: rows of a page; num_pages: of the pool. k, v: the
    pools (num_pages, page_size, heads, d), if rows are copied one by one. batch_idx (batch,): rows
    of the table, which are then not the sequences. leftpad (batch,): rows before the first key.

    Without a table a page has all rows of a batch entry, or of all packed sequences."""

    table: cute.Tensor | None
    page_size: Int32
    num_pages: Int32
    k: cute.Tensor | None = None
    v: cute.Tensor | None = None
    batch_idx: cute.Tensor | None = None
    leftpad: cute.Tensor | None = None

    @staticmethod
    def create(
        table: cute.Tensor | None,
        k: cute.Tensor,
        v: cute.Tensor,
        page_box: int | None,
        batch_idx: cute.Tensor | None = None,
        leftpad: cute.Tensor | None = None,
    ) -> "Pages | None":
        """Made from the arguments of a launch of a kernel with this `page_box`; k, v: the pools.
        Raises ValueError: there is a table without page_box, or page_box without a table; or
        leftpad for a kernel that loads boxes, in which keys need not lie side by side."""
        if (table is not None) != (page_box is not None):
            raise ValueError(f"mPageTable must fit the kernel's page_box, {page_box}")
        if table is None:
            return None
        pools = (None, None) if page_box % LEAST_BOX == 0 else (k, v)
        if leftpad is not None and page_box != 1:
            raise ValueError(f"mLeftpadK must come with page_box 1, got {page_box}")
        return Pages(table, Int32(k.shape[1]), Int32(k.shape[0]), *pools, batch_idx, leftpad)

    @staticmethod
    def of_entries(
        k: cute.Tensor, v: cute.Tensor, page_box: int, starts: cute.Tensor | None
    ) -> "Pages":
        """The rows of dense keys, or of packed sequences with these starts, as pages."""
        if starts is not None:
            k, v = (
                cute.make_tensor(x.iterator, cute.make_layout((1, *x.shape), stride=(0, *x.stride)))
                for x in (k, v)
            )
        extents = Int32(k.shape[1]), Int32(k.shape[0])
        pools = (None, None) if page_box % LEAST_BOX == 0 else (k, v)
        return Pages(None, *extents, *pools, leftpad=starts)

    @property
    def capacity(self) -> Int32:
        return self.table.shape[1] * self.page_size

    def row(self, batch_idx: Int32, key: Int32) -> Int32:
        if self.leftpad is None:
            return key
        return key + cutlass.max(self.leftpad[batch_idx], 0)

    def entry(self, batch_idx: Int32, row: Int32) -> Int32:
        """What the table has for a row of a sequence with at least one key."""
        if self.table is None:
            return batch_idx
        if self.batch_idx is not None:
            last = self.table.shape[0] - 1
            batch_idx = cutlass.max(cutlass.min(self.batch_idx[batch_idx], last), 0)
        return self.table[batch_idx, cutlass.min(self._column(row), self.table.shape[1] - 1)]

    def number(self, entry: Int32) -> Int32:
        return cutlass.max(cutlass.min(entry, self.num_pages - 1), 0)

    def place(self, page: Int32, key: Int32, seqlen_k: Int32) -> PageRow:
        first = self._column(key) * self.page_size
        in_use = cutlass.max(cutlass.min(seqlen_k - first, self.page_size), 1)
        return PageRow(page, key - first, in_use)

    def _column(self, key: Int32) -> Int32:
        if self.table is None:
            return Int32(0)
        # unsigned, which takes half as many instructions
        return Int32(Uint32(key) // Uint32(self.page_size))
