"""For each key block, the queries that chose it, in ascending order: query lists.

Lists are cut into segments: at the same queries for all blocks, and where a segment would be long.
An item is a key tile and one segment of its block's list, so several items may have the same keys.
Items of the same queries follow each other. CTAs that run at a time then read the same queries, and
add to the same sums of dQ, which the L2 cache holds.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

# entries of a segment at most: a CTA computes so many for about half a millisecond
SEGMENT = 1024
# int32 words of an item
ITEM_WORDS = 4


class Item(NamedTuple):
    """A key tile of a sequence, and the entries [first, end) of its list."""

    sequence: Int32
    block: Int32
    first: Int32
    end: Int32


class QueryLists(NamedTuple):
    """tokens: int32 (1 | heads_kv, entries), numbers of queries in their sequences. items: int32
    (1 | heads_kv, items, ITEM_WORDS); the first num_items (1 | heads_kv,) exist."""

    tokens: cute.Tensor
    items: cute.Tensor
    num_items: cute.Tensor

    def item(self, head_idx: Int32, number: Int32) -> Item:
        words = self.items[self._of_head(head_idx), number, None]
        return Item(*(words[i] for i in range(ITEM_WORDS)))

    def token(self, head_idx: Int32, entry: Int32) -> Int32:
        return self.tokens[self._of_head(head_idx), entry]

    def count(self, head_idx: Int32) -> Int32:
        return self.num_items[self._of_head(head_idx)]

    def _of_head(self, head_idx: Int32) -> Int32:
        return cutlass.min(head_idx, cute.size(self.num_items) - 1)
