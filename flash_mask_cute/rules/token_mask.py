"""The masks of a backward that visits the queries of query lists (`core/query_lists.py`).

A work tile is an item: keys, and a segment of the queries that chose them. Blocks of its walk are
neighbouring entries of the segment, whose heads share the block's rows. So without intervals and a
mask_mod, bits are needed only for an edge of the band, for the end of the keys, and in the last
block.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core.lengths import Lengths, describe
from flash_mask_cute.core.query_lists import QueryLists
from flash_mask_cute.core.tile_scheduler import TileScheduler, WorkTile
from flash_mask_cute.core.walk_ring import CHUNK, Block, Chunk, WalkRing
from flash_mask_cute.core.work_ring import NO_WORK, Work, WorkRing
from flash_mask_cute.rules.backward_mask import BackwardMask
from flash_mask_cute.rules.mask_rules import MaskWarpRows


@dataclass(frozen=True)
class TokenMask(BackwardMask):
    """`BackwardMask` of listed queries; block_info has their packed heads. Of a work tile
    first_block and end_block are the entries of its segment. by_head: the intervals or the mask_mod
    hide other scores from one head of a group than from another."""

    lists: QueryLists | None = None
    by_head: cutlass.Constexpr[bool] = False

    @property
    def tokens_per_block(self) -> int:
        return self.block_info.tile_m // self.block_info.qhead_per_kvhead_packgqa

    # -- tiles ----------------------------------------------------------------------------------

    @cute.jit
    def send_walk(self, ring: WalkRing, number: Int32, work: Work) -> Int32:
        """As `BackwardMask.send_walk`, of an item that has queries."""
        num_blocks = cute.ceil_div(work.end_block - work.first_block, self.tokens_per_block)
        base = Int32(0)
        chunk = self._judge_queries(ring, number, work, base)
        while base + CHUNK < num_blocks:
            base += CHUNK
            following = self._judge_queries(ring, number + 1, work, base)
            follower = following.kind_of(ring.next_bit(following, following.visible))
            ring.write(number, chunk._replace(follower=follower))
            number += 1
            chunk = following
        ring.write(number, chunk)
        return number + 1

    @cute.jit
    def _judge_queries(self, ring: WalkRing, number: Int32, work: Work, base: Int32) -> Chunk:
        """The chunk of 32 blocks from `base` on, which becomes chunk `number` of the ring."""
        band = self.block_info.band(work.seqlen)
        first_key = work.block * self.block_info.tile_n
        first = work.first_block + (base + cute.arch.lane_idx()) * self.tokens_per_block
        is_cut = Boolean(False)
        ring.acquire(number)
        for i in cutlass.range_constexpr(self.tokens_per_block):
            is_there = first + i < work.end_block
            entry = cutlass.min(first + i, work.end_block - 1)
            token = self.lists.token(work.head_idx, entry)
            lo, hi = band.k_range(token)
            sees_all = (lo <= first_key) & (hi >= first_key + self.block_info.tile_n)
            if const_expr(self.mask_mod is not None or self.args.columns is not None):
                sees_all = Boolean(False)
            is_cut = is_cut | (is_there == Boolean(False)) | (sees_all == Boolean(False))
            ring.write_token(number, i, cutlass.select_(is_there, token, Int32(-1)))
        visible = Int32(cute.arch.vote_ballot_sync(first < work.end_block))
        return Chunk.from_votes(base, work.head_idx, visible, is_cut, Boolean(False), Int32(0))

    # -- scores ---------------------------------------------------------------------------------

    def make_bits(self, work: Work, block: Block, warp_rows: MaskWarpRows) -> tuple:
        words: list[Any] = []
        for group in range(warp_rows.num_groups):
            k_idx = warp_rows.line(work, group)
            make = self._words_by_head if self.by_head else self._words_of_group
            words += make(work, block, k_idx)
        return tuple(words)

    def _words_of_group(self, work: Work, block: Block, k_idx: Int32) -> list:
        """The words of a key for a group whose heads all see the same."""
        words: list[Any] = [Int32(0)] * self.columns.num_words
        head_idx = work.head_idx * self.group_size
        queries = self._queries_of(work, head_idx, k_idx)
        for i in range(self.tokens_per_block):
            token = cute.arch.shuffle_sync(block.token, i)
            sees = self._sees_key(work, head_idx, token, k_idx, queries)
            for w in range(self.columns.num_words):
                bits = self._bits_of_token(w, i)
                if bits:
                    words[w] = words[w] | cutlass.select_(sees, Int32(bits), Int32(0))
        return words

    @cute.jit
    def _words_by_head(self, work: Work, block: Block, k_idx: Int32) -> tuple:
        """The words of a key, where each head of a query has bits of its own."""
        words = tuple(Int32(0) for _ in range(self.columns.num_words))
        for bit in cutlass.range(self._bits_per_word, unroll=1):
            words = self._with_bit(work, block, k_idx, bit, words)
        return words

    def _with_bit(self, work: Work, block: Block, k_idx: Int32, bit: Int32, words: tuple) -> tuple:
        found: list[Any] = []
        heads = self.block_info.qhead_per_kvhead_packgqa
        for w in range(self.columns.num_words):
            column = self.columns.col_of(w, bit)
            token = cute.arch.shuffle_sync(block.token, column // heads)
            of_group = cutlass.min(column % heads, self.group_size - 1)
            head_idx = work.head_idx * self.group_size + of_group
            queries = self._queries_of(work, head_idx, k_idx)
            sees = self._sees_key(work, head_idx, token, k_idx, queries)
            found.append(words[w] | (cutlass.select_(sees, Int32(1), Int32(0)) << bit))
        return tuple(found)

    def _queries_of(self, work: Work, head_idx: Int32, k_idx: Int32) -> tuple:
        """The queries [first, end) of a head that the band and the intervals let see a key, and
        holes in these; -1 in place of a query is before all of them."""
        lo, hi = self.block_info.band(work.seqlen).q_range(k_idx)
        holes: list[Any] = []
        if self.args.columns is not None:
            values = self._column_values(work, head_idx, k_idx)
            (lo, hi), *holes = self.intervals.visible_rows(values, lo, hi)
        hi = cutlass.select_(k_idx < work.seqlen_k, Int32(hi), Int32(0))
        return cutlass.max(Int32(lo), 0), hi, holes

    def _sees_key(
        self, work: Work, head_idx: Int32, token: Int32, k_idx: Int32, queries: tuple
    ) -> Boolean:
        """Whether a head of a listed query sees a key. queries: `_queries_of` both."""
        lo, hi, holes = queries
        sees = (token >= lo) & (token < hi)
        for first, end in holes:
            sees = sees & ((token < first) | (token >= end))
        if self.mask_mod is not None:
            q_idx = cutlass.max(token, 0)
            sees = sees & self._eval_mask_mod(work, head_idx, q_idx, k_idx)
        return sees

    def _bits_of_token(self, word: int, token: int) -> int:
        """The bits of a word that stand for the heads of a block's query."""
        heads = self.block_info.qhead_per_kvhead_packgqa
        columns = (self.columns.col_of(word, bit) for bit in range(self._bits_per_word))
        return sum(1 << bit for bit, column in enumerate(columns) if column // heads == token)


@cute.jit
def send_token_walks(
    scheduler: TileScheduler,
    rules: TokenMask,
    lengths: Lengths,
    ring: WorkRing,
    walk: WalkRing,
) -> None:
    """As `send_walks`, where work tiles are items, and heads take the place of sequences."""
    tiles, chunks = Int32(0), Int32(0)
    tile, search = scheduler.locate(scheduler.start(), rules.lists.count)
    while tile.is_valid:
        head_idx = tile.batch_idx
        item = rules.lists.item(head_idx, tile.block)
        of_keys = WorkTile(item.block, head_idx, item.sequence, Boolean(True))
        work = describe(of_keys, lengths, True)
        work = work._replace(first_block=item.first, end_block=item.end, place=tile.block)
        ring.write(tiles, work)
        chunks = rules.send_walk(walk, chunks, work)
        tiles += 1
        # as late as can be, as in `send_walks`
        ring.acquire(tiles)
        walk.wait_until_read(chunks)
        search = scheduler.advance(search, tiles - 1)
        tile, search = scheduler.locate(search, rules.lists.count)
    scheduler.finish()
    ring.write(tiles, NO_WORK)
