"""The Hopper backward of a query block up to its sums: S and dP, and of them P and dS.

A warpgroup has 64 keys as rows and the block's queries as columns. P^T and dS^T come out in 16 bits
as register operands of dV and dK; dS^T also goes to shared memory, where dQ reads it.

Where each warpgroup has keys of its own, it computes both products. Where both have the same keys,
the first one computes S and P and the second one dP and dS, and they exchange P and dS by way of
shared memory:

    warpgroup 0: S -> P -> store                      -> load dS
    warpgroup 1: dP              -> load P -> dS -> store

dS is then made from P in 16 bits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from flash_mask_cute.core.cta import THREADS_PER_WARPGROUP, thread_in_warpgroup
from flash_mask_cute.core.walk_ring import Kind
from flash_mask_cute.masks import bit_tile
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_bwd_math import ScoreChain, probabilities, score_gradients
from flash_mask_cute.sm90.flash_bwd_plan import (
    DS_STAGES,
    NUM_MMA_WARPGROUPS,
    Barrier,
    BwdPlan,
    Channels,
    Tiles,
)
from flash_mask_cute.sm90.warpgroups import (
    load_rows,
    mma_warpgroup_idx,
    store_rows,
    take_bits,
)

NUM_MMA_THREADS = NUM_MMA_WARPGROUPS * THREADS_PER_WARPGROUP


class Factors(NamedTuple):
    """Shared memory as operands of S^T = K Q^T and dP^T = V dO^T."""

    k: cute.Tensor
    q: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor


def sync_both() -> None:
    """Wait for both MMA warpgroups."""
    cute.arch.barrier(barrier_id=Barrier.BOTH, number_of_threads=NUM_MMA_THREADS)


class Known(NamedTuple):
    """Which fills for the next query block are known to have come (`Channel.is_full`)."""

    q: Boolean
    do: Boolean
    bits: Boolean

    @staticmethod
    def nothing() -> "Known":
        return Known(*(Boolean(False) for _ in Known._fields))


@dataclass(frozen=True)
class BlockScores:
    """P^T and dS^T of a query block.

    probs, grads: their words (`wgmma.round_pairs`), for the sums of dV and dK.
    """

    plan: cutlass.Constexpr[BwdPlan]
    tiles: Tiles
    channels: Channels
    chain: ScoreChain
    factors: Factors
    probs: cute.Tensor
    grads: cute.Tensor

    @staticmethod
    def create(plan: BwdPlan, tiles: Tiles, channels: Channels, chain: ScoreChain) -> "BlockScores":
        mma = plan.mma_scores()
        factors = Factors(
            wgmma.operand_a(mma, tiles.k),
            wgmma.operand_b(mma, tiles.q),
            wgmma.operand_a(mma, tiles.v),
            wgmma.operand_b(mma, tiles.do),
        )
        num_words = wgmma.ROWS_PER_WARPGROUP * plan.tile_m // THREADS_PER_WARPGROUP // 2
        probs, grads = (cute.make_rmem_tensor(num_words, Int32) for _ in range(2))
        return BlockScores(plan, tiles, channels, chain, factors, probs, grads)

    def compute(self, kind: Kind, tile: Int32, block: Int32, cut: Int32, known: Known) -> None:
        """Compute P and dS of query block `block`, which has arrived but for its dO.

        cut: number of the block's bits, where kind says that it is cut. Without products in flight
        before; afterwards dO has arrived, and dQ may read dS after `sync_both`.
        """
        if self.plan.shares_keys:
            self._compute_in_turn(kind, tile, block, cut, known)
            self.channels.do.wait(block)
        else:
            self._compute_both(kind, tile, block, cut, known)
        cute.arch.fence_proxy("async.shared", space="cta")

    def complete(self, block: Int32) -> None:
        """Take what the other warpgroup has computed, after `sync_both`."""
        if self.plan.shares_keys:
            # by both, because a branch would serialise the products that are in flight
            self._load(self.grads, self._ds_tile(block))

    # -- keys of its own ------------------------------------------------------------------------

    def _compute_both(
        self, kind: Kind, tile: Int32, block: Int32, cut: Int32, known: Known
    ) -> None:
        plan, chain, channels = self.plan, self.chain, self.channels
        is_plain = chain.is_empty
        acc_S, acc_dP = (wgmma.make_accumulator(plan.tile_m) for _ in range(2))
        lse, delta = self._statistics(block)
        self._issue_scores(acc_S, tile, block)
        channels.do.wait_unless(known.do, block)
        if is_plain:
            self._issue_dp(acc_dP, tile, block)
            warpgroup.wait_group(1)
        else:
            # no registers for dP meanwhile
            warpgroup.wait_group(0)
        self._apply(kind, tile, block, cut, known, wgmma.rows_by_cols(acc_S), lse)
        if not is_plain:
            self._issue_dp(acc_dP, tile, block)
        warpgroup.wait_group(0)
        score_gradients(wgmma.rows_by_cols(acc_dP), wgmma.rows_by_cols(acc_S), delta)
        wgmma.round_pairs(self.grads, acc_dP, plan.dtype)
        if is_plain:
            wgmma.round_pairs(self.probs, acc_S, plan.dtype)
        groups = plan.num_row_groups
        size = cute.size(self.grads) // groups
        for i in range(groups):
            unit = plan.ds_unit(block % DS_STAGES, mma_warpgroup_idx(), i)
            words = cute.make_tensor(self.grads.iterator + i * size, cute.make_layout(size))
            self._store(words, self.tiles.ds[None, None, unit])

    # -- the keys of both -----------------------------------------------------------------------

    @cute.jit
    def _compute_in_turn(
        self, kind: cutlass.Constexpr[Kind], tile: Int32, block: Int32, cut: Int32, known: Known
    ) -> None:
        if mma_warpgroup_idx() == 0:
            self._compute_probs(kind, tile, block, cut, known)
        else:
            self._compute_grads(tile, block, known)

    def _compute_probs(
        self, kind: Kind, tile: Int32, block: Int32, cut: Int32, known: Known
    ) -> None:
        acc_S = wgmma.make_accumulator(self.plan.tile_m)
        lse, _ = self._statistics(block)
        self._issue_scores(acc_S, tile, block)
        warpgroup.wait_group(0)
        self._apply(kind, tile, block, cut, known, wgmma.rows_by_cols(acc_S), lse)
        if self.chain.is_empty:
            wgmma.round_pairs(self.probs, acc_S, self.plan.dtype)
        else:
            # what dS has for P takes the way of dS
            wgmma.round_pairs(self.grads, acc_S, self.plan.dtype)
            self._store(self.grads, self._ds_tile(block))
        self._store(self.probs, self.tiles.p[None, None, 0])
        cute.arch.barrier_arrive(barrier_id=Barrier.PROBS, number_of_threads=NUM_MMA_THREADS)

    def _compute_grads(self, tile: Int32, block: Int32, known: Known) -> None:
        plan = self.plan
        acc_dP = wgmma.make_accumulator(plan.tile_m)
        _, delta = self._statistics(block)
        self.channels.do.wait_unless(known.do, block)
        self._issue_dp(acc_dP, tile, block)
        warpgroup.wait_group(0)
        cute.arch.barrier(barrier_id=Barrier.PROBS, number_of_threads=NUM_MMA_THREADS)
        self._load(self.probs, self.tiles.p[None, None, 0])
        words = self.probs
        if not self.chain.is_empty:
            words = self.grads
            self._load(words, self._ds_tile(block))
            cute.arch.sync_warp()
        factors = cute.make_rmem_tensor(acc_dP.layout, Float32)
        factors.store(wgmma.rounded_values(words, plan.dtype).load().to(Float32))
        score_gradients(wgmma.rows_by_cols(acc_dP), wgmma.rows_by_cols(factors), delta)
        wgmma.round_pairs(self.grads, acc_dP, plan.dtype)
        self._store(self.grads, self._ds_tile(block))

    # -- steps ----------------------------------------------------------------------------------

    def _issue_scores(self, acc_S: cute.Tensor, tile: Int32, block: Int32) -> None:
        k_tile = self.factors.k[None, None, None, self.plan.own_keys(self.channels.kv, tile)]
        q_tile = self.factors.q[None, None, None, self.channels.q.index(block)]
        wgmma.issue(self.plan.mma_scores(), acc_S, k_tile, q_tile, False)

    def _issue_dp(self, acc_dP: cute.Tensor, tile: Int32, block: Int32) -> None:
        v_tile = self.factors.v[None, None, None, self.plan.own_keys(self.channels.kv, tile)]
        do_tile = self.factors.do[None, None, None, self.channels.do.index(block)]
        wgmma.issue(self.plan.mma_scores(), acc_dP, v_tile, do_tile, False)

    def _apply(
        self,
        kind: Kind,
        tile: Int32,
        block: Int32,
        cut: Int32,
        known: Known,
        scores: cute.Tensor,
        lse: cute.Tensor,
    ) -> None:
        """In place of S, P or, where there is a chain, what dS has for it; then P is in probs."""
        channels, bits = self.channels, None
        if kind == Kind.CUT:
            bits = take_bits(self.tiles.bits, channels.bits, self.plan.first_key(), cut, known.bits)
        if self.chain.is_empty:
            if bits is not None:
                bit_tile.hide_unset(scores, bits)
            probabilities(scores, lse, self.chain.scales.scale_log2)
        else:
            work = channels.ring.read(tile)
            words = self.tiles.words[None, channels.q.index(block)]
            self.chain.apply(work, words[2], words[1], scores, bits, lse, self.probs)

    def _statistics(self, block: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """LSE and delta of the queries that this thread's columns are, in shared memory."""
        tile_m = self.plan.tile_m
        first = wgmma.first_col_of(thread_in_warpgroup())
        layout = cute.make_layout((2, tile_m // 8), stride=(1, 8))
        row = self.tiles.stats[None, self.channels.q.index(block)].iterator
        lse, delta = (
            cute.make_tensor((row + (first + start)).align(8), layout) for start in (0, tile_m)
        )
        return lse, delta

    def _ds_tile(self, block: Int32) -> cute.Tensor:
        return self.tiles.ds[None, None, block % DS_STAGES]

    def _store(self, words: cute.Tensor, smem: cute.Tensor) -> None:
        """Write 64 keys by 64 queries."""
        mma = self.plan.mma_keys(wgmma.ROWS_PER_WARPGROUP)
        store_rows(wgmma.rounded_values(words, self.plan.dtype), mma, smem)

    def _load(self, words: cute.Tensor, smem: cute.Tensor) -> None:
        mma = self.plan.mma_keys(wgmma.ROWS_PER_WARPGROUP)
        load_rows(smem, mma, wgmma.words_as_operand_a(words, self.plan.dtype))
