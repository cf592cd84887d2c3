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
two MMA warpgroups each computes S or dP of every second block, and sums half of the columns of all
blocks. It computes its next S or dP before it adds a block, so P and dS are on their way while
tensor cores work. Of the four warpgroups the one that is furthest behind waits for nobody.
docs/backward_sm90.md#heads-above-256 has the reasons.
"""

import copy
from collections.abc import Callable
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
# blocks in shared memory, and blocks whose P or dS is on its way
STAGES = 2
# of a thread, for P or dS of a block
WORDS_OF_BLOCK = ROWS // 16 * wgmma.WORDS_PER_STEP
# of a block: its flags, head and row block of statistics, in a vector
BLOCK_WORDS = 4
# keys and values of the heads in flight that should stay in the L2 cache
L2_SHARE = 24 * 1024 * 1024
# named barriers of each warpgroup (0 is __syncthreads), which has cleared rows of a block
CLEARED, CLEARED_BY_WARP = 1, 3
MMA_THREADS = NUM_MMA_WARPGROUPS * THREADS_PER_WARPGROUP


@dataclass(frozen=True)
class WideBwdTraits(BwdTraits):
    num_ctas, mma_registers = clusters.CTAS, 216
    cluster_tile_m = cluster_tile_n = ROWS

    @property
    def tile_d(self) -> int:
        """A warpgroup sums half of these columns: whole swizzled blocks of 32 or 64."""
        return -(-self.head_dim // 64) * 64

    tile_dv = tile_d

    @property
    def own_cols(self) -> int:
        return self.tile_d // NUM_MMA_WARPGROUPS

    @property
    def bytes_rows(self) -> int:
        return ROWS * self.tile_d * 2

    @property
    def smem_bytes(self) -> int:
        received = STAGES * THREADS_PER_WARPGROUP * WORDS_OF_BLOCK * 4
        out = NUM_MMA_WARPGROUPS * ROWS * ROWS * 2
        return (1 + STAGES) * self.bytes_rows + received + out + self.bytes_bits + SMEM_BOOKKEEPING

    def infeasible(self) -> str | None:
        fixed = {"head_dim_v": self.head_dim, "tile_m": ROWS, "stages_q": STAGES}
        fixed |= {"stages_do": STAGES, "stages_kv": 1, "value_cols": 0, "cta_pair": False}
        for name, value in (fixed | {"splits_keys": False, "has_reference": False}).items():
            if (given := getattr(self, name)) != value:
                return f"{name} must be {value} where head_dim is above {MAX_HEAD_DIM}, got {given}"
        is_right = MAX_HEAD_DIM < self.head_dim <= MAX_WIDE_HEAD_DIM
        return None if is_right else f"head_dim is from 264 to 512, got {self.head_dim}"

    def layout_rows(self, stages: int) -> cute.ComposedLayout:
        """(64, tile_d, stages)."""
        return wgmma.rows_layout(self.dtype, ROWS, self.tile_d, stages, self.own_cols)

    def boxes(self) -> tuple[tuple[cute.ComposedLayout, int, int], ...]:
        """See `QueryShape`: Q, dO, K and V are alike."""
        return ((self.layout_rows(STAGES), ROWS, self.tile_d),) * 4


class Shared(NamedTuple):
    kept: cute.Tensor  # (64, tile_d, 1)
    rows: cute.Tensor  # (64, tile_d, STAGES), of blocks that pass
    out: cute.Tensor  # (64, 64, warpgroups), gradients on their way
    block_words: cute.Tensor  # (BLOCK_WORDS, STAGES)
    bit_tile: cute.Tensor  # (4 words, 64)
    passing: Channel
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
        rows = tensor(traits.layout_rows(1)), tensor(traits.layout_rows(STAGES))
        out = tensor(wgmma.rows_layout(traits.dtype, ROWS, ROWS, NUM_MMA_WARPGROUPS))
        slots = words(STAGES * THREADS_PER_WARPGROUP * WORDS_OF_BLOCK)
        small = [
            cute.make_tensor(words(m * n), cute.make_layout((m, n)))
            for m, n in ((BLOCK_WORDS, STAGES), (wgmma.COLUMNS.num_words, ROWS))
        ]
        work, walk = (
            Ring.create(words(WORDS * n), barriers(2 * n), n, 1 + num_mask_warps + others)
            for n, others in ((RING_STAGES, warps), (WALK_STAGES, 0))
        )
        bit_readers = warps // NUM_MMA_WARPGROUPS
        return Shared(
            *(*rows, out, *small),
            Channel.create(barriers(2 * STAGES), STAGES, 1, warps),
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
            step = partial(self._load_block, self.shared.ring.read(tile), number)
            chunk, number = self.shared.walk.visit(chunk, number, step)
            self.shared.ring.release(tile)
            tile += 1

    @cute.jit
    def _load_block(self, work: Work, first: Int32, number: Int32, block: Block) -> Int32:
        """Load a block; first: the one with which the rows that are kept come."""
        shared, channel = self.shared, self.shared.passing
        of_block, query = self.lengths.of_block(work, block), (work.head_idx, work.block)
        if const_expr(self.by_keys):
            query = block.head_idx, block.index
            copy_kept = self._copy(self.kept, shared.kept, False, work, work.head_idx, work.block)
            copy_passing = self._copy(self.passing, shared.rows, True, of_block, *query)
        else:
            of_keys = work, work.head_idx // self.group, block.index
            copy_kept = self._copy(self.kept, shared.kept, True, work, *query)
            copy_passing = self._copy(self.passing, shared.rows, False, *of_keys)
        first_block = RowBlocks(self.lengths, ROWS).first_of(of_block.batch_idx, of_block.offset_q)
        flags = block.follower | (block.kind << OWN_KIND_SHIFT)
        words = flags, query[0], first_block + query[1]
        channel.acquire(number)
        stage, barrier = channel.index(number), channel.barrier(number)
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(len(words)):
                shared.block_words[i, stage] = Int32(words[i])
        num_bytes = self.traits.bytes_rows
        channel.expect(number, cutlass.select_(number == first, Int32(2 * num_bytes), num_bytes))
        copy_passing(stage, barrier)
        if number == first:
            channel.wait_until_released(number - 1)
            copy_kept(Int32(0), barrier)
        return number + 1

    def _copy(
        self, operand: Operand, smem: cute.Tensor, is_query: bool, work: Work, head: Int32,
        block: Int32,
    ) -> Callable[[Int32, cute.Pointer], None]:  # fmt: skip
        """A function that starts to copy 64 rows of a head into a stage, and signals a barrier."""
        side = tma.RowSide.of_keys(self.lengths)
        place = self.lengths.kv_entry(work.batch_idx), work.offset_k, work.seqlen_k
        if is_query:
            side = tma.RowSide.of_queries(self.lengths)
            place = work.batch_idx, work.offset_q, work.seqlen_q
        atom, source = operand
        gmem, row = tma.readable_rows(source, side, *place, block * ROWS)
        src, dst = tma.tile_of(atom, gmem, (head, row), ((1, ROWS), self.traits.tile_d), smem)
        return lambda stage, barrier: cute.copy(atom, src, dst[None, stage], tma_bar_ptr=barrier)


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
        acc = wgmma.make_accumulator(self.traits.own_cols)
        # numbers of the work tile, the block and the partial block, counted from 0
        tile, block, cut = Int32(0), Int32(0), Int32(0)
        while ring.wait(tile):
            passing.wait(block)
            flags = self._word(block, 0)
            kind, following = (flags >> OWN_KIND_SHIFT) & KIND_MASK, flags & KIND_MASK
            if self._is_turn(block):
                self._compute(block, kind, cut)
            cut += Int32(kind == Kind.PARTIAL)
            accumulate = Boolean(False)
            while following != Kind.END:
                # the next block first, so that its P and dS are on their way
                if self._is_turn(block + 1):
                    passing.wait(block + 1)
                    self._compute(block + 1, following, cut)
                cut += Int32(following == Kind.PARTIAL)
                self._add(acc, block, accumulate)
                accumulate = Boolean(True)
                block += 1
                passing.wait(block)
                following = self._word(block, 0) & KIND_MASK
            self._add(acc, block, accumulate)
            block += 1
            if const_expr(self.gradient is not None):
                self._store(acc, ring.read(tile))
            ring.release(tile)
            tile += 1

    def _word(self, block: Int32, i: int) -> Int32:
        return self.shared.block_words[i, self.shared.passing.index(block)]

    def _is_turn(self, block: Int32) -> Boolean:
        """Whether this warpgroup computes P or dS of a block."""
        return block % NUM_MMA_WARPGROUPS == mma_warpgroup_idx()

    @cute.jit
    def _compute(self, block: Int32, kind: Int32, cut: Int32):
        """Make P or dS of a block that has arrived, and send it. No products are in flight before
        or afterwards. cut: the number of the bits of a partial block."""
        traits, shared, exchange = self.traits, self.shared, self.shared.words
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP == 0:
            exchange.expect(block)
        if const_expr(self.by_keys and traits.has_marks):
            self._clear_marked_rows(block)
        numbers, acc = self._numbers(block), wgmma.make_accumulator(ROWS)
        words = cute.make_rmem_tensor(WORDS_OF_BLOCK, Int32)
        mma, stage = traits.mma_scores(), shared.passing.index(block)
        kept = wgmma.operand_a(mma, shared.kept)[None, None, None, 0]
        rows = wgmma.operand_b(mma, shared.rows)[None, None, None, stage]
        wgmma.issue(mma, acc, kept, rows, False, traits.steps_d)
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
        traits, shared, cols = self.traits, self.shared, self.traits.own_cols
        words = cute.make_rmem_tensor(WORDS_OF_BLOCK, Int32)
        shared.words.take(block, words)
        shared.words.release(block)
        shared.passing.wait(block)
        if const_expr(self.gradient is not None):
            if const_expr(self.by_keys and traits.has_marks):  # noqa: SIM102 (while tracing)
                if not self._is_turn(block):
                    # the other warpgroup has cleared rows of it
                    other = CLEARED + 1 - mma_warpgroup_idx()
                    cute.arch.barrier(barrier_id=other, number_of_threads=MMA_THREADS)
            columns = wgmma.columns_as_rows(shared.rows, mma_warpgroup_idx() * cols, cols)
            mma, stage = traits.mma_words(cols), shared.passing.index(block)
            rows = wgmma.operand_b(mma, columns)[None, None, None, stage]
            operand = wgmma.words_as_operand_a(words, traits.dtype)
            wgmma.issue(mma, acc, operand, rows, accumulate)
            warpgroup.wait_group(0)
        shared.passing.release(block)

    @cute.jit
    def _clear_marked_rows(self, block: Int32):
        """Clear the marked rows of a block, and tell the other warpgroup, which adds it later."""
        marks = self._marks(self._word(block, 1), self._word(block, 2))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
        if any_mark(marks, ROWS):
            for i in cutlass.range(ROWS // WARPS_PER_WARPGROUP, unroll=1):
                row = i * WARPS_PER_WARPGROUP + warp
                if is_marked(marks, row):
                    clear_row(self.shared.rows[row, None, self.shared.passing.index(block)])
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_warpgroup(CLEARED_BY_WARP)
        own = CLEARED + mma_warpgroup_idx()
        cute.arch.barrier_arrive(barrier_id=own, number_of_threads=MMA_THREADS)

    def _marks(self, head_idx: Int32, row_block: Int32) -> cute.Tensor:
        return marks_of(self.stats[head_idx, row_block, None], ROWS, self.traits.num_stats)

    @cute.jit
    def _store(self, acc: cute.Tensor, work: Work):
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
        place = first_row, work.slot - first_row, own * traits.own_cols
        send_gradient(traits, acc, self.shared.out[None, None, own], gmem, *place)
