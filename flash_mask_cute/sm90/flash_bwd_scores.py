"""The Hopper backward of a query block before its sums: S and dP, then P and dS.

If warpgroups have different keys, each computes both products. If both have the same keys, they
exchange P and dS through shared memory:

    warpgroup 0: S -> P -> store                      -> load dS
    warpgroup 1: dP              -> load P -> dS -> store

dS is then made from P in 16 bits. It is also made from P in 16 bits where a block is computed in
halves of its queries (`BwdTraits.splits_keys`), because wide sums leave registers for no more:

    S0, dP0 -> P0 -> dV, S1 -> dS0 -> dP1, dK -> P1 -> dV -> dS1 -> dK

Gradients of aux tensors need S and dP of a score at once. If they are wanted and warpgroups
share keys, the first one computes both products and the second one only loads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from flash_mask_cute.core.cta import THREADS_PER_WARPGROUP, thread_in_warpgroup, transposed
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.marked_rows import any_mark, clear_row, is_marked
from flash_mask_cute.core.query_loads import QUERY_WORDS
from flash_mask_cute.core.row_blocks import marks_of
from flash_mask_cute.core.score_gradients import (
    Statistics,
    has_reference,
    probabilities,
    score_gradients,
)
from flash_mask_cute.core.walk_ring import OWNERS_SHIFT, Kind
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.mods.difference_sums import is_mma_turn
from flash_mask_cute.mods.score_chain import ScoreChain
from flash_mask_cute.rules import bit_tile
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_bwd_chain import parts_of_products
from flash_mask_cute.sm90.flash_bwd_traits import (
    FEW_REGISTERS,
    NUM_MMA_WARPGROUPS,
    Barrier,
    BwdSmem,
    BwdTraits,
    Channels,
)
from flash_mask_cute.sm90.warpgroups import (
    keep_columns,
    load_rows,
    mma_warp,
    mma_warpgroup_idx,
    store_rows,
    take_bits,
)

NUM_MMA_THREADS = NUM_MMA_WARPGROUPS * THREADS_PER_WARPGROUP


class Factors(NamedTuple):
    """Operands in shared memory. q and do: one for each part of the products' columns."""

    k: cute.Tensor  # (64 keys, tile_d) in k-steps, and stages
    q: tuple[cute.Tensor, ...]  # (tile_m / parts, tile_d) each, or all in one
    v: cute.Tensor  # (64 keys, tile_dv)
    do: tuple[cute.Tensor, ...]  # (tile_m / parts, tile_dv) each


def sync_both() -> None:
    """Wait for both MMA warpgroups."""
    cute.arch.barrier(barrier_id=Barrier.BOTH, number_of_threads=NUM_MMA_THREADS)


class Peeked(NamedTuple):
    """Fills for the next query block that are known to have arrived (`Channel.is_full`).

    bits: of the next partial block, as far as this warp knows. bits_for_all: the same, as all warps
    of both warpgroups know it. unmarked: Q has arrived, and none of its rows must be cleared.
    """

    q: Boolean
    do: Boolean
    bits: Boolean
    bits_for_all: Boolean
    unmarked: Boolean

    @staticmethod
    def nothing() -> "Peeked":
        return Peeked(*(Boolean(False) for _ in Peeked._fields))


@cute.jit
def by_turn(is_turn: Boolean, step: cutlass.Constexpr[Callable[[bool], Peeked]]) -> Peeked:
    """Run step(is_turn). A branch inside it, while products are in flight, would serialise them."""
    peeked = Peeked.nothing()
    if is_turn:  # noqa: SIM108 (the compiler of the DSL takes branches)
        peeked = step(True)
    else:
        peeked = step(False)
    return peeked


class MainloopState(NamedTuple):
    """The numbers of the work tile, of the query block, and of the next partial block."""

    tile: Int32
    block: Int32
    cut: Int32
    peeked: Peeked


class HalfSums(NamedTuple):
    """Functions that issue products over half of a block's queries. Each takes the words of P or dS
    of that half, and its number, and returns the number of products."""

    add_dv: Callable[[cute.Tensor, int], int]
    add_dk: Callable[[cute.Tensor, int], int]


