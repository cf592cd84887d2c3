"""Tangents of attention for Hopper: with P from the LSE of a forward, one more walk over its tiles.

dS = scale * (tQ K^T + Q tK^T); tO = sum of (P dS) V + P tV, minus mu O; mu = sum of P dS of a row
is the tangent of its LSE. Five products of a key block, and one accumulator. From all dS of a row
its mean over the first block in which the row sees a key is subtracted, and added to mu at the end.
That changes nothing but the rounding: a shift that all keys have in common costs no precision.

All is as in `flash_fwd`, but one of the two mask warps loads what the load warp loads, of the
tangents, into the same fills. The stages of tangents follow those of their tensor. S and dS of a
block are issued with tO of the block before. P is computed under both others, P dS under tO.
"""

from dataclasses import dataclass, fields, replace
from operator import add
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from flash_mask_cute.core import tma
from flash_mask_cute.core.cta import thread_in_warpgroup
from flash_mask_cute.core.exp2 import LN_2, LOG2_E
from flash_mask_cute.core.lengths import Lengths, row_place
from flash_mask_cute.core.operand_loads import Buffer, OperandLoads
from flash_mask_cute.core.softmax import QUAD_ROWS, ScoreScales, quad_reduce
from flash_mask_cute.core.walk_ring import KIND_MASK, OWN_KIND_SHIFT, Kind
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.rules import bit_tile
from flash_mask_cute.rules.mask_rules import MaskArgs
from flash_mask_cute.sm90 import flash_fwd_mainloop as mainloop
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_fwd import FlashAttentionForwardSm90
from flash_mask_cute.sm90.flash_fwd_epilogue import Epilogue
from flash_mask_cute.sm90.flash_fwd_mainloop import Channels, FwdSmem, KeyBlocks
from flash_mask_cute.sm90.flash_fwd_traits import SCALAR_REGISTERS, FwdTraits
from flash_mask_cute.sm90.warpgroups import mma_warpgroup_idx


@dataclass(frozen=True)
class TangentTraits(FwdTraits):
    """`FwdTraits` of tiles that come with their tangents, in as many stages more. Scores become
    probabilities in place, and queries stay in shared memory."""

    num_mask_warps, keeps_scores, query_steps = 1, False, 0

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

    def _twice(self) -> "TangentTraits":
        return replace(self, stages_q=2 * self.stages_q, stages_kv=2 * self.stages_kv)

    def layout_q(self) -> cute.ComposedLayout:
        return FwdTraits.layout_q(self._twice())

    def layout_k(self) -> cute.ComposedLayout:
        return FwdTraits.layout_k(self._twice())

    def layout_v(self) -> cute.ComposedLayout:
        return FwdTraits.layout_v(self._twice())

    def infeasible(self) -> str | None:
        if self.tile_m != 128 or self.share_qo or self.mask_warpgroup:
            return "tangents need tile_m 128, memory for the output, and no more warpgroups"
        return super().infeasible()


