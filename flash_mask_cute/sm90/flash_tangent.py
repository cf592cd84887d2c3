"""Tangents of attention for Hopper: with P from the LSE of a forward, one more walk over its tiles.

dS = scale * (tQ K^T + Q tK^T); tO = sum of (P dS) V + P tV, minus mu O; mu = sum of P dS of a row
is the tangent of its LSE. Five products of a key block, and one accumulator. From all dS of a row
its mean over the row's first block is subtracted, and added to mu at the end. That changes nothing
but the rounding: a shift that all keys have in common costs no precision.

The roles and channels are those of `flash_fwd`, with two exceptions. Warp 2 loads what warp 0
loads, of the tangents, into the same fills, so each fill has two producers. One warp makes bits.

| in flight, in order             | what the warpgroup computes meanwhile             |
|---------------------------------|---------------------------------------------------|
| S of the next block             |                                                   |
| dS of it; tO of this block      | P of the next block, in place of S                |
| tO of this block                | P dS of the next block, in place of dS            |
|                                 | both rounded to the words that tO reads next      |
"""

from dataclasses import dataclass, fields
from operator import add
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from flash_mask_cute.core import tma
from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import (
    check_can_run,
    scheduler_rings,
    swizzled,
    thread_in_warpgroup,
)
from flash_mask_cute.core.exp2 import LOG2_E
from flash_mask_cute.core.lengths import Lengths, LseTensors, row_place
from flash_mask_cute.core.operand_loads import Buffer, OperandLoads
from flash_mask_cute.core.query_schedule import QuerySchedule
from flash_mask_cute.core.softmax import QUAD_ROWS, ScoreScales, quad_reduce
from flash_mask_cute.core.storage import elements
from flash_mask_cute.core.walk_ring import KIND_MASK, OWN_KIND_SHIFT, Kind
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.rules import bit_tile
from flash_mask_cute.rules.mask_rules import MaskArgs, WindowArgs
from flash_mask_cute.rules.stream_k_walks import schedule_forward
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_fwd import L2_SHARE, FlashAttentionForwardSm90
from flash_mask_cute.sm90.flash_fwd_epilogue import Epilogue
from flash_mask_cute.sm90.flash_fwd_mainloop import (
    BlockFacts,
    Channels,
    FwdSmem,
    KeyBlocks,
    tile_rows,
)
from flash_mask_cute.sm90.flash_fwd_traits import SCALAR_REGISTERS, FwdTraits
from flash_mask_cute.sm90.warpgroups import Role, mma_warpgroup_idx

# who loads a fill of Q, K or V: the warp of the tensor, and that of its tangent
LOADING_WARPS = 2


