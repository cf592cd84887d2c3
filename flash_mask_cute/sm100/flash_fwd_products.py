"""The mma warp of the Blackwell forward: its products, and the waits before them."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core.walk_ring import Block
from flash_mask_cute.sm100 import umma
from flash_mask_cute.sm100.flash_fwd_traits import (
    BUFFERS_S,
    FIRST_PART,
    Channels,
    FwdTraits,
    Products,
)


class MmaState(NamedTuple):
    """Number of key blocks whose scores were issued so far. is_first: the next block is the first
    of its tile. accumulates: the last block was not."""

    blocks: Int32
    is_first: Boolean
    accumulates: Boolean


@dataclass(frozen=True)
class WalkProducts:
    """State of the mma warp. in_parts: probabilities come in two parts."""

    traits: cutlass.Constexpr[FwdTraits]
    in_parts: cutlass.Constexpr[bool]
    products: Products
    channels: Channels

    @cute.jit
    def run(self):
        """Issue the products of every walk: P V lags one block behind S, across work tiles too."""
        channels, halves = self.channels, self.traits.halves
        tile, chunk = Int32(0), Int32(0)
        state = MmaState(Int32(0), Boolean(True), Boolean(False))
        while channels.ring.wait(tile):
            # -- key blocks of a work tile
            step = self._step(tile)
            state = state._replace(is_first=Boolean(True))
            chunk, state = channels.walk.visit(chunk, state, step)
            # -- Q may be replaced when the tile's last S is complete
            for half in cutlass.range_constexpr(halves):
                self.traits.group.commit(channels.q.vacancy(halves * tile + half))
            channels.ring.release(tile)
            tile += 1
        # -- P V of the last block of all
        state = state._replace(is_first=Boolean(True))
        if tile > 0:
            for half in cutlass.range_constexpr(halves):
                self._issue_values(tile, state, half)

    def _step(self, tile: Int32) -> partial:
        issue = self._issue_block if self.traits.halves > 1 else self._issue_block_ahead
        return partial(issue, tile)

    @cute.jit
    def _issue_block(self, tile: Int32, state: MmaState, block: Block):
        """For each half, issue P V of the previous block, then S of this one in P's place."""
        number = state.blocks
        for half in cutlass.range_constexpr(self.traits.halves):
            if number > 0:
                self._issue_values(tile, state, half)
            if const_expr(half == 0):
                self.channels.k.wait(number)
            self._issue_scores(tile, state, half)
        self.traits.group.commit(self.channels.k.vacancy(number))
        return MmaState(number + 1, Boolean(False), state.is_first == Boolean(False))

    @cute.jit
    def _issue_block_ahead(self, tile: Int32, state: MmaState, block: Block):
        """Issue S of a block in the place of the P used last, then P V of the previous block."""
        number = state.blocks
        self.channels.k.wait(number)
        self._issue_scores(tile, state, 0)
        self.traits.group.commit(self.channels.k.vacancy(number))
        if number > 0:
            self._issue_values(tile, state, 0)
        return MmaState(number + 1, Boolean(False), state.is_first == Boolean(False))

    @cute.jit
    def _issue_scores(self, tile: Int32, state: MmaState, half: cutlass.Constexpr):
        traits, channels = self.traits, self.channels
        half_tile, number = traits.halves * tile + half, traits.halves * state.blocks + half
        # -- S = Q K^T: (rows of the group, tile_n)
        if state.is_first:
            channels.q.wait(half_tile)
        umma.issue(
            traits.mma_qk(),
            traits.scores(traits.buffer_s(half, number)),
            self.products.q[None, None, None, channels.q.index(half_tile)],
            self.products.k[None, None, None, channels.k.index(state.blocks)],
            False,
        )
        traits.group.commit(channels.s.barrier(number))

    @cute.jit
    def _issue_values(self, tile: Int32, state: MmaState, half: cutlass.Constexpr):
        """Issue P V of the last block with scores: of the tile before `tile` if state.is_first."""
        traits, channels, block = self.traits, self.channels, state.blocks - 1
        half_tile = traits.halves * (tile - Int32(state.is_first)) + half
        number = traits.halves * block + half
        # -- V, P and, in the first block of a tile, the room for O
        if const_expr(half == 0):
            channels.v.wait(block)
        if const_expr(self.in_parts):
            channels.p.wait(number)
        else:
            # the scores of the block have made room for its probabilities
            channels.s.acquire(number + BUFFERS_S)
        if state.accumulates == Boolean(False):
            channels.o.acquire(half_tile)
        # -- O (+)= P V: (rows of the group, tile_dv)
        umma.fence_after_wait()
        issue = partial(
            umma.issue,
            traits.mma_pv(),
            traits.output(half),
            traits.probabilities(traits.buffer_s(half, number)),
            self.products.v[None, None, None, channels.v.index(block)],
        )
        if const_expr(self.in_parts):
            steps, first = traits.tile_n // umma.STEP, FIRST_PART // umma.STEP
            issue(state.accumulates, steps=range(first))
            channels.s.acquire(number + BUFFERS_S)
            umma.fence_after_wait()
            issue(True, steps=range(first, steps))
        else:
            issue(state.accumulates)
        # -- completion frees V, and gives O to the output warps after the tile's last block
        if const_expr(half == traits.halves - 1):
            traits.group.commit(channels.v.vacancy(block))
        if state.is_first:
            traits.group.commit(channels.o.barrier(half_tile))
