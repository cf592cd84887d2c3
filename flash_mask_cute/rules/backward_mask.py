"""The masks of a launch for blocks of keys: walks over queries, and mask bits.

A work tile belongs to a KV head, and visits the query blocks of each query head of its group; if
sequences have their keys in common, those of all sequences. A line of a bit tile is a key, so the
intervals of a key are ranges of bits directly.
"""

import operator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.semaphore import NO_PREDECESSOR
from flash_mask_cute.core.tile_state import PARTIAL, has_visible
from flash_mask_cute.core.walk_ring import CHUNK, Block, Chunk, WalkRing
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.rules import bit_tile
from flash_mask_cute.rules.bit_tile import ALL, HALF_WORD, WORD, Columns, bit_range
from flash_mask_cute.rules.mask_rules import MaskArgs, MaskRules, MaskWarpRows, both

# as in `forward_mask`; what a callable loads for more queries spills in the mask warps
ROWS_PER_EVAL = 2
# where tiles are staggered, neighbours begin so many blocks apart: an odd number, so that each of a
# chunk is the first one of some tile
STAGGER = 5


class PendingWalk(NamedTuple):
    """A walk so far: the number of the chunk that is sent next, that chunk, the predecessors of its
    blocks, and whether it has a visible block."""

    number: Int32
    chunk: Chunk
    predecessor: Int32
    found_any: Boolean


