"""FlashAttention forward for Hopper: O = softmax(mask(Q K^T * scale)) V.

A persistent CTA computes one work tile of tile_m query rows after another. Its roles:

| warps                   | role  | work                                                       |
|-------------------------|-------|------------------------------------------------------------|
| 0 of warpgroup 0        | load  | TMA of Q, K, V                                             |
| 1 of warpgroup 0        | plan  | choose work tiles and the key blocks they visit            |
| 2, 3 of warpgroup 0 (*) | paint | bits of the scores that count, for blocks that a mask cuts |
| warpgroups 1..tile_m/64 | mma   | 64 rows each: S = Q K^T, softmax, P V, output              |

(*) or four warps in a warpgroup of their own, after the others, where there is a mask_mod.

Channels (full/empty mbarrier pairs):

    plan ---------ring--> all          coordinates and lengths of the next work tile
    plan ---------walk--> load, paint  the key blocks it visits, up to 32 an entry
    load ---------q-----> mma          all query rows of a tile
    load ---------k-----> mma          one key block, and a word that says what it is
    load ---------v-----> mma          one value block
    paint --------bits--> mma          the bits of a key block that is cut

A stage of k is released when its S is complete, one of v when its P V is. There is one bit tile: it
is free again as soon as the mma warps hold its bits in registers, a whole block before they need
the next ones. Where tiles have three warpgroups or more, each passes over the cut blocks of which
its own 64 rows see nothing, without a product, and so does no more than a tile of 64 rows would.

S of the next key block is issued together with P V of this one, so the tensor cores have P V to do
while the exponentials of the next block are computed. At the end of a work tile the last P V goes
out together with the first S of the *next* tile, whose operands the load warp fetched meanwhile;
the output is scaled, staged in shared memory and stored by TMA under that product. Warpgroups take
turns to issue (FlashAttention-3's ping-pong), so that one computes exponentials while another
multiplies.

The mma warps know no mask: a block is cut or it is not, and if it is, a word of bits per row says
which scores count (`masks/rules.py`). A walk that sees nothing still visits one block, all of it
hidden: no role has a special case, the softmax of a row that saw nothing is O = 0, LSE = -inf.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from flash_mask_cute.core import softmax as softmax_math
from flash_mask_cute.core import tma
from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import (
    THREADS_PER_WARPGROUP,
    WARPS_PER_WARPGROUP,
    planning_rings,
    swizzled,
    thread_in_warpgroup,
)
from flash_mask_cute.core.lengths import Lengths, store_lse
from flash_mask_cute.core.mods import (
    RowPlace,
    ScoreModTraits,
    at_plain_distances,
    inside,
    modify_row,
)
from flash_mask_cute.core.operand_loads import N_BLOCK_SHIFT, Buffer, OperandLoads
from flash_mask_cute.core.query_schedule import QuerySchedule
from flash_mask_cute.core.softmax import OnlineSoftmax, QuadRows, ScoreArgs, ScoreScales
from flash_mask_cute.core.tile_scheduler import TileScheduler
from flash_mask_cute.core.walk_ring import KIND_MASK, OWN_KIND_SHIFT, Kind, WalkRing
from flash_mask_cute.core.work_ring import Work, WorkRing
from flash_mask_cute.masks import bit_tile
from flash_mask_cute.masks.intervals import Intervals
from flash_mask_cute.masks.query_walks import QueryWalks
from flash_mask_cute.masks.roles import paint_walks, plan_walks
from flash_mask_cute.masks.rules import MaskArgs, Share
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_fwd_plan import PAINTER_REGISTERS, Barrier, FwdPlan, MaxPolicy
from flash_mask_cute.sm90.score_replay import ScoreReplay
from flash_mask_cute.sm90.warpgroups import (
    Role,
    mma_warpgroup_idx,
    store_rows,
    sync_warpgroup,
    take_bits,
)

# Keys and values of the heads in flight should stay in the L2 cache of 50 MB. On an H200, 12 and
# 48 MB are slower for causal at 8K (docs/measured_facts.md).
L2_SHARE = 24 * 1024 * 1024


class Channels(NamedTuple):
    """How the roles of a CTA hand things on (see the top of this file)."""

    q: Channel
    k: Channel
    v: Channel
    bits: Channel
    ring: WorkRing
    walk: WalkRing


class Tiles(NamedTuple):
    """What lies in shared memory: operands with stages, a word per key stage, one bit tile, and for
    each 32 rows of it a word that is 0 where they see nothing."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    words: cute.Tensor
    bits: cute.Tensor
    seen: cute.Tensor


