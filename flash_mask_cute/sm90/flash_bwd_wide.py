"""FlashAttention backward for Hopper of heads above 256 columns: by roles, in two launches.

dK and dV of 64 keys take half of the registers of two SMs, so a CTA sums one gradient, of 64 rows
that stay. Two CTAs of a cluster have the same rows and the same walk, and divide the products:

| launch | rows that stay | blocks that pass by | first CTA              | second CTA             |
|--------|----------------|---------------------|------------------------|------------------------|
| keys   | K, V           | Q, dO               | S from K, Q; sums dK   | dP from V, dO; sums dV |
| queries| Q, dO          | K, V                | S from Q, K; sums dQ   | dP from dO, V          |

Each CTA loads only its own operands, K and Q or V and dO. The first one makes P and sends it, the
second one makes dS of it and sends that back (`cta_pairs.PeerWords`). P and dS are rounded to 16
bits, as register operands of the sums. A gradient has one owner, which writes it once: nothing is
added in memory, and bits are equal in every run.

| warps               | role     | work                                                         |
|---------------------|----------|--------------------------------------------------------------|
| 0 of warpgroup 0    | load     | TMA of the rows that stay and of those that pass by          |
| 1 of warpgroup 0    | schedule | choose work tiles and the blocks they visit, in both CTAs    |
| 2, 3 of warpgroup 0 | mask     | bits of the visible scores of partial blocks, in the first   |
| warpgroups 1, 2     | mma      | S or dP of every second block, and half of a sum's columns   |

    schedule -----ring--> all          coordinates and lengths of the next work tile
    schedule -----walk--> load, mask   the blocks it visits
    load --------passing-> mma         a block, words that say which, and with the first one the
                                       rows that stay
    mask ---------bits--> mma          the bits of a partial block
    mma ----------words-> mma          P or dS of a block, from CTA to CTA
    schedule ----claims-> schedule     the number of the next work tile, from the first CTA

A warpgroup computes its next S or dP before it adds a block to its sums, so P and dS of a block are
on their way while tensor cores work. Of the four warpgroups the one that is furthest behind waits
for nobody: what it needs was sent before, and its block was loaded. LSE and delta of a block are
read from memory while S or dP is computed. docs/backward_sm90.md#heads-above-256 has the reasons.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from flash_mask_cute.core import clusters, tma
from flash_mask_cute.core.cta import THREADS_PER_WARPGROUP, WARPS_PER_WARPGROUP, thread_in_warpgroup
from flash_mask_cute.core.exp2 import LOG2_E
from flash_mask_cute.core.key_schedule import KeySchedule
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.marked_rows import any_mark, clear_row, is_marked
from flash_mask_cute.core.query_loads import BwdOperands
from flash_mask_cute.core.query_schedule import QuerySchedule
from flash_mask_cute.core.row_blocks import RowBlocks, marks_of
from flash_mask_cute.core.score_gradients import probabilities, score_gradients
from flash_mask_cute.core.tile_scheduler import ScheduleParams
from flash_mask_cute.core.walk_ring import KIND_MASK, OWN_KIND_SHIFT, Block, Kind
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.rules import bit_tile
from flash_mask_cute.rules.backward_mask import BackwardMask
from flash_mask_cute.rules.forward_mask import ForwardMask
from flash_mask_cute.rules.mask_rules import MaskArgs, MaskWarpRows, WindowArgs, check_given
from flash_mask_cute.rules.mask_warps import make_mask_bits, send_walks
from flash_mask_cute.rules.stream_k_walks import CommonTiles
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_bwd import FlashAttentionBackwardSm90
from flash_mask_cute.sm90.flash_bwd_wide_traits import (
    ROWS,
    SLOTS,
    WORDS_OF_BLOCK,
    WideBwdTraits,
    WideChannels,
    WideSmem,
)
from flash_mask_cute.sm90.gradient_stores import send_gradient
from flash_mask_cute.sm90.warpgroups import Role, mma_warpgroup_idx, sync_warpgroup, take_bits

# keys and values of the heads in flight that should stay in the L2 cache
L2_SHARE = 24 * 1024 * 1024
# named barriers (0 is __syncthreads), one for each warpgroup: it has cleared rows of a block
CLEARED, CLEARED_BY_WARP = 1, 3
NUM_MMA_THREADS = 2 * THREADS_PER_WARPGROUP


class Side(NamedTuple):
    """The operands of a CTA: rows that stay and rows that pass by, with their TMA atoms."""

    staying_atom: cute.CopyAtom
    staying: cute.Tensor
    passing_atom: cute.CopyAtom
    passing: cute.Tensor


class WideBackwardSm90(FlashAttentionBackwardSm90):
    """Backward kernels for Hopper of heads with 264 to 512 columns, for `cute.compile`.

    Parameters are those of `FlashAttentionBackwardSm90`. Both head dimensions are equal, and there
    is no score_mod. As each gradient has an owner, deterministic and clears_dq change nothing.

    :raises ValueError: for a shape or configuration that cannot run
    """

    traits_class = WideBwdTraits

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mStats: cute.Tensor,
        mdQaccum: cute.Tensor,
        mSemaphores: cute.Tensor | None,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        softmax_scale: Float32,
        stream,
        mCuSeqlensQ: cute.Tensor | None = None,
        mCuSeqlensK: cute.Tensor | None = None,
        mSeqUsedQ: cute.Tensor | None = None,
        mSeqUsedK: cute.Tensor | None = None,
        window_size_left: Int32 | None = None,
        window_size_right: Int32 | None = None,
        aux_tensors=None,
        softcap: Float32 | None = None,
        tile_counter: cute.Tensor | None = None,
        column_tensors=None,
        block_bits=None,
        aux_grads=None,
        mask_bit_tensors: tuple | None = None,
        mQStart: cute.Tensor | Int32 | None = None,
    ):
        """Launch both kernels on `stream`. Arguments are those of `FlashAttentionBackwardSm90`, but
        mdQaccum is dQ itself, like mQ, and there are no semaphores, soft cap, gradients of aux
        tensors and mask bits."""
        for name, given in zip(
            ("mSemaphores", "softcap", "aux_grads", "mask_bit_tensors"),
            (mSemaphores, softcap, aux_grads, mask_bit_tensors),
            strict=True,
        ):
            check_given(name, given, False)
        traits, num_groups = self.traits, self.num_sms // clusters.CTAS
        lengths = Lengths.create(
            mQ, mK, mCuSeqlensQ, mCuSeqlensK, mSeqUsedQ, mSeqUsedK, mQStart, self.shared_kv
        )
        operands = BwdOperands.create(traits, (mQ, mdO, mK, mV), lengths)
        window = WindowArgs(window_size_left, window_size_right)
        masks = MaskArgs.create(
            self, window, column_tensors, mQ.shape[-2], None, block_bits, aux_tensors
        )
        is_short = self.is_local or masks.may_shorten(self)
        by_keys = KeySchedule.create(
            lengths, mQ, mK, (ROWS, ROWS), num_groups, None,
            is_unequal=self.is_causal and not is_short,
        )  # fmt: skip
        group_bytes = L2_SHARE if self.is_causal or self.is_local else None
        by_queries = QuerySchedule.create(lengths, mQ, mK, traits, num_groups, group_bytes)
        packed_q, packed_k = mCuSeqlensQ is not None, mCuSeqlensK is not None
        of_keys = tma.key_rows(mdK, packed_k), tma.key_rows(mdV, packed_k)
        of_queries = tma.key_rows(mdQaccum, packed_q), None
        for is_by_keys, schedule, group, gradients in (
            (True, by_keys, by_keys.group, of_keys),
            (False, by_queries, by_queries.heads_per_kv, of_queries),
        ):
            self.kernel(
                is_by_keys, operands, gradients, mStats, lengths, softmax_scale, masks,
                schedule.params, group, tile_counter,
            ).launch(
                grid=(schedule.grid * clusters.CTAS, 1, 1),
                block=(traits.num_threads, 1, 1),
                cluster=(clusters.CTAS, 1, 1),
                stream=stream,
                min_blocks_per_mp=1,
            )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        by_keys: cutlass.Constexpr[bool],
        operands: BwdOperands,
        gradients: tuple[cute.Tensor, cute.Tensor | None],
        stats: cute.Tensor,
        lengths: Lengths,
        softmax_scale: Float32,
        masks: MaskArgs,
        schedule: ScheduleParams,
        group: Int32,
        tile_counter: cute.Tensor | None,
    ):
        """One launch. by_keys: the rows that stay are keys. group: query heads of a KV head."""
        traits = self.traits
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom in operands[:8:2]:
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(traits.storage())
        is_first = clusters.rank() == clusters.LEADER
        num_mask_warps = cutlass.select_(is_first, Int32(traits.num_mask_warps), Int32(0))
        channels = traits.wide_channels(storage, lengths, num_mask_warps, by_keys)
        cute.arch.mbarrier_init_fence()
        clusters.sync()
        tiles = traits.tiles(storage)
        if warp_idx < Role.MMA:
            cute.arch.setmaxregister_decrease(traits.helper_registers)
            if warp_idx == Role.LOAD:
                q, do, k, v = (operands[i : i + 2] for i in range(0, 8, 2))
                first, second = (
                    Side(*x, *y) if by_keys else Side(*y, *x) for x, y in ((k, q), (v, do))
                )
                given = traits, by_keys, tiles, channels, lengths, group
                if is_first:
                    RoleLoads(*given, first).run()
                else:
                    RoleLoads(*given, second).run()
            elif warp_idx == Role.SCHEDULE:
                # walks of the last queries are the longest
                last_first = not by_keys and (self.is_causal or self.is_local)
                packed = lengths.cu_seqlens_k if by_keys else lengths.cu_seqlens_q
                scheduler = CommonTiles(
                    schedule, tile_counter, last_first, packed is not None, clusters.CTAS,
                    channels.claims,
                )  # fmt: skip
                rules = self._rules_of(by_keys, masks, lengths, group)
                rings = channels.ring, channels.walk
                send_walks(scheduler, rules, lengths, *rings, claims_late=Boolean(True))
            elif is_first:
                warp_rows = MaskWarpRows.create(
                    warp_idx - Role.MASK, traits.num_mask_warps, ROWS, wgmma.COLUMNS
                )
                rules = self._rules_of(by_keys, masks, lengths, group)
                rings = channels.ring, channels.walk
                make_mask_bits(rules, warp_rows, tiles.bits, channels.bits, *rings)
        else:
            cute.arch.setmaxregister_increase(traits.mma_registers)
            given = traits, by_keys, tiles, channels, lengths, stats, softmax_scale
            if is_first:
                RoleSums(*given, gradients[0], False).run()
            else:
                RoleSums(*given, gradients[1], True).run()
        # the other CTA may still arrive on mbarriers of this one
        clusters.sync()

    def _rules_of(
        self, by_keys: bool, masks: MaskArgs, lengths: Lengths, group: Int32
    ) -> BackwardMask | ForwardMask:
        if not by_keys:
            return ForwardMask.from_kernel(self, wgmma.COLUMNS, masks, lengths)
        rules = BackwardMask.create(self, wgmma.COLUMNS, masks, lengths, group)
        # nobody waits for another work tile's sums
        return replace(rules, is_ordered=False, staggers=False)


@dataclass(frozen=True)
class RoleLoads:
    """The load warp of a CTA. group: query heads of a KV head."""

    traits: cutlass.Constexpr[WideBwdTraits]
    by_keys: cutlass.Constexpr[bool]
    tiles: WideSmem
    channels: WideChannels
    lengths: Lengths
    group: Int32
    side: Side

    @cute.jit
    def run(self):
        """Load the rows of every work tile, and the blocks of its walk."""
        ring, walk = self.channels.ring, self.channels.walk
        tile, chunk, number = Int32(0), Int32(0), Int32(0)
        while ring.wait(tile):
            step = partial(self._load_block, ring.read(tile), number)
            chunk, number = walk.visit(chunk, number, step)
            ring.release(tile)
            tile += 1

    @cute.jit
    def _load_block(self, work: Work, first: Int32, number: Int32, block: Block) -> Int32:
        """Load a block; first: the one with which the rows that stay come. Returns the next."""
        traits, side, channel = self.traits, self.side, self.channels.passing
        of_block = self.lengths.of_block(work, block)
        if const_expr(self.by_keys):
            q_head, q_block = block.head_idx, block.index
            staying = self._rows(side.staying, False, work, work.head_idx, work.block)
            passing = self._rows(side.passing, True, of_block, q_head, q_block)
        else:
            q_head, q_block = work.head_idx, work.block
            staying = self._rows(side.staying, True, work, q_head, q_block)
            passing = self._rows(side.passing, False, work, q_head // self.group, block.index)
        row_blocks = RowBlocks(self.lengths, ROWS)
        row_block = row_blocks.first_of(of_block.batch_idx, of_block.offset_q) + q_block
        words = block.follower | (block.kind << OWN_KIND_SHIFT), q_head, row_block
        channel.acquire(number)
        stage, barrier = channel.index(number), channel.barrier(number)
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(len(words)):
                self.tiles.words[i, stage] = Int32(words[i])
        is_first = number == first
        more = cutlass.select_(is_first, Int32(traits.bytes_rows), Int32(0))
        channel.expect(number, traits.bytes_rows + more)
        self._copy(side.passing_atom, passing, self.tiles.passing, stage, barrier)
        if is_first:
            channel.wait_until_released(number - 1)
            self._copy(side.staying_atom, staying, self.tiles.staying, Int32(0), barrier)
        return number + 1

    def _rows(
        self, source: cute.Tensor, is_query: bool, work: Work, head: Int32, block: Int32
    ) -> tuple[cute.Tensor, Int32, Int32]:
        """The ((head, row), d) tensor of a sequence, the head and the first row to read."""
        if is_query:
            side = tma.RowSide.of_queries(self.lengths)
            place = work.batch_idx, work.offset_q, work.seqlen_q
        else:
            side = tma.RowSide.of_keys(self.lengths)
            place = self.lengths.kv_entry(work.batch_idx), work.offset_k, work.seqlen_k
        gmem, row = tma.readable_rows(source, side, *place, block * ROWS)
        return gmem, head, row

    def _copy(
        self,
        atom: cute.CopyAtom,
        rows: tuple[cute.Tensor, Int32, Int32],
        smem: cute.Tensor,
        stage: Int32,
        barrier: cute.Pointer,
    ) -> None:
        gmem, head, row = rows
        box = ((1, ROWS), self.traits.tile_d)
        src, dst = tma.tile_of(atom, gmem, (head, row), box, smem)
        cute.copy(atom, src, dst[None, stage], tma_bar_ptr=barrier)


@dataclass(frozen=True)
class RoleSums:
    """An MMA warpgroup. stats: LSE and delta, fp32 (heads_q, row_blocks, words). gradient: that the
    CTA sums, as `tma.key_rows`; None: none. makes_grads: dS from dP, not P from S."""

    traits: cutlass.Constexpr[WideBwdTraits]
    by_keys: cutlass.Constexpr[bool]
    tiles: WideSmem
    channels: WideChannels
    lengths: Lengths
    stats: cute.Tensor
    softmax_scale: Float32
    gradient: cute.Tensor | None
    makes_grads: cutlass.Constexpr[bool]

    @cute.jit
    def run(self):
        """P or dS of every second block, and half of the columns of the CTA's gradient."""
        ring, passing, traits = self.channels.ring, self.channels.passing, self.traits
        acc = wgmma.make_accumulator(traits.own_cols)
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
        return self.tiles.words[i, self.channels.passing.index(block)]

    def _is_turn(self, block: Int32) -> Boolean:
        """Whether this warpgroup computes P or dS of a block."""
        return block % SLOTS == mma_warpgroup_idx()

    @cute.jit
    def _compute(self, block: Int32, kind: Int32, cut: Int32):
        """P or dS of a block that has arrived, and send it. No products are in flight before or
        afterwards. cut: the number of the bits of a partial block."""
        traits, exchange = self.traits, self.channels.words
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP == 0:
            exchange.expect(block)
        if const_expr(self.by_keys and traits.has_marks):
            self._clear_marked_rows(block)
        numbers = self._numbers(block)
        acc = wgmma.make_accumulator(ROWS)
        words = cute.make_rmem_tensor(WORDS_OF_BLOCK, Int32)
        mma, stage = traits.mma_scores(), self.channels.passing.index(block)
        staying = wgmma.operand_a(mma, self.tiles.staying)[None, None, None, 0]
        passing = wgmma.operand_b(mma, self.tiles.passing)[None, None, None, stage]
        wgmma.issue(mma, acc, staying, passing, False, traits.steps_d)
        warpgroup.wait_group(0)
        if const_expr(self.makes_grads):
            exchange.take(block, words)
            factors = cute.make_rmem_tensor(acc.layout, Float32)
            factors.store(wgmma.rounded_values(words, traits.dtype).load().to(Float32))
            score_gradients(self._by_number(acc), self._by_number(factors), numbers)
        else:
            bits = Int32(bit_tile.ALL), Int32(bit_tile.ALL)
            if kind == Kind.PARTIAL:
                bits = take_bits(self.tiles.bits, self.channels.bits, Int32(0), cut, Boolean(False))
            bit_tile.hide_unset(wgmma.rows_by_cols(acc), bits)
            probabilities(self._by_number(acc), numbers, self.softmax_scale * LOG2_E)
        wgmma.round_pairs(words, acc, traits.dtype)
        exchange.send(block, words)

    def _by_number(self, acc: cute.Tensor) -> cute.Tensor:
        """View of this thread's scores whose second mode has the queries."""
        view = wgmma.rows_by_cols(acc)
        if self.by_keys:
            return view
        return cute.make_tensor(view.iterator, cute.select(view.layout, [1, 0]))

    def _numbers(self, block: Int32) -> cute.Tensor:
        """LSE to base 2 or delta of the queries of this thread, which begin to arrive."""
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
        """Add a block to this warpgroup's columns of the gradient."""
        traits, exchange, passing = self.traits, self.channels.words, self.channels.passing
        words = cute.make_rmem_tensor(WORDS_OF_BLOCK, Int32)
        exchange.take(block, words)
        exchange.release(block)
        passing.wait(block)
        if const_expr(self.gradient is not None):
            if const_expr(self.by_keys and traits.has_marks):  # noqa: SIM102 (while tracing)
                if self._is_turn(block + 1):
                    # the other warpgroup has cleared rows of it
                    barrier = CLEARED + 1 - mma_warpgroup_idx()
                    cute.arch.barrier(barrier_id=barrier, number_of_threads=NUM_MMA_THREADS)
            mma, stage = traits.mma_words(traits.own_cols), passing.index(block)
            first = mma_warpgroup_idx() * traits.own_cols
            columns = wgmma.columns_as_rows(self.tiles.passing, first, traits.own_cols)
            rows = wgmma.operand_b(mma, columns)[None, None, None, stage]
            operand = wgmma.words_as_operand_a(words, traits.dtype)
            wgmma.issue(mma, acc, operand, rows, accumulate)
            warpgroup.wait_group(0)
        passing.release(block)

    # -- rows of queries that see nothing ----------------------------------------------------------

    @cute.jit
    def _clear_marked_rows(self, block: Int32):
        """Clear the marked rows of a block, which probabilities of 0 would not keep from the sums
        (`core.row_blocks.marks_of`), and tell the other warpgroup, which adds the block later."""
        stage = self.channels.passing.index(block)
        marks = self._marks(self._word(block, 1), self._word(block, 2))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
        if any_mark(marks, ROWS):
            for i in cutlass.range(ROWS // WARPS_PER_WARPGROUP, unroll=1):
                row = i * WARPS_PER_WARPGROUP + warp
                if is_marked(marks, row):
                    clear_row(self.tiles.passing[row, None, stage])
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_warpgroup(CLEARED_BY_WARP)
        barrier = CLEARED + mma_warpgroup_idx()
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=NUM_MMA_THREADS)

    def _marks(self, head_idx: Int32, row_block: Int32) -> cute.Tensor:
        of_rows = self.stats[head_idx, row_block, None]
        return marks_of(of_rows, ROWS, self.traits.num_stats)

    # -- memory ------------------------------------------------------------------------------------

    @cute.jit
    def _store(self, acc: cute.Tensor, work: Work):
        """Store this warpgroup's columns of the gradient of a work tile."""
        traits, lengths, thread = self.traits, self.lengths, thread_in_warpgroup()
        scale = Float32(1.0) if const_expr(self.makes_grads) else self.softmax_scale
        # without scores, what was loaded is another sequence's, perhaps not even finite
        has_sums = [work.has_scores] * wgmma.ROWS_PER_THREAD
        if const_expr(not self.by_keys and traits.has_marks):
            of_sequence = RowBlocks(lengths, ROWS).first_of(work.batch_idx, work.offset_q)
            marks = self._marks(work.head_idx, of_sequence + work.block)
            for r in cutlass.range_constexpr(wgmma.ROWS_PER_THREAD):
                is_clear = is_marked(marks, wgmma.row_of(thread, r)) == Boolean(False)
                has_sums[r] = has_sums[r] & is_clear
        sums = wgmma.rows_by_cols(acc)
        for r in cutlass.range_constexpr(wgmma.ROWS_PER_THREAD):
            for c in cutlass.range_constexpr(cute.size(sums, mode=[1])):
                sums[r, c] = cutlass.select_(has_sums[r], sums[r, c] * scale, Float32(0.0))
        offset = work.offset_k if self.by_keys else work.offset_q
        gmem, first_row = self.gradient, work.block * ROWS
        if const_expr(cute.rank(gmem) == 4):
            gmem = gmem[None, None, work.head_idx, work.batch_idx]
        else:
            gmem = cute.domain_offset((offset, 0), gmem[None, None, work.head_idx])
        own, smem = mma_warpgroup_idx(), self.tiles.out
        rows = first_row, work.slot - first_row
        send_gradient(
            traits, acc, smem[None, None, own], gmem, *rows, first_col=own * traits.own_cols
        )
