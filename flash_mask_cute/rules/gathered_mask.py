"""Walks over small blocks of keys that the queries of a tile chose, whose keys lie side by side.

A tile of the walk holds the blocks that any query of the work tile chose, one after another, in
ascending order. The number of a tile counts these tiles, so a walk is as long as what was chosen.
Positions of keys follow from the list of the blocks, for masks and for load warps.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core.walk_ring import Block, Chunk
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.rules import selection_walk
from flash_mask_cute.rules.bit_tile import WORD
from flash_mask_cute.rules.forward_mask import ForwardMask
from flash_mask_cute.rules.mask_rules import MaskWarpRows

# Keys that a lane judges: side by side, and of one block.
QUAD = 4
# the columns of a word of bits that repeat from quad to quad
EVERY_OTHER = 0x55555555


@dataclass(frozen=True)
class GatheredMask(ForwardMask):
    """`ForwardMask` of a selection of blocks of block_k keys, a multiple of QUAD, without mods and
    intervals. Each tile of a walk is partial."""

    block_k: cutlass.Constexpr[int] = QUAD

    # -- lists ----------------------------------------------------------------------------------

    @property
    def _bits(self) -> Any:
        return self.args.bits

    def _place(self, work: Work) -> tuple[Int32, ...]:
        tile, of_rows = self.selection_tile(work, work.block), self._bits.visible
        return self.selection_place(of_rows, work, work.head_idx, tile, Int32(0))[:3]

    def list_of(self, work: Work) -> Int32:
        """The line of a work tile in `UnionLists.numbers`."""
        batch_idx, head_idx, tile = self._place(work)
        _, heads, tiles = self._bits.counts.shape
        return (batch_idx * heads + head_idx) * tiles + tile

    def _block_at(self, line: Int32, row: Int32) -> tuple[Boolean, Int32]:
        """Whether a row of a walk lies before the end of its list, and its block, or the last."""
        numbers = self._bits.numbers
        number = numbers[line, cutlass.min(row // self.block_k, numbers.shape[1] - 1)]
        return number >= 0, number ^ (number >> (WORD - 1))

    def key(self, line: Int32, block: Int32, row: Int32, length: Int32) -> Int32:
        """The key at a row of a tile of a walk, for one lane of a warp. length: of all keys."""
        row = block * self.block_info.tile_n + row
        return self._block_at(line, row)[1] * self.block_k + (row & (self.block_k - 1))

    def num_tiles(self, work: Work) -> Int32:
        """Tiles of the blocks that queries of a work tile chose."""
        keys = self._bits.counts[self._place(work)] * self.block_k
        return cute.ceil_div(keys, self.block_info.tile_n)

    # -- walks ----------------------------------------------------------------------------------

    @property
    def _leaps(self) -> bool:
        return False

    def key_blocks(self, work: Work) -> tuple[Int32, Int32]:
        """Without the selection, so that all heads of a sequence have as many."""
        tiles = cute.ceil_div(work.seqlen_k, self.block_info.tile_n)
        return Int32(0), cutlass.min(tiles, self._bits.most_tiles)

    @cute.jit
    def _classify(self, work: Work, base: Int32, position: Any) -> tuple[Chunk, Any]:
        n_block, end = base + cute.arch.lane_idx(), self.num_tiles(work)
        first: Any = Int32(0)
        if const_expr(work.first_block is not None):
            first, end = work.first_block, cutlass.min(end, work.end_block)
        is_own = (n_block >= first) & (n_block < end) & self._has_blocks(work, n_block)
        visible = Int32(cute.arch.vote_ballot_sync(is_own))
        cuts = Boolean(True), Boolean(False), Int32(0)
        return Chunk.from_votes(base, work.head_idx, visible, *cuts), position

    def _has_blocks(self, work: Work, n_block: Int32) -> Boolean:
        """Whether a tile before the end has a block that exists."""
        return Boolean(True)

    # -- scores ---------------------------------------------------------------------------------

    @cute.jit
    def make_bits(self, work: Work, block: Block, warp_rows: MaskWarpRows) -> tuple:
        """As `ForwardMask.make_bits`. A lane judges QUAD keys for one query after another; votes
        are words of its rows."""
        quad = cutlass.min(cute.arch.lane_idx(), self.block_info.tile_n // QUAD - 1) * QUAD
        row = block.index * self.block_info.tile_n + quad
        exists, number = self._shown(work, block.index, row)
        exists = exists & (block.is_hidden == Boolean(False))
        keys = exists, number, number * self.block_k + (row & (self.block_k - 1))
        votes = tuple(Int32(0) for _ in range(warp_rows.num_groups * QUAD))
        for query in cutlass.range(WORD // self._rows_of_query, unroll=2):
            votes = self._vote(work, warp_rows, query, keys, votes)
        words: list[Int32] = []
        for first in cutlass.range_constexpr(0, len(votes), QUAD):
            of_group = votes[first : first + QUAD]
            words += [self._word(w, of_group) for w in range(self.columns.num_words)]
        return tuple(words)

    def _shown(self, work: Work, block: Int32, row: Int32) -> tuple[Boolean, Int32]:
        """Whether a row of a walk, in a tile of it, is of a block to see, and the block."""
        return self._block_at(self.list_of(work), row)

    def _vote(
        self, work: Work, warp_rows: MaskWarpRows, query: int | Int32, keys: tuple, votes: tuple
    ) -> tuple:
        """Votes about the keys of each lane by the rows of a query in each group, for these rows.
        keys: whether a lane has any, their block, and the first one."""
        exists, number, first_key = keys
        lane, rows = cute.arch.lane_idx(), self._rows_of_query
        band, (offset_q, _) = self.block_info.band(self.seqlen_of(work)), self._listed_offsets(work)
        found: list[Int32] = []
        for group in range(warp_rows.num_groups):
            row = warp_rows.line(work, group) - lane + query * rows
            q_idx = cutlass.min(self._query(row), work.seqlen_q - 1)
            low, high = band.k_range(q_idx)
            is_chosen = self.chosen_bit(work, work.head_idx, q_idx + offset_q, number) != 0
            for key in (first_key + i for i in range(QUAD)):
                is_seen = exists & is_chosen & (key >= low) & (key < high)
                vote = Int32(cute.arch.vote_ballot_sync(is_seen))
                found.append(cutlass.select_(lane // rows == query, vote, votes[len(found)]))
        return tuple(found)

    def _word(self, w: int, votes: tuple) -> Int32:
        """A word of bits, of whose columns pairs lie in every other quad. votes: one for each key
        of all quads."""
        first, second, third = (self.columns.col_of(w, bit) for bit in range(3))
        assert second == first + 1 and third == first + 2 * QUAD, "columns of other tiles"
        quad, key = divmod(first, QUAD)
        even, odd = ((votes[key + i] >> quad) & EVERY_OTHER for i in range(2))
        return even | (odd << 1)


@dataclass(frozen=True)
class GatheredEntries(GatheredMask):
    """`GatheredMask` of a sequence's only query by its entries, in their order. An entry that is no
    block of the sequence, or that came before, shows nothing."""

    @property
    def _per_tile(self) -> int:
        return self.block_info.tile_n // self.block_k

    def list_of(self, work: Work) -> Int32:
        entries = self._bits.visible
        place = self.selection_place(entries, work, work.head_idx, Int32(0), Int32(0))
        return place[0] * entries.shape[1] + place[1]

    def _entry(self, line: Int32, i: Int32, length: Int32) -> Int32:
        """Entry i; negative if it is no block of `length` keys."""
        entries, num_blocks = self._bits.visible, cute.ceil_div(length, self.block_k)
        place = line // entries.shape[1], line % entries.shape[1]
        return selection_walk.entry_at(entries, place, i, num_blocks)

    def _of_lane(self, line: Int32, block: Int32, length: Int32) -> Int32:
        """The entry of a tile with this lane's number."""
        lane = cutlass.min(cute.arch.lane_idx(), self._per_tile - 1)
        return self._entry(line, block * self._per_tile + lane, length)

    def key(self, line: Int32, block: Int32, row: Int32, length: Int32) -> Int32:
        """Where there is no block, of another one, if any: keys that nobody chose may be NaN."""
        own = self._of_lane(line, block, length)
        place = cutlass.min(row // self.block_k, self._per_tile - 1)
        number = cute.arch.shuffle_sync(own, place)
        number = cutlass.select_(number < 0, self._any_block(line, own, length), number)
        return number * self.block_k + (row & (self.block_k - 1))

    @cute.jit
    def _any_block(self, line: Int32, own: Int32, length: Int32) -> Int32:
        """The first block of a tile, else of the list, else 0. own: of this lane."""
        votes, start = Int32(cute.arch.vote_ballot_sync(own >= 0)), Int32(0)
        while (votes == 0) & (start < self._bits.visible.shape[3]):
            own = self._entry(line, start + cute.arch.lane_idx(), length)
            votes = Int32(cute.arch.vote_ballot_sync(own >= 0))
            start += WORD
        return cutlass.max(cute.arch.shuffle_sync(own, cute.arch.popc((votes & -votes) - 1)), 0)

    def num_tiles(self, work: Work) -> Int32:
        return Int32(cute.ceil_div(self._bits.visible.shape[3], self._per_tile))

    def key_blocks(self, work: Work) -> tuple[Int32, Int32]:
        """Of all entries, which may be more than the sequence has blocks."""
        return Int32(0), self.num_tiles(work)

    @cute.jit
    def _has_blocks(self, work: Work, n_block: Int32) -> Boolean:
        line, first, largest = self.list_of(work), n_block * self._per_tile, Int32(-1)
        for i in cutlass.range(self._per_tile, unroll=8):
            largest = cutlass.max(largest, self._entry(line, first + i, work.seqlen_k))
        return largest >= 0

    # all rows have the bits of the only query
    _rows_of_query = WORD

    def chosen_bit(self, work: Work, head_idx: Int32, row: Int32, k_block: Int32) -> Int32:
        return Int32(1)

    def _shown(self, work: Work, block: Int32, row: Int32) -> tuple[Boolean, Int32]:
        line, place = self.list_of(work), row // self.block_k - block * self._per_tile
        own = self._of_lane(line, block, work.seqlen_k)
        number = cute.arch.shuffle_sync(own, place)
        repeated = self._repeated(line, block, own, work.seqlen_k)
        return (number >= 0) & (((repeated >> place) & 1) == 0), number

    @cute.jit
    def _repeated(self, line: Int32, block: Int32, own: Int32, length: Int32) -> Int32:
        """A bit for each entry of a tile that came before. own: of this lane."""
        first, found = block * self._per_tile, Int32(0)
        wanted = [cute.arch.shuffle_sync(own, i) for i in range(self._per_tile)]
        for start in cutlass.range(0, first + self._per_tile, WORD, unroll=1):
            at = start + cute.arch.lane_idx()
            other = self._entry(line, at, length)
            for i in cutlass.range_constexpr(self._per_tile):
                is_same = (other == wanted[i]) & (at - first < i)
                found = found | cutlass.select_(is_same, Int32(1) << i, Int32(0))
        return Int32(cute.arch.warp_redux_sync(found, "or"))