@dataclass(frozen=True)
class BlockScores:
    """probs, grads: P^T and dS^T (64, tile_m) of a query block, as words of `wgmma.round_pairs`.
    values: the first columns of this warpgroup's values in registers, or None."""

    traits: cutlass.Constexpr[BwdTraits]
    tiles: BwdSmem
    channels: Channels
    chain: ScoreChain
    factors: Factors
    probs: cute.Tensor
    grads: cute.Tensor
    values: cute.Tensor | None
    lengths: Lengths
    passes_over: cutlass.Constexpr[bool]

    @staticmethod
    def create(
        traits: BwdTraits,
        tiles: BwdSmem,
        channels: Channels,
        chain: ScoreChain,
        lengths: Lengths,
        passes_over: bool,
    ) -> "BlockScores":
        parts_s, parts_dp = parts_of_products(traits, chain)
        mma = traits.mma_scores()

        def parts(smem: cute.Tensor, dim: int, count: int) -> tuple[cute.Tensor, ...]:
            if count == 1:
                return (wgmma.operand_b(mma, smem),)
            tile = (traits.tile_m // count, dim)
            views = (cute.local_tile(smem, tile, (i, 0, None)) for i in range(count))
            return tuple(wgmma.operand_b(traits.mma_scores(count), view) for view in views)

        factors = Factors(
            wgmma.operand_a(mma, tiles.k),
            parts(tiles.q, traits.tile_d, parts_s),
            wgmma.operand_a(mma, tiles.v),
            parts(tiles.do, traits.tile_dv, parts_dp),
        )
        num_words = wgmma.ROWS_PER_WARPGROUP * traits.tile_m // THREADS_PER_WARPGROUP // 2
        probs, grads = (cute.make_rmem_tensor(num_words, Int32) for _ in range(2))
        values = None
        if chain.is_empty and traits.value_steps > 0:
            values = wgmma.make_operand_words(traits.value_steps)
        more = probs, grads, values, lengths, passes_over
        return BlockScores(traits, tiles, channels, chain, factors, *more)

    @property
    def num_parts(self) -> int:
        return self.traits.num_score_parts(self.chain.num_by_parts)

    @property
    def needs_scores(self) -> bool:
        """Whether `compute` is for work tiles with scores only."""
        return self.chain.by_parts or bool(self.chain.aux.wants_aux)

    def begin(self, tile: Int32, block: Int32) -> None:
        """Load the values that stay in registers for a work tile, with its first query block."""
        if self.values is not None:
            self.channels.do.wait(block)
            smem = self.tiles.v[None, None, self.traits.own_keys(tile)]
            keep_columns(self.values, self.traits.mma_values(), smem)

    def compute(self, kind: Kind, state: MainloopState, sums: HalfSums | None = None) -> None:
        """Compute P and dS of a query block that has arrived, except perhaps its dO.

        No products may be in flight before. Afterwards dO has arrived, and dQ may read dS after
        `sync_both`. sums: dV and dK, which are added to meanwhile if there are halves.
        """
        # early, where registers are free
        self.acquire_summed(state.block)
        if self.traits.shares_keys:
            self._compute_alternating(kind, state)
            self.channels.do.wait(state.block)
        elif sums is not None:
            self._compute_in_halves(kind, state, sums)
        else:
            self._compute_both(kind, state)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def clear_marked_rows(self, block: Int32) -> None:
        """Clear the rows of Q and dO that probabilities of 0 would not keep from the sums
        (`core.row_blocks.marks_of`), in a block whose Q has arrived. Run by both warpgroups, with
        no products of the block in flight; they meet only if there are such rows."""
        traits, channels = self.traits, self.channels
        if self._any_mark(block):
            channels.do.wait(block)
            stage, do_stage = channels.q.index(block), channels.do.index(block)
            marks = self._marks(block)
            warp = mma_warp()
            for i in cutlass.range(traits.tile_m // traits.num_mma_warps, unroll=1):
                row = i * traits.num_mma_warps + warp
                if is_marked(marks, row, traits.packed_heads):
                    clear_row(self.tiles.q[row, None, stage])
                    clear_row(self.tiles.do[row, None, do_stage])
            cute.arch.fence_proxy("async.shared", space="cta")
            sync_both()

    @cute.jit
    def is_unmarked(self, block: Int32, has_come: Boolean) -> Boolean:
        """Whether Q of a block has arrived, as given, and has no row to clear."""
        is_unmarked = Boolean(False)
        if has_come:
            is_unmarked = self._any_mark(block) == Boolean(False)
        return is_unmarked

    def _any_mark(self, block: Int32) -> Boolean:
        return any_mark(self._marks(block), self.traits.tile_m, self.traits.packed_heads)

    def _marks(self, block: Int32) -> cute.Tensor:
        stats = self.tiles.stats[None, self.channels.q.index(block)]
        traits = self.traits
        return marks_of(stats, traits.tile_m, traits.num_stats, traits.packed_heads)

    def _is_listed(self, block: Int32) -> Boolean:
        """Whether block lists have a query block for this warpgroup's keys."""
        flags = self.tiles.words[0, self.channels.q.index(block)]
        return ((flags >> (mma_warpgroup_idx() + OWNERS_SHIFT)) & 1) != 0

    @cute.jit
    def is_hidden(
        self, state: MainloopState, by_bits: cutlass.Constexpr[bool], first_visible: Int32 | None
    ) -> Boolean:
        """Whether all keys of this warpgroup are known to be hidden from a query block.
        first_visible: the first block that causal masking lets see a key."""
        is_hidden = Boolean(False)
        if const_expr(by_bits):
            if state.peeked.bits_for_all:
                is_hidden = self._has_no_bits()
            if const_expr(first_visible is not None):
                m_block = self.tiles.words[1, self.channels.q.index(state.block)]
                is_hidden = is_hidden | (m_block < first_visible)
        if const_expr(self.traits.lists_per_warpgroup):
            is_hidden = is_hidden | (self._is_listed(state.block) == Boolean(False))
        return is_hidden

    def _has_no_bits(self) -> Boolean:
        """Whether the current bits, which have arrived, hide all keys of this warpgroup."""
        first = mma_warpgroup_idx() * (wgmma.ROWS_PER_WARPGROUP // bit_tile.WORD)
        return (self.tiles.any_bits[first] | self.tiles.any_bits[first + 1]) == 0

    @cute.jit
    def tell_ready(self, block: Int32, following_cut: Int32) -> None:
        """Record whether the next bits have arrived, for both warpgroups when they meet in a block:
        what a warpgroup does must not depend on what each of its warps observes."""
        is_ready, ready = self.channels.bits.is_full(following_cut), self.tiles.ready
        if cute.arch.thread_idx()[0] == THREADS_PER_WARPGROUP:
            ready[block % 2] = Int32(is_ready)

    def was_ready(self, block: Int32) -> Boolean:
        """The value recorded in a block, after both have met."""
        return self.tiles.ready[block % 2] != 0

    def clear(self, kind: Kind, state: MainloopState) -> None:
        """What `compute` does, for a block that is hidden from this warpgroup's keys: dS is 0."""
        if kind == Kind.PARTIAL:
            self.channels.bits.wait_unless(state.peeked.bits_for_all, state.cut)
            cute.arch.sync_warp()
            self.channels.bits.release(state.cut)
        self.grads.fill(0)
        self._store_own_grads(state.block)
        self.channels.do.wait_unless(state.peeked.do, state.block)
        cute.arch.fence_proxy("async.shared", space="cta")

    def acquire_grads(self, block: Int32) -> None:
        """Wait until dS of a block may be written, if it has the place of the one before."""
        if self.channels.grads is not None:
            self.channels.grads.channel.acquire(block)
        elif self.channels.ds is not None:
            self.channels.ds.acquire(block)

    def acquire_summed(self, block: Int32) -> None:
        """Wait until mask warps have summed the dS that is in the place of a block's dS."""
        if self.channels.summed is not None:
            self.channels.summed.acquire(block)

    def publish_grads(self, block: Int32) -> None:
        """Let the mask warps sum dS of a block, which both warpgroups have written."""
        if self.channels.summed is not None:
            self.channels.summed.publish(block)

    def complete(self, block: Int32) -> None:
        """Take the other warpgroup's results, after `sync_both`."""
        if self.traits.shares_keys:
            # by both, because a branch would serialise the products that are in flight
            self._load_grads(self.grads, self.traits.ds_stage(block))

    @cute.jit
    def discard_bits(self, cut: Int32) -> None:
        """Take the bits of a skipped block, if this warpgroup reads them."""
        if const_expr(not self.traits.shares_keys) or self.traits.warpgroup_idx() == 0:
            self._bits(Kind.PARTIAL, cut, Boolean(False))

    # -- keys of its own ------------------------------------------------------------------------

    def _compute_both(self, kind: Kind, state: MainloopState) -> None:
        self._turn_to_head(state)
        if self.chain.by_parts:
            self._compute_by_parts(kind, state)
        else:
            self._compute_whole(kind, state)
        self._store_own_grads(state.block)

    def _store_own_grads(self, block: Int32) -> None:
        traits = self.traits
        self.acquire_grads(block)
        groups = traits.num_row_groups
        size = cute.size(self.grads) // groups
        for i in range(groups):
            unit = traits.ds_unit(traits.ds_stage(block), mma_warpgroup_idx(), i)
            words = cute.make_tensor(self.grads.iterator + i * size, cute.make_layout(size))
            self._store_grads(words, unit)

    def _compute_in_halves(self, kind: Kind, state: MainloopState, sums: HalfSums) -> None:
        """P and dS, and the products of dV and dK, of one half of the queries after the other."""
        traits, channels = self.traits, self.channels
        width = traits.tile_m // self.num_parts
        bits = self._bits(kind, state.cut, state.peeked.bits)
        acc_S, acc_dP = (wgmma.make_accumulator(width) for _ in range(2))  # (64, width)
        self._issue_scores(acc_S, state, 0)
        channels.do.wait_unless(state.peeked.do, state.block)
        self._issue_dp(acc_dP, state, 0)
        warpgroup.wait_group(1)
        for half in range(self.num_parts):
            is_last = half + 1 == self.num_parts
            probs, grads = (_words_of(x, half, self.num_parts) for x in (self.probs, self.grads))
            statistics = self._statistics(state.block, half)
            self._make_probs(acc_S, bits, statistics, half)
            wgmma.round_pairs(probs, acc_S, traits.dtype)
            num_behind = sums.add_dv(probs, half)
            if not is_last:
                acc_S = wgmma.make_accumulator(width)
                self._issue_scores(acc_S, state, half + 1)
                num_behind += 1
            warpgroup.wait_group(num_behind)
            self._make_grads(acc_dP, probs, grads, statistics.delta)
            if half == 0:
                self.acquire_grads(state.block)
            self._store_half_grads(grads, state.block, half)
            if not is_last:
                acc_dP = wgmma.make_accumulator(width)
                self._issue_dp(acc_dP, state, half + 1)
            num_behind = sums.add_dk(grads, half)
            if not is_last:
                warpgroup.wait_group(num_behind + 1)

    def _make_probs(
        self, acc_S: cute.Tensor, bits: tuple | None, statistics: Statistics, half: int
    ) -> None:
        """Replace S of half of the queries by P."""
        scores = wgmma.rows_by_cols(acc_S)
        if bits is not None:
            first_col = half * cute.size(scores, mode=[1])
            bit_tile.hide_unset(scores, tuple(word >> first_col for word in bits))
        probabilities(scores, statistics.lse, self.chain.scales.scale_log2)

    def _make_grads(
        self, acc_dP: cute.Tensor, probs: cute.Tensor, grads: cute.Tensor, delta: cute.Tensor
    ) -> None:
        """dS from dP, as words, and from words of P."""
        factors = cute.make_rmem_tensor(acc_dP.layout, Float32)
        factors.store(wgmma.rounded_values(probs, self.traits.dtype).load().to(Float32))
        score_gradients(wgmma.rows_by_cols(acc_dP), wgmma.rows_by_cols(factors), delta)
        wgmma.round_pairs(grads, acc_dP, self.traits.dtype)

    def _store_half_grads(self, words: cute.Tensor, block: Int32, half: int) -> None:
        traits = self.traits
        width = traits.tile_m // self.num_parts
        unit = traits.ds_unit(traits.ds_stage(block), mma_warpgroup_idx(), 0)
        tile = wgmma.ROWS_PER_WARPGROUP, width
        smem = cute.local_tile(self._grads_by_keys(unit), tile, (0, half))
        values = wgmma.rounded_values(words, traits.dtype)
        store_rows(values, traits.mma_words(width), smem, transposes=True)

    def _compute_whole(self, kind: Kind, state: MainloopState) -> None:
        traits, chain, channels = self.traits, self.chain, self.channels
        is_plain = chain.is_empty
        # for wide heads there are no registers for dP while scores are modified
        is_early = is_plain or traits.fragment_registers <= FEW_REGISTERS
        acc_S, acc_dP = (wgmma.make_accumulator(traits.tile_m) for _ in range(2))  # (64, tile_m)
        statistics = self._statistics(state.block)
        self._issue_scores(acc_S, state)
        channels.do.wait_unless(state.peeked.do, state.block)
        if is_early:
            self._issue_dp(acc_dP, state)
        # with a branch in the modification, products in flight would be serialised
        warpgroup.wait_group(1 if is_plain else 0)
        self._apply(kind, state, wgmma.rows_by_cols(acc_S), statistics)
        if not is_early:
            self._issue_dp(acc_dP, state)
        if chain.aux.wants_aux:
            chain = self._chain_of(state.block)
            chain = replace(chain, along=chain.along.look_ahead(*self._place(state)))
        warpgroup.wait_group(0)
        delta, factors, grads = statistics.delta, *map(wgmma.rows_by_cols, (acc_S, acc_dP))
        if chain.aux.wants_aux:
            chain.apply_to_grads(*self._place(state), factors, grads, delta, self.grads)
        else:
            score_gradients(grads, factors, delta)
            wgmma.round_pairs(self.grads, acc_dP, traits.dtype)
        if is_plain:
            wgmma.round_pairs(self.probs, acc_S, traits.dtype)

    def _compute_by_parts(self, kind: Kind, state: MainloopState) -> None:
        """P, dS and the gradients of aux tensors, one part of the columns at a time. A branch in
        each part keeps the compiler from mixing parts, which the registers do not hold."""
        counts = self.num_parts, len(self.factors.q), len(self.factors.do)
        width, width_s, width_dp = (self.traits.tile_m // count for count in counts)
        statistics = self._statistics(state.block)
        bits, place = self._bits(kind, state.cut, state.peeked.bits), self._place(state)
        self.channels.do.wait_unless(state.peeked.do, state.block)
        for col in range(0, self.traits.tile_m, width):
            if col % width_s == 0:
                acc_S = wgmma.make_accumulator(width_s)  # (64, width_s)
                self._issue_scores(acc_S, state, col // width_s)
            if col % width_dp == 0:
                acc_dP = wgmma.make_accumulator(width_dp)  # (64, width_dp)
                self._issue_dp(acc_dP, state, col // width_dp)
                warpgroup.wait_group(0)
            scores, grads = (
                wgmma.rows_by_cols(wgmma.columns(acc, col % size, col % size + width))
                for acc, size in ((acc_S, width_s), (acc_dP, width_dp))
            )
            first_col = col // width * cute.size(scores, mode=[1])
            self._chain_of(state.block).apply_to_both(
                place, scores, grads, first_col, bits, statistics, (self.probs, self.grads)
            )

    # -- the keys of both -----------------------------------------------------------------------

    @cute.jit
    def _compute_alternating(self, kind: cutlass.Constexpr[Kind], state: MainloopState) -> None:
        if const_expr(self.chain.by_parts):
            self._compute_in_first(kind, state)
        elif self.traits.warpgroup_idx() == 0:
            self._compute_probs(kind, state)
        else:
            self._compute_grads(state)

    @cute.jit
    def _compute_in_first(self, kind: cutlass.Constexpr[Kind], state: MainloopState) -> None:
        if self.traits.warpgroup_idx() == 0:
            self._turn_to_head(state)
            self._compute_by_parts(kind, state)
            self._store_grads(self.grads, self.traits.ds_stage(state.block))
            self._pass_probs(state.block)
        else:
            self._take_probs(state.block)

    def _compute_probs(self, kind: Kind, state: MainloopState) -> None:
        acc_S = wgmma.make_accumulator(self.traits.tile_m)  # (64, tile_m)
        statistics = self._statistics(state.block)
        self._issue_scores(acc_S, state)
        warpgroup.wait_group(0)
        self._apply(kind, state, wgmma.rows_by_cols(acc_S), statistics)
        if self.chain.is_empty:
            wgmma.round_pairs(self.probs, acc_S, self.traits.dtype)
        else:
            # the other warpgroup needs P times a derivative for dS; it goes by the place of dS
            wgmma.round_pairs(self.grads, acc_S, self.traits.dtype)
            self._store_grads(self.grads, self.traits.ds_stage(state.block))
        self._pass_probs(state.block)

    def _compute_grads(self, state: MainloopState) -> None:
        traits = self.traits
        acc_dP = wgmma.make_accumulator(traits.tile_m)  # (64, tile_m)
        delta = self._statistics(state.block).delta
        self.channels.do.wait_unless(state.peeked.do, state.block)
        self._issue_dp(acc_dP, state)
        warpgroup.wait_group(0)
        self._take_probs(state.block)
        words = self.probs
        if not self.chain.is_empty:
            words = self.grads
            self._load_grads(words, self.traits.ds_stage(state.block))
            cute.arch.sync_warp()
        self._make_grads(acc_dP, words, self.grads, delta)
        self._store_grads(self.grads, self.traits.ds_stage(state.block))

    # -- gradients of aux tensors ---------------------------------------------------------------

    def _turn_to_head(self, state: MainloopState) -> None:
        if self.chain.turns_to_heads:
            work, head_idx, _ = self._place(state)
            self.chain.turn_to(work, head_idx)

    @cute.jit
    def end_walk(self, work: Work) -> None:
        """Send the sums over the walk of a work tile; of warpgroups that share keys, the first."""
        if const_expr(self.traits.shares_keys):
            if self.traits.warpgroup_idx() == 0:
                self.chain.end_walk(work)
        else:
            self.chain.end_walk(work)

    # -- steps ----------------------------------------------------------------------------------

    def _issue_scores(self, acc_S: cute.Tensor, state: MainloopState, part: int = 0) -> None:
        k_tile = self.factors.k[None, None, None, self.traits.own_keys(state.tile)]
        q_tile = self.factors.q[part][None, None, None, self.channels.q.index(state.block)]
        mma, steps = self.traits.mma_scores(len(self.factors.q)), self.traits.steps_d
        wgmma.issue(mma, acc_S, k_tile, q_tile, False, steps)

    def _issue_dp(self, acc_dP: cute.Tensor, state: MainloopState, part: int = 0) -> None:
        v_tile = self.factors.v[None, None, None, self.traits.own_keys(state.tile)]
        do_tile = self.factors.do[part][None, None, None, self.channels.do.index(state.block)]
        mma, steps = self.traits.mma_scores(len(self.factors.do)), self.traits.steps_dv
        if self.values is None:
            wgmma.issue(mma, acc_dP, v_tile, do_tile, False, steps)
        else:
            operand = wgmma.words_as_operand_a(self.values, self.traits.dtype)
            kept = self.traits.mma_values(), operand
            wgmma.issue_with_kept(mma, acc_dP, kept, v_tile, do_tile, steps)

    def _apply(
        self, kind: Kind, state: MainloopState, scores: cute.Tensor, statistics: Statistics
    ) -> None:
        """P in place of S; of modified scores P in `probs`, and P times derivative for S."""
        bits = self._bits(kind, state.cut, state.peeked.bits)
        if self.chain.is_empty:
            if bits is not None:
                bit_tile.hide_unset(scores, bits)
            probabilities(scores, statistics.lse, self.chain.scales.scale_log2)
        else:
            chain = self._chain_of(state.block)
            chain.apply(*self._place(state), scores, bits, statistics, self.probs)

    def _bits(self, kind: Kind, cut: Int32, is_ready: Boolean) -> tuple | None:
        if kind != Kind.PARTIAL:
            return None
        first = self.traits.first_key()
        return take_bits(self.tiles.bits, self.channels.bits, first, cut, is_ready)

    def _chain_of(self, block: Int32) -> ScoreChain:
        if self.chain.by_difference is not None and self.chain.by_difference.takes_turns:
            m_block = self.tiles.words[1, self.channels.q.index(block)]
            along = replace(self.chain.along, reduces_diagonals=is_mma_turn(m_block))
            return replace(self.chain, along=along)
        if not self.traits.tells_queries:
            return self.chain
        words = self.tiles.words[None, self.channels.q.index(block)].iterator + QUERY_WORDS
        layout = cute.make_layout(self.traits.tokens_per_block)
        return self.chain.of_queries(cute.make_tensor(words, layout))

    def _place(self, state: MainloopState) -> tuple[Work, Int32, Int32]:
        """The work tile of a query block, with the queries of its sequence, its head and number."""
        words = self.tiles.words[None, self.channels.q.index(state.block)]
        work = self.channels.ring.read(state.tile)
        if self.lengths.num_sequences is not None:
            work = self.lengths.of_sequence(work, words[3])
        return work, words[2], words[1]

    def _statistics(self, block: Int32, half: int | None = None) -> Statistics:
        """Statistics of the queries of this thread's columns, or of those in half of the block."""
        tile_m = self.traits.tile_m
        first, num_queries = wgmma.first_col_of(thread_in_warpgroup()), tile_m
        if half is not None:
            num_queries = tile_m // self.num_parts
            first += half * num_queries
        layout = cute.make_layout((2, num_queries // 8), stride=(1, 8))
        row = self.tiles.stats[None, self.channels.q.index(block)].iterator
        if self.traits.by_query_lists:
            # the words of a query follow each other: LSE of all its heads, delta of all its heads
            heads, of_query = self.traits.packed_heads, self.traits.words_of_query
            # groups of 8 columns, of a query or of several
            in_query, queries = max(heads // 8, 1), min(self.traits.tokens_per_block, tile_m // 8)
            stride = (1, (8, of_query * max(8 // heads, 1)))
            layout = cute.make_layout((2, (in_query, queries)), stride=stride)
            if heads < 8:
                first = first // heads * of_query + first % heads
            return Statistics(
                *(
                    cute.make_tensor((row + (first + i * heads)).align(8), layout)
                    for i in range(self.traits.num_stats)
                )
            )
        lse, delta = (
            cute.make_tensor((row + (first + start)).align(8), layout) for start in (0, tile_m)
        )
        if not self.traits.has_reference:
            return Statistics(lse, delta)
        # by the same address as LSE, to save registers
        delta, reference = (
            cute.make_tensor(lse.iterator + start, layout) for start in (tile_m, 2 * tile_m)
        )
        has_branch = self.chain.by_parts and not self.chain.adds_after_walk
        if self.traits.shares_keys or has_branch:
            # ptxas would serialise the products for a branch, or it would save little
            return Statistics(lse, delta, reference)
        references = cute.make_tensor((row + 2 * tile_m).align(8), cute.make_layout(tile_m))
        return Statistics(lse, delta, reference, has_reference(references))

    def _pass_probs(self, block: Int32) -> None:
        if self.traits.has_p:
            values = wgmma.rounded_values(self.probs, self.traits.dtype)
            store_rows(values, self._exchange_mma(), self.tiles.p[None, None, 0])
        else:
            self.channels.grads.channel.acquire(block)
            self._store_grads(self.probs, self.traits.ds_stage(block))
        cute.arch.barrier_arrive(barrier_id=Barrier.PROBS, number_of_threads=NUM_MMA_THREADS)

    def _take_probs(self, block: Int32) -> None:
        cute.arch.barrier(barrier_id=Barrier.PROBS, number_of_threads=NUM_MMA_THREADS)
        if self.traits.has_p:
            operand = wgmma.words_as_operand_a(self.probs, self.traits.dtype)
            load_rows(self.tiles.p[None, None, 0], self._exchange_mma(), operand)
        else:
            # each warp overwrites its part of P by dS
            self._load_grads(self.probs, self.traits.ds_stage(block))
            cute.arch.sync_warp()

    def _store_grads(self, words: cute.Tensor, unit: Int32) -> None:
        """Write dS^T of 64 keys and 64 queries in dQ's layout, a query's values contiguous."""
        values = wgmma.rounded_values(words, self.traits.dtype)
        store_rows(values, self._exchange_mma(), self._grads_by_keys(unit), transposes=True)

    def _load_grads(self, words: cute.Tensor, unit: Int32) -> None:
        operand = wgmma.words_as_operand_a(words, self.traits.dtype)
        load_rows(self._grads_by_keys(unit), self._exchange_mma(), operand, transposes=True)

    def _grads_by_keys(self, unit: Int32) -> cute.Tensor:
        return transposed(self.tiles.ds)[None, None, unit]

    def _exchange_mma(self) -> cute.TiledMma:
        """A product whose accumulator and operand A have the order of 64 keys by 64 queries."""
        return self.traits.mma_words(wgmma.ROWS_PER_WARPGROUP)


def _words_of(words: cute.Tensor, part: int, num_parts: int) -> cute.Tensor:
    """Words of one of equal parts of the columns."""
    size = cute.size(words) // num_parts
    return cute.make_tensor(words.iterator + part * size, cute.make_layout(size))
