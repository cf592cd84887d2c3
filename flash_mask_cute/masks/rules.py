"""All masks of a call as one rule with two readings: which key blocks, and which scores of a block.

A score counts when everything that was given lets it: the lengths, causal and window (`Band`),
column intervals, block lists, mask_mod. `MaskRules.plan` reads the rule at the level of tiles and
sends a work tile's walk; `MaskRules.paint` reads it at the level of scores, for the blocks that
something cuts, into bit tiles. Both are run by warps that compute no scores, for any architecture.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.block_info import BlockInfo
from flash_mask_cute.core.mods import call_mask_mod
from flash_mask_cute.core.walk_ring import CHUNK, Block, Chunk, Kind, WalkRing, highest_bit
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.masks import bit_tile
from flash_mask_cute.masks.bit_tile import ALL, WORD, Columns, bit_range
from flash_mask_cute.masks.intervals import Intervals


class ColumnArgs(NamedTuple):
    """Column intervals: indices (batch | 1, heads_mask, seqlen_k, n) int32, and their smallest and
    largest values per key block, bounds (batch | 1, heads_mask, 2 n, num_n_blocks).

    heads_per_mask_head: consecutive heads of the work tiles that share a mask head. Where keys are
    packed, both tensors have one batch entry for all sequences (`ColumnMask.bounds`).
    """

    indices: cute.Tensor
    bounds: cute.Tensor
    heads_per_mask_head: Int32


class ListArgs(NamedTuple):
    """Block lists, cnt (batch | 1, heads | 1, num_q_blocks), idx (..., num_k_blocks), of blocks of
    block_q x block_k scores, multiples of the kernel's tiles. full_* may be absent."""

    mask_cnt: cute.Tensor
    mask_idx: cute.Tensor
    full_cnt: cute.Tensor | None
    full_idx: cute.Tensor | None
    block_q: Int32
    block_k: Int32


class BitArgs(NamedTuple):
    """State of logical blocks that kernel tiles do not nest in: bit kb % 32 of word kb // 32 of
    visible, full (batch | 1, heads | 1, num_q_blocks, words)."""

    visible: cute.Tensor
    full: cute.Tensor
    block_q: Int32
    block_k: Int32


class MaskArgs(NamedTuple):
    """What the masks of a launch are made of; anything may be absent."""

    window_left: Int32 | None
    window_right: Int32 | None
    columns: ColumnArgs | None
    lists: ListArgs | None
    bits: BitArgs | None
    aux_tensors: Any


class ListPosition(NamedTuple):
    """Entries of a row's block lists that a descending walk has not passed yet."""

    mask_left: Int32
    full_left: Int32