class FlashAttentionForwardSm90:
    """Forward kernel for Hopper, to be passed to `cute.compile`.

    :param dtype: cutlass.BFloat16 or cutlass.Float16, of Q, K, V and O
    :param head_dim, head_dim_v: multiples of 8 up to 256
    :param qhead_per_kvhead: query heads per KV head; fixed at compile time only with `pack_gqa`
    :param is_causal: bottom-right aligned causal masking
    :param is_local: the call's window sides apply
    :param pack_gqa: the query heads of a KV head (a divisor of 64) share a tile's rows
    :param tile_m, tile_n: query rows and keys of a tile
    :param num_stages: key and value blocks in flight
    :param num_threads: None, or what follows from the tiles; with mask_mod, the number without a
        warpgroup of painters asks for none
    :param mask_mod, score_mod: user callables (`core/mods.py`)
    :param has_aux_tensors: the call passes aux_tensors to them
    :param stages_q: query tiles in flight, 1 or 2
    :param share_qo: the output is staged in its query's shared memory
    :param intervals: the form of the column intervals that the call passes, or None
    :param skip_blocks: leave out hidden blocks and the masking of blocks that nothing cuts
    :param num_sms: CTAs to launch at most
    :param cta_pair: False
    :raises NotImplementedError: for an option of other kernels that this one does not have
    :raises ValueError: for a shape or configuration that cannot run
    """

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        head_dim: int,
        head_dim_v: int | None = None,
        qhead_per_kvhead: int = 1,
        is_causal: bool = False,
        is_local: bool = False,
        pack_gqa: bool = False,
        tile_m: int = 128,
        tile_n: int = 128,
        num_stages: int = 2,
        num_threads: int | None = None,
        Q_in_regs: bool = False,
        intra_wg_overlap: bool = True,
        mma_pv_is_rs: bool = True,
        mask_mod: Callable[..., Any] | None = None,
        score_mod: Callable[..., Any] | None = None,
        has_aux_tensors: bool = False,
        stages_q: int = 2,
        share_qo: bool = False,
        intervals: Intervals | None = None,
        skip_blocks: bool = True,
        num_sms: int = 132,
        cta_pair: bool = False,
    ):
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        plan = FwdPlan(
            dtype,
            head_dim,
            head_dim_v,
            tile_m,
            tile_n,
            qhead_per_kvhead if pack_gqa else 1,
            num_stages,
            stages_q,
            share_qo,
            cta_pair=cta_pair,
        )
        if mask_mod is not None and num_threads != plan.num_threads:
            # if there are registers for it
            painting = replace(plan, painter_warpgroup=True)
            plan = plan if painting.infeasible() else painting
        self.plan = plan
        refused = {
            "Q_in_regs": Q_in_regs,
            "intra_wg_overlap": not intra_wg_overlap,
            "mma_pv_is_rs": not mma_pv_is_rs,
        }
        for name, given in refused.items():
            if given:
                raise NotImplementedError(f"FlashAttentionForwardSm90 does not support {name}")
        if dtype not in (cutlass.BFloat16, cutlass.Float16):
            raise ValueError(f"dtype must be BFloat16 or Float16, got {dtype}")
        reason = self.plan.infeasible()
        if reason is not None:
            raise ValueError(reason)
        if num_threads not in (None, self.plan.num_threads):
            raise ValueError(
                f"num_threads is {self.plan.num_threads} for tile_m={tile_m}, got {num_threads}"
            )
        self.is_causal = is_causal
        self.is_local = is_local
        self.mask_mod = mask_mod
        self.score_mod = score_mod
        self.has_aux_tensors = has_aux_tensors
        self.intervals = intervals
        self.skip_blocks = skip_blocks
        self.num_sms = num_sms

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
        softmax_scale: Float32,
        stream,
        mCuSeqlensQ: cute.Tensor | None = None,
        mCuSeqlensK: cute.Tensor | None = None,
        mSeqUsedQ: cute.Tensor | None = None,
        mSeqUsedK: cute.Tensor | None = None,
        mPageTable: cute.Tensor | None = None,
        window_size_left: Int32 | None = None,
        window_size_right: Int32 | None = None,
        learnable_sink: cute.Tensor | None = None,
        blocksparse_tensors=None,
        aux_tensors=None,
        softcap: Float32 | None = None,
        tile_counter: cute.Tensor | None = None,
        column_tensors=None,
        block_size=None,
        block_bits=None,
        stored_bits: cute.Tensor | None = None,
    ):
        """Launch on `stream`.

        Shapes: mQ (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with
        mCuSeqlensQ; mK, mV alike; mO like mQ with head_dim_v; mLSE (batch, heads_q, seqlen_q) or
        (heads_q, total_q). tile_counter (2,) int32, zero before the launch and after it: CTAs take
        work tiles as they get free instead of in turns; launches that may overlap need one each.

        blocksparse_tensors: a `BlockSparseTensors` of blocks of block_size, a pair of multiples of
        tile_m and tile_n (None: of exactly these). column_tensors: the tensors `indices` and
        `bounds` (for tile_n) of column intervals. block_bits: `visible`, `full` and their two block
        sizes, of logical blocks in which tiles do not nest. stored_bits: bits of partial blocks, of
        all without lists, in place of a mask_mod (`masks/rules.py` describes all four).
        """
        if const_expr(mPageTable is not None):
            raise NotImplementedError("FlashAttentionForwardSm90 does not support mPageTable")
        plan = self.plan
        operands = tma.Operands.of_forward(
            plan, mQ, mK, mV, mO, mCuSeqlensQ is not None, mCuSeqlensK is not None
        )
        lengths = Lengths.of(mQ, mK, mCuSeqlensQ, mCuSeqlensK, mSeqUsedQ, mSeqUsedK)
        group_bytes = None
        if const_expr(self.is_causal or window_size_right is not None):
            group_bytes = L2_SHARE
        schedule = QuerySchedule.create(
            lengths, mQ, mK, (plan.head_dim, plan.head_dim_v), plan.tile_m, plan.packed_heads,
            group_bytes, self.num_sms,
        )  # fmt: skip
        scales = ScoreScales.create(softmax_scale, softcap, self.score_mod is not None)
        score_args = ScoreArgs(scales, learnable_sink)
        masks = MaskArgs.create(
            self,
            (window_size_left, window_size_right),
            column_tensors,
            schedule.num_heads,
            blocksparse_tensors,
            (plan.tile_m, plan.tile_n) if const_expr(block_size is None) else block_size,
            block_bits,
            aux_tensors,
            stored_bits,
        )
        self.kernel(operands, mLSE, lengths, score_args, masks, schedule, tile_counter).launch(
            grid=(schedule.grid, 1, 1),
            block=(plan.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        operands: tma.Operands,
        mLSE: cute.Tensor | None,
        lengths: Lengths,
        score_args: ScoreArgs,
        masks: MaskArgs,
        schedule: QuerySchedule,
        tile_counter: cute.Tensor | None,
    ):
        plan = self.plan
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom in (operands.q_atom, operands.k_atom, operands.v_atom, operands.o_atom):
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(plan.storage())
        mma_warps = plan.num_mma_warps
        # the load warp arrives with the bytes that TMA brings
        loads = 1
        ring, walk = planning_rings(storage, 1 + plan.num_painters, mma_warps, ascending=False)
        channels = Channels(
            q=Channel.create(storage.q_barriers.data_ptr(), plan.stages_q, loads, mma_warps),
            k=Channel.create(storage.k_barriers.data_ptr(), plan.stages_k, loads, mma_warps),
            v=Channel.create(storage.v_barriers.data_ptr(), plan.stages_kv, loads, mma_warps),
            bits=Channel.create(storage.bits_barriers.data_ptr(), 1, plan.num_painters, mma_warps),
            ring=ring,
            walk=walk,
        )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        tiles = Tiles(
            q=swizzled(storage.q, plan.layout_q()),
            k=swizzled(storage.k, plan.layout_k()),
            v=swizzled(storage.v, plan.layout_v()),
            o=swizzled(storage.q if const_expr(plan.share_qo) else storage.o, plan.layout_o()),
            words=storage.words.get_tensor(cute.make_layout(plan.stages_k)),
            bits=storage.bits.get_tensor(cute.make_layout((wgmma.COLUMNS.num_words, plan.tile_m))),
            seen=storage.seen.get_tensor(cute.make_layout(plan.tile_m // bit_tile.WORD)),
        )

        painter = warp_idx - plan.first_painter
        if warp_idx < Role.MMA:
            cute.arch.setmaxregister_decrease(plan.helper_registers)
            if warp_idx == Role.LOAD:
                operand_loads = OperandLoads(
                    operands,
                    Buffer(tiles.q, channels.q),
                    Buffer(tiles.k, channels.k),
                    Buffer(tiles.v, channels.v),
                    lengths,
                    schedule.heads_per_kv,
                    plan,
                    tiles.words,
                )
                operand_loads.stream(channels.ring, channels.walk)
            elif warp_idx == Role.PLAN:
                scheduler = TileScheduler(
                    schedule.params,
                    tile_counter,
                    self.is_causal or self.is_local,
                    lengths.cu_seqlens_q is not None,
                )
                rules = self._rules(masks, lengths)
                plan_walks(scheduler, rules, lengths, channels.ring, channels.walk)
            elif const_expr(not plan.painter_warpgroup):
                self.paint(painter, tiles, channels, lengths, masks)
        elif warp_idx < Role.MMA + mma_warps:
            cute.arch.setmaxregister_increase(plan.mma_registers)
            self.mma(operands, tiles, channels, mLSE, lengths, score_args, masks)
        elif const_expr(plan.painter_warpgroup):
            cute.arch.setmaxregister_decrease(PAINTER_REGISTERS)
            self.paint(painter, tiles, channels, lengths, masks)

    def paint(
        self, painter: Int32, tiles: Tiles, channels: Channels, lengths: Lengths, masks: MaskArgs
    ):
        """Painting warp: bits of a share of every tile's rows."""
        plan = self.plan
        share = Share.create(painter, plan.num_painters, plan.tile_m, wgmma.COLUMNS)
        rules = self._rules(masks, lengths)
        seen = tiles.seen if const_expr(self._may_pass_over(masks)) else None
        paint_walks(rules, share, tiles.bits, channels.bits, channels.ring, channels.walk, seen)

    def _rules(self, masks: MaskArgs, lengths: Lengths) -> QueryWalks:
        # of whole blocks, a score_mod is told rows without asking whether there are so many
        cuts_overhang = self.score_mod is not None
        return QueryWalks.of_kernel(self, wgmma.COLUMNS, masks, lengths, cuts_overhang)

    @cute.jit
    def mma(
        self,
        operands: tma.Operands,
        tiles: Tiles,
        channels: Channels,
        mLSE: cute.Tensor | None,
        lengths: Lengths,
        score_args: ScoreArgs,
        masks: MaskArgs,
    ):
        """MMA warpgroup: 64 query rows of every work tile."""
        plan = self.plan
        ring = channels.ring
        mma_qk, mma_pv = plan.mma_qk(), plan.mma_pv()
        tSrQ, tSrK = wgmma.operand_a(mma_qk, tiles.q), wgmma.operand_b(mma_qk, tiles.k)
        tOrV = wgmma.operand_b(mma_pv, tiles.v)
        first_S = wgmma.make_accumulator(plan.tile_n)
        acc_O = wgmma.make_accumulator(plan.tile_dv)
        probs = cute.make_rmem_tensor(cute.size(first_S) // 2, Int32)
        tOrP = wgmma.as_operand_a(cute.recast_tensor(probs, plan.dtype))
        traits = ScoreModTraits(computes_functions=False, factor=1.0)
        if const_expr(self.score_mod is not None):
            traits = ScoreModTraits.of(self.score_mod, masks.aux_tensors)
        has_cap = score_args.scales.cap is not None
        softmax = OnlineSoftmax.create(
            score_args.scales.scale_log2 * traits.factor,
            wgmma.ROWS_PER_THREAD,
            plan.dtype,
            QuadRows(uses_polynomial=has_cap or traits.computes_functions),
        )

        issue_scores = partial(self._issue_scores, channels, mma_qk, tSrQ, tSrK)
        first_scores = partial(self._first_scores, channels, issue_scores, first_S)
        first_row = mma_warpgroup_idx() * wgmma.ROWS_PER_WARPGROUP
        bits_of = partial(take_bits, tiles.bits, channels.bits, first_row)
        modifies = self.score_mod is not None or score_args.scales.cap is not None
        policy = plan.policy(modifies)
        # 1, since grids are one-dimensional, but the compiler does not know that
        opaque_one = Int32(cute.arch.grid_dim()[2])
        places_of = partial(self._places, ring, opaque_one - 1)
        modify = partial(self._modify, score_args.scales, masks.aux_tensors, traits.factor)
        replay = partial(self._replay, tiles, channels, opaque_one)
        may_pass_over = self._may_pass_over(masks)
        # the work tile, the key/value block and the cut block at hand, numbered from 0
        tile, block, cut = Int32(0), Int32(0), Int32(0)
        self._first_turn()
        is_valid = ring.wait(tile)
        first_scores(tile, block, is_valid)
        while is_valid:
            word = tiles.words[channels.k.index(block)]
            scores = wgmma.rows_by_cols(first_S)
            if const_expr(self.score_mod is None):
                modify(None, scores)
            elif ring.read(tile).has_scores:
                # a sequence without queries or keys has no position to ask about
                modify(places_of(tile, word, True), scores)
            sees = Boolean(True)
            if (word >> OWN_KIND_SHIFT) & KIND_MASK == Kind.CUT:
                channels.bits.wait(cut)
                if const_expr(may_pass_over):
                    sees = self._sees(tiles)
                bit_tile.hide_unset(scores, bits_of(cut, Boolean(True)))
                cut += 1
            channels.k.release(block)
            if sees:
                softmax.start(scores)
                softmax.accumulate(scores)
                wgmma.round_pairs(probs, first_S, plan.dtype)
            else:
                softmax.clear()
                probs.fill(0)
            if const_expr(plan.share_qo and plan.overlaps_tiles):  # noqa: SIM102 (while tracing)
                # by now the previous tile's output has left its query's place
                if tile > 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    channels.q.release(tile - 1)
            accumulate = Boolean(False)
            # key blocks passed over since the one whose probabilities are at hand
            passed = Int32(0)
            # whether fills that will be needed next are known to be there
            is_k_full, is_v_full, are_bits_full = (Boolean(False) for _ in range(3))
            following = word & KIND_MASK
            # The same loop for blocks that are cut and for others: one that asked every block would
            # have one branch more while P V is in flight, which ptxas answers by serialising all
            # products.
            while following != Kind.END:
                for kind in self._kinds(masks):
                    while following == kind:
                        channels.k.wait_unless(is_k_full, block + 1)
                        word = tiles.words[channels.k.index(block + 1)]
                        multiplies = True
                        if const_expr(kind == Kind.CUT and may_pass_over):
                            channels.bits.wait_unless(are_bits_full, cut)
                            are_bits_full = Boolean(True)
                            # P V is due where this block's values need its stage: the next keys
                            # come after them
                            multiplies = self._sees(tiles) | (passed + 1 == plan.stages_kv)
                        # no product is in flight at this branch, or ptxas would serialise all
                        if multiplies:
                            bits = None
                            if const_expr(kind == Kind.CUT):
                                bits = bits_of(cut, are_bits_full)
                                cut += 1
                            self._wait_turn()
                            # a tensor of its own: one that lived on across the loops would cost as
                            # many registers again
                            acc_S = wgmma.make_accumulator(plan.tile_n)
                            fresh_probs = cute.make_rmem_tensor(probs.layout, Int32)
                            issue_scores(acc_S, tile, block + 1)
                            # before a wait, so that what a score_mod makes of them can be, too
                            places = places_of(tile, word, kind == Kind.CUT)
                            channels.v.wait_unless(is_v_full, block - passed)
                            v_tile = tOrV[None, None, None, channels.v.index(block - passed)]
                            wgmma.issue(mma_pv, acc_O, tOrP, v_tile, accumulate)
                            self._pass_turn()
                            warpgroup.wait_group(1)
                            if const_expr(policy != MaxPolicy.REPLAY):
                                channels.k.release(block + 1)
                            scores = wgmma.rows_by_cols(acc_S)
                            modify(places, scores)
                            if const_expr(kind == Kind.CUT):
                                bit_tile.hide_unset(scores, bits)
                            may_be_first = kind == Kind.CUT and may_pass_over
                            replay_block = partial(replay, tile, block, bits)
                            factors = self._exponentials(
                                policy, may_be_first, softmax, scores, fresh_probs, replay_block
                            )
                            if const_expr(policy == MaxPolicy.REPLAY):
                                channels.k.release(block + 1)
                            # asked now, as the answer takes a while
                            is_k_full = channels.k.is_full(block + 2)
                            is_v_full = channels.v.is_full(block + 1)
                            if const_expr(kind == Kind.CUT):
                                are_bits_full = channels.bits.is_full(cut)
                            # The wait stands behind a branch, with a copy inside it, because ptxas
                            # moves it up to the start of its basic block: above the exponentials
                            # that should overlap P V.
                            if softmax_math.differ_from_one(factors):
                                warpgroup.wait_group(0)
                                softmax_math.rescale(wgmma.rows_by_cols(acc_O), factors)
                            warpgroup.wait_group(0)
                            self._release_values(channels, block, passed)
                            if const_expr(policy == MaxPolicy.SEARCH):
                                wgmma.round_pairs(probs, acc_S, plan.dtype)
                            else:
                                wgmma.copy_words(probs, fresh_probs, opaque_one)
                            accumulate = Boolean(True)
                            passed = Int32(0)
                        else:
                            self._pass_over(channels, block + 1, cut, passed)
                            is_k_full, are_bits_full = Boolean(False), Boolean(False)
                            cut += 1
                            passed += 1
                        block += 1
                        following = word & KIND_MASK

            # the last P V of this tile, and with it the first S of the next
            next_is_valid = ring.wait(tile + 1)
            if const_expr(not plan.share_qo):
                # before the turn: another warpgroup may wait, in its own, for the query that takes
                # this one's place
                channels.q.release(tile)
            channels.v.wait_unless(is_v_full, block - passed)
            self._wait_turn()
            v_tile = tOrV[None, None, None, channels.v.index(block - passed)]
            wgmma.issue(mma_pv, acc_O, tOrP, v_tile, accumulate)
            if const_expr(plan.overlaps_tiles):
                self._issue_next_scores(channels, issue_scores, first_S, tile, block, next_is_valid)
            self._pass_turn()
            warpgroup.wait_group(1 if const_expr(plan.overlaps_tiles) else 0)
            self._release_values(channels, block, passed)
            work = ring.read(tile)
            if const_expr(lengths.cu_seqlens_k is not None):  # noqa: SIM102 (while tracing)
                if not work.has_scores:
                    # what was loaded is a row of a neighbour
                    acc_O.fill(0.0)
            o_stage = mma_warpgroup_idx()
            if const_expr(plan.share_qo):
                o_stage += channels.q.index(tile) * plan.num_mma_warpgroups
            sO = tiles.o[None, None, o_stage]
            self._epilogue(operands, sO, acc_O, softmax, mLSE, lengths, score_args.sink, work)
            ring.release(tile)
            if const_expr(plan.overlaps_tiles):
                warpgroup.wait_group(0)
            else:
                # the output has left, and with it the query's last reader
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                channels.q.release(tile)
                first_scores(tile + 1, block + 1, next_is_valid)
            tile += 1
            block += 1
            is_valid = next_is_valid
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _kinds(self, masks: MaskArgs) -> tuple[Kind, ...]:
        """What blocks after a walk's first may be."""
        callables = (self.score_mod, self.mask_mod)
        lists = (masks.columns, masks.bits, masks.stored)
        can_cut = (self.is_causal, self.is_local, *callables, *lists)
        has_cut = any(x is not None and x is not False for x in can_cut)
        return (Kind.CUT, Kind.WHOLE) if has_cut or not self.skip_blocks else (Kind.WHOLE,)

    def _may_pass_over(self, masks: MaskArgs) -> bool:
        """Whether warpgroups pass over blocks; not where a walk's first block alone may be cut."""
        return self.plan.passes_over and Kind.CUT in self._kinds(masks)

    def _sees(self, tiles: Tiles) -> Boolean:
        """Whether a row of this warpgroup sees a key of the block whose bits have arrived."""
        first = mma_warpgroup_idx() * (wgmma.ROWS_PER_WARPGROUP // bit_tile.WORD)
        return (tiles.seen[first] | tiles.seen[first + 1]) != 0

    @cute.jit
    def _pass_over(self, channels: Channels, block: Int32, cut: Int32, passed: Int32):
        """Take key block `block`, which is cut, without a product, as `passed` before it were."""
        cute.arch.sync_warp()
        channels.bits.release(cut)
        channels.k.release(block)
        # the next warpgroup's turn comes from this one
        self._wait_turn()
        self._pass_turn()
        if passed > 0:
            # the values that go with the keys before these, which have come
            channels.v.wait(block - 1)
            channels.v.release(block - 1)

    @cute.jit
    def _release_values(self, channels: Channels, block: Int32, passed: Int32):
        """Release the values of a complete P V, and those of `block` if it was passed over last.

        `_pass_over` leaves them, because a tile's last values may come after the next query, which
        waits for this tile's end.
        """
        channels.v.release(block - passed)
        if passed > 0:
            channels.v.wait(block)
            channels.v.release(block)

    def _issue_scores(self, channels: Channels, mma_qk, tSrQ, tSrK, acc_S, tile, block):
        """Start S = Q K^T of this warpgroup's rows of a work tile and a key block."""
        q_stage = channels.q.index(tile) * self.plan.num_mma_warpgroups + mma_warpgroup_idx()
        q_tile = tSrQ[None, None, None, q_stage]
        k_tile = tSrK[None, None, None, channels.k.index(block)]
        wgmma.issue(mma_qk, acc_S, q_tile, k_tile, False)

    @cute.jit
    def _first_scores(self, channels, issue_scores, acc_S, tile, block, is_valid: Boolean):
        """S of a work tile's first key block, with nothing to overlap it."""
        # gives the registers a value on the other path, so that they need not live on from before
        acc_S.fill(0.0)
        if is_valid:
            channels.q.wait(tile)
            channels.k.wait(block)
            issue_scores(acc_S, tile, block)
            warpgroup.wait_group(0)

    @cute.jit
    def _issue_next_scores(self, channels, issue_scores, acc_S, tile, block, is_valid: Boolean):
        """Issue S of the next tile's first key block.

        Where there is no next tile the product is issued all the same, for nothing, on this tile's
        operands: a product under a branch would make the compiler serialise all of them.
        """
        if is_valid:
            tile += 1
            block += 1
            channels.q.wait(tile)
            channels.k.wait(block)
        issue_scores(acc_S, tile, block)

    @cute.jit
    def _exponentials(
        self,
        policy: cutlass.Constexpr[MaxPolicy],
        may_be_first: cutlass.Constexpr[bool],
        softmax: OnlineSoftmax,
        scores: cute.Tensor,
        fresh_probs: cute.Tensor,
        replay: Callable[[], ScoreReplay],
    ) -> tuple:
        """Probabilities of a block's scores, and their sums.

        They are left in the words of fresh_probs, with MaxPolicy.SEARCH in place of the scores.
        may_be_first: rows may well have seen nothing before this block. Returns the factor per row
        for what was accumulated before.
        """
        factors = (Float32(1.0), Float32(1.0))
        if const_expr(policy == MaxPolicy.SEARCH):
            tile_max = softmax.tile_max(scores)
            is_old = softmax.outgrown(tile_max)
            if softmax_math.any_in_warp(is_old):
                factors = softmax.renew(tile_max, is_old)
            softmax.accumulate(scores)
        else:
            keep_probs = partial(wgmma.keep_pair, fresh_probs, self.plan.dtype)
            if const_expr(policy == MaxPolicy.REPLAY or may_be_first):
                is_first = softmax.unseen()
                if softmax_math.any_in_warp(is_first):
                    softmax.renew(softmax.tile_max(scores), is_first)
            sums = softmax.exponentials(scores, keep_probs)
            is_old = softmax.overflowed(sums)
            if softmax_math.any_in_warp(is_old):
                if const_expr(policy == MaxPolicy.REPLAY):
                    factors, sums = replay().renew(softmax, is_old, sums, fresh_probs)
                else:
                    factors = softmax.renew(softmax.tile_max(scores), is_old)
                    sums = softmax.exponentials(scores, keep_probs)
            softmax.add(sums)
        return factors

    def _replay(self, tiles: Tiles, channels: Channels, opaque_one, tile, block, bits):
        """How to compute the scores of the key block after `block` once more."""
        q_stage = channels.q.index(tile) * self.plan.num_mma_warpgroups + mma_warpgroup_idx()
        sK = tiles.k[None, None, channels.k.index(block + 1)]
        return ScoreReplay(tiles.q[None, None, q_stage], sK, bits, opaque_one, self.plan.dtype)

    @cute.jit
    def _modify(
        self,
        scales: ScoreScales,
        aux_tensors,
        factor: cutlass.Constexpr[float],
        places: tuple | None,
        scores: cute.Tensor,
    ):
        """Soft-cap the scores of a key block, and let score_mod have them, with their `places`."""
        if const_expr(scales.cap is not None):
            for i in cutlass.range_constexpr(cute.size(scores)):
                scores[i] = scales.bounded(scores[i])
        if const_expr(self.score_mod is not None):
            rows, k_idx_of = places
            for r, row in enumerate(rows):
                modify_row(
                    self.score_mod, scores, r, scales.scale_mod, row, k_idx_of, aux_tensors, factor
                )

    def _places(self, ring: WorkRing, opaque_zero: Int32, tile, word, is_cut: bool) -> tuple | None:
        """Where the rows of a thread's scores lie, and the key of a column as a function.

        None where nobody asks. Rows and keys past the end are in cut blocks only.
        """
        if self.score_mod is None:
            return None
        work, n_block = ring.read(tile), word >> N_BLOCK_SHIFT
        rows, heads = self._tile_rows(work, thread_in_warpgroup()), self.plan.packed_heads
        first_k_idx = n_block * self.plan.tile_n + wgmma.first_col_of(thread_in_warpgroup())
        places = [RowPlace.of(work, row, heads) for row in rows]
        if is_cut:
            return places, lambda c: inside(first_k_idx + wgmma.col_offset(c), work)
        q_after, k_after = at_plain_distances(rows[0] // heads, first_k_idx, opaque_zero)
        places = [
            place._replace(q_idx=q_after(wgmma.row_offset(r) // heads))
            for r, place in enumerate(places)
        ]
        return places, lambda c: k_after(wgmma.col_offset(c))

    def _tile_rows(self, work: Work, thread: Int32):
        """Rows of the sequence (of its packed rows) that a thread's accumulator holds."""
        first = work.block * self.plan.tile_m + mma_warpgroup_idx() * wgmma.ROWS_PER_WARPGROUP
        return tuple(first + wgmma.row_of(thread, r) for r in range(wgmma.ROWS_PER_THREAD))

    @cute.jit
    def _epilogue(
        self,
        operands: tma.Operands,
        sO: cute.Tensor,
        acc_O: cute.Tensor,
        softmax: OnlineSoftmax,
        mLSE: cute.Tensor | None,
        lengths: Lengths,
        mSink: cute.Tensor | None,
        work: Work,
    ):
        """Scale the accumulator, store it (by way of sO) and the LSE of this warpgroup's rows."""
        plan = self.plan
        thread = thread_in_warpgroup()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rows = self._tile_rows(work, thread)
        q_idx = tuple(row // plan.packed_heads for row in rows)
        heads = tuple(work.head_idx * plan.packed_heads + row % plan.packed_heads for row in rows)
        sinks = None
        if const_expr(mSink is not None):
            sinks = tuple(mSink[head].to(Float32) for head in heads)
        output = wgmma.rows_by_cols(acc_O)
        for r, (factor, lse) in enumerate(softmax.finalize(sinks)):
            if const_expr(lengths.seqused_q is not None):
                used = q_idx[r] < work.seqlen_q
                lse = cutlass.select_(used, lse, -Float32.inf)
                for c in cutlass.range_constexpr(cute.size(output, mode=[1])):
                    output[r, c] = cutlass.select_(used, output[r, c] * factor, Float32(0.0))
            else:
                # adding 0 makes the zeros of a row that saw nothing positive, however they came
                for c in cutlass.range_constexpr(cute.size(output, mode=[1])):
                    output[r, c] = cute.math.fma(output[r, c], factor, Float32(0.0))
            if const_expr(mLSE is not None):  # noqa: SIM102 (decided while tracing)
                if thread % 4 == 0 and q_idx[r] < work.slot:
                    store_lse(mLSE, lengths, work, heads[r], q_idx[r], lse)

        # the previous tile's store must have read the staging memory, and all warps their queries
        is_storing_warp = warp_idx % WARPS_PER_WARPGROUP == 0
        if is_storing_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        sync_warpgroup(Barrier.EPILOGUE)
        store_rows(wgmma.rounded(acc_O, plan.dtype), plan.mma_pv(), sO)
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_warpgroup(Barrier.EPILOGUE)
        if is_storing_warp:
            tile_row = work.block * plan.tile_m + mma_warpgroup_idx() * wgmma.ROWS_PER_WARPGROUP
            first = (work.head_idx * plan.packed_heads, tile_row // plan.packed_heads)
            is_packed = lengths.cu_seqlens_q is not None
            gO = tma.of_sequence(operands.o, is_packed, work.batch_idx, work.offset_q, work.slot)
            dst, src = tma.tile_of(operands.o_atom, gO, first, (plan.row_tile, plan.tile_dv), sO)
            cute.copy(operands.o_atom, src, dst)
            cute.arch.cp_async_bulk_commit_group()

    # Turns: a warpgroup issues its products after the one before it has issued, in a circle.
    @cute.jit
    def _first_turn(self):
        if mma_warpgroup_idx() == self.plan.num_mma_warpgroups - 1:
            self._pass_turn()

    def _wait_turn(self):
        cute.arch.barrier(
            barrier_id=Barrier.TURN + mma_warpgroup_idx(),
            number_of_threads=2 * THREADS_PER_WARPGROUP,
        )

    def _pass_turn(self):
        warpgroup_idx = mma_warpgroup_idx()
        is_last = warpgroup_idx == self.plan.num_mma_warpgroups - 1
        following = cutlass.select_(is_last, Int32(0), warpgroup_idx + 1)
        cute.arch.barrier_arrive(
            barrier_id=Barrier.TURN + following, number_of_threads=2 * THREADS_PER_WARPGROUP
        )
