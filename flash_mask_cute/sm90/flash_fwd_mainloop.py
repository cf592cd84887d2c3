"""The Hopper forward of a key block: S = Q K^T, its softmax, and P V of the block before.

docs/forward_sm90.md#a-step-and-what-overlaps-what describes the order and overlap of a step. P is
stored in words of two probabilities (`wgmma.round_pairs`), which are a register operand of P V.

A step reads P of the previous block from one tensor of words, and writes its own to the same tensor
or to another. If P V is complete before the exponentials begin, the same tensor is free
(`FwdTraits.values_first`). If they overlap, a second tensor saves a copy. But registers cannot be
indexed, so the code of a step then exists twice. That pays for full blocks, where many
follow each other (`KeyBlocks.alternates`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from flash_mask_cute.core import softmax as softmax_math
from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import THREADS_PER_WARPGROUP, thread_in_warpgroup
from flash_mask_cute.core.operand_loads import N_BLOCK_SHIFT
from flash_mask_cute.core.softmax import OnlineSoftmax, QuadRows, ScoreScales
from flash_mask_cute.core.walk_ring import KIND_MASK, OWN_KIND_SHIFT, OWNERS_SHIFT, Kind, WalkRing
from flash_mask_cute.core.work_ring import Work, WorkRing
from flash_mask_cute.mods.calling import (
    RowPlace,
    ScoreModifier,
    ScoreModTraits,
    at_plain_distances,
    columns_of,
    inside,
)
from flash_mask_cute.mods.table_rows import LoadedRows
from flash_mask_cute.rules import bit_tile
from flash_mask_cute.rules.bit_tile import HALF_WORD, LOW_HALF
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.cached_bias import CachedBiasRows
from flash_mask_cute.sm90.cta_pairs import PeerWords
from flash_mask_cute.sm90.flash_fwd_traits import HALF_KEYS, Barrier, FwdTraits
from flash_mask_cute.sm90.quad_tables import QUAD, QuadTableColumns
from flash_mask_cute.sm90.warpgroups import keep_columns, mma_warpgroup_idx, take_bits


class Channels(NamedTuple):
    """The channels between the roles of a CTA (see the top of `flash_fwd`)."""

    q: Channel
    k: Channel
    v: Channel
    bits: Channel
    ring: WorkRing
    walk: WalkRing


class FwdSmem(NamedTuple):
    """any_bits: for each 32 rows of the bit tile, whether any bit is set. peer: where two CTAs
    exchange P."""

    q: cute.Tensor  # (64, tile_d, warpgroups * stages_q)
    k: cute.Tensor  # (tile_n, tile_d, stages_k)
    v: cute.Tensor  # (tile_dv, tile_n, stages_kv)
    o: cute.Tensor  # (64, tile_dv, warpgroups), of the query's place with its stages
    block_flags: cute.Tensor  # (stages_k,)
    bits: cute.Tensor  # (4 words, tile_m)
    any_bits: cute.Tensor  # (tile_m / 32,)
    cached_bias: CachedBiasRows | None = None
    peer: PeerWords | None = None


class MainloopState(NamedTuple):
    """block: number of the newest key block. cut: of the next partial block. Both count all walks
    of the CTA, from 0, as the fills of their channels do. passed: key blocks skipped since the
    block of the current P. accumulate: acc_O already has an output of this work tile. *_ready: the
    next fill of this channel is known to have arrived.
    """

    block: Int32
    cut: Int32
    passed: Int32
    accumulate: Boolean
    k_ready: Boolean
    v_ready: Boolean
    bits_ready: Boolean

    @staticmethod
    def start() -> "MainloopState":
        return MainloopState(*(Int32(0) for _ in range(3)), *(Boolean(False) for _ in range(4)))


class BlockFacts(NamedTuple):
    """can_be_cut: a later block may be partial. keeps_largest, rows_alone: `OnlineSoftmax`."""

    can_be_cut: bool
    keeps_largest: bool
    rows_alone: bool


@dataclass(frozen=True)
class KeyBlocks:
    """acc_O: fp32 (64, tile_dv), O of the work tile, not yet divided by the sums of `softmax`.
    kept_q: the first columns of the query, in registers, or None (`FwdTraits.query_steps`).
    opaque_one: a 1 whose value the compiler must not know.
    """

    traits: cutlass.Constexpr[FwdTraits]
    score_mod: cutlass.Constexpr[Callable[..., Any] | None]
    facts: cutlass.Constexpr[BlockFacts]
    score_traits: cutlass.Constexpr[ScoreModTraits]
    tiles: FwdSmem
    channels: Channels
    scales: ScoreScales
    aux_tensors: Any
    softmax: OnlineSoftmax
    acc_O: cute.Tensor
    kept_q: cute.Tensor | None
    opaque_one: Int32

    @staticmethod
    def create(
        traits: FwdTraits,
        score_mod: Callable[..., Any] | None,
        tiles: FwdSmem,
        channels: Channels,
        scales: ScoreScales,
        aux_tensors: Any,
        facts: BlockFacts,
    ) -> "KeyBlocks":
        score_traits = ScoreModTraits()
        if score_mod is not None:
            score_traits = ScoreModTraits.create(score_mod, aux_tensors)
        computes_functions = scales.cap is not None or score_traits.computes_functions
        softmax = OnlineSoftmax.create(
            scales.scale_log2 * score_traits.factor,
            traits.rows_of_thread,
            traits.dtype,
            QuadRows(*traits.polynomial if computes_functions else ()),
            None if score_mod is None else score_traits.factor,
            facts.keeps_largest,
            facts.rows_alone,
        )
        kept_q = None
        if score_mod is None and traits.query_steps > 0:
            kept_q = wgmma.make_operand_words(traits.query_steps)
            # a value for the products that are issued although there is no next tile
            kept_q.fill(0)
        return KeyBlocks(
            traits,
            score_mod,
            facts,
            score_traits,
            tiles,
            channels,
            scales,
            aux_tensors,
            softmax=softmax,
            acc_O=wgmma.make_accumulator(traits.tile_dv),
            kept_q=kept_q,
            # grids are one-dimensional, but the compiler does not know that
            opaque_one=Int32(cute.arch.grid_dim()[2]),
        )

    def make_probs(self) -> cute.Tensor:
        """Words of P, (64, tile_n) of a warpgroup."""
        words = wgmma.make_operand_words(self.traits.tile_n // 16)
        if self.traits.few_rows:
            # rows without queries keep these zeros
            words.fill(0)
        return words

    def _rows_of(self, acc: cute.Tensor) -> cute.Tensor:
        """The rows of an accumulator for which there are queries."""
        return wgmma.rows_by_cols(acc, self.traits.rows_of_thread)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The possible kinds of blocks after a walk's first one."""
        return (Kind.PARTIAL, Kind.FULL) if self.facts.can_be_cut else (Kind.FULL,)

    @property
    def may_pass_over(self) -> bool:
        """Whether a warpgroup skips a block that a mask, or its own lists, hide from its rows."""
        return self._has_any_bits or self.traits.lists_per_warpgroup

    @property
    def _has_any_bits(self) -> bool:
        """Whether mask warps write `FwdSmem.any_bits`."""
        return self.traits.passes_over and self.facts.can_be_cut

    def alternates(self, kind: Kind) -> bool:
        """Whether a step over a block of this kind writes P to other words than it reads."""
        traits = self.traits
        if traits.lists_per_warpgroup:
            # after a skipped block, P would be in the words that the next step does not read
            return False
        return kind == Kind.FULL and traits.keeps_scores and not traits.values_first

    # -- products -------------------------------------------------------------------------------

    def take_query(self, tile: Int32) -> None:
        """Load `kept_q` of a work tile, whose query has arrived."""
        if self.kept_q is not None:
            smem = self.tiles.q[None, None, self._query_stage(tile)]
            keep_columns(self.kept_q, self.traits.mma_qk(warpgroup.OperandSource.RMEM), smem)

    def issue_scores(
        self, acc_S: cute.Tensor, tile: Int32, block: Int32, half: Int32 | None = None
    ) -> None:
        """Start S = Q K^T of a key block. half: which half of the keys, 0 or 1; None: all."""
        keys = self.tiles.k
        if half is not None:
            keys = cute.local_tile(keys, (HALF_KEYS, self.traits.tile_d), (half, 0, None))
        mma = self.traits.mma_qk(num_keys=None if half is None else HALF_KEYS)
        q_tile = wgmma.operand_a(mma, self.tiles.q)[None, None, None, self._query_stage(tile)]
        k_stage = self.channels.k.index(block)
        k_tile = wgmma.operand_b(mma, keys)[None, None, None, k_stage]
        if self.kept_q is None:
            wgmma.issue(mma, acc_S, q_tile, k_tile, False)
        else:
            operand = wgmma.words_as_operand_a(self.kept_q, self.traits.dtype)
            kept = self.traits.mma_qk(warpgroup.OperandSource.RMEM), operand
            wgmma.issue_with_kept(mma, acc_S, kept, q_tile, k_tile, cute.size(q_tile, mode=[2]))

    def issue_values(self, probs: cute.Tensor, state: MainloopState) -> None:
        """Start O += P V of the last block that was not skipped."""
        width = self.traits.tile_dv // self.traits.value_parts
        mma = self.traits.mma_pv(width)
        operand = wgmma.words_as_operand_a(probs, self.traits.dtype)
        v_stage = self.channels.v.index(state.block - state.passed)
        if const_expr(self.traits.value_parts == 1):
            v_tile = wgmma.operand_b(mma, self.tiles.v)[None, None, None, v_stage]
            wgmma.issue(mma, self.acc_O, operand, v_tile, state.accumulate)
        else:
            parts = []
            for part in range(self.traits.value_parts):
                v = cute.local_tile(self.tiles.v, (width, self.traits.tile_n), (part, 0, None))
                v_tile = wgmma.operand_b(mma, v)[None, None, None, v_stage]
                acc = wgmma.columns(self.acc_O, part * width, (part + 1) * width)
                parts.append((acc, v_tile))
            wgmma.issue_parts(mma, operand, parts, state.accumulate)

    def wait_for_keys(self, block: Int32, is_known: Boolean | None = None) -> None:
        """is_known: whether the block is known to have arrived."""
        if is_known is None:
            self.channels.k.wait(block)
        else:
            self.channels.k.wait_unless(is_known, block)
        self._order_copies()

    def wait_for_values(self, state: MainloopState) -> None:
        """Wait for V of the last block that was not skipped."""
        self.channels.v.wait_unless(state.v_ready, state.block - state.passed)
        self._order_copies()

    def _order_copies(self) -> None:
        """Order copies of other warps before products, which read through another proxy."""
        if self.traits.copies_rows and not self.traits.in_fp8:
            cute.arch.fence_proxy("async.shared", space="cta")

    def release_values(self, state: MainloopState) -> None:
        """Release the values of a complete P V, and those of the last block if it was skipped:
        `_pass_over` leaves them, because a tile's last values may come after the next query, which
        waits for this tile's end."""
        self.channels.v.release(state.block - state.passed)
        if const_expr(self.may_pass_over):
            self._release_passed(state)

    @cute.jit
    def _release_passed(self, state: MainloopState):
        if state.passed > 0:
            self.channels.v.wait(state.block)
            self.channels.v.release(state.block)

    def _query_stage(self, tile: Int32) -> Int32:
        stage = self.channels.q.index(tile)
        return stage * self.traits.num_mma_warpgroups + mma_warpgroup_idx()

    # -- steps ----------------------------------------------------------------------------------

    @cute.jit
    def first(
        self, tile: Int32, state: MainloopState, acc_S: cute.Tensor, probs: cute.Tensor
    ) -> tuple:
        """P of a work tile's first key block, whose S (64, tile_n) is complete. Returns the new
        state, and the kind of the next block."""
        channels = self.channels
        flags, scores = self._block_flags(state.block), self._rows_of(acc_S)
        if const_expr(self.score_mod is None):
            self._modify(None, None, scores)
        elif channels.ring.read(tile).has_scores:
            # a sequence without queries or keys has no position to evaluate
            loaded = self._load_table_rows(tile, flags)
            self._modify(self._places(tile, flags, True), loaded, scores)
        sees, cut = Boolean(True), state.cut
        if (flags >> OWN_KIND_SHIFT) & KIND_MASK == Kind.PARTIAL:
            channels.bits.wait(cut)
            if const_expr(self._has_any_bits):
                sees = self._visible_columns() != 0
            bit_tile.hide_unset(scores, self._bits(cut, Boolean(True)))
            cut += 1
        channels.k.release(state.block, flags)
        if const_expr(self.traits.lists_per_warpgroup):
            sees = sees & self._is_listed(flags)
        if sees:
            self.softmax.start(scores)
            self.softmax.accumulate(scores)
            wgmma.round_pairs(probs, acc_S, self.traits.dtype)
        else:
            self.softmax.clear()
            probs.fill(0)
        return state._replace(cut=cut), flags & KIND_MASK

    @cute.jit
    def step(
        self,
        kind: cutlass.Constexpr[Kind],
        tile: Int32,
        state: MainloopState,
        probs: cute.Tensor,
        target: cute.Tensor,
    ) -> tuple:
        """P V of the previous block, whose P is in `probs`, and P of the next block, of this kind,
        into `target`: the same words unless the kind `alternates`. No products are in flight before
        or afterwards. Returns the new state, and the kind of the block after it."""
        self.wait_for_keys(state.block + 1, state.k_ready)
        flags = self._block_flags(state.block + 1)
        if const_expr(self.traits.lists_per_warpgroup):
            state = self._multiply_listed(kind, tile, flags, state, probs)
        elif const_expr(kind == Kind.PARTIAL and self.may_pass_over):
            state = self._multiply_visible(tile, flags, state, probs, target)
        else:
            state = self._multiply(kind, tile, flags, state, probs, target)
        return state, flags & KIND_MASK

    @cute.jit
    def _multiply_listed(
        self,
        kind: cutlass.Constexpr[Kind],
        tile: Int32,
        flags: Int32,
        state: MainloopState,
        probs: cute.Tensor,
    ) -> MainloopState:
        """`step` over a block that this warpgroup's lists may leave out."""
        sees = self._is_listed(flags)
        if const_expr(kind == Kind.PARTIAL):
            self.channels.bits.wait_unless(state.bits_ready, state.cut)
            state = state._replace(bits_ready=Boolean(True))
            sees = sees & (self._visible_columns() != 0)
        if sees:
            state = self._multiply(kind, tile, flags, state, probs, probs)
        else:
            # P V is due where this block's values need its stage: the next keys come after them
            if state.passed + 1 == self.traits.stages_kv:
                self.wait_for_values(state)
                self.issue_values(probs, state)
                warpgroup.wait_group(0)
                self.channels.v.release(state.block - state.passed)
                # for the next product, of a skipped block
                probs.fill(0)
                accumulate, unknown = Boolean(True), Boolean(False)
                state = state._replace(passed=Int32(0), accumulate=accumulate, v_ready=unknown)
            state = self._pass_over(state, kind)
        return state

    def _is_listed(self, flags: Int32) -> Boolean:
        """Whether this warpgroup's lists have a block."""
        flags = cute.arch.make_warp_uniform(flags)
        return ((flags >> (mma_warpgroup_idx() + OWNERS_SHIFT)) & 1) != 0

    @cute.jit
    def _multiply_visible(
        self,
        tile: Int32,
        flags: Int32,
        state: MainloopState,
        probs: cute.Tensor,
        target: cute.Tensor,
    ) -> MainloopState:
        """`step` over a partial block; this warpgroup may see nothing of it, or only half."""
        self.channels.bits.wait_unless(state.bits_ready, state.cut)
        state = state._replace(bits_ready=Boolean(True))
        visible = self._visible_columns()
        is_low_visible, is_high_visible = (visible & LOW_HALF) != 0, (visible >> HALF_WORD) != 0
        # P V is due where this block's values need its stage: the next keys come after them
        if (visible == 0) & (state.passed + 1 < self.traits.stages_kv):
            state = self._pass_over(state, Kind.PARTIAL)
        elif const_expr(self.traits.halves_blocks):
            if is_low_visible != is_high_visible:
                half = cutlass.select_(is_low_visible, Int32(0), Int32(1))
                state = self._multiply(Kind.PARTIAL, tile, flags, state, probs, target, half)
            else:
                state = self._multiply(Kind.PARTIAL, tile, flags, state, probs, target)
        else:
            state = self._multiply(Kind.PARTIAL, tile, flags, state, probs, target)
        return state

    @cute.jit
    def _multiply(
        self,
        kind: cutlass.Constexpr[Kind],
        tile: Int32,
        flags: Int32,
        state: MainloopState,
        probs: cute.Tensor,
        target: cute.Tensor,
        half: Int32 | None = None,
    ) -> MainloopState:
        """`step` with products. half: which half of the keys, 0 or 1, if no row sees the other."""
        traits, channels = self.traits, self.channels
        block, cut, bits = state.block + 1, state.cut, None
        if const_expr(kind == Kind.PARTIAL):
            bits = self._bits(cut, state.bits_ready)
            if const_expr(half is not None):
                bits = tuple(word_of_row >> (half * HALF_WORD) for word_of_row in bits)
            cut += 1
        # tensors of their own: if they lived on from step to step, they would cost as many
        # registers again
        acc_S, fresh = wgmma.make_accumulator(traits.tile_n), target
        loaded = None
        if const_expr(self.tiles.cached_bias is not None):
            # no branches under products, and what is kept takes few clocks
            loaded = self._load_table_rows(tile, flags)
        if const_expr(half is not None):
            acc_S = wgmma.make_accumulator(HALF_KEYS)
            fresh = wgmma.make_operand_words(HALF_KEYS // 16)
        # -- issue P V of the block before, and S of this one
        if const_expr(traits.values_first):
            self.wait_for_values(state)
            self.wait_scheduler_barrier()
            self.issue_values(probs, state)
            self.issue_scores(acc_S, tile, block, half)
            places = self._places(tile, flags, kind == Kind.PARTIAL, half)
            self.arrive_scheduler_barrier()
            loaded = self._load_table_rows(tile, flags, half)
            warpgroup.wait_group(0)
            self.release_values(state)
        else:
            if const_expr(not self.alternates(kind)):
                fresh = self.make_probs()
            self.wait_scheduler_barrier()
            self.issue_scores(acc_S, tile, block)
            # before a wait, so that the compiler can also compute before it what follows from them
            places = self._places(tile, flags, kind == Kind.PARTIAL)
            self.wait_for_values(state)
            self.issue_values(probs, state)
            self.arrive_scheduler_barrier()
            if const_expr(self.tiles.cached_bias is None):
                loaded = self._load_table_rows(tile, flags)
            warpgroup.wait_group(1)
        # -- S is complete: modify and hide scores, take exponentials
        channels.k.release(block, flags)
        scores = self._rows_of(acc_S)  # (rows, tile_n / 4) of a thread
        self._modify(places, loaded, scores)
        if const_expr(kind == Kind.PARTIAL):
            bit_tile.hide_unset(scores, bits)
        may_be_first = self.may_pass_over and (kind == Kind.PARTIAL or traits.lists_per_warpgroup)
        factors = self._exponentials(may_be_first, scores, fresh)
        if const_expr(half is not None):
            wgmma.place_half(target, fresh, half)
        # -- peek at the next fills, since an answer takes a while
        k_ready, v_ready = channels.k.is_full(block + 1), channels.v.is_full(block)
        bits_ready = state.bits_ready
        if const_expr(kind == Kind.PARTIAL):
            bits_ready = channels.bits.is_full(cut)
        # -- rescale O, and finish P V
        if softmax_math.differ_from_one(factors):
            if const_expr(not traits.values_first):
                warpgroup.wait_group(0)
            softmax_math.rescale(self._rows_of(self.acc_O), factors)
        if const_expr(not traits.values_first):
            # behind a branch, with a copy inside it, because ptxas moves it up to the start of its
            # basic block: above the exponentials that should overlap P V
            # docs/facts/compiler.md#a-wait-for-products-moves-up-to-the-start-of-its-basic-block
            warpgroup.wait_group(0)
            self.release_values(state)
            if const_expr(not traits.keeps_scores):
                wgmma.round_pairs(target, acc_S, traits.dtype)
            elif const_expr(not self.alternates(kind)):
                wgmma.copy_words(target, fresh, self.opaque_one)
        return MainloopState(block, cut, Int32(0), Boolean(True), k_ready, v_ready, bits_ready)

    def _pass_over(self, state: MainloopState, kind: Kind) -> MainloopState:
        """`step` without products: skip a key block of this kind."""
        channels, block = self.channels, state.block + 1
        cute.arch.sync_warp()
        if kind == Kind.PARTIAL:
            channels.bits.release(state.cut)
        channels.k.release(block)
        # its turn passes at once: the next warpgroup waits for it
        self.wait_scheduler_barrier()
        self.arrive_scheduler_barrier()
        self._release_passed(state)
        unknown = Boolean(False)
        return state._replace(
            block=block,
            cut=state.cut + int(kind == Kind.PARTIAL),
            passed=state.passed + 1,
            k_ready=unknown,
            bits_ready=unknown,
        )

    @cute.jit
    def _exponentials(
        self,
        may_be_first: cutlass.Constexpr[bool],
        scores: cute.Tensor,
        fresh_probs: cute.Tensor,
    ) -> tuple:
        """Add probabilities to the sums, and write them to fresh_probs if `FwdTraits.keeps_scores`,
        else in place of the scores. may_be_first: rows may have seen nothing before this block.
        Returns for each row the factor of what was accumulated before."""
        softmax = self.softmax
        softmax.see(scores)
        factors = tuple(Float32(1.0) for _ in range(self.traits.rows_of_thread))
        if const_expr(not self.traits.keeps_scores):
            tile_max = softmax.tile_max(scores)
            is_old = softmax.outgrown(tile_max)
            if softmax_math.any_in_warp(is_old):
                factors = softmax.renew(tile_max, is_old)
            softmax.accumulate(scores)
        else:
            keep_probs = partial(wgmma.keep_pair, fresh_probs, self.traits.dtype)
            if const_expr(may_be_first):
                is_first = softmax.is_empty()
                if softmax_math.any_in_warp(is_first):
                    softmax.renew(softmax.tile_max(scores), is_first)
            sums = softmax.exponentials(scores, keep_probs)
            is_old = softmax.overflowed(sums)
            if const_expr(softmax.takes_any_size and not may_be_first):
                is_old = softmax_math.either(is_old, softmax.is_empty())
            if softmax_math.any_in_warp(is_old):
                factors = softmax.renew(softmax.tile_max(scores), is_old)
                if const_expr(not softmax.takes_any_size):
                    sums = softmax.exponentials(scores, keep_probs)
                elif softmax_math.any_in_warp(softmax.non_empty_of(is_old)):
                    # not of rows that still see nothing, whose probabilities are 0 already
                    sums = softmax.exponentials(scores, keep_probs, exactly=True)
            softmax.add(sums)
        return factors

    # -- scores ---------------------------------------------------------------------------------

    def _block_flags(self, block: Int32) -> Int32:
        return self.tiles.block_flags[self.channels.k.index(block)]

    def _bits(self, cut: Int32, is_ready: Boolean) -> tuple:
        first_row = mma_warpgroup_idx() * wgmma.ROWS_PER_WARPGROUP
        of_rows = self.traits.row_of, self.traits.rows_of_thread
        return take_bits(self.tiles.bits, self.channels.bits, first_row, cut, is_ready, *of_rows)

    def _visible_columns(self) -> Int32:
        """The OR of the bits of this warpgroup's rows in the block whose bits have arrived."""
        first = mma_warpgroup_idx() * (wgmma.ROWS_PER_WARPGROUP // bit_tile.WORD)
        return self.tiles.any_bits[first] | self.tiles.any_bits[first + 1]

    @cute.jit
    def _modify(self, places: tuple | None, loaded: LoadedRows | None, scores: cute.Tensor):
        """Soft-cap scores, and apply score_mod at `places`. loaded: its reads along the keys."""
        scales = self.scales
        if const_expr(scales.cap is not None):
            for i in cutlass.range_constexpr(cute.size(scores)):
                scores[i] = scales.bounded(scores[i])
        if const_expr(self.score_mod is not None):
            rows, k_idx_of = places
            traits = self.score_traits
            score_mod = ScoreModifier(self.score_mod, self.aux_tensors, traits.factor)
            for cols in columns_of(scores, traits.by_columns):
                for r, row in enumerate(rows):
                    args = scores, r, scales.scale_mod, row, k_idx_of, loaded
                    score_mod.modify_row(*args, of_cols=cols)

    def _places(
        self, tile: Int32, flags: Int32, is_cut: bool, half: Int32 | None = None
    ) -> tuple | None:
        """The places of a thread's score rows, and a function from a column to its key, for a
        score_mod. Rows and keys past the end are in partial blocks only."""
        if self.score_mod is None:
            return None
        work, n_block = self.channels.ring.read(tile), flags >> N_BLOCK_SHIFT
        rows, heads = tile_rows(self.traits, work, thread_in_warpgroup()), self.traits.packed_heads
        first_k_idx = n_block * self.traits.tile_n + wgmma.first_col_of(thread_in_warpgroup())
        if half is not None:
            first_k_idx += half * HALF_KEYS
        group = heads, self.traits.group_size
        places = [RowPlace.create(work, row, *group) for row in rows]
        if is_cut:
            return places, lambda c: inside(first_k_idx + wgmma.col_offset(c), work)
        first_q_idx = rows[0] // heads
        if work.q_start is not None:
            first_q_idx += work.q_start
        q_after, k_after = at_plain_distances(first_q_idx, first_k_idx, self.opaque_one - 1)
        places = [
            place._replace(q_idx=q_after(wgmma.row_offset(r) // heads))
            for r, place in enumerate(places)
        ]
        return places, lambda c: k_after(wgmma.col_offset(c))

    def _load_table_rows(
        self, tile: Int32, flags: Int32, half: Int32 | None = None
    ) -> LoadedRows | None:
        """The rows of tables that the score_mod reads in a key block or half of it."""
        if not self.score_traits.row_reads:
            return None
        traits, work, cached_bias = (
            self.traits,
            self.channels.ring.read(tile),
            self.tiles.cached_bias,
        )
        n_block, num_keys = flags >> N_BLOCK_SHIFT, traits.tile_n
        first_key = n_block * traits.tile_n
        if half is not None:
            first_key, num_keys = first_key + half * HALF_KEYS, HALF_KEYS
        rows = tile_rows(traits, work, thread_in_warpgroup())
        group = traits.packed_heads, traits.group_size
        return LoadedRows.load(
            self.score_traits.row_reads,
            self.aux_tensors,
            [RowPlace.create(work, row, *group) for row in rows],
            first_key,
            num_keys // QUAD,
            QuadTableColumns(),
            traits.table_words,
            None if cached_bias is None else partial(cached_bias.load, work, n_block),
        )

    # -- order of the warpgroups ----------------------------------------------------------------

    @cute.jit
    def start_scheduler_barrier(self):
        """Let the first warpgroup begin: warpgroups issue their products in turn."""
        if const_expr(self.traits.is_ordered):  # noqa: SIM102 (decided while tracing)
            if mma_warpgroup_idx() == self.traits.num_mma_warpgroups - 1:
                self.arrive_scheduler_barrier()

    def wait_scheduler_barrier(self) -> None:
        if not self.traits.is_ordered:
            return
        cute.arch.barrier(
            barrier_id=Barrier.SCHEDULER + mma_warpgroup_idx(),
            number_of_threads=2 * THREADS_PER_WARPGROUP,
        )

    def arrive_scheduler_barrier(self) -> None:
        if not self.traits.is_ordered:
            return
        warpgroup_idx = mma_warpgroup_idx()
        is_last = warpgroup_idx == self.traits.num_mma_warpgroups - 1
        following = cutlass.select_(is_last, Int32(0), warpgroup_idx + 1)
        cute.arch.barrier_arrive(
            barrier_id=Barrier.SCHEDULER + following, number_of_threads=2 * THREADS_PER_WARPGROUP
        )


def tile_rows(traits: FwdTraits, work: Work, thread: Int32) -> tuple:
    """The rows of a thread's accumulator, counted in the sequence (`packed_heads` to a query)."""
    first = work.block * traits.tile_m + mma_warpgroup_idx() * wgmma.ROWS_PER_WARPGROUP
    return tuple(first + traits.row_of(thread, r) for r in range(traits.rows_of_thread))