@dataclass(frozen=True)
class MaskRules:
    """The masks of a launch, for one shape of tiles.

    keys_are_packed: the keys of all sequences lie in one tensor.
    skip: leave hidden blocks out and cut-free blocks unpainted; without it every block of a
    sequence is visited and painted, to the same result.
    """

    args: MaskArgs
    block_info: BlockInfo
    intervals: cutlass.Constexpr[Intervals | None]
    mask_mod: cutlass.Constexpr[Callable[..., Any] | None]
    columns: cutlass.Constexpr[Columns]
    keys_are_packed: cutlass.Constexpr[bool]
    skip: cutlass.Constexpr[bool]

    @property
    def _can_ask(self) -> bool:
        return self.mask_mod is not None or self.args.bits is not None

    # -- tiles ----------------------------------------------------------------------------------

    @cute.jit
    def plan(self, ring: WalkRing, number: Int32, work: Work) -> Int32:
        """Send the walk of a work tile as chunks from `number` on; returns the next number.

        A walk that sees nothing visits one hidden block, so that no role has a special case.
        """
        n_block_min, n_block_max = self.block_info.get_n_block_min_max(work.seqlen, work.m_block)
        if const_expr(not self.skip):
            n_block_min = Int32(0)
            n_block_max = cute.ceil_div(work.seqlen_k, self.block_info.tile_n)
        position = self._list_start(work)
        pending = Chunk(n_block_min, Kind.END, 1, 1, 0, 0, 0)
        pending = Chunk(*(Int32(field) for field in pending))
        found_any = Boolean(False)
        chunk_idx = (cutlass.max(n_block_max, 1) - 1) // CHUNK
        while chunk_idx >= n_block_min // CHUNK:
            chunk, position = self._classify(work, chunk_idx * CHUNK, position)
            if chunk.visible != 0:
                if found_any:
                    follower = chunk.kind_of(highest_bit(chunk.visible))
                    ring.write(number, pending._replace(follower=follower))
                    number += 1
                pending = chunk
                found_any = Boolean(True)
            chunk_idx -= 1
        ring.write(number, pending)
        return number + 1

    @cute.jit
    def _classify(self, work: Work, base: Int32, position: ListPosition) -> tuple:
        """The chunk of the 32 blocks from `base` on, a lane each."""
        n_block = base + cute.arch.lane_idx()
        info, seqlen = self.block_info, work.seqlen
        n_block_min, n_block_max = info.get_n_block_min_max(seqlen, work.m_block)
        visible = (n_block >= n_block_min) & (n_block < n_block_max)
        exists = n_block < cute.ceil_div(work.seqlen_k, info.tile_n)
        is_band = n_block >= info.get_n_block_min_causal_local_mask(
            seqlen, work.m_block, n_block_min
        )
        if const_expr(self.args.window_left is not None):
            is_band = is_band | (
                n_block < info.get_n_block_min_before_local_mask(seqlen, work.m_block, n_block_min)
            )
        is_columns = Boolean(False)
        if const_expr(self.args.columns is not None):
            hides_all, is_columns = self._classify_columns(work, n_block)
            visible = visible & (hides_all == Boolean(False))
        visible_word = cute.arch.vote_ballot_sync(visible)
        asks_word = Int32(ALL if const_expr(self._can_ask) else 0)
        if const_expr(self.args.lists is not None):
            listed, full, position = self._take_listed(work, base, position)
            visible_word = visible_word & listed
            asks_word = asks_word & (full ^ ALL)
        chunk = Chunk(
            base,
            Int32(Kind.END),
            visible_word,
            Int32(0),
            cute.arch.vote_ballot_sync(is_band),
            cute.arch.vote_ballot_sync(is_columns),
            asks_word,
        )
        if const_expr(not self.skip):
            chunk = chunk._replace(
                visible=cute.arch.vote_ballot_sync(exists),
                hidden=visible_word ^ ALL,
                band=Int32(ALL),
                columns=Int32(0 if const_expr(self.args.columns is None) else ALL),
            )
        return chunk, position

    @cute.jit
    def _classify_columns(self, work: Work, n_block: Int32) -> tuple:
        """Whether the intervals hide all of a block from a work tile, and whether they cut it."""
        args = self.args.columns
        first_row, end_row = self.block_info.query_range(work.seqlen, work.m_block)
        batch_idx, head_idx, k_start = self._column_place(work)
        at = n_block
        if const_expr(self.keys_are_packed):
            at = n_block + k_start // self.block_info.tile_n + work.batch_idx
        at = cutlass.min(at, cute.size(args.bounds, mode=[3]) - 1)
        bounds = tuple(
            args.bounds[batch_idx, head_idx, i, at] for i in range(2 * self.intervals.num_vectors)
        )
        return self.intervals.classify(bounds, first_row, end_row, work.seqlen_q)

    def _list_start(self, work: Work) -> ListPosition:
        args = self.args.lists
        if args is None:
            return ListPosition(Int32(0), Int32(0))
        place = self._list_place(args.mask_cnt, work)
        full_left = Int32(0)
        if args.full_cnt is not None:
            full_left = args.full_cnt[self._list_place(args.full_cnt, work)]
        return ListPosition(args.mask_cnt[place], full_left)

    def _list_place(self, tensor: cute.Tensor, work: Work) -> tuple:
        first_row, _ = self.block_info.query_range(work.seqlen, work.m_block)
        # the slot of a sequence may have more rows than the lists, which end where its queries do
        last = cute.size(tensor, mode=[2]) - 1
        q_block = cutlass.min(first_row // self.args.lists.block_q, last)
        return (*_broadcast_place(tensor, work), q_block)

    @cute.jit
    def _take_listed(self, work: Work, base: Int32, position: ListPosition) -> tuple:
        """Words of the listed and of the full blocks of a chunk, and the position after it."""
        args = self.args.lists
        ratio = args.block_k // self.block_info.tile_n
        row = args.mask_idx[(*self._list_place(args.mask_cnt, work), None)]
        listed, mask_left = _take_from_row(row, position.mask_left, base, ratio)
        full, full_left = Int32(0), position.full_left
        if const_expr(args.full_idx is not None):
            row = args.full_idx[(*self._list_place(args.full_cnt, work), None)]
            full, full_left = _take_from_row(row, position.full_left, base, ratio)
        return listed | full, full, ListPosition(mask_left, full_left)

    # -- scores ---------------------------------------------------------------------------------

    @cute.jit
    def paint(self, work: Work, block: Block, share: "Share") -> tuple:
        """The words of a block's bits in this warp's share of a tile's rows, for `Share.store`.

        A lane holds a row of each group of 32, or, where a rule is about columns, one of 32 columns
        until its bits are transposed. All words are made together: a painting warp has nothing
        else to hide the latency of one behind.
        """
        words = share.fill(ALL)
        if block.is_hidden:
            words = share.fill(0)
        else:
            if block.is_columns:
                words = self._column_words(work, block.n_block, share)
            elif block.is_band:
                words = self._band_words(work, block.n_block, share)
            if const_expr(self._can_ask):  # noqa: SIM102 (decided while tracing)
                if block.asks:
                    words = _both(words, self._asked_words(work, block.n_block, share))
        return words

    def _band_words(self, work: Work, n_block: Int32, share: "Share") -> tuple:
        """Bits that the band, the end of the keys included, leaves to each row."""
        band = self.block_info.band(work.seqlen)
        first_k_idx = n_block * self.block_info.tile_n
        words = []
        for group in range(share.num_groups):
            lo, hi = band.k_range(self._query(work, share.row(work, group)))
            for w in range(self.columns.num_words):
                word = bit_tile.low_bits(self.columns.count_below(w, hi - first_k_idx))
                if band.window_left is not None:
                    hidden = bit_tile.low_bits(self.columns.count_below(w, lo - first_k_idx))
                    word = word & (hidden ^ ALL)
                words.append(word)
        return tuple(words)

    def _column_words(self, work: Work, n_block: Int32, share: "Share") -> tuple:
        """Bits that the intervals leave to each row, and the band, as one more interval of rows."""
        if self.args.columns is None:
            return share.fill(ALL)
        args, lane = self.args.columns, cute.arch.lane_idx()
        batch_idx, head_idx, k_start = self._column_place(work)
        heads = self.block_info.qhead_per_kvhead_packgqa
        first_k_idx = n_block * self.block_info.tile_n
        band = self.block_info.band(work.seqlen)
        seen, hidden = [], []
        for w in range(self.columns.num_words):
            k_idx = first_k_idx + self.columns.col_of(w, lane)
            lo, hi = band.q_range(k_idx)
            # past the end of the keys, no row
            seen.append((lo, cutlass.select_(k_idx < work.seqlen_k, hi, Int32(0))))
            at = k_start + cutlass.min(k_idx, work.seqlen_k - 1)
            values = [
                args.indices[batch_idx, head_idx, at, i] for i in range(self.intervals.num_vectors)
            ]
            hidden.append(self.intervals.hidden_rows(values, work.seqlen_q))
        words = []
        for group in range(share.num_groups):
            first_row = share.row(work, group) - lane
            for w in range(self.columns.num_words):
                lo, hi = seen[w]
                word = bit_range(lo * heads - first_row, hi * heads - first_row)
                for start, end in hidden[w]:
                    rows = bit_range(start * heads - first_row, end * heads - first_row)
                    word = word & (rows ^ ALL)
                words.append(word)
        return tuple(bit_tile.transpose(words, lane))

    @cute.jit
    def _asked_words(self, work: Work, n_block: Int32, share: "Share") -> tuple:
        """Bits that mask_mod, and logical blocks smaller than a tile, leave to each row."""
        words = share.fill(ALL)
        if const_expr(self.mask_mod is not None):
            # A lane asks about one column at a time, row after row: what the callable loads for a
            # key is the same for all rows, so the compiler loads it once.
            words = share.fill(0)
            for bit in cutlass.range(WORD, unroll=4):
                words = self._ask(work, n_block, share, bit, words)
            words = tuple(bit_tile.transpose(words, cute.arch.lane_idx()))
        if const_expr(self.args.bits is not None):
            words = self._within_logical_blocks(work, n_block, share, words)
        return words

    def _ask(self, work: Work, n_block: Int32, share: "Share", bit: Int32, words: tuple) -> tuple:
        """Ask mask_mod about row `bit` of each group, and this lane's column of each word."""
        asked = []
        lane = cute.arch.lane_idx()
        heads = self.block_info.qhead_per_kvhead_packgqa
        first_k_idx = n_block * self.block_info.tile_n
        for group in range(share.num_groups):
            row = share.row(work, group) - lane + bit
            head_idx = work.head_idx * heads + row % heads if heads > 1 else work.head_idx
            for w in range(self.columns.num_words):
                # positions past the ends are hidden, but the callable may index tensors with them
                visible = call_mask_mod(
                    self.mask_mod,
                    work.batch_idx,
                    head_idx,
                    cutlass.min(self._query(work, row), work.seqlen_q - 1),
                    cutlass.min(first_k_idx + self.columns.col_of(w, lane), work.seqlen_k - 1),
                    self.args.aux_tensors,
                )
                word = words[len(asked)]
                asked.append(word + cutlass.select_(visible, Int32(1) << bit, Int32(0)))
        return tuple(asked)

    @cute.jit
    def _within_logical_blocks(
        self, work: Work, n_block: Int32, share: "Share", words: tuple
    ) -> tuple:
        """The given bits where a listed logical block asks for them, all where it is full."""
        args, info = self.args.bits, self.block_info
        first_k_idx = n_block * info.tile_n
        last_k_idx = cutlass.min(first_k_idx + info.tile_n, work.seqlen_k) - 1
        result = share.fill(0)
        for kb in cutlass.range(first_k_idx // args.block_k, last_k_idx // args.block_k + 1):
            result = self._add_logical_block(work, kb, first_k_idx, share, words, result)
        return result

    def _add_logical_block(
        self, work: Work, kb: Int32, first_k_idx: Int32, share: "Share", words: tuple, result: tuple
    ) -> tuple:
        args = self.args.bits
        start = kb * args.block_k - first_k_idx
        added = []
        for group in range(share.num_groups):
            q_idx = cutlass.min(self._query(work, share.row(work, group)), work.seqlen_q - 1)
            place = (*_broadcast_place(args.visible, work), q_idx // args.block_q, kb // WORD)
            is_listed = (args.visible[place] >> (kb % WORD)) & 1
            is_full = (args.full[place] >> (kb % WORD)) & 1
            for w in range(self.columns.num_words):
                bits = bit_range(
                    self.columns.count_below(w, start),
                    self.columns.count_below(w, start + args.block_k),
                )
                i = len(added)
                # 0 - 1 is a word of ones
                added.append(result[i] | (bits & (0 - is_listed) & (words[i] | (0 - is_full))))
        return tuple(added)

    def _query(self, work: Work, row: Int32) -> Int32:
        return row // self.block_info.qhead_per_kvhead_packgqa

    # -- where a work tile's masks lie ----------------------------------------------------------

    def _column_place(self, work: Work) -> tuple[Int32, Int32, Int32]:
        """Batch, head and first key of a work tile in the interval tensors."""
        args = self.args.columns
        batch_idx = cutlass.min(work.batch_idx, cute.size(args.indices, mode=[0]) - 1)
        k_start = work.offset_k if self.keys_are_packed else Int32(0)
        return batch_idx, work.head_idx // args.heads_per_mask_head, k_start


@dataclass(frozen=True)
class Share:
    """The rows of a work tile that one of several painting warps looks after, and its words.

    num_groups: groups of 32 neighbouring rows; their words follow each other, group by group.
    """

    painter: Int32
    tile_m: cutlass.Constexpr[int]
    num_groups: cutlass.Constexpr[int]
    num_words: cutlass.Constexpr[int]

    @staticmethod
    def create(painter: Int32, num_painters: int, tile_m: int, columns: Columns) -> "Share":
        return Share(painter, tile_m, tile_m // WORD // num_painters, columns.num_words)

    def fill(self, word: int) -> tuple:
        return tuple(Int32(word) for _ in range(self.num_groups * self.num_words))

    def tile_row(self, group: int) -> Int32:
        """This lane's row of a group, counted in the tile."""
        return (self.painter * self.num_groups + group) * WORD + cute.arch.lane_idx()

    def row(self, work: Work, group: int) -> Int32:
        """This lane's row of a group, counted in the sequence."""
        return work.m_block * self.tile_m + self.tile_row(group)

    def store(self, tile: cute.Tensor, words: tuple) -> None:
        """Write the words into tile (num_words, tile_m) int32."""
        for group in range(self.num_groups):
            for w in range(self.num_words):
                tile[w, self.tile_row(group)] = words[group * self.num_words + w]


def _both(words: tuple, others: tuple) -> tuple:
    return tuple(a & b for a, b in zip(words, others, strict=True))


def _broadcast_place(tensor: cute.Tensor, work: Work) -> tuple[Int32, Int32]:
    """Batch and head of a work tile in a tensor that may have one for all."""
    return (
        cutlass.min(work.batch_idx, cute.size(tensor, mode=[0]) - 1),
        cutlass.min(work.head_idx, cute.size(tensor, mode=[1]) - 1),
    )


@cute.jit
def _take_from_row(row: cute.Tensor, left: Int32, base: Int32, ratio: Int32) -> tuple:
    """Blocks of the chunk at `base` that an ascending list has among its first `left` entries.

    Each entry stands for `ratio` blocks. Returns their word, and how many entries lie below.
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