class TangentTensors(NamedTuple):
    """In the place of the destination of splits: tangents of Q, K and V, and of the forward O
    (batch, row, head, d), or (row, head, d) if queries are packed, and LSE. operands: of TMA."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    operands: tma.Operands | None = None

    num_splits = split_blocks = None

    def grid(self, by_tiles: Int32) -> Int32:
        return by_tiles


@dataclass(frozen=True)
class TangentBlocks(KeyBlocks):
    """`KeyBlocks` with the state of a thread's rows: what turns scores to base 2 into exponents of
    probabilities, what is subtracted from dS, how many keys were visible when it was found (0: it
    is not known yet), and sums of P (dS - centre). words: of P dS and P."""

    bias: cute.Tensor | None = None
    centre: cute.Tensor | None = None
    seen: cute.Tensor | None = None
    mu: cute.Tensor | None = None
    words: tuple[cute.Tensor, cute.Tensor] | None = None

    @staticmethod
    def of(blocks: KeyBlocks) -> "TangentBlocks":
        given = [getattr(blocks, x.name) for x in fields(KeyBlocks)]
        rows = (cute.make_rmem_tensor((wgmma.ROWS_PER_THREAD,), Float32) for _ in range(4))
        return TangentBlocks(*given, *rows, (blocks.make_probs(), blocks.make_probs()))

    # -- products -------------------------------------------------------------------------------

    def issue_keys(self, acc_S: cute.Tensor, acc_dS: cute.Tensor, tile: Int32, block: Int32):
        """Start S = Q K^T, and dS = tQ K^T + Q tK^T, of a key block."""
        mma, traits = self.traits.mma_qk(), self.traits
        q, k = wgmma.operand_a(mma, self.tiles.q), wgmma.operand_b(mma, self.tiles.k)
        of_q, of_k = self._query_stage(tile), self.channels.k.index(block)
        of_tq, of_tk = of_q + traits.stages_q * traits.q_boxes, of_k + traits.stages_k
        q, tq = (q[None, None, None, stage] for stage in (of_q, of_tq))
        k, tk = (k[None, None, None, stage] for stage in (of_k, of_tk))
        wgmma.issue(mma, acc_S, q, k, False)
        wgmma.issue_sum(mma, acc_dS, [(tq, k), (q, tk)], False)

    def issue_values(self, block: Int32, accumulate: Boolean) -> None:
        """Start tO += (P dS) V + P tV of a block."""
        mma, traits, stage = self.traits.mma_pv(), self.traits, self.channels.v.index(block)
        pairs, values = [], wgmma.operand_b(mma, self.tiles.v)
        for words, twin in zip(self.words, (0, traits.stages_kv), strict=True):
            operand = wgmma.words_as_operand_a(words, traits.dtype)
            pairs.append((operand, values[None, None, None, stage + twin]))
        wgmma.issue_sum(mma, self.acc_O, pairs, accumulate)

    # -- steps ----------------------------------------------------------------------------------

    @cute.jit
    def begin(self, given: TangentTensors, lengths: Lengths, work: Work):
        """Begin a work tile."""
        for r, row in enumerate(mainloop.tile_rows(self.traits, work, thread_in_warpgroup())):
            lse = Float32(0.0)
            if row < work.seqlen_q:
                lse = given.lse[row_place(lengths, work, work.head_idx, row)]
            # a row that sees nothing has no probabilities, whatever the exponents begin with
            self.bias[r] = cutlass.select_(lse == -Float32.inf, Float32(0.0), -lse * LOG2_E)
            for of_row in (self.centre, self.seen, self.mu):
                of_row[r] = Float32(0.0)

    @cute.jit
    def visit(
        self, kind: cutlass.Constexpr[Kind | None], tile: Int32, block: Int32, cut: Int32,
        accumulate: Boolean, finds_centre: cutlass.Constexpr[bool] = True,
    ) -> tuple:  # fmt: skip
        """P and P dS of a key block of this kind, and tO of the block before. kind None: the first
        block of a walk. Returns the number of the next partial block, and the next block's kind."""
        is_first, channels = const_expr(kind is None), self.channels
        self.wait_for_keys(block)
        flags, bits = self._block_flags(block), None
        if const_expr(kind == Kind.PARTIAL):
            bits = self._bits(cut, Boolean(False))
            cut += 1
        elif const_expr(is_first):
            bits = tuple(Int32(bit_tile.ALL) for _ in range(wgmma.ROWS_PER_THREAD))
            if (flags >> OWN_KIND_SHIFT) & KIND_MASK == Kind.PARTIAL:
                bits = self._bits(cut, Boolean(False))
                cut += 1
        acc_S, acc_dS = (wgmma.make_accumulator(self.traits.tile_n) for _ in range(2))
        scores, dscores = wgmma.rows_by_cols(acc_S), wgmma.rows_by_cols(acc_dS)
        if const_expr(is_first):
            self.issue_keys(acc_S, acc_dS, tile, block)
        else:
            self.wait_scheduler_barrier()
            self.issue_keys(acc_S, acc_dS, tile, block)
            channels.v.wait(block - 1)
            self.issue_values(block - 1, accumulate)
            self.arrive_scheduler_barrier()
        warpgroup.wait_group(1 if const_expr(is_first) else 2)
        if const_expr(bits is not None):
            bit_tile.hide_unset(scores, bits)
        self._exponentiate(scores)
        warpgroup.wait_group(0 if const_expr(is_first) else 1)
        channels.k.release(block)
        if const_expr(bits is not None):
            bit_tile.hide_unset(dscores, bits, Float32(0.0))
        if const_expr(finds_centre):
            self._find_centre(dscores, bits)
        self._multiply_dscores(scores, dscores)
        if const_expr(not is_first):
            warpgroup.wait_group(0)
            channels.v.release(block - 1)
        for words, acc in zip(self.words, (acc_dS, acc_S), strict=True):
            wgmma.round_pairs(words, acc, self.traits.dtype)
        return cut, flags & KIND_MASK

    @cute.jit
    def end(self, block: Int32, accumulate: Boolean):
        """tO of the last block of a work tile."""
        self.channels.v.wait(block)
        self.wait_scheduler_barrier()
        self.issue_values(block, accumulate)
        self.arrive_scheduler_barrier()
        warpgroup.wait_group(0)
        self.channels.v.release(block)

    def _exponentiate(self, scores: cute.Tensor) -> None:
        """Probabilities in place of scores."""
        for r in range(wgmma.ROWS_PER_THREAD):
            for c in range(cute.size(scores, mode=[1])):
                exponent = cute.math.fma(scores[r, c], self.scales.scale_log2, self.bias[r])
                scores[r, c] = cute.math.exp2(exponent, fastmath=True)

    def _find_centre(self, dscores: cute.Tensor, bits: tuple | None) -> None:
        """The mean of the visible dS of each row that has seen no key before. bits None: it sees
        all of these."""
        columns = cute.size(dscores, mode=[1])
        for r in range(wgmma.ROWS_PER_THREAD):
            visible = Int32(columns)
            if bits is not None:
                visible = Int32(cute.arch.popc(bits[r] & ((1 << columns) - 1)))
            count = quad_reduce(visible.to(Float32), add)
            total = quad_reduce(QUAD_ROWS.total([dscores[r, c] for c in range(columns)]), add)
            mean = total * cute.arch.rcp_approx(cute.arch.fmax(count, Float32(1.0)))
            mean *= self.scales.scale_log2 * LN_2
            self.centre[r] = cutlass.select_(self.seen[r] == 0.0, mean, self.centre[r])
            self.seen[r] += count

    def _multiply_dscores(self, probs: cute.Tensor, dscores: cute.Tensor) -> None:
        """P (dS - centre) in place of dS, and its sums."""
        scale = self.scales.scale_log2 * LN_2
        for r in range(wgmma.ROWS_PER_THREAD):
            terms = []
            for c in range(cute.size(probs, mode=[1])):
                centred = cute.math.fma(dscores[r, c], scale, -self.centre[r])
                terms.append(probs[r, c] * centred)
                dscores[r, c] = terms[-1]
            self.mu[r] += QUAD_ROWS.total(terms)


