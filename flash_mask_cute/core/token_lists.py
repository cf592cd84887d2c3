"""For each key block, the queries that chose it, in ascending order: token lists.

Long lists are cut into segments. An item is a key tile and one segment of its block's list, so
several items may have the same keys.
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
    """A key tile of a sequence, and the entries [first, end) of its list. sequence is negative
    where there is no such item."""

    sequence: Int32
    block: Int32
    first: Int32
    end: Int32


class TokenLists(NamedTuple):
    """tokens: int32 (1 | heads_kv, entries), numbers of queries in their sequences. items: int32
    (1 | heads_kv, items, ITEM_WORDS), those that exist first."""

    tokens: cute.Tensor
    items: cute.Tensor

    def item(self, head_idx: Int32, number: Int32) -> Item:
        words = self.items[self._of_head(head_idx, self.items), number, None]
        return Item(*(words[i] for i in range(ITEM_WORDS)))

    def token(self, head_idx: Int32, entry: Int32) -> Int32:
        return self.tokens[self._of_head(head_idx, self.tokens), entry]

    def _of_head(self, head_idx: Int32, tensor: cute.Tensor) -> Int32:
        return cutlass.min(head_idx, cute.size(tensor, mode=[0]) - 1)
