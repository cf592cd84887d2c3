"""FlashAttention backward for Hopper of heads above 256 columns: by roles, in two launches.

A CTA keeps 64 rows of an operand, walks over blocks of 64 rows of another one, and sums a gradient
of the rows that it keeps. Two CTAs of a cluster have the same rows and the same walk:

| launch  | kept  | passing | first CTA              | second CTA             |
|---------|-------|---------|------------------------|------------------------|
| keys    | K, V  | Q, dO   | S from K, Q; sums dK   | dP from V, dO; sums dV |
| queries | Q, dO | K, V    | S from Q, K; sums dQ   | dP from dO, V          |

The first CTA sends P, the second one makes dS of it and sends that back (`cta_pairs.PeerWords`),
both as operands in registers. A gradient has one owner, which writes it once, so bits are equal in
every run. The roles of warps are those of `flash_bwd`; mask warps of the second CTA do nothing. Of
two MMA warpgroups each computes S or dP of every second block, and sums every second fill of all
blocks, 64 columns. S or dP of the next block comes first, so P and dS are on their way while tensor
cores work. Of the four warpgroups the one that is furthest behind waits for nobody.
docs/backward_sm90.md#heads-above-256 has the reasons.
"""

import copy
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from flash_mask_cute.core import clusters, tma
from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import (
    RING_STAGES,
    SMEM_CAPACITY,
    THREADS_PER_WARPGROUP,
    WALK_STAGES,
    WARPS_PER_WARPGROUP,
    thread_in_warpgroup,
)
from flash_mask_cute.core.dq_sums import Scratch
from flash_mask_cute.core.exp2 import LOG2_E
from flash_mask_cute.core.key_schedule import KeySchedule
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.marked_rows import any_mark, clear_row, is_marked
from flash_mask_cute.core.query_loads import BwdOperands
from flash_mask_cute.core.query_schedule import QuerySchedule
from flash_mask_cute.core.ring import WORDS, Ring
from flash_mask_cute.core.row_blocks import RowBlocks, marks_of
from flash_mask_cute.core.score_gradients import probabilities, score_gradients
from flash_mask_cute.core.softmax import ScoreScales
from flash_mask_cute.core.tile_scheduler import ScheduleParams
from flash_mask_cute.core.walk_ring import KIND_MASK, OWN_KIND_SHIFT, Block, Kind, WalkRing
from flash_mask_cute.core.work_ring import Work, WorkRing
from flash_mask_cute.limits import MAX_HEAD_DIM, MAX_WIDE_HEAD_DIM
from flash_mask_cute.rules import bit_tile
from flash_mask_cute.rules.forward_mask import ForwardMask
from flash_mask_cute.rules.mask_rules import MaskArgs, MaskWarpRows, check_given
from flash_mask_cute.rules.mask_warps import make_mask_bits, send_walks
from flash_mask_cute.rules.stream_k_walks import CommonTiles
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.cta_pairs import PeerWords
from flash_mask_cute.sm90.flash_bwd import FlashAttentionBackwardSm90
from flash_mask_cute.sm90.flash_bwd_traits import BwdTraits
from flash_mask_cute.sm90.gradient_columns import NUM_MMA_WARPGROUPS
from flash_mask_cute.sm90.gradient_stores import KeyGradients, rows_of, send_gradient
from flash_mask_cute.sm90.warpgroups import (
    SMEM_BOOKKEEPING,
    Role,
    mma_warpgroup_idx,
    sync_warpgroup,
    take_bits,
)

ROWS = wgmma.ROWS_PER_WARPGROUP
# columns of a fill of 64 rows, and its bytes; the most blocks that fills in flight belong to
FILL_COLUMNS = 64
FILL_BYTES = ROWS * FILL_COLUMNS * 2
MOST_BLOCKS = 4
# blocks whose P or dS is on its way
STAGES = 2
# of a thread, for P or dS of a block
WORDS_OF_BLOCK = ROWS // 16 * wgmma.WORDS_PER_STEP
# of a block: its flags, head and row block of statistics, in a vector
BLOCK_WORDS = 4
# keys and values of the heads in flight that should stay in the L2 cache
L2_SHARE = 24 * 1024 * 1024
# named barrier of each warpgroup (0 is __syncthreads)
CLEARED = 1