@dataclass(frozen=True)
class BackwardMask(MaskRules):
    """`MaskRules` for work tiles of tile_n keys that visit blocks of queries.

    Block lists are always given as bits, even if tiles nest in their blocks. group: query heads of
    a KV head.

    Blocks of a query head are visited in ascending order. is_ordered: the work tiles that see a
    query block have an order, from the last keys to the first, and each tile gets its predecessor.
    Work tiles are handed out in that order, so no CTA waits for a tile that has not begun.

    staggers: each tile starts a chunk at a different block, and visits the blocks before that one
    last. So tiles that visit the same chunk at the same time do not add to the same rows of dQ.

    is_part: the tiles are one CTA's part of the tiles that walks were made for. A part may lie
    after the end of the keys, or be full although the whole tile is partial.

    in_common: lengths of the sequences that have their keys in common, if they have.

    own_keys: keys of a warpgroup, if blocks of the lists consist of such keys and of whole query
    blocks. None: bits of scores tell what lists hide.
    """

    group: Int32
    is_ordered: cutlass.Constexpr[bool]
    is_part: cutlass.Constexpr[bool] = False
    staggers: cutlass.Constexpr[bool] = False
    in_common: Lengths | None = None
    own_keys: cutlass.Constexpr[int | None] = None

    # a launch has all blocks
    first_block = None

    @classmethod
    def create(
        cls,
        kernel: Any,
        columns: Columns,
        masks: MaskArgs,
        lengths: Lengths,
        group: Int32,
        is_part: bool = False,
        own_keys: int | None = None,
    ):
        """The masks of a backward kernel (`MaskedKernel`), with deterministic and clears_dq."""
        # Who comes first to a row block stores while others wait. Under bands walks begin apart.
        begin_alike = not (kernel.is_causal or kernel.is_local)
        staggers = begin_alike and not (kernel.deterministic or kernel.clears_dq)
        return cls.from_kernel(
            kernel,
            columns,
            masks,
            lengths,
            group=group,
            is_ordered=kernel.deterministic,
            is_part=is_part,
            staggers=staggers,
            in_common=None if lengths.num_sequences is None else lengths,
            own_keys=own_keys,
        )

    def num_blocks(self, lengths: Lengths, batch_idx: Int32) -> Int32:
        """Work tiles of a packed sequence, including those of unused keys."""
        starts = lengths.cu_seqlens_k
        return cute.ceil_div(starts[batch_idx + 1] - starts[batch_idx], self.block_info.tile_n)

    # -- tiles ----------------------------------------------------------------------------------

    @cute.jit
    def send_walk(self, ring: WalkRing, number: Int32, work: Work) -> Int32:
        """As `ForwardMask.send_walk`."""
        m_blocks = self._m_blocks(work)
        nothing = Chunk.hidden_block(Int32(0), work.head_idx * self.group)
        if const_expr(self.own_keys is not None):
            nothing = nothing.with_owners([Int32(0)] * self._num_owners)
        walk = PendingWalk(number, nothing, Int32(NO_PREDECESSOR), Boolean(False))
        if const_expr(self.in_common is None):
            walk = self._extend(ring, walk, work, m_blocks)
        else:
            walk = self._extend_by_all(ring, walk, work)
        ring.write(walk.number, walk.chunk, walk.predecessor)
        return walk.number + 1

    @cute.jit
    def _extend_by_all(self, ring: WalkRing, walk: PendingWalk, work: Work) -> PendingWalk:
        # a hidden block is one of real queries: rows past the last query may hold anything
        walk, with_queries = walk._replace(chunk=walk.chunk._replace(sequence=Int32(0))), Int32(-1)
        for sequence in cutlass.range(self.in_common.num_sequences, unroll=1):
            own = self.in_common.of_sequence(work, sequence)
            if (own.seqlen_q > 0) & (with_queries < 0):
                with_queries = sequence
                walk = walk._replace(chunk=walk.chunk._replace(sequence=sequence))
            walk = self._extend(ring, walk, own, self._m_blocks(own))
        return walk

    @cute.jit
    def _m_blocks(self, work: Work) -> tuple[Int32, Int32]:
        """The query blocks of a head that a walk may visit: the first, and one past the last."""
        m_block_min, m_block_max = self.block_info.get_m_block_min_max(work.seqlen, work.block)
        if const_expr(not self.skip):
            m_block_min = Int32(0)
            m_block_max = cute.ceil_div(work.seqlen_q, self.block_info.tile_m)
            # a tile of unused keys has no place in the order of dQ
            has_keys = work.block * self.block_info.tile_n < work.seqlen_k
            m_block_max = cutlass.select_(has_keys, m_block_max, Int32(0))
        return m_block_min, m_block_max

    @cute.jit
    def _extend(
        self, ring: WalkRing, walk: PendingWalk, work: Work, m_blocks: tuple[Int32, Int32]
    ) -> PendingWalk:
        """Extend a walk by the queries of a sequence; its last chunk is not sent yet."""
        m_block_min, m_block_max = m_blocks
        first_head = work.head_idx * self.group
        number, pending, predecessor, found_any = walk
        for i in cutlass.range(self.group):
            chunk_idx = m_block_min // CHUNK
            while chunk_idx * CHUNK < m_block_max:
                chunk = self._classify(work, first_head + i, chunk_idx * CHUNK)
                for visible in self._portions(work, chunk.visible):
                    if visible != 0:
                        if found_any:
                            follower = chunk.kind_of(ring.next_bit(chunk, visible))
                            ring.write(number, pending._replace(follower=follower), predecessor)
                            number += 1
                        pending = chunk._replace(visible=visible)
                        if const_expr(self.is_ordered):
                            predecessor = self._predecessor(work, chunk)
                        found_any = Boolean(True)
                chunk_idx += 1
        return PendingWalk(number, pending, predecessor, found_any)

    def _portions(self, work: Work, visible: Int32) -> tuple[Int32, ...]:
        """The visible blocks of a chunk, in portions to visit in turn."""
        if not self.staggers:
            return (visible,)
        late = bit_tile.low_bits(work.block * STAGGER % CHUNK)
        return visible & (late ^ ALL), visible & late

    @cute.jit
    def _predecessor(self, work: Work, chunk: Chunk) -> Int32:
        """1 + the next key block that sees this lane's query block, or 0."""
        m_block = chunk.base + cute.arch.lane_idx()
        n_block = work.block
        end = cute.ceil_div(work.seqlen_k, self.block_info.tile_n)
        if const_expr(self.skip):
            _, end = self.block_info.get_n_block_min_max(work.seqlen, m_block)
        is_found = Boolean(False)
        while (n_block < end) & (is_found == Boolean(False)):
            n_block += 1
            is_found = n_block < end
            if const_expr(self.skip):
                sees = self._sees(work, chunk.head_idx, m_block, n_block)
                is_found = is_found & sees
        return cutlass.select_(is_found, n_block + 1, Int32(0))

    @cute.jit
    def _sees(self, work: Work, head_idx: Int32, m_block: Int32, n_block: Int32) -> Boolean:
        is_visible = self._judge(work, head_idx, m_block, n_block).is_visible
        return self._judge_by_mask_mod(work, head_idx, m_block, n_block, is_visible)[0]

    @cute.jit
    def _judge_by_mask_mod(
        self, work: Work, head_idx: Int32, m_block: Int32, n_block: Int32, is_visible: Boolean
    ) -> tuple[Boolean, Boolean]:
        """Whether lists or stored states show a tile, and whether mask_mod decides about it."""
        if const_expr(self.args.mask_bits is not None):
            is_visible, needs_mask_mod = self._look_up(work, m_block, n_block, is_visible)
        else:
            is_listed, needs_mask_mod = self.judge_listed(work, head_idx, m_block, n_block)
            is_visible = is_visible & is_listed
        return is_visible, needs_mask_mod

    @property
    def _bit_tiles_per_tile(self) -> int:
        return self.block_info.tile_n // cute.size(self.args.mask_bits.tiles, mode=[3])

    @cute.jit
    def _classify(self, work: Work, head_idx: Int32, base: Int32) -> Chunk:
        """The chunk of the 32 blocks from `base` on; each lane judges one."""
        m_block = base + cute.arch.lane_idx()
        verdict = self._judge(work, head_idx, m_block, work.block)
        owners: list[Boolean] = []
        if const_expr(self.own_keys is None):
            is_visible, needs_mask_mod = self._judge_by_mask_mod(
                work, head_idx, m_block, work.block, verdict.is_visible
            )
        else:
            owners = [
                self._is_listed(work, head_idx, m_block, owner) for owner in range(self._num_owners)
            ]
            is_visible = verdict.is_visible & reduce(operator.or_, owners)
            needs_mask_mod = Boolean(False)
        chunk = Chunk.from_votes(
            base,
            head_idx,
            cute.arch.vote_ballot_sync(is_visible),
            verdict.is_band,
            verdict.is_columns,
            cute.arch.vote_ballot_sync(needs_mask_mod),
        ).with_owners([cute.arch.vote_ballot_sync(x) for x in owners])
        if const_expr(not self.skip):
            exists = m_block < cute.ceil_div(work.seqlen_q, self.block_info.tile_m)
            chunk = chunk.without_skipping(exists, self.args.columns is not None)
        if const_expr(self.in_common is not None):
            chunk = chunk._replace(sequence=work.batch_idx)
        return chunk

    @property
    def _num_owners(self) -> int:
        return self.block_info.tile_n // self.own_keys

    @cute.jit
    def _is_listed(
        self, work: Work, head_idx: Int32, m_block: Int32, owner: cutlass.Constexpr[int]
    ) -> Boolean:
        args, info = self.args.bits, self.block_info
        first_q_idx = m_block * info.tile_m
        first_k_idx = work.block * info.tile_n + owner * self.own_keys
        is_listed = Int32(0)
        if (first_q_idx < work.seqlen_q) & (first_k_idx < work.seqlen_k):
            blocks = first_q_idx // args.block_q, first_k_idx // args.block_k
            is_listed, _ = self._block_bits(work, head_idx, *blocks)
        return is_listed != 0

    @property
    def _may_need_mask_mod(self) -> bool:
        return self.own_keys is None and super()._may_need_mask_mod

    # -- scores ---------------------------------------------------------------------------------

    @cute.jit
    def make_bits(self, work: Work, block: Block, warp_rows: MaskWarpRows) -> tuple:
        """As `ForwardMask.make_bits`. A lane holds a key of each group of 32."""
        if const_expr(self.in_common is not None):
            work = self.in_common.of_block(work, block)
        words = warp_rows.fill(ALL)
        if block.is_hidden:
            words = warp_rows.fill(0)
        else:
            if block.is_band | block.is_columns:
                words = self._visible_words(work, block, warp_rows)
            if const_expr(self._may_need_mask_mod):  # noqa: SIM102 (decided while tracing)
                if block.needs_mask_mod:
                    words = both(words, self.mask_mod_words(work, block, warp_rows))
        return words

    def _visible_words(self, work: Work, block: Block, warp_rows: MaskWarpRows) -> tuple:
        """Bits of each key that the band (with the end of the keys) and intervals show."""
        band = self.block_info.band(work.seqlen)
        first_q_idx = block.index * self.block_info.tile_m
        words = []
        for group in range(warp_rows.num_groups):
            k_idx = warp_rows.line(work, group)
            lo, hi = band.q_range(k_idx)
            holes: list[Any] = []
            if self.args.columns is not None:
                values = self._column_values(work, block.head_idx, k_idx)
                (lo, hi), *holes = self.intervals.visible_rows(values, lo, hi)
            # after the intervals: before them, mask warps spill more
            hi = cutlass.select_(k_idx < work.seqlen_k, Int32(hi), Int32(0))
            for w in range(self.columns.num_words):
                ranges = [
                    tuple(self.columns.count_below(w, q_idx - first_q_idx) for q_idx in edges)
                    for edges in ((lo, hi), *holes)
                ]
                words.append(bit_tile.bits_of(*ranges))
        return tuple(words)

    def mask_mod_words(self, work: Work, block: Block, warp_rows: MaskWarpRows) -> tuple:
        """Bits of each key that mask_mod and logical blocks leave visible."""
        if self.args.mask_bits is not None:
            return self._mask_bit_words(work, block, warp_rows)
        words = warp_rows.fill(ALL)
        if self.mask_mod is not None:
            words = self._eval_all(work, block, warp_rows)
        if self.has_selection:
            words = both(words, self._selection_words(work, block, warp_rows))
        elif self.args.bits is not None:
            words = self._within_logical_blocks(work, block, warp_rows, words)
        return words

    def _selection_words(self, work: Work, block: Block, warp_rows: MaskWarpRows) -> tuple:
        """Bits of each key whose block a query chose."""
        words = []
        for group in range(warp_rows.num_groups):
            k_idx = warp_rows.line(work, group)
            for w in range(self.columns.num_words):
                words.append(self._selection_word(work, block, k_idx, w))
        return tuple(words)

    @cute.jit
    def _selection_word(
        self, work: Work, block: Block, k_idx: Int32, w: cutlass.Constexpr[int]
    ) -> Int32:
        """Votes of a warp whose lanes hold 32 keys, block after block: a lane votes for a query."""
        lane, first_q_idx = cute.arch.lane_idx(), block.index * self.block_info.tile_m
        q_idx = cutlass.min(first_q_idx + self.columns.col_of(w, lane), work.seqlen_q - 1)
        own, first, last = (
            cutlass.min(key, work.seqlen_k - 1) // self.args.bits.block_k
            for key in (k_idx, k_idx - lane, k_idx - lane + WORD - 1)
        )
        word = Int32(0)
        for kb in cutlass.range(first, last + 1, unroll=1):
            bit = self.chosen_bit(work, block.head_idx, q_idx + work.offset_q, kb)
            vote = Int32(cute.arch.vote_ballot_sync(bit != 0))
            word = cutlass.select_(own == kb, vote, word)
        return word

    def _mask_bit_words(self, work: Work, block: Block, warp_rows: MaskWarpRows) -> tuple:
        n_block = work.block
        if self.is_part:
            n_block = cutlass.min(n_block, cute.size(self.args.mask_bits.states, mode=[2]) - 1)
        mask_bits, place = self.args.mask_bits, (work.batch_idx, block.index, n_block)
        words = warp_rows.load(mask_bits.tile(*place))
        if self.has_halves:
            words = bit_tile.split_halves(words)
        if self.is_part:
            # of a part that nothing cuts no words were stored
            state = mask_bits.state(*place)
            uncut = cutlass.select_(has_visible(state), Int32(ALL), Int32(0))
            words = tuple(cutlass.select_(state == PARTIAL, word, uncut) for word in words)
        return words

    @property
    def has_halves(self) -> bool:
        return self._bits_per_word == HALF_WORD

    @cute.jit
    def _eval_all(self, work: Work, block: Block, warp_rows: MaskWarpRows) -> tuple:
        # query after query: what the callable loads for a key, the compiler loads once
        words = warp_rows.fill(0)
        for step in cutlass.range(self._bits_per_word // ROWS_PER_EVAL, unroll=1):
            words = self._eval_step(work, block, warp_rows, step * ROWS_PER_EVAL, words)
        return words

    def _eval_step(
        self, work: Work, block: Block, warp_rows: MaskWarpRows, first: Int32, words: tuple
    ) -> tuple:
        """Evaluate mask_mod for the columns of some bits of each word, from `first` on."""
        updated: list[Any] = []
        first_q_idx = block.index * self.block_info.tile_m
        for group in range(warp_rows.num_groups):
            k_idx = warp_rows.line(work, group)
            for w in range(self.columns.num_words):
                bits = Int32(0)
                for i in range(ROWS_PER_EVAL):
                    q_idx = first_q_idx + self.columns.col_of(w, first + i)
                    visible = self._eval_mask_mod(work, block.head_idx, q_idx, k_idx)
                    bits = bit_tile.set_if(visible, bits, i)
                word = words[len(updated)]
                updated.append(bit_tile.push(word, bits, ROWS_PER_EVAL, self._bits_per_word))
        return tuple(updated)

    @property
    def _bits_per_word(self) -> int:
        return self.block_info.tile_m // self.columns.num_words

    @cute.jit
    def _within_logical_blocks(
        self, work: Work, block: Block, warp_rows: MaskWarpRows, words: tuple
    ) -> tuple:
        """The given bits where a logical block is listed as partial, all bits where it is full."""
        args, info = self.args.bits, self.block_info
        offset_q, _ = self._listed_offsets(work)
        first_q_idx = block.index * info.tile_m + offset_q
        end_q_idx = cutlass.min(first_q_idx + info.tile_m, work.seqlen_q + offset_q)
        result = warp_rows.fill(0)
        qb = first_q_idx // args.block_q
        while qb * args.block_q < end_q_idx:
            result = self._add_logical_block(work, block, qb, warp_rows, words, result)
            qb += 1
        return result

    def _add_logical_block(
        self,
        work: Work,
        block: Block,
        qb: Int32,
        warp_rows: MaskWarpRows,
        words: tuple,
        result: tuple,
    ) -> tuple:
        args = self.args.bits
        offset_q, offset_k = self._listed_offsets(work)
        start = qb * args.block_q - (block.index * self.block_info.tile_m + offset_q)
        added: list[Any] = []
        for group in range(warp_rows.num_groups):
            k_idx = cutlass.min(warp_rows.line(work, group), work.seqlen_k - 1) + offset_k
            is_listed, is_full = self._block_bits(work, block.head_idx, qb, k_idx // args.block_k)
            for w in range(self.columns.num_words):
                bits = bit_range(
                    self.columns.count_below(w, start),
                    self.columns.count_below(w, start + args.block_q),
                )
                i = len(added)
                # 0 - 1 is a word of ones
                added.append(result[i] | (bits & (0 - is_listed) & (words[i] | (0 - is_full))))
        return tuple(added)
