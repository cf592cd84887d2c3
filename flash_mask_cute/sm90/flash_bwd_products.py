"""The products of the Hopper backward that sum dV, dK and dQ, of one query block."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_bwd_operands import Fragments
from flash_mask_cute.sm90.flash_bwd_scores import BlockScores, HalfSums
from flash_mask_cute.sm90.flash_bwd_traits import BwdSmem, BwdTraits, Channels
from flash_mask_cute.sm90.gradient_stores import stage_nothing
from flash_mask_cute.sm90.warpgroups import Role, mma_warpgroup_idx


@dataclass(frozen=True)
class BlockProducts:
    """The products after P and dS, in the order dV, dQ, dK. If two CTAs sum dQ together, a part of
    dK comes before dQ. If a block is computed in halves, dV and dK of a half come as soon as it has
    P and dS, and dQ after both."""

    traits: cutlass.Constexpr[BwdTraits]
    channels: Channels
    fragments: Fragments

    def add_dv(
        self, accs: list, words: cute.Tensor, block: Int32, accumulate: bool | Boolean
    ) -> None:
        """Start dV += P^T dO. accs: (64, width) for each part of dV's columns. words: of P^T."""
        stage = self.channels.do.index(block)
        self._issue_sums(accs, words, self.fragments.dv_do, stage, accumulate)

    def half_sums(
        self, acc_dV: list, acc_dK: list, accumulate: bool | Boolean, block: Int32
    ) -> HalfSums | None:
        """The products of dV and dK over half of a block, if it is computed in halves."""
        if not self.traits.splits_keys:
            return None
        of_dv = self.fragments.dv_do, self.channels.do.index(block)
        of_dk = self.fragments.dk_q, self.channels.q.index(block)
        return HalfSums(
            partial(self._issue_half, acc_dV, accumulate, *of_dv),
            partial(self._issue_half, acc_dK, accumulate, *of_dk),
        )

    def complete_sums(self, block: Int32) -> None:
        """Wait for dV and dK of a block: dQ takes the registers of P and dS."""
        warpgroup.wait_group(0)
        self.channels.do.release(block)

    def add_dq_and_dk(
        self,
        accs: list,
        words: cute.Tensor,
        block: Int32,
        accumulate: bool | Boolean,
        issue_dQ: Callable[[int], list],
    ) -> tuple[list, int]:
        """Start the first part of dQ, and dK += dS^T Q, after dV. accs: of dK. words: of dS^T.
        Returns the accumulators of dQ, and the number of products issued after it."""
        operands, stage = self.fragments.dk_q, self.channels.q.index(block)
        if not self.traits.cta_pair:
            acc_dQ = issue_dQ(0)
            self._issue_sums(accs, words, operands, stage, accumulate)
            return acc_dQ, len(accs)
        # so the other CTA's dS may come late, and dO is released as soon as dV is complete
        self._issue_sums(accs[:-1], words, operands[:-1], stage, accumulate)
        acc_dQ = issue_dQ(0)
        # dV is complete when these are left
        warpgroup.wait_group(len(accs[:-1]) + len(acc_dQ))
        self.channels.do.release(block)
        self.channels.grads.channel.wait(block)
        peer_ds = self.fragments.peer_ds[None, None, None, 0]
        for acc, peer_k in zip(acc_dQ, self.fragments.peer_k, strict=True):
            pair = peer_ds, peer_k[None, None, None, 0]
            wgmma.issue_sum(self.traits.mma_dq(wgmma.num_cols(acc)), acc, [pair], True)
        self._issue_sums(accs[-1:], words, operands[-1:], stage, accumulate)
        return acc_dQ, 1

    def issue_dq(self, block: Int32, tile: Int32, groups: tuple[Int32, ...], part: int) -> list:
        """Start this warpgroup's products of a part of dQ over the keys of some groups."""
        traits, accs = self.traits, []
        if not groups:
            return accs
        stage = traits.ds_stage(block)
        row_group = mma_warpgroup_idx() if traits.num_row_groups > 1 else Int32(0)
        products = traits.columns.products_dq(part)
        for (columns, _), operand in zip(products, self.fragments.dq_k[part], strict=True):
            width = columns.width
            acc_dQ, pairs = wgmma.make_accumulator(width), []  # (64 queries, width)
            for group in groups:
                unit = traits.ds_unit(stage, group, row_group)
                ds_tile = self.fragments.dq_ds[None, None, None, unit]
                k_tile = operand[None, None, None, traits.keys_unit(tile, group)]
                pairs.append((ds_tile, k_tile))
            wgmma.issue_sum(traits.mma_dq(width), acc_dQ, pairs, False)
            accs.append(acc_dQ)
        return accs

    @cute.jit
    def send_grads(self, block: Int32):
        """Send dS, which all warps have written, to the other CTA, if there is one."""
        if const_expr(self.traits.cta_pair):  # noqa: SIM102 (decided while tracing)
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == Role.MMA:
                self.channels.grads.send(block)

    def release_summed(self, block: Int32) -> None:
        """Release what is no longer read when the first part of dQ is complete: dS of both CTAs if
        they share dQ, dS of both warpgroups if it has one place, otherwise dO."""
        if self.traits.cta_pair:
            self.channels.grads.release(block)
        elif self.channels.ds is not None:
            self.channels.ds.release(block)
        else:
            self.channels.do.release(block)

    def _issue_sums(
        self,
        accs: list,
        words: cute.Tensor,
        operands_b: tuple,
        stage: Int32,
        accumulate: bool | Boolean,
        first_step: int = 0,
    ) -> None:
        """Add to the parts of dV or dK, a commit group each. first_step: where words begin."""
        operand_a = wgmma.words_as_operand_a(words, self.traits.dtype)
        for acc, operand_b in zip(accs, operands_b, strict=True):
            mma = self.traits.mma_words(wgmma.num_cols(acc))
            tile = operand_b[None, None, None, stage]
            wgmma.issue(mma, acc, operand_a, tile, accumulate, first_step=first_step)

    def _issue_half(
        self,
        accs: list,
        accumulate: bool | Boolean,
        operands_b: tuple,
        stage: Int32,
        words: cute.Tensor,
        half: int,
    ) -> int:
        """`HalfSums`: `_issue_sums` over half of the queries; returns the number of products."""
        first_step = half * cute.size(words) // wgmma.WORDS_PER_STEP
        adds = accumulate if half == 0 else True
        self._issue_sums(accs, words, operands_b, stage, adds, first_step)
        return len(accs)


@cute.jit
def pass_over(tiles: BwdSmem, channels: Channels, scores: BlockScores, block: Int32, cut: Int32):
    """Skip a partial query block of a work tile without scores: it adds 0 to dQ."""
    # dO is released first, as after a block's products: the load warp may wait for that before
    # it takes a part of dQ
    channels.do.wait(block)
    channels.do.release(block)
    scores.discard_bits(cut)
    scores.acquire_summed(block)
    scores.publish_grads(block)
    traits = scores.traits
    if const_expr(traits.columns.alternating):
        if traits.sums_dq(block):
            stage_nothing(traits, tiles, channels.dq, block)
    else:
        stage_nothing(traits, tiles, channels.dq, block)
    channels.q.release(block)
