"""The masks of a launch for blocks of queries: walks over keys, and mask bits.

A line of a bit tile is a query row (a packed row, if heads share a tile).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.partials import Partials
from flash_mask_cute.core.walk_ring import CHUNK, Block, Chunk, WalkRing
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.mods.calling import head_of_row
from flash_mask_cute.rules import bit_tile, selection_walk
from flash_mask_cute.rules.bit_tile import ALL, WORD, bit_range
from flash_mask_cute.rules.mask_rules import (
    MaskRules,
    MaskWarpRows,
    both,
    broadcast_place,
)
from flash_mask_cute.rules.selection_walk import SelectionWords

# rows whose mask_mod is evaluated together: the places of their bits are constants
ROWS_PER_EVAL = 4


class ListPosition(NamedTuple):
    """Entries of a row's block lists that a descending walk has not reached yet."""

    mask_left: Int32
    full_left: Int32


@dataclass(frozen=True)
class ForwardMask(MaskRules):
    """`MaskRules` for work tiles of tile_m query rows that visit blocks of keys.

    cuts_overhang: if a tile reaches past the last query, or before position 0, all its blocks count
    as cut.

    own_rows: so many rows of a tile each have block lists of their own. A walk visits the blocks of
    all, and says whose each one is. None: the lists' blocks have whole tiles.

    shares_mask: mask_mod is the same for all heads of a query, and is evaluated for one of them.
    """

    cuts_overhang: cutlass.Constexpr[bool] = False
    own_rows: cutlass.Constexpr[int | None] = None
    shares_mask: cutlass.Constexpr[bool] = False

    def num_blocks(self, lengths: Lengths, batch_idx: Int32) -> Int32:
        """Work tiles of a packed sequence in a launch, including those of unused rows."""
        starts = lengths.cu_seqlens_q
        blocks = self.num_query_blocks(starts[batch_idx + 1] - starts[batch_idx])
        if self.first_block is None:
            return blocks
        first, end = self.args.mask_bits.rows_of_query_chunk(batch_idx)
        return cutlass.min(end, blocks) - cutlass.min(first, blocks)

    def num_query_blocks(self, slot: Int32) -> Int32:
        """Work tiles of a head of a sequence that occupies `slot` rows."""
        info = self.block_info
        return cute.ceil_div(slot * info.qhead_per_kvhead_packgqa, info.tile_m)

    @property
    def first_block(self) -> Callable[[Int32], Int32] | None:
        """The first work tile of a sequence in this launch; None if the launch has all."""
        mask_bits = self.args.mask_bits
        if mask_bits is None or mask_bits.query_chunk is None:
            return None
        return lambda batch_idx: mask_bits.rows_of_query_chunk(batch_idx)[0]

    @property
    def _bits_per_word(self) -> int:
        return self.block_info.tile_n // self.columns.num_words

    # -- tiles ----------------------------------------------------------------------------------

    def key_blocks(self, work: Work) -> tuple[Int32, Int32]:
        if self.skip:
            return self.block_info.get_n_block_min_max(self.seqlen_of(work), work.block)
        return Int32(0), cute.ceil_div(work.seqlen_k, self.block_info.tile_n)

    def split(
        self, work: Work, num_heads: Int32, num_splits: Int32
    ) -> tuple[Work, SelectionWords | None]:
        """One of `num_splits` splits of a work tile, and words for its walk if the choice of its
        queries cuts it. head_idx counts the heads of all splits."""
        split_idx = work.head_idx // num_heads
        work = work._replace(head_idx=work.head_idx - split_idx * num_heads, place=split_idx)
        first, end = self.key_blocks(work)
        words = None
        if self._cuts_walks:
            places = split_idx, split_idx + 1, num_splits
            first, end, words = selection_walk.cut(self, work, *places)
        elif self.skip:
            of_splits = replace(self.block_info, is_split_kv=True)
            first, end = of_splits.get_n_block_min_max(
                self.seqlen_of(work), work.block, split_idx, num_splits
            )
        else:
            of_split = cute.ceil_div(end, num_splits)
            first = cutlass.min(split_idx * of_split, end)
            end = cutlass.min(first + of_split, end)
        return work._replace(first_block=first, end_block=end), words

    @property
    def _cuts_walks(self) -> bool:
        """Whether splits have equal parts of entries or of gathered keys, not of all keys."""
        return self.skip and self.has_selection and self.args.bits.of_any is None

    def has_blocks(self, work: Work) -> Boolean:
        assert work.first_block is not None and work.end_block is not None
        return work.first_block < work.end_block

    @cute.jit
    def leave_unseen(self, work: Work, partials: Partials, queries_are_packed: cutlass.Constexpr):
        """Record that the rows of a work tile see nothing of a fixed split. Run by a whole warp."""
        info, heads = self.block_info, self.block_info.qhead_per_kvhead_packgqa
        low = None if partials.low is None else Float32(0.0)
        for i in cutlass.range_constexpr(info.tile_m // WORD):
            row = work.block * info.tile_m + i * WORD + cute.arch.lane_idx()
            if (row // heads < work.slot) & (row % heads < self.group_size):
                head_idx = head_of_row(work, row, heads, self.group_size)
                place = partials.row(work, queries_are_packed, head_idx, row // heads, Int32(0))
                partials.store_lse(place, -Float32.inf, low)

    def within_fixed_split(self, work: Work, split_idx: Int32, split_blocks: Int32) -> Work:
        """A work tile with only those of its key blocks that lie in a fixed split."""
        first, end = self.key_blocks(work)
        begin = split_idx * split_blocks
        first, end = cutlass.max(first, begin), cutlass.min(end, begin + split_blocks)
        return work._replace(first_block=first, end_block=end)

    @cute.jit
    def send_walk(
        self, ring: WalkRing, number: Int32, work: Work, words: SelectionWords | None = None
    ) -> Int32:
        """Send the walk of a work tile as chunks, starting with chunk `number`; returns the next
        number. A walk that sees nothing visits one hidden block. words: instead of _list_start."""
        n_block_min, n_block_max = work.first_block, work.end_block
        if const_expr(work.first_block is None):
            n_block_min, n_block_max = self.key_blocks(work)
        # a scheduler warp has few registers but those of the whole warp
        n_block_min = cute.arch.make_warp_uniform(n_block_min)
        position = self._list_start(work) if const_expr(words is None) else words
        pending = Chunk.hidden_block(n_block_min, work.head_idx)
        if const_expr(self.own_rows is not None):
            pending = pending.with_owners([Int32(0)] * self._num_owners)
        found_any = Boolean(False)
        chunk_idx = (cutlass.max(n_block_max, 1) - 1) // CHUNK
        while chunk_idx >= n_block_min // CHUNK:
            chunk, position = self._classify(work, chunk_idx * CHUNK, position)
            if chunk.visible != 0:
                if found_any:
                    follower = chunk.kind_of(ring.next_bit(chunk, chunk.visible))
                    if const_expr(ring.tells_next):
                        follower = follower | ring.number_of_first(chunk)
                    ring.write(number, pending._replace(follower=follower))
                    number += 1
                pending = chunk
                found_any = Boolean(True)
            if const_expr(self._leaps):
                chunk_idx = selection_walk.chunk_before(self, position, chunk_idx)
            else:
                chunk_idx -= 1
        ring.write(number, pending)
        return number + 1

    @cute.jit
    def _classify(self, work: Work, base: Int32, position: Any) -> tuple:
        """The chunk of the 32 blocks from `base` on; each lane judges one."""
        n_block = base + cute.arch.lane_idx()
        verdict = self._judge(work, work.head_idx, work.block, n_block)
        is_visible, mask_mod_word = (
            verdict.is_visible,
            Int32(ALL if const_expr(self._may_need_mask_mod) else 0),
        )
        if const_expr(self.args.mask_bits is not None):
            is_visible, needs_mask_mod = self._look_up(work, work.block, n_block, is_visible)
            mask_mod_word = cute.arch.vote_ballot_sync(needs_mask_mod)
        elif const_expr(self.prefix_mod is not None):
            mask_mod_word = cute.arch.vote_ballot_sync(self.ends_prefix(work, n_block))
        exists = n_block < cute.ceil_div(work.seqlen_k, self.block_info.tile_n)
        if const_expr(work.first_block is not None):
            of_split = (n_block >= work.first_block) & (n_block < work.end_block)
            is_visible, exists = is_visible & of_split, exists & of_split
        visible_word = cute.arch.vote_ballot_sync(is_visible)
        owned: tuple = ()
        if const_expr(self.own_rows is not None):
            taken = [self._take_listed(work, base, x, owner) for owner, x in enumerate(position)]
            owned, position = tuple(x[0] for x in taken), tuple(x[2] for x in taken)
            listed = Int32(0)
            for i in cutlass.range_constexpr(self._num_owners):
                listed = listed | owned[i]
            visible_word = visible_word & listed
        elif const_expr(self.args.lists is not None):
            listed, full, position = self._take_listed(work, base, position)
            visible_word = visible_word & listed
            mask_mod_word = mask_mod_word & (full ^ ALL)
        elif const_expr(self.has_selection):
            position = selection_walk.words_for(self, work, base, position)
            is_listed, needs_mask_mod = selection_walk.judge(self, position, work, n_block)
            visible_word = visible_word & cute.arch.vote_ballot_sync(is_listed)
            mask_mod_word = cute.arch.vote_ballot_sync(needs_mask_mod)
        elif const_expr(self.args.bits is not None):
            # rows of a tile do not begin where blocks of the lists do
            is_listed, needs_mask_mod = self.judge_listed(work, work.head_idx, work.block, n_block)
            visible_word = visible_word & cute.arch.vote_ballot_sync(is_listed)
            mask_mod_word = cute.arch.vote_ballot_sync(needs_mask_mod)
        is_band = verdict.is_band
        if const_expr(self.cuts_overhang):
            rows = work.seqlen_q * self.block_info.qhead_per_kvhead_packgqa
            is_band = is_band | ((work.block + 1) * self.block_info.tile_m > rows)
            if const_expr(work.q_start is not None):
                first, _ = self.block_info.query_range(work.seqlen, work.block)
                is_band = is_band | (first + work.q_start < 0)
        chunk = Chunk.from_votes(
            base, work.head_idx, visible_word, is_band, verdict.is_columns, mask_mod_word
        ).with_owners(owned)
        if const_expr(not self.skip):
            chunk = chunk.without_skipping(exists, self.args.columns is not None)
        return chunk, position

    @property
    def _leaps(self) -> bool:
        """Whether a walk leaves out chunks without looking at them."""
        return self.skip and self.has_selection

    def _list_start(self, work: Work) -> Any:
        """What is known of the lists (of each owner), or of the selection, when a walk begins."""
        if self.has_selection:
            return SelectionWords.none()
        if self.args.lists is None:
            return ListPosition(Int32(0), Int32(0))
        if self.own_rows is None:
            return self._entries(work)
        positions = []
        for owner in range(self._num_owners):
            first_row = self._first_row_of(work, owner)
            position = self._entries(work, owner)
            # rows that do not exist see nothing
            there = first_row < work.seqlen_q
            positions.append(ListPosition(*(cutlass.select_(there, x, Int32(0)) for x in position)))
        return tuple(positions)

    def _entries(self, work: Work, owner: int = 0) -> ListPosition:
        args = self.args.lists
        place = self._list_place(args.mask_cnt, work, owner)
        full_left = Int32(0)
        if args.full_cnt is not None:
            full_left = args.full_cnt[self._list_place(args.full_cnt, work, owner)]
        return ListPosition(args.mask_cnt[place], full_left)

    @property
    def _num_owners(self) -> int:
        return self.block_info.tile_m // self.own_rows

    def _first_row_of(self, work: Work, owner: int) -> Int32:
        return work.block * self.block_info.tile_m + owner * self.own_rows

    def _list_place(self, tensor: cute.Tensor, work: Work, owner: int = 0) -> tuple:
        first_row, _ = self.block_info.query_range(work.seqlen, work.block)
        if self.own_rows is not None:
            first_row = self._first_row_of(work, owner)
        # the slot of a sequence may have more rows than the lists, which end where its queries do
        last = cute.size(tensor, mode=[2]) - 1
        q_block = cutlass.min(first_row // self.args.lists.block_q, last)
        return (*broadcast_place(tensor, work, work.head_idx), q_block)

    @cute.jit
    def _take_listed(
        self, work: Work, base: Int32, position: ListPosition, owner: cutlass.Constexpr[int] = 0
    ) -> tuple:
        """Words of a chunk's listed blocks and of its full blocks, and the position after it."""
        args = self.args.lists
        ratio = args.block_k // self.block_info.tile_n
        row = args.mask_idx[(*self._list_place(args.mask_cnt, work, owner), None)]
        listed, mask_left = _take_from_row(row, position.mask_left, base, ratio)
        full, full_left = Int32(0), position.full_left
        if const_expr(args.full_idx is not None):
            row = args.full_idx[(*self._list_place(args.full_cnt, work, owner), None)]
            full, full_left = _take_from_row(row, position.full_left, base, ratio)
        return listed | full, full, ListPosition(mask_left, full_left)

    # -- scores ---------------------------------------------------------------------------------

    @cute.jit
    def make_bits(self, work: Work, block: Block, warp_rows: MaskWarpRows) -> tuple:
        """The words of a block's bits for this warp's rows of a tile (`MaskWarpRows.store`).

        A lane holds a row of each group of 32. If a rule is about columns, it holds one of 32
        columns until its bits are transposed.
        """
        words = warp_rows.fill(ALL)
        if block.is_hidden:
            words = warp_rows.fill(0)
        else:
            if const_expr(self.args.columns is not None):  # noqa: SIM102 (decided while tracing)
                if block.is_columns:
                    words = self._column_words(work, block.index, warp_rows)
            if block.is_band:
                words = both(words, self._band_words(work, block.index, warp_rows))
            if const_expr(self._may_need_mask_mod):  # noqa: SIM102 (decided while tracing)
                if block.needs_mask_mod:
                    words = both(words, self.mask_mod_words(work, block.index, warp_rows))
        return words

    @cute.jit
    def _band_words(self, work: Work, n_block: Int32, warp_rows: MaskWarpRows) -> tuple:
        """Bits of each row that the band shows, by the edges that cross the block."""
        info = self.block_info
        band = info.band(self.seqlen_of(work))
        first, end = info.query_range(work.seqlen, work.block)
        first_k_idx = n_block * info.tile_n
        words = warp_rows.fill(ALL)
        if band.k_range(first)[1] < first_k_idx + info.tile_n:
            words = self._edge_words(work, first_k_idx, warp_rows, is_upper=True)
        if const_expr(band.window_left is not None):  # noqa: SIM102 (decided while tracing)
            if band.k_range(end - 1)[0] > first_k_idx:
                words = both(words, self._edge_words(work, first_k_idx, warp_rows, is_upper=False))
        return words

    def _edge_words(
        self, work: Work, first_k_idx: Int32, warp_rows: MaskWarpRows, is_upper: bool
    ) -> tuple:
        """Bits of the keys below each row's upper edge of the band, or from its lower edge on."""
        band = self.block_info.band(self.seqlen_of(work))
        bits = bit_tile.low_bits if is_upper else bit_tile.bits_from
        words = []
        for group in range(warp_rows.num_groups):
            edge = band.k_range(self._query(warp_rows.line(work, group)))[is_upper]
            for w in range(self.columns.num_words):
                words.append(bits(self.columns.count_below(w, edge - first_k_idx)))
        return tuple(words)

    def _column_words(self, work: Work, n_block: Int32, warp_rows: MaskWarpRows) -> tuple:
        """Bits of each row that the intervals leave visible."""
        lane = cute.arch.lane_idx()
        heads = self.block_info.qhead_per_kvhead_packgqa
        first_k_idx = n_block * self.block_info.tile_n
        columns = []
        for w in range(self.columns.num_words):
            k_idx = first_k_idx + self.columns.col_of(w, lane)
            values = self._column_values(work, work.head_idx, k_idx)
            if heads > 1:
                # a row that is never reached may be any number
                values = tuple(cutlass.min(value, work.seqlen_q) * heads for value in values)
            columns.append(values)
        words: tuple = ()
        for group in range(warp_rows.num_groups):
            first_row = warp_rows.line(work, group) - lane
            by_column = []
            for values in columns:
                rows = self.intervals.visible_rows([value - first_row for value in values])
                by_column.append(bit_tile.bits_of(*rows))
            words += bit_tile.transpose_if_mixed(tuple(by_column), lane)
        return words

    @cute.jit
    def mask_mod_words(self, work: Work, n_block: Int32, warp_rows: MaskWarpRows) -> tuple:
        """Bits of each row that mask_mod, and logical blocks smaller than a tile, leave visible."""
        words = warp_rows.fill(ALL)
        if const_expr(self.args.mask_bits is not None):
            words = warp_rows.load(self.args.mask_bits.tile(work.batch_idx, work.block, n_block))
        if const_expr(self.mask_mod is not None):
            # row after row: what the callable loads for a lane's key, the compiler loads once
            words = warp_rows.fill(0)
            if const_expr(self.shares_mask):
                for query in cutlass.range(WORD // self._rows_of_query, unroll=1):
                    words = self._eval_query(work, n_block, warp_rows, query, words)
            else:
                for step in cutlass.range(WORD // ROWS_PER_EVAL, unroll=1):
                    words = self._eval_step(work, n_block, warp_rows, step * ROWS_PER_EVAL, words)
                words = tuple(bit_tile.transpose(words, cute.arch.lane_idx()))
        if const_expr(self.args.bits is not None):
            words = self._within_logical_blocks(work, n_block, warp_rows, words)
        return words

    @property
    def _rows_of_query(self) -> int:
        """Rows of a group of 32 that belong to a query."""
        return min(self.block_info.qhead_per_kvhead_packgqa, WORD)

    def _eval_query(
        self, work: Work, n_block: Int32, warp_rows: MaskWarpRows, query: Int32, words: tuple
    ) -> tuple:
        """Evaluate mask_mod for a query's first head; lanes' votes are words of all its rows."""
        updated: list[Any] = []
        lane, rows = cute.arch.lane_idx(), self._rows_of_query
        for group in range(warp_rows.num_groups):
            row = warp_rows.line(work, group) - lane + query * rows
            for w in range(self.columns.num_words):
                k_idx = n_block * self.block_info.tile_n + self.columns.col_of(w, lane)
                head_idx = work.head_idx * self.group_size
                visible = self._eval_mask_mod(work, head_idx, self._query(row), k_idx)
                word = Int32(cute.arch.vote_ballot_sync(visible))
                is_own = lane // rows == query
                updated.append(cutlass.select_(is_own, word, words[len(updated)]))
        return tuple(updated)

    def _eval_step(
        self, work: Work, n_block: Int32, warp_rows: MaskWarpRows, first: Int32, words: tuple
    ) -> tuple:
        """Evaluate mask_mod for rows of each group from `first` on, and this lane's columns."""
        updated: list[Any] = []
        lane = cute.arch.lane_idx()
        heads = self.block_info.qhead_per_kvhead_packgqa
        first_k_idx = n_block * self.block_info.tile_n
        for group in range(warp_rows.num_groups):
            first_row = warp_rows.line(work, group) - lane + first
            for w in range(self.columns.num_words):
                k_idx = first_k_idx + self.columns.col_of(w, lane)
                bits = Int32(0)
                for i in range(ROWS_PER_EVAL):
                    row = first_row + i
                    head_idx = head_of_row(work, row, heads, self.group_size)
                    visible = self._eval_mask_mod(work, head_idx, self._query(row), k_idx)
                    bits = bit_tile.set_if(visible, bits, i)
                updated.append(bit_tile.push(words[len(updated)], bits, ROWS_PER_EVAL))
        return tuple(updated)

    @cute.jit
    def _within_logical_blocks(
        self, work: Work, n_block: Int32, warp_rows: MaskWarpRows, words: tuple
    ) -> tuple:
        """The given bits where a logical block is listed as partial, all bits where it is full."""
        args, info = self.args.bits, self.block_info
        _, offset_k = self._listed_offsets(work)
        first_k_idx = n_block * info.tile_n + offset_k
        last_k_idx = cutlass.min(first_k_idx + info.tile_n, work.seqlen_k + offset_k) - 1
        result, chosen = warp_rows.fill(0), None
        if const_expr(args.are_entries):
            chosen = selection_walk.chosen_from(self, work, first_k_idx // args.block_k)
        for kb in cutlass.range(first_k_idx // args.block_k, last_k_idx // args.block_k + 1):
            of_block = first_k_idx, warp_rows, words, result, chosen
            result = self._add_logical_block(work, kb, *of_block)
            if const_expr(chosen is not None):
                chosen = chosen >> 1
        return result

    def _add_logical_block(
        self,
        work: Work,
        kb: Int32,
        first_k_idx: Int32,
        warp_rows: MaskWarpRows,
        words: tuple,
        result: tuple,
        chosen: Int32 | None,
    ) -> tuple:
        args = self.args.bits
        start = kb * args.block_k - first_k_idx
        offset_q, _ = self._listed_offsets(work)
        added = []
        for group in range(warp_rows.num_groups):
            q_idx = (
                cutlass.min(self._query(warp_rows.line(work, group)), work.seqlen_q - 1) + offset_q
            )
            of_block = work, work.head_idx, q_idx // args.block_q, kb
            found = self._block_bits(*of_block) if chosen is None else (chosen & 1, chosen & 1)
            is_listed, is_full = found
            for w in range(self.columns.num_words):
                bits = bit_range(
                    self.columns.count_below(w, start),
                    self.columns.count_below(w, start + args.block_k),
                )
                i = len(added)
                # 0 - 1 is a word of ones
                added.append(result[i] | (bits & (0 - is_listed) & (words[i] | (0 - is_full))))
        return tuple(added)

    def _query(self, row: Int32) -> Int32:
        return row // self.block_info.qhead_per_kvhead_packgqa


@cute.jit
def _take_from_row(row: cute.Tensor, left: Int32, base: Int32, ratio: Int32) -> tuple:
    """Blocks of the chunk at `base` that are among the first `left` entries of an ascending list.

    Each entry stands for `ratio` blocks. Returns the word of the blocks, and the number of entries
    below them.
    """
    lane = cute.arch.lane_idx()
    word = Int32(0)
    passed = Int32(ALL)
    while passed == ALL:
        at = left - 1 - lane
        is_passed = Boolean(False)
        if at >= 0:
            first = row[at] * ratio - base
            word = word | bit_range(first, first + ratio)
            is_passed = first >= 0
        passed = Int32(cute.arch.vote_ballot_sync(is_passed))
        left -= Int32(cute.arch.popc(passed))
    return Int32(cute.arch.warp_redux_sync(word, "or")), left