@dataclass(frozen=True)
class TangentEpilogue(Epilogue):
    """The destination of tO, and of mu in place of LSE. partials: `TangentTensors`."""

    @cute.jit
    def _finish(self, blocks: TangentBlocks, sO: cute.Tensor, work: Work):
        traits, given, lengths = self.traits, self.partials, self.lengths
        thread, output = thread_in_warpgroup(), wgmma.rows_by_cols(blocks.acc_O)
        columns = cute.size(output, mode=[1])
        for r, row in enumerate(mainloop.tile_rows(traits, work, thread)):
            mu, result = quad_reduce(blocks.mu[r], add), Float32(0.0)
            if row < work.seqlen_q:
                lse = given.lse[row_place(lengths, work, work.head_idx, row)]
                if const_expr(self.sink is not None):
                    # probabilities that have no values, and from whose dS nothing was subtracted
                    logit = self.sink[work.head_idx].to(Float32)
                    of_sink = cute.math.exp2((logit - lse) * LOG2_E, fastmath=True)
                    mu -= of_sink * blocks.centre[r]
                if lse > -Float32.inf:
                    result = mu + blocks.centre[r]
                place = work.batch_idx, row, work.head_idx
                if const_expr(lengths.cu_seqlens_q is not None):
                    place = work.offset_q + row, work.head_idx
                out, pair = given.out[(*place, None)], cute.make_rmem_tensor((2,), traits.dtype)
                for c in cutlass.range_constexpr(0, columns, 2):
                    # columns come in groups of 8, as those of the output do
                    if const_expr(wgmma.col_offset(c) < traits.head_dim_v):
                        column = wgmma.first_col_of(thread) + wgmma.col_offset(c)
                        cute.autovec_copy(cute.local_tile(out, (2,), (column // 2,)), pair)
                        output[r, c] -= mu * pair[0].to(Float32)
                        output[r, c + 1] -= mu * pair[1].to(Float32)
            else:
                for c in cutlass.range_constexpr(columns):
                    output[r, c] = Float32(0.0)
            if self._writes_rows(thread) & self._is_row(work, row):
                self.lse.store(lengths, work, work.head_idx, row, result, None)
        self._store_tile(sO, blocks.acc_O, work)


class AttentionTangentSm90(FlashAttentionForwardSm90):
    """Kernel of tangents for Hopper. Arguments are those of the forward, without score_mod, splits,
    pages, fp8, packed heads and lists per warpgroup. mO and mLSE are the tangents of the results,
    mPartials the first fields of `TangentTensors`."""

    traits_type, query_loaders = TangentTraits, 2
    destination_of = staticmethod(lambda given, split, has_low: TangentTensors(*given))

    def with_operands(self, partials: TangentTensors, lengths: Lengths, mO: cute.Tensor):
        operands = tma.Operands.of_forward(self.traits, *partials[:3], mO, lengths)
        return partials._replace(operands=operands)

    def _num_loading_warps(self) -> int:
        return self.query_loaders

    @cute.jit
    def load_and_mask(
        self, loader: OperandLoads, mask_warp: Int32, tiles: FwdSmem, channels: Channels,
        lengths: Lengths, masks: MaskArgs, partials: TangentTensors,
    ):  # fmt: skip
        """The first mask warp loads tangents, the other one makes bits."""
        if mask_warp == 0:
            traits, buffers = self.traits, {}
            stages = traits.q_boxes * traits.stages_q, traits.stages_k, traits.stages_kv
            for name, count in zip("qkv", stages, strict=True):
                twins = cute.domain_offset((0, 0, count), getattr(tiles, name))
                buffers[name] = Buffer(twins, getattr(channels, name))
            twin = replace(loader, operands=partials.operands, words=None, **buffers)
            twin.stream(channels.ring, channels.walk)
        else:
            self.mask(mask_warp - 1, tiles, channels, lengths, masks)

    @cute.jit
    def mma(
        self, epilogue: Epilogue, tiles: FwdSmem, channels: Channels, scales: ScoreScales,
        masks: MaskArgs,
    ):  # fmt: skip
        """MMA warpgroup: 64 query rows of every work tile."""
        epilogue = TangentEpilogue(*(getattr(epilogue, x.name) for x in fields(Epilogue)))
        facts = mainloop.BlockFacts(self._can_be_cut(masks), False, False)
        base = KeyBlocks.create(self.traits, None, tiles, channels, scales, None, facts)
        blocks, ring = TangentBlocks.of(base), channels.ring
        tile, block, cut = Int32(0), Int32(0), Int32(0)
        blocks.start_scheduler_barrier()
        while ring.wait(tile):
            work, accumulate = ring.read(tile), Boolean(False)
            blocks.begin(epilogue.partials, epilogue.lengths, work)
            channels.q.wait(tile)
            cut, following = blocks.visit(None, tile, block, cut, accumulate)
            while following != Kind.END:
                for kind in blocks.kinds:
                    is_full = kind == Kind.FULL
                    if const_expr(is_full):  # noqa: SIM102 (while tracing)
                        if following == kind:
                            block += 1
                            cut, following = blocks.visit(kind, tile, block, cut, accumulate, True)
                            accumulate = Boolean(True)
                    while following == kind:
                        # after a full block every row has its centre
                        block, finds_centre = block + 1, const_expr(not is_full)
                        cut, following = blocks.visit(
                            kind, tile, block, cut, accumulate, finds_centre
                        )
                        accumulate = Boolean(True)
            # before the last values, which come after the next query
            channels.q.release(tile)
            blocks.end(block, accumulate)
            work = ring.read(tile)
            epilogue.run(blocks, tiles.o[None, None, mma_warpgroup_idx()], work)
            ring.release(tile)
            tile += 1
            block += 1
        cute.arch.cp_async_bulk_wait_group(0, read=True)
