"""The mma warp of the Blackwell backward: its products, and the waits before them."""

from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core.marked_rows import any_mark, clear_row, is_marked
from flash_mask_cute.core.row_blocks import marks_of
from flash_mask_cute.core.walk_ring import Block
from flash_mask_cute.sm100 import umma
from flash_mask_cute.sm100.flash_bwd_fragments import Products
from flash_mask_cute.sm100.flash_bwd_pairs import Arrivals
from flash_mask_cute.sm100.flash_bwd_storage import BwdSmem, Channels
from flash_mask_cute.sm100.flash_bwd_traits import BwdTraits

# k-steps of a product that is not rolled: descriptors of more would stay in registers
MOST_STEPS = 4


@dataclass(frozen=True)
class BlockProducts:
    """State of the mma warp. together: S and dP of a block are needed together, or `is_serial`."""

    traits: cutlass.Constexpr[BwdTraits]
    together: cutlass.Constexpr[bool]
    products: Products
    tiles: BwdSmem
    channels: Channels

    @property
    def arrivals(self) -> Arrivals:
        """Of a pair."""
        return Arrivals(self.traits, False, self.tiles, self.channels)

    @cute.jit
    def run(self):
        """Issue the products of every walk; dK and dQ lag one block behind the others."""
        group = self.traits.group
        tile, chunk, number = Int32(0), Int32(0), Int32(0)
        while self.channels.ring.wait(tile):
            # -- query blocks of a work tile
            first = number
            if const_expr(self.traits.holds_keys):
                self.channels.kv.wait(tile)
            step = self._step(tile, first)
            chunk, number = self.channels.walk.visit(chunk, number, step)
            # -- what lags of the last block; then dV and dK of the tile are complete
            if const_expr(not self.together):
                if const_expr(self.traits.values_lag):
                    self._issue_late_values(number - 1, first)
                self._issue_gradients(number - 1, first)
            group.commit(self.channels.sums.barrier(tile))
            if const_expr(self.traits.is_wide_pair):
                # the sums leave by way of the memory of dO
                self.channels.sums.wait_until_released(tile)
                group.commit(self.channels.do.vacancy(number - 1))
            self.channels.ring.release(tile)
            tile += 1

    def _step(self, tile: Int32, first: Int32) -> partial:
        issue = self._issue_block
        if self.traits.is_folded:
            issue = self._issue_folded_block
        elif self.traits.is_wide_pair:
            issue = self._issue_block_in_order
        elif self.together:
            issue = self._issue_block_together
        elif self.traits.values_lag:
            issue = self._issue_block_ahead
        return partial(issue, tile, first)

    @cute.jit
    def _issue_block(self, tile: Int32, first: Int32, number: Int32, block: Block):
        """Issue S of a block, dK and dQ of the previous one, then dV and dP of this one."""
        traits = self.traits
        if const_expr(traits.cta_pair):
            self.arrivals.q(number)
        else:
            self._await_q(number)
        # -- S, then dK and dQ of the previous block, while the compute warps make P
        self._issue_scores(number)
        if const_expr(traits.cta_pair):
            traits.group.commit(self.channels.q.vacancy(number))
        if number > first:
            self._issue_gradients(number - 1, first)
        # -- dV and dP, which both read dO
        if const_expr(traits.cta_pair):
            self.arrivals.do(number)
        else:
            self.channels.do.wait(number)
        self._await_sums(tile, number, first)
        self._issue_whole_dv(number, first)
        self._issue_dp(number)
        self.traits.group.commit(self.channels.do.vacancy(number))
        return number + 1

    @cute.jit
    def _issue_block_ahead(self, tile: Int32, first: Int32, number: Int32, block: Block):
        """Issue dV of the previous block, S of this one, dK and dQ of the previous one, then dP."""
        if number > first:
            self._issue_late_values(number - 1, first)
        self._await_q(number)
        self._issue_scores(number)
        if number > first:
            self._issue_gradients(number - 1, first)
        self.channels.do.wait(number)
        self._await_sums(tile, number, first)
        self._issue_dp(number)
        return number + 1

    @cute.jit
    def _issue_late_values(self, number: Int32, first: Int32):
        """dV of a block whose dP has been issued; it is the last to read the block's dO."""
        self._issue_whole_dv(number, first)
        self.traits.group.commit(self.channels.do.vacancy(number))

    @cute.jit
    def _issue_block_together(self, tile: Int32, first: Int32, number: Int32, block: Block):
        """Issue all products of a block: S and dP, then those that use their results."""
        traits, group = self.traits, self.traits.group
        self._await_q(number)
        # -- S and dP
        self._issue_scores(number)
        if const_expr(not traits.makes_dk):
            group.commit(self.channels.q.vacancy(number))
        self.channels.do.wait(number)
        self._await_sums(tile, number, first)
        if const_expr(traits.makes_dk):
            self._issue_dp(number)
        # -- dV when P is there, dK and dQ when dS is
        if const_expr(traits.makes_dv):
            self._issue_whole_dv(number, first)
        group.commit(self.channels.do.vacancy(number))
        if const_expr(traits.makes_dk):
            self._issue_gradients(number, first)
        return number + 1

    @cute.jit
    def _issue_block_in_order(self, tile: Int32, first: Int32, number: Int32, block: Block):
        """Issue S, dP, dV, dK, dQ of a block of a wide pair. dP, and dV of the first chunks of
        queries, run beside the exponentials.

        dS lies over dO and Q by rows. So they are released when dQ has read dS, and when dS of the
        other CTA has been sent; dO of a work tile's last block when its sums have left."""
        group, channels = self.traits.group, self.channels
        if number > first:
            group.commit(channels.do.vacancy(number - 1))
        self.arrivals.q(number)
        self._issue_scores(number)
        self.arrivals.do(number)
        # the rest of dQ of the block before has been taken from there
        channels.dq_left.acquire(number)
        channels.taken.wait_until_released(number)
        self._issue_dp(number)
        self._await_sums(tile, number, first)
        steps = umma.CHUNK // umma.STEP
        channels.first_p.wait_until_released(number)
        self._issue_dv(number, number > first, range(steps))
        channels.s.wait_until_released(number)
        self._issue_dv(number, True, range(steps, 2 * steps))
        group.commit(channels.dv.barrier(number))
        self._issue_gradients(number, first)
        return number + 1

    @cute.jit
    def _issue_folded_block(self, tile: Int32, first: Int32, number: Int32, block: Block):
        """Issue S, dP, dK, dV, dQ of a block of a folded pair. Q and dO by columns take the places
        of those by rows. The last release also says that dQ has read the keys."""
        group, channels = self.traits.group, self.channels
        self.arrivals.q(number)
        self._issue_scores(number)
        group.commit(channels.q.vacancy(number))
        self.arrivals.do(number)
        self._await_sums(tile, number, first)
        self._issue_dp(number)
        group.commit(channels.do.vacancy(number))
        self.arrivals.scores(number)
        self.arrivals.q_columns(number)
        self._issue_dk(number, first)
        group.commit(channels.q_columns.vacancy(number))
        self.arrivals.do_columns(number)
        self._issue_dv(number, number > first)
        self.arrivals.ds(number)
        self._issue_dq(number)
        group.commit(channels.do_columns.vacancy(number))
        return number + 1

    @cute.jit
    def _issue_scores(self, number: Int32):
        if const_expr(self.traits.dq_over_scores):
            # dQ of the block before has been taken from there
            self.channels.dq.acquire(number)
        umma.fence_after_wait()
        q_tile = self.products.s_q[None, None, None, self.channels.q.index(number)]
        s_k = self.products.s_k
        umma.issue(self.traits.mma_scores(), self.products.s, s_k, q_tile, False, MOST_STEPS)
        self.traits.group.commit(self.channels.s.barrier(number))

    @cute.jit
    def _issue_dp(self, number: Int32):
        if const_expr(self.traits.dq_shares):
            # dQ of the block before has been taken from there
            self.channels.dq.acquire(number)
        umma.fence_after_wait()
        do_tile = self.products.dp_do[None, None, None, self.channels.do.index(number)]
        dp_v = self.products.dp_v
        umma.issue(self.traits.mma_scores(), self.products.dp, dp_v, do_tile, False, MOST_STEPS)
        self.traits.group.commit(self.channels.dp.barrier(number))

    @cute.jit
    def _await_sums(self, tile: Int32, number: Int32, first: Int32):
        """Wait until the sums of the work tile before are taken; then dS may be written, too."""
        if number == first:
            self.channels.sums.acquire(tile)

    def _issue_whole_dv(self, number: Int32, first: Int32) -> None:
        # probabilities are there
        self.channels.s.wait_until_released(number)
        self._issue_dv(number, number > first)

    @cute.jit
    def _issue_dv(
        self,
        number: Int32,
        accumulate: bool | Boolean,
        steps: cutlass.Constexpr[range | None] = None,
    ):
        """dV += P^T dO: (128 keys, tile_dv). steps: of the queries of each half, if not all."""
        traits = self.traits
        umma.fence_after_wait()
        do_tile = self.products.dv_do[None, None, None, self.channels.do.index(number)]
        mma, acc, p = traits.mma_sums(traits.tile_dv), self.products.dv, self.products.p
        if const_expr(traits.is_folded):
            umma.issue(mma, acc, p[0], do_tile, accumulate, MOST_STEPS)
        else:
            umma.issue_parts(mma, acc, p, do_tile, accumulate, steps)

    @cute.jit
    def _await_q(self, number: Int32):
        """Wait for Q of a block, and clear marked rows of Q and dO."""
        traits, stage = self.traits, self.channels.q.index(number)
        self.channels.q.wait(number)
        if const_expr(traits.has_marks):
            marks = marks_of(self.tiles.stats[None, stage], traits.tile_m, traits.num_stats)
            if any_mark(marks, traits.tile_m):
                self.channels.do.wait(number)
                for row in cutlass.range(traits.tile_m, unroll=1):
                    if is_marked(marks, row):
                        clear_row(self.tiles.q[row, None, stage])
                        clear_row(self.tiles.do[row, None, self.channels.do.index(number)])
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()

    @cute.jit
    def _issue_gradients(self, number: Int32, first: Int32):
        """Issue dK and dQ of a block. This releases Q, and shows that keys have been read."""
        traits, group = self.traits, self.traits.group
        q = self.channels.q
        if const_expr(traits.cta_pair):
            q = self.channels.q_columns
            self.arrivals.q_columns(number)
        # dS is there
        self.channels.dp.wait_until_released(number)
        self._issue_dk(number, first)
        if const_expr(traits.cta_pair):
            self.arrivals.ds(number)
            if const_expr(traits.is_wide_pair):
                group.commit(self.channels.q.vacancy(number))
        self._issue_dq(number)
        group.commit(q.vacancy(number))

    @cute.jit
    def _issue_dk(self, number: Int32, first: Int32):
        """dK += dS^T Q: (keys, tile_d)."""
        traits = self.traits
        q = self.channels.q_columns if const_expr(traits.cta_pair) else self.channels.q
        umma.fence_after_wait()
        dk_q = self.products.dk_q[None, None, None, q.index(number)]
        mma, acc, ds = traits.mma_sums(traits.tile_d), self.products.dk, self.products.ds
        if const_expr(traits.is_folded):
            umma.issue(mma, acc, ds[0], dk_q, number > first, MOST_STEPS)
        else:
            umma.issue_parts(mma, acc, ds, dk_q, number > first)

    @cute.jit
    def _issue_dq(self, number: Int32):
        """dQ = dS K, (tile_m queries, tile_d), in the place of the previous block's."""
        traits = self.traits
        self.channels.dq.acquire(number)
        umma.fence_after_wait()
        dq_ds = self.products.dq_ds[None, None, None, 0]
        for width, part in zip(traits.widths_dq, self.products.dq, strict=True):
            dq_k = part.k[None, None, None, 0]
            umma.issue(traits.mma_dq(width), part.acc, dq_ds, dq_k, False, MOST_STEPS)
        traits.group.commit(self.channels.dq.barrier(number))
