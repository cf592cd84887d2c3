"""For each key block, the queries that chose it, in ascending order: token lists.

Lists are cut into segments: at the same queries for all blocks, and where a segment would be long.
An item is a key tile and one segment of its block's list, so several items may have the same keys.
Items of the same queries follow each other. CTAs that run at a time then read the same queries, and
add to the same sums of dQ, which the L2 cache holds.

Where sums have an order, items are processed from the last one to the first. So a query's dQ is
summed from its highest block down, and dK and dV of a key tile from the end of its list.

Why no CTA waits forever. Items of a head have numbers in the order in which they are handed out. An
item waits for two things, both of items of the same head with smaller numbers: a block of its
queries waits until the next higher blocks of these queries have been added to their dQ, and its dK
and dV wait until those of the key tile's later entries have been added. A CTA claims each of its
items, the first one, too, from a counter (`TileScheduler.claims_first`), so all items with smaller
numbers belong to CTAs that run or have ended. The load warp of a CTA may be an item ahead of its
MMA warps, but only when all dQ of the item before has been added and told to others, so that they
need nothing more of it. So of all items that are not complete, the one with the smallest number
waits for nobody, with any number of CTAs at a time, even one.
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


class TokenLists(NamedTuple):
    """tokens: int32 (1 | heads_kv, entries), numbers of queries in their sequences. items: int32
    (1 | heads_kv, items, ITEM_WORDS), of which the first num_items (1 | heads_kv,) exist.

    Where sums have an order: successors, of the shape of tokens: 1 + the first key tile of the next
    higher block in whose list a query is, or 0. turns: int32 (heads_kv, key tiles, MMA warps): the
    end of the entries of a key tile's list whose dK and dV have not been added; at first that of
    its last item. tiles_per_block: key tiles of a block.
    """

    tokens: cute.Tensor
    items: cute.Tensor
    num_items: cute.Tensor
    successors: cute.Tensor | None = None
    turns: cute.Tensor | None = None
    tiles_per_block: Int32 | None = None

    def item(self, head_idx: Int32, number: Int32) -> Item:
        words = self.items[self._of_head(head_idx), number, None]
        return Item(*(words[i] for i in range(ITEM_WORDS)))

    def token(self, head_idx: Int32, entry: Int32) -> Int32:
        return self.tokens[self._of_head(head_idx), entry]

    def predecessor(self, head_idx: Int32, entry: Int32, tile: Int32, end_tile: Int32) -> Int32:
        """1 + the key tile whose dQ of a query is added before that of `tile`, or 0; end_tile: key
        tiles of the sequence."""
        of_blocks = self.successors[self._of_head(head_idx), entry]
        is_last = ((tile + 1) % self.tiles_per_block == 0) | (tile + 1 == end_tile)
        return cutlass.select_(is_last, of_blocks, tile + 2)

    def count(self, head_idx: Int32) -> Int32:
        """The items of a head."""
        return self.num_items[self._of_head(head_idx)]

    def _of_head(self, head_idx: Int32) -> Int32:
        return cutlass.min(head_idx, cute.size(self.num_items) - 1)