@dataclass(frozen=True)
class WideBwdTraits(BwdTraits):
    num_ctas, mma_registers = clusters.CTAS, 216
    cluster_tile_m = cluster_tile_n = ROWS

    @property
    def tile_d(self) -> int:
        """A warpgroup sums every second fill of these columns."""
        return -(-self.head_dim // (2 * FILL_COLUMNS)) * 2 * FILL_COLUMNS

    tile_dv = tile_d

    @property
    def block_fills(self) -> int:
        return self.tile_d // FILL_COLUMNS

    @property
    def _bytes_without_fills(self) -> int:
        received = STAGES * THREADS_PER_WARPGROUP * WORDS_OF_BLOCK * 4
        return self.block_fills * FILL_BYTES + received + self.bytes_bits + SMEM_BOOKKEEPING

    @property
    def num_fills(self) -> int:
        """Of blocks that pass, in shared memory."""
        return (SMEM_CAPACITY - self._bytes_without_fills) // FILL_BYTES

    @property
    def smem_bytes(self) -> int:
        return self._bytes_without_fills + self.num_fills * FILL_BYTES

    def infeasible(self) -> str | None:
        fixed = {"head_dim_v": self.head_dim, "tile_m": ROWS, "stages_q": STAGES}
        fixed |= {"stages_do": STAGES, "stages_kv": 1, "value_cols": 0, "cta_pair": False}
        for name, value in (fixed | {"splits_keys": False, "has_reference": False}).items():
            if (given := getattr(self, name)) != value:
                return f"{name} must be {value} where head_dim is above {MAX_HEAD_DIM}, got {given}"
        is_right = MAX_HEAD_DIM < self.head_dim <= MAX_WIDE_HEAD_DIM
        return None if is_right else f"head_dim is from 264 to 512, got {self.head_dim}"

    def layout_rows(self, fills: int) -> cute.ComposedLayout:
        return wgmma.rows_layout(self.dtype, ROWS, FILL_COLUMNS, fills)

    def boxes(self) -> tuple[tuple[cute.ComposedLayout, int, int], ...]:
        """See `QueryShape`: Q, dO, K and V are alike."""
        return ((self.layout_rows(self.num_fills), ROWS, FILL_COLUMNS),) * 4


class Shared(NamedTuple):
    kept: cute.Tensor  # (64, 64, fills of a block); a gradient leaves through the first ones
    rows: cute.Tensor  # (64, 64, num_fills), of blocks that pass
    block_words: cute.Tensor  # (BLOCK_WORDS, MOST_BLOCKS)
    bit_tile: cute.Tensor  # (4 words, 64)
    passing: Channel
    kept_rows: Channel  # released when nobody needs kept; passing says when it is full
    cleared: Channel  # of a block, its marked rows; passing says when it is empty
    bits: Channel
    ring: WorkRing
    walk: WalkRing
    words: PeerWords
    claims: clusters.Claims

    @staticmethod
    def allocate(
        traits: WideBwdTraits, lengths: Lengths, num_mask_warps: Int32, by_keys: bool
    ) -> "Shared":
        """Made by all threads; a barrier of both CTAs must follow."""
        allocator, warps = cutlass.memory.SmemAllocator(), traits.num_mma_warps

        def tensor(layout: cute.ComposedLayout) -> cute.Tensor:
            return allocator.allocate_tensor(traits.dtype, layout.outer, 1024, layout.inner)

        words = partial(allocator.allocate_array, Int32, byte_alignment=16)
        barriers = partial(allocator.allocate_array, Int64)
        stages = traits.num_fills
        rows = tensor(traits.layout_rows(traits.block_fills)), tensor(traits.layout_rows(stages))
        slots = words(STAGES * THREADS_PER_WARPGROUP * WORDS_OF_BLOCK)
        small = [
            cute.make_tensor(words(m * n), cute.make_layout((m, n)))
            for m, n in ((BLOCK_WORDS, MOST_BLOCKS), (wgmma.COLUMNS.num_words, ROWS))
        ]
        work, walk = (
            Ring.create(words(WORDS * n), barriers(2 * n), n, 1 + num_mask_warps + others)
            for n, others in ((RING_STAGES, warps), (WALK_STAGES, 0))
        )
        bit_readers = warps // NUM_MMA_WARPGROUPS
        return Shared(
            *(*rows, *small),
            Channel.create(barriers(2 * stages), stages, 1, warps),
            Channel.create(barriers(2), 1, 1, warps),
            Channel.create(barriers(2 * MOST_BLOCKS), MOST_BLOCKS, WARPS_PER_WARPGROUP, 1),
            Channel.create(barriers(2), 1, traits.num_mask_warps, bit_readers),
            WorkRing(work, lengths.work_fields),
            WalkRing(walk, by_keys, False, fields=lengths.chunk_fields),
            PeerWords(
                Channel.create(barriers(2 * STAGES), STAGES, 1, warps), slots, WORDS_OF_BLOCK
            ),
            clusters.Claims.create(barriers(2), words(1)),
        )


class WideBackwardSm90(FlashAttentionBackwardSm90):
    """Backward kernels for Hopper of heads with 264 to 512 columns, for `cute.compile`.

    Parameters are those of `FlashAttentionBackwardSm90`. Both head dimensions are equal, and there
    is no score_mod. As each gradient has an owner, deterministic and clears_dq change nothing. A
    launch gets dQ in the place of mdQaccum, and no mSemaphores, softcap or mask_bit_tensors.

    :raises ValueError: for a shape or configuration that cannot run
    """

    traits_class = WideBwdTraits
    # whether keys are kept, in the first launch, or queries
    by_keys = True

    def __post_init__(self) -> None:
        super().__post_init__()
        # nobody waits for another work tile's sums
        self.deterministic, self.clears_dq = False, True

    def _launches(
        self, schedule: KeySchedule, gradients: KeyGradients, lengths: Lengths, mQ: cute.Tensor,
        mK: cute.Tensor, mdQ: cute.Tensor,
    ):  # fmt: skip
        by_queries = copy.copy(self)
        by_queries.by_keys = False
        group_bytes = L2_SHARE if self.is_causal or self.is_local else None
        of_queries = lengths, mQ, mK, self.traits, self.num_sms // clusters.CTAS, group_bytes
        params, heads_per_kv, grid, _ = QuerySchedule.create(*of_queries)
        dq = KeyGradients(tma.key_rows(mdQ, lengths.cu_seqlens_q is not None), None)
        tiles = KeySchedule(params, heads_per_kv, grid)
        return (self, schedule, gradients), (by_queries, tiles, dq)

    @cute.kernel
    def kernel(
        self, operands: BwdOperands, gradients: KeyGradients, scratch: Scratch, lengths: Lengths,
        softmax_scale: Float32, scales: ScoreScales, masks: MaskArgs, schedule: ScheduleParams,
        group: Int32, group_splits: None, tile_counter: cute.Tensor | None, aux_grads: None,
        query_lists: None,
    ):  # fmt: skip
        check_given("softcap", scales.cap, False)
        check_given("mask_bit_tensors", masks.mask_bits, False)
        traits, by_keys = self.traits, self.by_keys
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        is_first = clusters.rank() == clusters.LEADER
        num_mask_warps = cutlass.select_(is_first, Int32(traits.num_mask_warps), Int32(0))
        shared = Shared.allocate(traits, lengths, num_mask_warps, by_keys)
        cute.arch.mbarrier_init_fence()
        clusters.sync()
        rings = shared.ring, shared.walk
        given = traits, by_keys, shared, lengths
        if warp_idx < Role.MMA:
            cute.arch.setmaxregister_decrease(traits.helper_registers)
            if warp_idx == Role.LOAD:
                q, do, k, v = (operands[i : i + 2] for i in range(0, 8, 2))
                if is_first:
                    RoleLoads(*given, group, *((k, q) if by_keys else (q, k))).run()
                else:
                    RoleLoads(*given, group, *((v, do) if by_keys else (do, v))).run()
            elif warp_idx == Role.SCHEDULE:
                # the walks of the last queries are the longest
                last_first = not by_keys and (self.is_causal or self.is_local)
                starts = lengths.cu_seqlens_k if by_keys else lengths.cu_seqlens_q
                of_pairs = last_first, starts is not None, clusters.CTAS, shared.claims
                scheduler = CommonTiles(schedule, tile_counter, *of_pairs)
                rules = self._rules(masks, lengths, group, query_lists)
                send_walks(scheduler, rules, lengths, *rings, claims_late=Boolean(True))
            elif is_first:
                of_warp = warp_idx - Role.MASK, traits.num_mask_warps, ROWS, wgmma.COLUMNS
                rules = self._rules(masks, lengths, group, query_lists)
                of_bits = MaskWarpRows.create(*of_warp), shared.bit_tile, shared.bits
                make_mask_bits(rules, *of_bits, *rings)
        else:
            cute.arch.setmaxregister_increase(traits.mma_registers)
            if is_first:
                RoleSums(*given, scratch.stats, softmax_scale, gradients.dk, False).run()
            else:
                RoleSums(*given, scratch.stats, softmax_scale, gradients.dv, True).run()
        # the other CTA may still arrive on mbarriers of this one
        clusters.sync()

    def _rules(self, masks: MaskArgs, lengths: Lengths, group: Int32, query_lists: None):
        if self.by_keys:
            return super()._rules(masks, lengths, group, query_lists)
        return ForwardMask.from_kernel(self, wgmma.COLUMNS, masks, lengths)


# a TMA atom and its tensor
Operand = tuple[cute.CopyAtom, cute.Tensor]


@dataclass(frozen=True)
class RoleLoads:
    """The load warp of a CTA. group: query heads of a KV head."""

    traits: cutlass.Constexpr[WideBwdTraits]
    by_keys: cutlass.Constexpr[bool]
    shared: Shared
    lengths: Lengths
    group: Int32
    kept: Operand
    passing: Operand

    @cute.jit
    def run(self):
        """Load the rows of every work tile, and the blocks of its walk."""
        tile, chunk, number = Int32(0), Int32(0), Int32(0)
        while self.shared.ring.wait(tile):
            step = partial(self._load_block, self.shared.ring.read(tile), tile, number)
            chunk, number = self.shared.walk.visit(chunk, number, step)
            self.shared.ring.release(tile)
            tile += 1

    @cute.jit
    def _load_block(self, work: Work, tile: Int32, first: Int32, number: Int32, block: Block):
        """Load a block; first: the one with which the rows that are kept come."""
        shared, channel, fills = self.shared, self.shared.passing, self.traits.block_fills
        of_block, query = self.lengths.of_block(work, block), (work.head_idx, work.block)
        if const_expr(self.by_keys):
            query = block.head_idx, block.index
            kept = self._rows(self.kept, False, work, work.head_idx, work.block)
            passing = self._rows(self.passing, True, of_block, *query)
        else:
            kept = self._rows(self.kept, True, work, *query)
            head_kv = work.head_idx // self.group
            passing = self._rows(self.passing, False, work, head_kv, block.index)
        first_block = RowBlocks(self.lengths, ROWS).first_of(of_block.batch_idx, of_block.offset_q)
        flags = block.follower | (block.kind << OWN_KIND_SHIFT)
        words = flags, query[0], first_block + query[1]
        fill = number * fills
        channel.acquire(fill)
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(len(words)):
                shared.block_words[i, number % MOST_BLOCKS] = Int32(words[i])
        num_bytes = cutlass.select_(number == first, Int32(2 * FILL_BYTES), FILL_BYTES)
        for i in cutlass.range(fills, unroll=1):
            channel.acquire(fill + i)
            channel.expect(fill + i, num_bytes)
            place = channel.index(fill + i), channel.barrier(fill + i)
            self._copy(self.passing, passing, i, shared.rows, *place)
        if number == first:
            shared.kept_rows.acquire(tile)
            for i in cutlass.range(fills, unroll=1):
                self._copy(self.kept, kept, i, shared.kept, i, channel.barrier(fill + i))
        return number + 1

    def _rows(
        self, operand: Operand, is_query: bool, work: Work, head: Int32, block: Int32
    ) -> tuple[cute.Tensor, tuple[Int32, Int32]]:
        """The ((head, row), d) tensor of a sequence, and the head and the first row to read."""
        side = tma.RowSide.of_keys(self.lengths)
        place = self.lengths.kv_entry(work.batch_idx), work.offset_k, work.seqlen_k
        if is_query:
            side = tma.RowSide.of_queries(self.lengths)
            place = work.batch_idx, work.offset_q, work.seqlen_q
        rows, row = tma.readable_rows(operand[1], side, *place, block * ROWS)
        return rows, (head, row)

    def _copy(
        self, operand: Operand, rows: tuple[cute.Tensor, tuple[Int32, Int32]], i: Int32,
        smem: cute.Tensor, stage: Int32, barrier: cute.Pointer,
    ) -> None:  # fmt: skip
        """Load fill i of a block. One past the end has any columns, which are not stored."""
        column = cutlass.min(i, (self.traits.head_dim - 1) // FILL_COLUMNS) * FILL_COLUMNS
        src, dst = tma.tile_of(operand[0], *rows, ((1, ROWS), FILL_COLUMNS), smem, column)
        cute.copy(operand[0], src, dst[None, stage], tma_bar_ptr=barrier)


@dataclass(frozen=True)
class RoleSums:
    """An MMA warpgroup. stats: fp32 (heads_q, row_blocks, words). gradient: that the CTA sums, as
    `tma.key_rows`, or None. makes_grads: dS from dP, not P from S."""

    traits: cutlass.Constexpr[WideBwdTraits]
    by_keys: cutlass.Constexpr[bool]
    shared: Shared
    lengths: Lengths
    stats: cute.Tensor
    softmax_scale: Float32
    gradient: cute.Tensor | None
    makes_grads: cutlass.Constexpr[bool]

    @cute.jit
    def run(self):
        """P or dS of every second block, and half of the columns of the CTA's gradient."""
        ring, passing = self.shared.ring, self.shared.passing
        acc = wgmma.make_accumulator(self.traits.tile_d // NUM_MMA_WARPGROUPS)
        # numbers of the work tile, the block and the partial block, counted from 0
        tile, block, cut = Int32(0), Int32(0), Int32(0)
        while ring.wait(tile):
            # all rows that are kept have come with it
            self._wait_for_all(block)
            flags = self._word(block, 0)
            kind, following = (flags >> OWN_KIND_SHIFT) & KIND_MASK, flags & KIND_MASK
            if self._is_turn(block):
                self._compute(block, kind, cut)
            cut += Int32(kind == Kind.PARTIAL)
            accumulate = Boolean(False)
            while following != Kind.END:
                # the next block first, so that its P and dS are on their way
                if self._is_turn(block + 1):
                    passing.wait((block + 1) * self.traits.block_fills)
                    self._compute(block + 1, following, cut)
                cut += Int32(following == Kind.PARTIAL)
                self._add(acc, block, accumulate)
                accumulate = Boolean(True)
                block += 1
                passing.wait(block * self.traits.block_fills)
                following = self._word(block, 0) & KIND_MASK
            self._add(acc, block, accumulate)
            block += 1
            if const_expr(self.gradient is not None):
                self._store(acc, ring.read(tile), block - 1)
            self.shared.kept_rows.release(tile)
            ring.release(tile)
            tile += 1

    def _word(self, block: Int32, i: int) -> Int32:
        return self.shared.block_words[i, block % MOST_BLOCKS]

    def _wait_for_all(self, block: Int32) -> None:
        for i in range(self.traits.block_fills):
            self.shared.passing.wait(block * self.traits.block_fills + i)

    def _is_turn(self, block: Int32) -> Boolean:
        """Whether this warpgroup computes P or dS of a block."""
        return block % NUM_MMA_WARPGROUPS == mma_warpgroup_idx()

    @cute.jit
    def _compute(self, block: Int32, kind: Int32, cut: Int32):
        """Make P or dS of a block that arrives, and send it. No products are in flight before or
        afterwards. cut: the number of the bits of a partial block."""
        traits, shared, exchange = self.traits, self.shared, self.shared.words
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP == 0:
            exchange.expect(block)
        if const_expr(self.by_keys and traits.has_marks):
            self._clear_marked_rows(block)
        numbers, acc = self._numbers(block), wgmma.make_accumulator(ROWS)
        words = cute.make_rmem_tensor(WORDS_OF_BLOCK, Int32)
        mma, passing, steps = traits.mma_scores(), shared.passing, FILL_COLUMNS // 16
        kept, rows = wgmma.operand_a(mma, shared.kept), wgmma.operand_b(mma, shared.rows)
        for i in cutlass.range_constexpr(traits.block_fills):
            passing.wait(block * traits.block_fills + i)
            stage = passing.index(block * traits.block_fills + i)
            of_fill = kept[None, None, None, i], rows[None, None, None, stage]
            if const_expr(steps * i < traits.steps_d):
                wgmma.issue(mma, acc, *of_fill, i > 0, min(steps, traits.steps_d - steps * i))
        warpgroup.wait_group(0)
        if const_expr(self.makes_grads):
            exchange.take(block, words)
            factors = cute.make_rmem_tensor(acc.layout, Float32)
            factors.store(wgmma.rounded_values(words, traits.dtype).load().to(Float32))
            score_gradients(self._by_query(acc), self._by_query(factors), numbers)
        else:
            bits = Int32(bit_tile.ALL), Int32(bit_tile.ALL)
            if kind == Kind.PARTIAL:
                # those before, which the other warpgroup may not have taken yet
                shared.bits.acquire(cut)
                bits = take_bits(shared.bit_tile, shared.bits, Int32(0), cut, Boolean(False))
            bit_tile.hide_unset(wgmma.rows_by_cols(acc), bits)
            probabilities(self._by_query(acc), numbers, self.softmax_scale * LOG2_E)
        wgmma.round_pairs(words, acc, traits.dtype)
        exchange.send(block, words)

    def _by_query(self, acc: cute.Tensor) -> cute.Tensor:
        """View of this thread's scores whose second mode has the queries."""
        view = wgmma.rows_by_cols(acc)
        order = [0, 1] if self.by_keys else [1, 0]
        return cute.make_tensor(view.iterator, cute.select(view.layout, order))

    def _numbers(self, block: Int32) -> cute.Tensor:
        """LSE to base 2 or delta of this thread's queries."""
        thread = thread_in_warpgroup()
        row = self.stats[self._word(block, 1), self._word(block, 2), None].iterator
        row += ROWS if self.makes_grads else 0
        if self.by_keys:
            layout = cute.make_layout((2, ROWS // 8), stride=(1, 8))
            row = (row + wgmma.first_col_of(thread)).align(8)
        else:
            layout = cute.make_layout(wgmma.ROWS_PER_THREAD, stride=wgmma.row_offset(1))
            row += wgmma.row_of(thread, 0)
        numbers = cute.make_rmem_tensor(layout.shape, Float32)
        cute.autovec_copy(cute.make_tensor(row, layout), numbers)
        return numbers

    @cute.jit
    def _add(self, acc: cute.Tensor, block: Int32, accumulate: Boolean):
        traits, passing, own = self.traits, self.shared.passing, mma_warpgroup_idx()
        words = cute.make_rmem_tensor(WORDS_OF_BLOCK, Int32)
        self.shared.words.take(block, words)
        if not self._is_turn(block):
            self._wait_for_all(block)
        fill, pairs = block * traits.block_fills + own, traits.block_fills // NUM_MMA_WARPGROUPS
        for i in cutlass.range_constexpr(pairs):
            passing.release(fill + 2 * i + 1 - 2 * own)
        if const_expr(self.gradient is not None):
            if const_expr(self.by_keys and traits.has_marks):
                self.shared.cleared.wait(block)
            mma = traits.mma_words(FILL_COLUMNS)
            operand = wgmma.words_as_operand_a(words, traits.dtype)
            rows = wgmma.operand_b(mma, wgmma.columns_as_rows(self.shared.rows, 0, FILL_COLUMNS))
            for i in cutlass.range_constexpr(pairs):
                part = wgmma.columns(acc, i * FILL_COLUMNS, (i + 1) * FILL_COLUMNS)
                stage = passing.index(fill + 2 * i)
                wgmma.issue(mma, part, operand, rows[None, None, None, stage], accumulate)
        # products have taken the words now, for whose loads an arrival would not wait
        self.shared.words.release(block)
        for i in cutlass.range_constexpr(pairs):
            warpgroup.wait_group(pairs - 1 - i)
            passing.release(fill + 2 * i)

    @cute.jit
    def _clear_marked_rows(self, block: Int32):
        """Clear the marked rows of a block, and tell the other warpgroup, which adds it later."""
        self._wait_for_all(block)
        marks = self._marks(self._word(block, 1), self._word(block, 2))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
        if any_mark(marks, ROWS):
            for i in cutlass.range(ROWS // WARPS_PER_WARPGROUP, unroll=1):
                row = i * WARPS_PER_WARPGROUP + warp
                if is_marked(marks, row):
                    for j in cutlass.range_constexpr(self.traits.block_fills):
                        stage = self.shared.passing.index(block * self.traits.block_fills + j)
                        clear_row(self.shared.rows[row, None, stage])
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_warpgroup(CLEARED)
        self.shared.cleared.publish(block)

    def _marks(self, head_idx: Int32, row_block: Int32) -> cute.Tensor:
        return marks_of(self.stats[head_idx, row_block, None], ROWS, self.traits.num_stats)

    @cute.jit
    def _store(self, acc: cute.Tensor, work: Work, last_block: Int32):
        traits, thread = self.traits, thread_in_warpgroup()
        scale = Float32(1.0) if const_expr(self.makes_grads) else self.softmax_scale
        # without scores, what was loaded is another sequence's, perhaps not even finite
        has_sums = [work.has_scores] * wgmma.ROWS_PER_THREAD
        if const_expr(not self.by_keys and traits.has_marks):
            first_block = RowBlocks(self.lengths, ROWS).first_of(work.batch_idx, work.offset_q)
            marks = self._marks(work.head_idx, first_block + work.block)
            for r in cutlass.range_constexpr(wgmma.ROWS_PER_THREAD):
                is_hostile = is_marked(marks, wgmma.row_of(thread, r))
                has_sums[r] = has_sums[r] & (is_hostile == Boolean(False))
        sums = wgmma.rows_by_cols(acc)
        for r in cutlass.range_constexpr(wgmma.ROWS_PER_THREAD):
            for c in cutlass.range_constexpr(cute.size(sums, mode=[1])):
                sums[r, c] = cutlass.select_(has_sums[r], sums[r, c] * scale, Float32(0.0))
        gmem = rows_of(self.gradient, work, work.offset_k if self.by_keys else work.offset_q)
        own, first_row = mma_warpgroup_idx(), work.block * ROWS
        # the other warpgroup, too, has computed all that it needs kept rows for
        self.shared.passing.wait_until_released((last_block + 1) * traits.block_fills - 1)
        for i in cutlass.range_constexpr(traits.block_fills // NUM_MMA_WARPGROUPS):
            part = wgmma.columns(acc, i * FILL_COLUMNS, (i + 1) * FILL_COLUMNS)
            place = first_row, work.slot - first_row, (2 * i + own) * FILL_COLUMNS
            send_gradient(traits, part, self.shared.kept[None, None, own], gmem, *place)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
