"""FlashAttention backward for Hopper: dQ, dK, dV from dO, LSE and delta = rowsum(dO * O) - dLSE.

A persistent CTA computes one work tile of tile_n keys of a KV head after another; the queries of
the group's heads pass by in blocks of tile_m. With P = exp(S - LSE) and dP = dO V^T,

    dV = P^T dO        dS = P * (dP - delta)        dK = scale dS^T Q        dQ = scale dS K

| warps                  | role  | work                                                      |
|------------------------|-------|-----------------------------------------------------------|
| 0 of warpgroup 0       | load  | TMA of K, V, and of Q, dO, LSE and delta                  |
| 1 of warpgroup 0       | plan  | choose work tiles and the query blocks they visit         |
| 2, 3 of warpgroup 0    | paint | bits of the scores that count, for blocks that a mask cuts|
| warpgroups 1, 2        | mma   | 64 keys each                                              |

Channels (full/empty mbarrier pairs):

    plan ---------ring--> all          coordinates and lengths of the next work tile
    plan ---------walk--> load, paint  the query blocks it visits, up to 32 an entry
    load ---------kv----> mma          keys and values of a work tile
    load ---------q-----> mma          a query block, its LSE and delta, and words that say which
    load ---------do----> mma          dO of a query block
    load ---------dq----> mma          the staging memory of dQ, free again
    paint --------bits--> mma          the bits of a query block that is cut

A warpgroup computes S^T and dP^T of its own keys, 64 rows by tile_m columns, so that P^T and dS^T
lie in registers as dV and dK want them (FlashAttention-3's choice). dS also goes to shared memory,
where both warpgroups sum dQ over the keys of both, a part of the block's rows or columns each.

The products of a block, in the order of their issue: S, dP, dV, dQ, dK. The sums of dQ go, in fp32
and in the order of the accumulators, to shared memory, from where the load warp has them added to
scratch memory. As in the forward, the mma warps know no mask but bits (`masks/key_walks.py`), and a
key block that nobody sees visits one hidden query block. docs/backward_sm90.md tells why.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from flash_mask_cute.block_info import BlockInfo
from flash_mask_cute.core import tma
from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import (
    THREADS_PER_WARPGROUP,
    WALK_STAGES,
    WARPS_PER_WARPGROUP,
    planning_rings,
    thread_in_warpgroup,
)
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.row_blocks import RowBlocks
from flash_mask_cute.core.softmax import ScoreScales
from flash_mask_cute.core.tile_scheduler import ScheduleParams, TileScheduler
from flash_mask_cute.core.turns import pass_turn, wait_for_turn
from flash_mask_cute.core.walk_ring import (
    CHUNK,
    KIND_MASK,
    OWN_KIND_SHIFT,
    Block,
    Kind,
    WalkRing,
)
from flash_mask_cute.core.work_ring import Work, WorkRing
from flash_mask_cute.masks import bit_tile
from flash_mask_cute.masks.intervals import Intervals
from flash_mask_cute.masks.key_walks import NO_TURN, KeyWalks
from flash_mask_cute.masks.roles import paint_walks, plan_walks
from flash_mask_cute.masks.rules import BitArgs, ColumnArgs, MaskArgs, Share
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_bwd_math import ScoreChain, probabilities, score_gradients
from flash_mask_cute.sm90.flash_bwd_plan import (
    DS_STAGES,
    NUM_MMA_WARPGROUPS,
    QUERY_WORDS,
    Barrier,
    BwdPlan,
)
from flash_mask_cute.sm90.warpgroups import (
    Role,
    mma_warpgroup_idx,
    store_rows,
    sync_warpgroup,
    take_bits,
)


class Operands(NamedTuple):
    """TMA atoms with their coordinate tensors.

    q, do: ((1 head, row), d, ...); k, v, dk, dv: (row, d, head, ...); the last mode is the batch,
    or, where lengths vary, that of `tma.ragged_rows` (q, do, dk, dv) or none.
    """

    q_atom: cute.CopyAtom
    q: cute.Tensor
    do_atom: cute.CopyAtom
    do: cute.Tensor
    k_atom: cute.CopyAtom
    k: cute.Tensor
    v_atom: cute.CopyAtom
    v: cute.Tensor
    dk_atom: cute.CopyAtom
    dk: cute.Tensor
    dv_atom: cute.CopyAtom
    dv: cute.Tensor


class Scratch(NamedTuple):
    """By row block: stats (heads_q, row_blocks, 2, tile_m) and dq (heads_q, row_blocks, -1), fp32;
    turns (heads_q, row_blocks), 1 + the key block that added to a row block's dQ last, or 0.
    """

    stats: cute.Tensor
    dq: cute.Tensor
    turns: cute.Tensor | None


class Channels(NamedTuple):
    """How the roles of a CTA hand things on (see the top of this file)."""

    q: Channel
    do: Channel
    kv: Channel
    dq: Channel
    bits: Channel
    ring: WorkRing
    walk: WalkRing


class Tiles(NamedTuple):
    """What lies in shared memory."""

    q: cute.Tensor
    do: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    ds: cute.Tensor
    dq: cute.Tensor
    stats: cute.Tensor
    words: cute.Tensor
    bits: cute.Tensor


class Fragments(NamedTuple):
    """Shared memory as operands: a letter for the product, one for the operand."""

    scores_k: cute.Tensor
    scores_q: cute.Tensor
    scores_v: cute.Tensor
    scores_do: cute.Tensor
    dv_do: cute.Tensor
    dk_q: cute.Tensor
    dq_ds: cute.Tensor
    dq_k: cute.Tensor


class FlashAttentionBackwardSm90:
    """Backward kernel for Hopper, to be passed to `cute.compile`.

    :param dtype: cutlass.BFloat16 or cutlass.Float16, of Q, K, V and dO, dK, dV
    :param head_dim, head_dim_v: multiples of 8 up to 128
    :param is_causal: bottom-right aligned causal masking
    :param is_local: the call's window sides apply
    :param tile_m: query rows of a block, 64 or 128; tile_n is 128
    :param stages_q, stages_do, stages_kv: see `BwdPlan`
    :param mask_mod, score_mod: user callables (`core/mods.py`)
    :param score_mod_bwd: the user's derivative; without it, score_mod is differentiated
        (`core/derivative.py`)
    :param has_aux_tensors: the call passes aux_tensors to them
    :param intervals: the form of the column intervals that the call passes, or None
    :param skip_blocks: leave out hidden blocks and the masking of blocks that nothing cuts
    :param deterministic: dQ is summed in an order that does not depend on the run
    :param num_sms: CTAs to launch at most
    :raises ValueError: for a shape or configuration that cannot run
    """

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        head_dim: int,
        head_dim_v: int | None = None,
        is_causal: bool = False,
        is_local: bool = False,
        tile_m: int = 64,
        stages_q: int = 2,
        stages_do: int = 2,
        stages_kv: int = 1,
        mask_mod: Callable[..., Any] | None = None,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bwd: Callable[..., Any] | None = None,
        has_aux_tensors: bool = False,
        intervals: Intervals | None = None,
        skip_blocks: bool = True,
        deterministic: bool = False,
        num_sms: int = 132,
    ):
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        if dtype not in (cutlass.BFloat16, cutlass.Float16):
            raise ValueError(f"dtype must be BFloat16 or Float16, got {dtype}")
        self.plan = BwdPlan(dtype, head_dim, head_dim_v, tile_m, stages_q, stages_do, stages_kv)
        reason = self.plan.infeasible()
        if reason is not None:
            raise ValueError(reason)
        self.is_causal = is_causal
        self.is_local = is_local
        self.mask_mod = mask_mod
        self.score_mod = score_mod
        self.score_mod_bwd = score_mod_bwd
        self.has_aux_tensors = has_aux_tensors
        self.intervals = intervals
        self.skip_blocks = skip_blocks
        self.deterministic = deterministic
        self.num_sms = num_sms

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mStats: cute.Tensor,
        mdQaccum: cute.Tensor,
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
        mTurns: cute.Tensor | None = None,
    ):
        """Launch on `stream`.

        Shapes: mQ, mdO (batch, seqlen_q, heads_q, d), or (total_q, heads_q, d) with mCuSeqlensQ;
        mK, mV and mdK, mdV alike with heads_kv. mStats (heads_q, row_blocks, 2, tile_m) from
        `BwdPreprocess`, mdQaccum (heads_q, row_blocks, tile_m * tile_d) zeroed by it; row blocks
        are those of `RowBlocks`. tile_counter, column_tensors and block_bits are those of
        `FlashAttentionForwardSm90`; block lists are always given as bits. mTurns (heads_q,
        row_blocks) int32, 0 before the launch: for a deterministic kernel.
        """
        for name, given, wanted in (
            ("aux_tensors", aux_tensors, self.has_aux_tensors),
            ("column_tensors", column_tensors, self.intervals is not None),
            ("mTurns", mTurns, self.deterministic),
        ):
            if const_expr((given is not None) != wanted):
                raise ValueError(f"{name} must {'' if wanted else 'not '}be given to this kernel")
        plan = self.plan
        varlen_q = const_expr(mCuSeqlensQ is not None)
        varlen_k = const_expr(mCuSeqlensK is not None)
        operands = self._operands(mQ, mK, mV, mdO, mdK, mdV, varlen_q, varlen_k)

        seqlen_q = mQ.shape[0] if varlen_q else mQ.shape[1]
        seqlen_k = mK.shape[0] if varlen_k else mK.shape[1]
        lengths = Lengths(mCuSeqlensQ, mCuSeqlensK, mSeqUsedQ, mSeqUsedK, seqlen_q, seqlen_k)
        heads_q = mQ.shape[1] if varlen_q else mQ.shape[2]
        heads_kv = mK.shape[1] if varlen_k else mK.shape[2]
        num_batch = mK.shape[0]
        if const_expr(varlen_k):
            num_batch = mCuSeqlensK.shape[0] - 1
        num_blocks = cute.ceil_div(seqlen_k, plan.tile_n)
        schedule = ScheduleParams(num_blocks, heads_kv, num_batch, Int32(1))
        grid = Int32(self.num_sms)
        if const_expr(not varlen_k):
            grid = cutlass.min(grid, num_blocks * heads_kv * num_batch)

        scales = ScoreScales.create(softmax_scale, softcap, self.score_mod is not None)
        columns, bits = None, None
        if const_expr(column_tensors is not None):
            indices, bounds = column_tensors
            columns = ColumnArgs(indices, bounds, heads_q // indices.shape[1])
        if const_expr(block_bits is not None):
            bits = BitArgs(*block_bits)
        masks = MaskArgs(window_size_left, window_size_right, columns, None, bits, aux_tensors)
        scratch = Scratch(mStats, mdQaccum, mTurns)
        self.kernel(
            operands, scratch, lengths, softmax_scale, scales, masks, schedule,
            heads_q // heads_kv, tile_counter,
        ).launch(
            grid=(grid, 1, 1),
            block=(plan.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    def _operands(self, mQ, mK, mV, mdO, mdK, mdV, varlen_q: bool, varlen_k: bool) -> Operands:
        plan = self.plan
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

        def atom(op, tensor: cute.Tensor, is_packed: bool, layout, rows: int, d: int) -> tuple:
            view = tma.sequence_rows(tensor, is_packed)
            return cpasync.make_tiled_tma_atom(op, view, tma.one_stage(layout), ((1, rows), d))

        def by_query(op, tensor: cute.Tensor, layout, d: int) -> tuple:
            return atom(op, tensor, varlen_q, layout, plan.tile_m, d)

        def by_key(op, tensor: cute.Tensor, layout, d: int) -> tuple:
            return atom(op, tensor, varlen_k, layout, wgmma.ROWS_PER_WARPGROUP, d)

        return Operands(
            *by_query(load, mQ, plan.layout_q(), plan.tile_d),
            *by_query(load, mdO, plan.layout_do(), plan.tile_dv),
            *by_key(load, mK, plan.layout_k(), plan.tile_d),
            *by_key(load, mV, plan.layout_v(), plan.tile_dv),
            *by_key(store, mdK, plan.layout_k(), plan.tile_d),
            *by_key(store, mdV, plan.layout_v(), plan.tile_dv),
        )

    @cute.kernel
    def kernel(
        self,
        operands: Operands,
        scratch: Scratch,
        lengths: Lengths,
        softmax_scale: Float32,
        scales: ScoreScales,
        masks: MaskArgs,
        schedule: ScheduleParams,
        group: Int32,
        tile_counter: cute.Tensor | None,
    ):
        plan = self.plan
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom in operands[::2]:
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(plan.storage())
        mma_warps = plan.num_mma_warps
        # the load warp arrives with the bytes that TMA brings
        loads, turns = 1, None
        if const_expr(self.deterministic):
            turns = storage.turns.get_tensor(cute.make_layout((CHUNK, WALK_STAGES)))
        ring, walk = planning_rings(storage, 1 + plan.num_painters, mma_warps, True, turns)
        channels = Channels(
            q=Channel.create(storage.q_barriers.data_ptr(), plan.stages_q, loads, mma_warps),
            do=Channel.create(storage.do_barriers.data_ptr(), plan.stages_do, loads, mma_warps),
            kv=Channel.create(storage.kv_barriers.data_ptr(), plan.stages_kv, loads, mma_warps),
            dq=Channel.create(storage.dq_barriers.data_ptr(), 1, loads, mma_warps),
            bits=Channel.create(storage.bits_barriers.data_ptr(), 1, plan.num_painters, mma_warps),
            ring=ring,
            walk=walk,
        )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        def tensor(memory, layout: cute.ComposedLayout) -> cute.Tensor:
            return memory.get_tensor(layout.outer, swizzle=layout.inner)

        tiles = Tiles(
            q=tensor(storage.q, plan.layout_q()),
            do=tensor(storage.do, plan.layout_do()),
            k=tensor(storage.k, plan.layout_k()),
            v=tensor(storage.v, plan.layout_v()),
            ds=tensor(storage.ds, plan.layout_ds()),
            dq=storage.dq.get_tensor(plan.layout_dq()),
            stats=storage.stats.get_tensor(cute.make_layout((2 * plan.tile_m, plan.stages_q))),
            words=storage.words.get_tensor(cute.make_layout((QUERY_WORDS, plan.stages_q))),
            bits=storage.bits.get_tensor(cute.make_layout((wgmma.COLUMNS.num_words, plan.tile_n))),
        )

        if warp_idx < Role.MMA:
            cute.arch.setmaxregister_decrease(plan.helper_registers)
            if warp_idx == Role.LOAD:
                self.load(operands, tiles, channels, scratch, lengths)
            elif warp_idx == Role.PLAN:
                # those whose turn comes first, first
                scheduler = TileScheduler(
                    schedule, tile_counter, self.deterministic, lengths.cu_seqlens_k is not None
                )
                rules = self._rules(masks, lengths, group)
                plan_walks(scheduler, rules, lengths, channels.ring, channels.walk)
            else:
                painter = warp_idx - Role.PAINT
                share = Share.create(painter, plan.num_painters, plan.tile_n, wgmma.COLUMNS)
                rules = self._rules(masks, lengths, group)
                paint_walks(rules, share, tiles.bits, channels.bits, channels.ring, channels.walk)
        else:
            cute.arch.setmaxregister_increase(plan.mma_registers)
            self.mma(operands, tiles, channels, lengths, softmax_scale, scales, masks)

    def _rules(self, masks: MaskArgs, lengths: Lengths, group: Int32) -> KeyWalks:
        block_info = BlockInfo(
            self.plan.tile_m,
            self.plan.tile_n,
            is_causal=self.is_causal,
            is_local=self.is_local,
            window_size_left=masks.window_left,
            window_size_right=masks.window_right,
        )
        return KeyWalks(
            masks,
            block_info,
            self.intervals,
            self.mask_mod,
            wgmma.COLUMNS,
            lengths.cu_seqlens_k is not None,
            self.skip_blocks,
            group,
            self.deterministic,
        )

    # -- load -----------------------------------------------------------------------------------

    @cute.jit
    def load(
        self,
        operands: Operands,
        tiles: Tiles,
        channels: Channels,
        scratch: Scratch,
        lengths: Lengths,
    ):
        """Load warp: keys and values of every work tile, and the query blocks of its walk.

        It also sends off what the others have summed of dQ. A stage of q comes back when its
        block's dQ lies ready, so there is nothing more to wait for.
        """
        tile, chunk, number = Int32(0), Int32(0), Int32(0)
        while channels.ring.wait(tile):
            work = channels.ring.read(tile)
            add_dq = partial(self._add_dq, tiles, channels, scratch, work.block + 1)
            self._load_keys(operands, tiles, channels.kv, lengths, tile, work)
            # head, row block and turn of blocks whose dQ is due, the oldest first
            due = (Int32(0), Int32(-1), Int32(0)) * self.plan.stages_q
            step = partial(
                self._load_block, operands, tiles, channels, scratch.stats, lengths, work, add_dq
            )
            chunk, state = channels.walk.visit(chunk, (number, *due), step)
            number = state[0]
            for i in cutlass.range_constexpr(self.plan.stages_q):
                channels.q.acquire(number + i)
                add_dq(number + i - self.plan.stages_q, *state[1 + 3 * i : 4 + 3 * i])
            channels.ring.release(tile)
            tile += 1
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _add_dq(
        self,
        tiles: Tiles,
        channels: Channels,
        scratch: Scratch,
        own_turn: Int32,
        number: Int32,
        head_idx: Int32,
        row_block: Int32,
        turn: Int32,
    ):
        """Add the staged dQ of query block `number`, if it is one, to the scratch memory.

        Where dQ is summed in a fixed order, after the key block that `turn` names.
        """
        if row_block >= 0:
            target = scratch.dq[head_idx, row_block, None].iterator
            count = cute.size(tiles.dq)
            if const_expr(scratch.turns is None):
                tma.add_bulk(tiles.dq.iterator, target, count)
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            elif turn != NO_TURN:
                place = cute.domain_offset((head_idx, row_block), scratch.turns).iterator
                wait_for_turn(place, turn)
                tma.add_bulk(tiles.dq.iterator, target, count)
                cute.arch.cp_async_bulk_wait_group(0)
                pass_turn(place, own_turn)
            channels.dq.publish(number)

    def _load_keys(self, operands, tiles, channel: Channel, lengths, number, work: Work):
        plan = self.plan
        channel.acquire(number)
        channel.expect(number, plan.bytes_kv)
        for atom, source, smem, d in (
            (operands.k_atom, operands.k, tiles.k, plan.tile_d),
            (operands.v_atom, operands.v, tiles.v, plan.tile_dv),
        ):
            for w in range(NUM_MMA_WARPGROUPS):
                row = work.block * plan.tile_n + w * wgmma.ROWS_PER_WARPGROUP
                if const_expr(lengths.cu_seqlens_k is None):
                    gmem = source[None, None, work.batch_idx]
                else:
                    gmem, row = tma.readable_rows(
                        source, work.offset_k, work.seqlen_k, lengths.seqlen_k, row
                    )
                tile = ((1, wgmma.ROWS_PER_WARPGROUP), d)
                src, dst = tma.tile_of(atom, gmem, (work.head_idx, row), tile, smem)
                stage = channel.index(number) * NUM_MMA_WARPGROUPS + w
                cute.copy(atom, src, dst[None, stage], tma_bar_ptr=channel.barrier(number))

    def _query_rows(self, tensor, lengths: Lengths, work: Work, row: Int32) -> tuple:
        """The ((head, row), d) tensor of a sequence of Q or dO, and the row to read from."""
        if lengths.cu_seqlens_q is None:
            return tensor[None, None, work.batch_idx], row
        return tma.readable_rows(tensor, work.offset_q, work.seqlen_q, lengths.seqlen_q, row)

    @cute.jit
    def _load_block(
        self, operands, tiles, channels, mStats, lengths, work: Work, add_dq, state, block: Block
    ):
        """Fetch a query block: Q with its statistics, and dO.

        state: its number, and head, row block and turn of the last stages_q blocks.
        """
        plan = self.plan
        number = state[0]
        row_block = block.index + RowBlocks(lengths, plan.tile_m).first_of(
            work.batch_idx, work.offset_q
        )
        flags = block.follower | (block.kind << OWN_KIND_SHIFT)
        words = (flags, block.index, block.head_idx, row_block)
        tile = ((1, plan.tile_m), plan.tile_d)
        gmem, row = self._query_rows(operands.q, lengths, work, block.index * plan.tile_m)
        src, dst = tma.tile_of(operands.q_atom, gmem, (block.head_idx, row), tile, tiles.q)
        stage = channels.q.index(number)
        channels.q.acquire(number)
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(QUERY_WORDS):
                tiles.words[i, stage] = Int32(words[i])
        channels.q.expect(number, plan.bytes_q + plan.bytes_stats)
        barrier = channels.q.barrier(number)
        cute.copy(operands.q_atom, src, dst[None, stage], tma_bar_ptr=barrier)
        stats = mStats[block.head_idx, row_block, None, None].iterator
        stats = cute.make_tensor(stats, cute.make_layout(2 * plan.tile_m))
        tma.copy_bulk(stats, tiles.stats[None, stage], barrier)
        tile = ((1, plan.tile_m), plan.tile_dv)
        gmem, row = self._query_rows(operands.do, lengths, work, block.index * plan.tile_m)
        src, dst = tma.tile_of(operands.do_atom, gmem, (block.head_idx, row), tile, tiles.do)
        channels.do.acquire(number)
        channels.do.expect(number, plan.bytes_do)
        cute.copy(
            operands.do_atom,
            src,
            dst[None, channels.do.index(number)],
            tma_bar_ptr=channels.do.barrier(number),
        )
        add_dq(number - plan.stages_q, *state[1:4])
        return (number + 1, *state[4:], block.head_idx, row_block, block.turn)

    # -- mma ------------------------------------------------------------------------------------

    @cute.jit
    def mma(
        self,
        operands: Operands,
        tiles: Tiles,
        channels: Channels,
        lengths: Lengths,
        softmax_scale: Float32,
        scales: ScoreScales,
        masks: MaskArgs,
    ):
        """MMA warpgroup: 64 keys of every work tile."""
        plan = self.plan
        ring = channels.ring
        mma_scores, mma_dq = plan.mma_scores(), plan.mma_dq()
        mma_dv, mma_dk = plan.mma_keys(plan.tile_dv), plan.mma_keys(plan.tile_d)
        at = self._fragments(tiles)
        acc_dV, acc_dK = wgmma.make_accumulator(plan.tile_dv), wgmma.make_accumulator(plan.tile_d)
        # P and dS in 16 bits, as operands
        num_words = wgmma.ROWS_PER_WARPGROUP * plan.tile_m // THREADS_PER_WARPGROUP // 2
        probs = cute.make_rmem_tensor(num_words, Int32)
        grads = cute.make_rmem_tensor(num_words, Int32)
        tdVrP = wgmma.as_operand_a(cute.recast_tensor(probs, plan.dtype))
        tdKrdS = wgmma.as_operand_a(cute.recast_tensor(grads, plan.dtype))

        chain = ScoreChain(
            scales,
            masks.aux_tensors,
            self.score_mod,
            self.score_mod_bwd,
            plan.dtype,
            (plan.tile_m, plan.tile_n),
        )
        # the work tile, the query block and the cut block at hand, numbered from 0
        tile, block, cut = Int32(0), Int32(0), Int32(0)
        while ring.wait(tile):
            channels.kv.wait(tile)
            channels.q.wait(block)
            accumulate = Boolean(False)
            current = (tiles.words[0, channels.q.index(block)] >> OWN_KIND_SHIFT) & KIND_MASK
            # The same loop for blocks that are cut and for others: one that asked every block would
            # branch while products are in flight, which ptxas answers by serialising them all.
            while current != Kind.END:
                for kind in (Kind.CUT, Kind.WHOLE):
                    while current == kind:
                        stage = channels.q.index(block)
                        own_keys = self._own_keys(channels, tile)
                        do_stage = channels.do.index(block)
                        channels.q.wait(block)
                        following = tiles.words[0, stage] & KIND_MASK
                        acc_S = wgmma.make_accumulator(plan.tile_m)
                        k_tile = at.scores_k[None, None, None, own_keys]
                        q_tile = at.scores_q[None, None, None, stage]
                        wgmma.issue(mma_scores, acc_S, k_tile, q_tile, False)
                        channels.do.wait(block)
                        acc_dP = wgmma.make_accumulator(plan.tile_m)
                        v_tile = at.scores_v[None, None, None, own_keys]
                        do_tile = at.scores_do[None, None, None, do_stage]
                        issue_dP = partial(wgmma.issue, mma_scores, acc_dP, v_tile, do_tile, False)
                        if const_expr(chain.is_empty):
                            issue_dP()

                        scores = wgmma.rows_by_cols(acc_S)
                        lse, delta = self._statistics(tiles.stats, stage)
                        warpgroup.wait_group(1 if const_expr(chain.is_empty) else 0)
                        bits = None
                        if const_expr(kind == Kind.CUT):
                            bits = take_bits(tiles.bits, channels.bits, cut)
                            cut += 1
                        if const_expr(chain.is_empty):
                            if const_expr(kind == Kind.CUT):
                                bit_tile.hide_unset(scores, bits)
                            probabilities(scores, lse, scales.scale_log2)
                        else:
                            # no registers for dP meanwhile
                            work = ring.read(tile)
                            m_block, head_idx = tiles.words[1, stage], tiles.words[2, stage]
                            chain.apply(work, head_idx, m_block, scores, bits, lse, probs)
                            issue_dP()
                        warpgroup.wait_group(0)
                        score_gradients(wgmma.rows_by_cols(acc_dP), scores, delta)
                        wgmma.round_pairs(grads, acc_dP, plan.dtype)
                        if const_expr(chain.is_empty):
                            wgmma.round_pairs(probs, acc_S, plan.dtype)
                        ds_stage = block % DS_STAGES
                        self._store_ds(tiles.ds, grads, ds_stage)
                        do_tile = at.dv_do[None, None, None, do_stage]
                        wgmma.issue(mma_dv, acc_dV, tdVrP, do_tile, accumulate)
                        # dQ reads the dS of both
                        self._sync_both()
                        acc_dQ = wgmma.make_accumulator(plan.dq_cols)
                        self._issue_dq(at, mma_dq, acc_dQ, ds_stage, channels.kv.index(tile))
                        q_tile = at.dk_q[None, None, None, stage]
                        wgmma.issue(mma_dk, acc_dK, tdKrdS, q_tile, accumulate)
                        warpgroup.wait_group(1)
                        channels.do.release(block)
                        self._stage_dq(tiles, channels.dq, block, acc_dQ)
                        warpgroup.wait_group(0)
                        channels.q.release(block)
                        accumulate = Boolean(True)
                        block += 1
                        current = following

            work = ring.read(tile)
            self._scale(acc_dK, softmax_scale)
            if not work.has_scores:
                # what was loaded is another sequence's, and may not even be finite
                acc_dK.fill(0.0)
                acc_dV.fill(0.0)
            self._epilogue(operands, tiles, channels, acc_dK, acc_dV, lengths, tile, work)
            ring.release(tile)
            tile += 1
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _fragments(self, tiles: Tiles) -> Fragments:
        plan = self.plan
        warpgroup_idx = mma_warpgroup_idx()
        mma_scores, mma_dq = plan.mma_scores(), plan.mma_dq()
        mma_dv, mma_dk = plan.mma_keys(plan.tile_dv), plan.mma_keys(plan.tile_d)
        k_columns = wgmma.transposed(tiles.k)
        if plan.num_row_groups == 1:
            # the warpgroups share the columns of dQ
            tile = (plan.dq_cols, wgmma.ROWS_PER_WARPGROUP)
            k_columns = cute.local_tile(k_columns, tile, (warpgroup_idx, 0, None))

        return Fragments(
            scores_k=wgmma.operand_a(mma_scores, tiles.k),
            scores_q=wgmma.operand_b(mma_scores, tiles.q),
            scores_v=wgmma.operand_a(mma_scores, tiles.v),
            scores_do=wgmma.operand_b(mma_scores, tiles.do),
            dv_do=wgmma.operand_b(mma_dv, wgmma.transposed(tiles.do)),
            dk_q=wgmma.operand_b(mma_dk, wgmma.transposed(tiles.q)),
            dq_ds=wgmma.operand_a(mma_dq, wgmma.transposed(tiles.ds)),
            dq_k=wgmma.operand_b(mma_dq, k_columns),
        )

    def _own_keys(self, channels: Channels, tile: Int32) -> Int32:
        """Stage of this warpgroup's keys of a work tile."""
        return channels.kv.index(tile) * NUM_MMA_WARPGROUPS + mma_warpgroup_idx()

    def _statistics(self, stats: cute.Tensor, stage: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """LSE and delta of the queries that this thread's columns are, in shared memory."""
        first = wgmma.first_col_of(thread_in_warpgroup())
        layout = cute.make_layout((2, self.plan.tile_m // 8), stride=(1, 8))
        row = stats[None, stage].iterator
        return tuple(
            cute.make_tensor((row + (first + start)).align(8), layout)
            for start in (0, self.plan.tile_m)
        )

    @cute.jit
    def _store_ds(self, sdS: cute.Tensor, grads: cute.Tensor, stage: Int32):
        """Write this warpgroup's dS^T where the products of dQ read it."""
        plan = self.plan
        values = cute.recast_tensor(grads, plan.dtype)
        size = cute.size(values) // plan.num_row_groups
        layout = wgmma.make_accumulator(wgmma.ROWS_PER_WARPGROUP).layout
        for i in cutlass.range_constexpr(plan.num_row_groups):
            part = cute.make_tensor(values.iterator + i * size, layout)
            unit = self._ds_unit(stage, mma_warpgroup_idx(), i)
            store_rows(part, plan.mma_keys(wgmma.ROWS_PER_WARPGROUP), sdS[None, None, unit])
        cute.arch.fence_proxy("async.shared", space="cta")

    def _ds_unit(self, stage: Int32, warpgroup_idx: Int32, row_group: Int32) -> Int32:
        groups = self.plan.num_row_groups
        return (stage * NUM_MMA_WARPGROUPS + warpgroup_idx) * groups + row_group

    def _sync_both(self):
        """Wait for both MMA warpgroups."""
        cute.arch.barrier(
            barrier_id=Barrier.BOTH,
            number_of_threads=NUM_MMA_WARPGROUPS * THREADS_PER_WARPGROUP,
        )

    def _issue_dq(self, at: Fragments, mma_dq, acc_dQ, ds_stage: Int32, kv_stage: Int32):
        """Start this warpgroup's part of dQ = dS K, over the keys of both."""
        row_group = mma_warpgroup_idx() if self.plan.num_row_groups > 1 else Int32(0)
        pairs = []
        for w in range(NUM_MMA_WARPGROUPS):
            ds_tile = at.dq_ds[None, None, None, self._ds_unit(ds_stage, Int32(w), row_group)]
            k_tile = at.dq_k[None, None, None, kv_stage * NUM_MMA_WARPGROUPS + w]
            pairs.append((ds_tile, k_tile))
        wgmma.issue_sum(mma_dq, acc_dQ, pairs, False)

    @cute.jit
    def _stage_dq(self, tiles: Tiles, channel: Channel, block: Int32, acc_dQ: cute.Tensor):
        """Write this warp's part of a query block's dQ where the load warp adds it from."""
        groups = self.plan.dq_cols // 8
        lane = cute.arch.lane_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - Role.MMA
        quads = cute.make_tensor(acc_dQ.iterator, cute.make_layout((4, groups)))
        if block > 0:
            channel.wait(block - 1)
        for g in cutlass.range_constexpr(groups):
            cute.autovec_copy(quads[None, g], tiles.dq[None, lane, g, warp_idx])
        cute.arch.fence_proxy("async.shared", space="cta")
        # releasing the block's query tells the load warp
        cute.arch.sync_warp()

    @cute.jit
    def _scale(self, acc: cute.Tensor, factor: Float32):
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] * factor

    @cute.jit
    def _epilogue(
        self,
        operands: Operands,
        tiles: Tiles,
        channels: Channels,
        acc_dK: cute.Tensor,
        acc_dV: cute.Tensor,
        lengths: Lengths,
        tile: Int32,
        work: Work,
    ):
        """Store dK and dV of this warpgroup's keys, by way of where these lay."""
        plan = self.plan
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        stage = self._own_keys(channels, tile)
        is_packed = lengths.cu_seqlens_k is not None
        # the other warpgroup's dQ has read these keys as well
        self._sync_both()
        for acc, cols, smem in (
            (acc_dV, plan.tile_dv, tiles.v),
            (acc_dK, plan.tile_d, tiles.k),
        ):
            rounded = wgmma.rounded(acc, plan.dtype)
            store_rows(rounded, plan.mma_keys(cols), smem[None, None, stage])
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_warpgroup(Barrier.EPILOGUE)
        if warp_idx % WARPS_PER_WARPGROUP == 0:
            row = work.block * plan.tile_n + mma_warpgroup_idx() * wgmma.ROWS_PER_WARPGROUP
            for atom, target, cols, smem in (
                (operands.dv_atom, operands.dv, plan.tile_dv, tiles.v),
                (operands.dk_atom, operands.dk, plan.tile_d, tiles.k),
            ):
                gmem = tma.of_sequence(target, is_packed, work.batch_idx, work.offset_k, work.slot)
                dst, src = tma.tile_of(
                    atom, gmem, (work.head_idx, row), ((1, wgmma.ROWS_PER_WARPGROUP), cols), smem
                )
                cute.copy(atom, src[None, stage], dst)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        channels.kv.release(tile)