@dataclass(frozen=True)
class TangentTraits(FwdTraits):
    """`FwdTraits` of tiles that come with their tangents."""

    num_mask_warps = 1
    first_mask_warp = int(Role.MASK) + 1
    # scores become probabilities in place, and queries stay in shared memory
    keeps_scores = False
    query_steps = 0

    @property
    def registers_needed(self) -> int:
        """Of S and dS, P and P dS in 16 bits, tO, and scalars."""
        return 2 * (self.tile_n // 2 + self.tile_n // 4) + self.tile_dv // 2 + SCALAR_REGISTERS

    @property
    def stages_k(self) -> int:
        return self.stages_kv

    @property
    def _smem_without_spare_key(self) -> int:
        of_keys = self.stages_kv * (self.bytes_k + self.bytes_v)
        return super()._smem_without_spare_key + self.stages_q * self.bytes_q + of_keys

    def infeasible(self) -> str | None:
        if self.tile_m != 128 or self.share_qo:
            return f"tangents need tile_m 128 and share_qo False, got {self.tile_m}"
        return super().infeasible()

    def tangent_storage(self) -> cute.struct:
        """The shared memory for tangents, behind that of `storage`."""

        @cute.struct
        class TangentStorage:
            q: elements(self.dtype, self.layout_q())
            k: elements(self.dtype, self.layout_k())
            v: elements(self.dtype, self.layout_v())

        return TangentStorage


class Primal(NamedTuple):
    """Results of the forward. out (batch, row, head, d_v), or (row, head, d_v) if queries are
    packed; lse as in `LseTensors`."""

    out: cute.Tensor
    lse: cute.Tensor


class RowState(NamedTuple):
    """Of a thread's rows of a work tile. bias: what turns a scaled score into the exponent of its
    probability. centre: what is subtracted from dS. mu: this thread's sums of P (dS - centre)."""

    bias: cute.Tensor
    centre: cute.Tensor
    mu: cute.Tensor

    @staticmethod
    def create() -> "RowState":
        return RowState(*(cute.make_rmem_tensor((wgmma.ROWS_PER_THREAD,), Float32) for _ in "bcm"))


@dataclass(frozen=True)
class TangentBlocks(KeyBlocks):
    """`KeyBlocks` of tangents, whose tiles have the same layouts. softmax_scale: of scores."""

    tangents: FwdSmem | None = None
    rows: RowState | None = None
    softmax_scale: Float32 | None = None

    @staticmethod
    def of_tiles(
        traits: TangentTraits,
        tiles: FwdSmem,
        tangents: FwdSmem,
        channels: Channels,
        softmax_scale: Float32,
        can_be_cut: bool,
    ) -> "TangentBlocks":
        scales, facts = ScoreScales.create(softmax_scale, None, False), (can_be_cut, False, False)
        base = KeyBlocks.create(traits, None, tiles, channels, scales, None, BlockFacts(*facts))
        given = {x.name: getattr(base, x.name) for x in fields(KeyBlocks)}
        more = {"tangents": tangents, "rows": RowState.create(), "softmax_scale": softmax_scale}
        return TangentBlocks(**given, **more)

    # -- products -------------------------------------------------------------------------------

    def _issue_of_keys(self, acc: cute.Tensor, pairs: tuple, tile: Int32, block: Int32) -> None:
        """Start acc = the sum of the products of query and key tiles."""
        mma, k_stage = self.traits.mma_qk(), self.channels.k.index(block)
        operands = []
        for queries, keys in pairs:
            a = wgmma.operand_a(mma, queries)[None, None, None, self._query_stage(tile)]
            operands.append((a, wgmma.operand_b(mma, keys)[None, None, None, k_stage]))
        wgmma.issue_sum(mma, acc, operands, False)

    def issue_keys(
        self, acc_S: cute.Tensor, acc_dS: cute.Tensor, tile: Int32, block: Int32
    ) -> None:
        """Start S, and dS, of a key block."""
        own, of = self.tiles, self.tangents
        self._issue_of_keys(acc_S, ((own.q, own.k),), tile, block)
        self._issue_of_keys(acc_dS, ((of.q, own.k), (own.q, of.k)), tile, block)

    def issue_tangents(self, words: tuple, block: Int32, accumulate: bool | Boolean) -> None:
        """Start tO += P tV + (P dS) V of a block. words: of P, and of P dS."""
        mma, v_stage = self.traits.mma_pv(), self.channels.v.index(block)
        pairs = []
        for words_a, values in zip(words, (self.tangents.v, self.tiles.v), strict=True):
            operand = wgmma.words_as_operand_a(words_a, self.traits.dtype)
            pairs.append((operand, wgmma.operand_b(mma, values)[None, None, None, v_stage]))
        wgmma.issue_sum(mma, self.acc_O, pairs, accumulate)

    # -- steps ----------------------------------------------------------------------------------

    @cute.jit
    def start_rows(self, primal: Primal, lengths: Lengths, work: Work):
        """Begin a work tile."""
        for r, row in enumerate(tile_rows(self.traits, work, thread_in_warpgroup())):
            lse = Float32(0.0)
            if row < work.seqlen_q:
                lse = primal.lse[row_place(lengths, work, work.head_idx, row)]
            # a row that sees nothing has no probabilities, whatever the exponents begin with
            lse = cutlass.select_(lse == -Float32.inf, Float32(0.0), lse)
            self.rows.bias[r] = -lse * LOG2_E
            self.rows.mu[r] = Float32(0.0)

    @cute.jit
    def first_of_tile(self, tile: Int32, block: Int32, cut: Int32, words: tuple) -> tuple:
        """P and P dS of a work tile's first key block. Returns the number of the next partial
        block, and the kind of the next block."""
        acc_S, acc_dS = self._accumulators()
        self.wait_for_keys(block)
        self.issue_keys(acc_S, acc_dS, tile, block)
        warpgroup.wait_group(0)
        flags = self._block_flags(block)
        scores, dscores = wgmma.rows_by_cols(acc_S), wgmma.rows_by_cols(acc_dS)
        seen = cute.make_rmem_tensor((wgmma.ROWS_PER_THREAD,), Float32)
        seen.fill(float(self.traits.tile_n))
        if (flags >> OWN_KIND_SHIFT) & KIND_MASK == Kind.PARTIAL:
            self.channels.bits.wait(cut)
            bits = self._bits(cut, Boolean(True))
            bit_tile.hide_unset(scores, bits)
            bit_tile.hide_unset(dscores, bits, Float32(0.0))
            for r in cutlass.range_constexpr(wgmma.ROWS_PER_THREAD):
                count = Float32(0.0)
                for c in cutlass.range_constexpr(self.traits.tile_n // 4):
                    visible = scores[r, c] > -Float32.inf
                    count += cutlass.select_(visible, Float32(1.0), Float32(0.0))
                seen[r] = cute.arch.fmax(quad_reduce(count, add), Float32(1.0))
            cut += 1
        self.channels.k.release(block)
        for r in cutlass.range_constexpr(wgmma.ROWS_PER_THREAD):
            total = QUAD_ROWS.total([dscores[r, c] for c in range(cute.size(dscores, mode=[1]))])
            mean = quad_reduce(total, add) * cute.arch.rcp_approx(seen[r])
            self.rows.centre[r] = mean * self.softmax_scale
        self._exponentials_of(scores)
        self._times(scores, dscores)
        self._round(words, acc_S, acc_dS)
        return cut, flags & KIND_MASK

    @cute.jit
    def next_block(
        self,
        kind: cutlass.Constexpr[Kind],
        tile: Int32,
        block: Int32,
        cut: Int32,
        words: tuple,
        accumulate: Boolean,
    ) -> tuple:
        """tO of the block before, whose P and P dS are in `words`, and these of block `block`, of
        this kind. Returns as `first_of_tile`."""
        channels = self.channels
        self.wait_for_keys(block)
        flags = self._block_flags(block)
        bits = None
        if const_expr(kind == Kind.PARTIAL):
            bits = self._bits(cut, Boolean(False))
            cut += 1
        acc_S, acc_dS = self._accumulators()
        self.wait_scheduler_barrier()
        self.issue_keys(acc_S, acc_dS, tile, block)
        channels.v.wait(block - 1)
        self.issue_tangents(words, block - 1, accumulate)
        self.arrive_scheduler_barrier()
        # -- S is complete
        warpgroup.wait_group(2)
        scores, dscores = wgmma.rows_by_cols(acc_S), wgmma.rows_by_cols(acc_dS)
        if const_expr(kind == Kind.PARTIAL):
            bit_tile.hide_unset(scores, bits)
        self._exponentials_of(scores)
        # -- dS is complete
        warpgroup.wait_group(1)
        channels.k.release(block)
        if const_expr(kind == Kind.PARTIAL):
            bit_tile.hide_unset(dscores, bits, Float32(0.0))
        self._times(scores, dscores)
        # -- tO of the block before is complete
        warpgroup.wait_group(0)
        channels.v.release(block - 1)
        self._round(words, acc_S, acc_dS)
        return cut, flags & KIND_MASK

    @cute.jit
    def last_of_tile(self, block: Int32, words: tuple, accumulate: Boolean):
        """tO of a work tile's last block."""
        self.channels.v.wait(block)
        self.wait_scheduler_barrier()
        self.issue_tangents(words, block, accumulate)
        self.arrive_scheduler_barrier()
        warpgroup.wait_group(0)
        self.channels.v.release(block)

    def _accumulators(self) -> tuple[cute.Tensor, cute.Tensor]:
        """Of S and dS, (64, tile_n) of the warpgroup."""
        tile_n = self.traits.tile_n
        return wgmma.make_accumulator(tile_n), wgmma.make_accumulator(tile_n)

    def _exponentials_of(self, scores: cute.Tensor) -> None:
        """Probabilities in place of scores."""
        scale_log2 = self.scales.scale_log2
        for r in range(wgmma.ROWS_PER_THREAD):
            for c in range(cute.size(scores, mode=[1])):
                exponent = cute.math.fma(scores[r, c], scale_log2, self.rows.bias[r])
                scores[r, c] = cute.math.exp2(exponent, fastmath=True)

    def _times(self, probs: cute.Tensor, dscores: cute.Tensor) -> None:
        """P (dS - centre) in place of dS, and its sums."""
        for r in range(wgmma.ROWS_PER_THREAD):
            terms = []
            for c in range(cute.size(probs, mode=[1])):
                centred = cute.math.fma(dscores[r, c], self.softmax_scale, -self.rows.centre[r])
                dscores[r, c] = probs[r, c] * centred
                terms.append(dscores[r, c])
            self.rows.mu[r] += QUAD_ROWS.total(terms)

    def _round(self, words: tuple, acc_S: cute.Tensor, acc_dS: cute.Tensor) -> None:
        for target, acc in zip(words, (acc_S, acc_dS), strict=True):
            wgmma.round_pairs(target, acc, self.traits.dtype)


@dataclass(frozen=True)
class TangentEpilogue(Epilogue):
    """The destination of tO, and of mu in place of LSE."""

    primal: Primal | None = None

    @cute.jit
    def _finish(self, blocks: TangentBlocks, sO: cute.Tensor, work: Work):
        traits, lengths, thread = self.traits, self.lengths, thread_in_warpgroup()
        output = wgmma.rows_by_cols(blocks.acc_O)
        for r, row in enumerate(tile_rows(traits, work, thread)):
            used = row < work.seqlen_q
            mu, sees = quad_reduce(blocks.rows.mu[r], add), Boolean(False)
            if used:
                lse = self.primal.lse[row_place(lengths, work, work.head_idx, row)]
                sees = lse > -Float32.inf
                self._subtract(output, r, mu, self._primal_row(work, row), thread)
            for c in cutlass.range_constexpr(cute.size(output, mode=[1])):
                output[r, c] = cutlass.select_(used, output[r, c], Float32(0.0))
            mu = cutlass.select_(sees, mu + blocks.rows.centre[r], Float32(0.0))
            if self._writes_rows(thread) & self._is_row(work, row):
                self.lse.store(lengths, work, work.head_idx, row, mu, None)
        self._store_output(sO, blocks.acc_O, work)

    def _primal_row(self, work: Work, row: Int32) -> cute.Tensor:
        if self.lengths.cu_seqlens_q is None:
            return self.primal.out[work.batch_idx, row, work.head_idx, None]
        return self.primal.out[work.offset_q + row, work.head_idx, None]

    def _subtract(
        self, output: cute.Tensor, r: int, mu: Float32, columns: cute.Tensor, thread: Int32
    ) -> None:
        """Subtract mu O from a row of the accumulator; columns: the row of O."""
        pair = cute.make_rmem_tensor((2,), columns.element_type)
        for c in range(0, cute.size(output, mode=[1]), 2):
            if wgmma.col_offset(c) < self.traits.head_dim_v:
                column = wgmma.first_col_of(thread) + wgmma.col_offset(c)
                cute.autovec_copy(cute.local_tile(columns, (2,), (column // 2,)), pair)
                for i in range(2):
                    output[r, c + i] -= mu * pair[i].to(Float32)


class AttentionTangentSm90(FlashAttentionForwardSm90):
    """Tangents of attention for Hopper, for `cute.compile`.

    Arguments as `FlashAttentionForwardSm90`, of which it has no score_mod, splits, pages, fp8,
    packed heads, lists per warpgroup and cached bias rows; head_dim_v is head_dim, up to 128."""

    def __post_init__(self) -> None:
        self.traits = TangentTraits(
            self.dtype,
            self.head_dim,
            self.head_dim,
            self.tile_m,
            self.tile_n,
            packed_heads=1,
            stages_kv=self.num_stages,
            stages_q=self.stages_q,
            share_qo=self.share_qo,
            cta_pair=self.cta_pair,
        )
        check_can_run(self.traits)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mTQ: cute.Tensor,
        mTK: cute.Tensor,
        mTV: cute.Tensor,
        mTO: cute.Tensor,
        mTLSE: cute.Tensor,
        softmax_scale: Float32,
        stream,
        mCuSeqlensQ: cute.Tensor | None = None,
        mCuSeqlensK: cute.Tensor | None = None,
        mSeqUsedQ: cute.Tensor | None = None,
        mSeqUsedK: cute.Tensor | None = None,
        window_size_left: Int32 | None = None,
        window_size_right: Int32 | None = None,
        blocksparse_tensors=None,
        aux_tensors=None,
        tile_counter: cute.Tensor | None = None,
        column_tensors=None,
        block_size=None,
        block_bits=None,
        mQStart: cute.Tensor | Int32 | None = None,
    ):
        """Launch on `stream`. mO and mLSE are results of a forward of mQ, mK and mV. mTQ, mTK and
        mTV are like these, and mTO and mTLSE, which are written, like those. Other arguments as
        those of the forward."""
        traits, of_sequences = self.traits, (mCuSeqlensQ, mCuSeqlensK, mSeqUsedQ, mSeqUsedK)
        lengths = Lengths.create(mQ, mK, *of_sequences, mQStart, self.shared_kv)
        operands = tma.Operands.of_forward(traits, mQ, mK, mV, mTO, lengths)
        tangents = tma.Operands.of_forward(traits, mTQ, mTK, mTV, mTO, lengths)
        group_bytes = None
        if const_expr(self.is_causal or window_size_right is not None):
            # tangents take as much of the L2 cache
            group_bytes = L2_SHARE // 2
        schedule = QuerySchedule.create(lengths, mQ, mK, traits, self.num_sms, group_bytes)
        masks = MaskArgs.create(
            self, WindowArgs(window_size_left, window_size_right, None), column_tensors,
            schedule.num_heads,
            None if const_expr(blocksparse_tensors is None) else (blocksparse_tensors, block_size),
            block_bits, aux_tensors,
        )  # fmt: skip
        self.kernel_of_tangents(
            operands, tangents, Primal(mO, mLSE), LseTensors(mTLSE, None),
            lengths, softmax_scale, masks, schedule, tile_counter,
        ).launch(
            grid=(schedule.grid, 1, 1),
            block=(traits.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel_of_tangents(
        self,
        operands: tma.Operands,
        tangents: tma.Operands,
        primal: Primal,
        lse: LseTensors,
        lengths: Lengths,
        softmax_scale: Float32,
        masks: MaskArgs,
        schedule: QuerySchedule,
        tile_counter: cute.Tensor | None,
    ):
        traits = self.traits
        # -- shared memory and channels
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom in (*operands.atoms, *tangents.atoms[:-1]):
                cpasync.prefetch_descriptor(atom)
        allocator = cutlass.memory.SmemAllocator()
        storage = allocator.allocate(traits.storage())
        storage_of_tangents = allocator.allocate(traits.tangent_storage())
        mma_warps = traits.num_mma_warps
        ring, walk = scheduler_rings(
            storage, (LOADING_WARPS + traits.num_mask_warps, mma_warps), ascending=False,
            uncut_first=self._has_cutters(masks), fields=lengths.work_fields,
        )  # fmt: skip

        def of_values(barriers: Any, stages: int) -> Channel:
            return Channel.create(barriers.data_ptr(), stages, LOADING_WARPS, mma_warps)

        channels = Channels(
            q=of_values(storage.q_barriers, traits.stages_q),
            k=of_values(storage.k_barriers, traits.stages_k),
            v=of_values(storage.v_barriers, traits.stages_kv),
            bits=Channel.create(
                storage.bits_barriers.data_ptr(), 1, traits.num_mask_warps, mma_warps
            ),
            ring=ring,
            walk=walk,
        )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        tiles = self._tiles(storage, None)
        twins = tiles._replace(
            q=swizzled(storage_of_tangents.q, traits.layout_q()),
            k=swizzled(storage_of_tangents.k, traits.layout_k()),
            v=swizzled(storage_of_tangents.v, traits.layout_v()),
        )
        # -- roles
        if warp_idx < Role.MMA:
            cute.arch.setmaxregister_decrease(traits.helper_registers)
            if warp_idx == Role.LOAD:
                self._loads(operands, tiles, channels, lengths, schedule, tiles.block_flags)
            elif warp_idx == Role.SCHEDULE:
                rules, rings = self._rules(masks, lengths), (channels.ring, channels.walk)
                schedule_forward(self, rules, rings, lengths, schedule, tile_counter, None)
            elif warp_idx == Role.MASK:
                self._loads(tangents, twins, channels, lengths, schedule, None)
            else:
                mask_warp = warp_idx - traits.first_mask_warp
                self.mask(mask_warp, tiles, channels, lengths, masks)
        else:
            cute.arch.setmaxregister_increase(traits.mma_registers)
            epilogue = TangentEpilogue(
                traits, operands, lse, lengths, None, None, None, False, None, primal
            )
            self.mma_of_tangents(epilogue, tiles, twins, channels, softmax_scale, masks)

    def _loads(
        self, operands: tma.Operands, tiles: FwdSmem, channels: Channels, lengths: Lengths,
        schedule: QuerySchedule, words: cute.Tensor | None,
    ) -> None:  # fmt: skip
        """A loading warp: the tensors, or their tangents."""
        buffers = (Buffer(getattr(tiles, x), getattr(channels, x)) for x in "qkv")
        loader = OperandLoads(
            operands, *buffers, lengths, schedule.heads_per_kv, self.traits, words
        )
        loader.stream(channels.ring, channels.walk)

    @cute.jit
    def mma_of_tangents(
        self,
        epilogue: TangentEpilogue,
        tiles: FwdSmem,
        twins: FwdSmem,
        channels: Channels,
        softmax_scale: Float32,
        masks: MaskArgs,
    ):
        """MMA warpgroup: 64 query rows of every work tile."""
        traits, ring = self.traits, channels.ring
        blocks = TangentBlocks.of_tiles(
            traits, tiles, twins, channels, softmax_scale, self._can_be_cut(masks)
        )
        # of P and P dS, (64, tile_n) as pairs
        words = blocks.make_probs(), blocks.make_probs()
        tile, block, cut = Int32(0), Int32(0), Int32(0)
        blocks.start_scheduler_barrier()
        while ring.wait(tile):
            work = ring.read(tile)
            blocks.start_rows(epilogue.primal, epilogue.lengths, work)
            channels.q.wait(tile)
            cut, following = blocks.first_of_tile(tile, block, cut, words)
            accumulate = Boolean(False)
            while following != Kind.END:
                for kind in blocks.kinds:
                    while following == kind:
                        block += 1
                        cut, following = blocks.next_block(
                            kind, tile, block, cut, words, accumulate
                        )
                        accumulate = Boolean(True)
            channels.q.release(tile)
            blocks.last_of_tile(block, words, accumulate)
            work = ring.read(tile)
            if const_expr(epilogue.lengths.keys_may_be_absent):  # noqa: SIM102 (while tracing)
                if not work.has_scores:
                    # what was loaded is a row that is not in use, or a neighbour's
                    blocks.acc_O.fill(0.0)
            epilogue.run(blocks, tiles.o[None, None, mma_warpgroup_idx()], work)
            ring.release(tile)
            tile += 1
            block += 1
        cute.arch.cp_async_bulk_wait_group(0, read=True)
