"""Selection of the next work tile of a persistent CTA.

A work tile is one block of one head of one sequence: tile_m query rows in the forward, tile_n keys
in the backward. Tiles have a fixed linear order. A CTA starts with the tile of its own number. When
it is done, it takes the next free tile (an atomic counter), or, without a counter, every grid-th
tile. A counter is read while the first tile is computed, so of few unequal tiles the second one is
fixed, too: the CTA whose first tile is the longest gets the shortest one.

Linear order: first groups of heads, then the blocks of a group, then its heads. In the forward the
keys and values of a group fit the L2 cache together. Blocks start from the last one if the launch
asks for it. In a dense launch groups are formed over the heads of all sequences; in a varlen
launch, sequence by sequence, over the heads of one.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core.clusters import Claims
from flash_mask_cute.core.warp_scan import WARP, running

# Of work tiles in turn, the part that CTAs have from the start, as a fraction.
OWN_TILES = 7, 8


class WorkTile(NamedTuple):
    """Coordinates of a work tile. head_idx counts KV heads in the backward, and in the forward if
    query heads are packed. block: negative if the tile was handed out before."""

    block: Int32
    head_idx: Int32
    batch_idx: Int32
    is_valid: Boolean


class ScheduleParams(NamedTuple):
    """Run-time extents of the schedule, made on the host side of the launch. first_block: the first
    block of this launch in each head, or None if it has all."""

    num_blocks: Int32
    num_heads: Int32
    num_batch: Int32
    heads_per_group: Int32
    first_block: Int32 | None = None


def alternating_params(params: ScheduleParams) -> ScheduleParams:
    """For tiles in turn: a group has as many heads as a CTA begins with tiles, which are then the
    same block of all of them, and CTAs with other blocks read the same keys at the same time."""
    ctas, _, _ = cute.arch.grid_dim()
    share, of_all = OWN_TILES
    tiles = params.num_blocks * params.num_heads * params.num_batch
    own = cutlass.max(tiles // of_all * share // ctas, 1)
    return params._replace(heads_per_group=own)


class Search(NamedTuple):
    """Linear index of the current tile, and the state of the varlen search. The state is the first
    sequence of its window and the number of tiles before it."""

    index: Int32
    batch_start: Int32
    tiles_before: Int32


@dataclass(frozen=True)
class TileScheduler:
    """Hands out the work tiles of a launch.

    counter: (2,) int32 tiles handed out and CTAs finished, both 0 between launches, or None.
    last_first: start with the last blocks, because their walks are the longest or other blocks must
    wait for them.
    varlen: blocks per sequence differ.
    mirrored: whether, with a counter, the second tile of a CTA is the one that mirrors its first
    (docs/facts/hopper_forward.md#few-unequal-work-tiles-are-claimed-late-and-the-second-one-is-fixed);
    None: it never is.
    ctas_per_tile: number of neighbouring CTAs that take tiles together; a tile then has one block
    for each of them. claims: how one of them claims for all; without it, such CTAs have no counter.
    claims_first: a CTA claims its first tile, too. Then CTAs that wait for the tiles before theirs
    all end, however few run at a time: the first tile that is not done waits for none, and its CTA
    runs and has done those that it claimed before.
    entries_first: of dense launches, groups have a head of several sequences, then of others.
    alternating: with entries_first, a CTA begins with the tiles of a block of a group
    (`alternating_params`), and claims tiles later.
    longest: of varlen launches, blocks that come before all others, head by head: their number,
    and the sequence and block of one in each lane (`MaskBitsArgs.longest_walks`).
    """

    params: ScheduleParams
    counter: cute.Tensor | None
    last_first: cutlass.Constexpr[bool]
    varlen: cutlass.Constexpr[bool]
    ctas_per_tile: cutlass.Constexpr[int] = 1
    claims: Claims | None = None
    mirrored: Boolean | None = None
    claims_first: cutlass.Constexpr[bool] = False
    entries_first: cutlass.Constexpr[bool] = False
    alternating: cutlass.Constexpr[bool] = False
    longest: tuple[Int32, Int32, Int32] | None = None

    def start(self) -> Search:
        search = self.before_start()
        if self.claims_first and self.counter is not None:
            return self.advance(search, Int32(0))
        return search

    def before_start(self) -> Search:
        if self.alternating:
            return Search(
                cute.arch.block_idx()[0] * self.params.heads_per_group, Int32(0), Int32(0)
            )
        return Search(cute.arch.block_idx()[0] // self.ctas_per_tile, Int32(0), Int32(0))

    def own_block(self, block: Int32) -> Int32:
        """The block of this CTA among those of a work tile."""
        return block * self.ctas_per_tile + cute.arch.block_idx()[0] % self.ctas_per_tile

    @cute.jit
    def advance(self, search: Search, number: Int32) -> Search:
        """Claim the next tile, by a whole warp; its index comes later. number: of claims before."""
        ctas, _, _ = cute.arch.grid_dim()
        step = ctas // self.ctas_per_tile
        index = search.index + step
        if const_expr(self.alternating):
            index = self._next_alternating(search.index, number + 1)
        elif const_expr(self.counter is not None):
            claimed, claims = Int32(0), cute.arch.lane_idx() == 0
            if const_expr(self.claims is not None):
                claims = claims & self.claims.is_leader()
            if const_expr(self.mirrored is not None):
                claims = claims & ((number > 0) | (self.mirrored == Boolean(False)))
            if claims:
                claimed = cute.arch.atomic_add(self.counter.iterator, Int32(1))
            if const_expr(self.claims is not None):
                claimed = self.claims.share(number, claimed)
            index = cute.arch.shuffle_sync(claimed, 0)
            if const_expr(not self.claims_first):
                index += step
            if const_expr(self.mirrored is not None):
                mirror = 2 * step - 1 - search.index
                later = cutlass.select_(number > 0, index + step, mirror)
                index = cutlass.select_(self.mirrored, later, index)
        return search._replace(index=index)

    @cute.jit
    def _next_alternating(self, index: Int32, number: Int32) -> Int32:
        """The tile with this number, from 0, of a CTA whose last one is `index`."""
        ctas, _, _ = cute.arch.grid_dim()
        own = self.params.heads_per_group
        claimed = (number - own) * ctas + cute.arch.block_idx()[0]
        if const_expr(self.counter is not None):
            claimed = Int32(0)
            if (cute.arch.lane_idx() == 0) & (number >= own):
                claimed = cute.arch.atomic_add(self.counter.iterator, Int32(1))
            claimed = cute.arch.shuffle_sync(claimed, 0)
        return cutlass.select_(number < own, index + 1, ctas * own + claimed)

    @cute.jit
    def finish(self) -> None:
        """Each CTA calls this once after its last claim; the last CTA clears the counter."""
        if const_expr(self.counter is not None):  # noqa: SIM102 (decided while tracing)
            if cute.arch.lane_idx() == 0:
                ctas, _, _ = cute.arch.grid_dim()
                finished = cute.arch.atomic_add(self.counter.iterator + 1, Int32(1))
                if finished == ctas - 1:
                    self.counter[0] = Int32(0)
                    self.counter[1] = Int32(0)

    def locate(
        self,
        search: Search,
        num_blocks_of: Callable[[Int32], Int32],
        first_block_of: Callable[[Int32], Int32] | None = None,
    ) -> tuple[WorkTile, Search]:
        """The current tile, and the search moved up to it. Run by a whole warp.

        num_blocks_of(batch_idx): blocks of a sequence, used if these differ; first_block_of: the
        first block of a sequence in the launch, None if it has all.
        """
        if const_expr(self.longest is not None):
            return self._locate_longest(search, num_blocks_of, first_block_of)
        if const_expr(self.varlen):
            work, search = self._locate_varlen(search, num_blocks_of)
            if const_expr(first_block_of is not None):
                sequence = cutlass.min(work.batch_idx, self.params.num_batch - 1)
                work = work._replace(block=work.block + first_block_of(sequence))
            return work, search
        return self._locate_dense(search.index), search

    def _locate_longest(self, search: Search, *blocks_of: Any) -> tuple[WorkTile, Search]:
        """The longest blocks, then all blocks. The block of a tile that is done is negative."""
        count, sequence, block = self.longest
        num_longest = count * self.params.num_heads
        others = search._replace(index=cutlass.max(search.index - num_longest, 0))
        other, others = replace(self, longest=None).locate(others, *blocks_of)
        is_done = cute.arch.vote_any_sync((sequence == other.batch_idx) & (block == other.block))
        other = other._replace(block=cutlass.select_(is_done, Int32(-1), other.block))
        head_idx = search.index // cutlass.max(count, 1)
        at = search.index - head_idx * count
        block, sequence = (cute.arch.shuffle_sync(x, at) for x in (block, sequence))
        own = WorkTile(block, head_idx, sequence, Boolean(True))
        is_own = search.index < num_longest
        work = WorkTile(*(cutlass.select_(is_own, x, y) for x, y in zip(own, other, strict=True)))
        return work, others._replace(index=search.index)

    def _walk_order(self, block: Int32, num_blocks: Int32) -> Int32:
        block = num_blocks - 1 - block if self.last_first else block
        return block if self.params.first_block is None else block + self.params.first_block

    def _locate_dense(self, index: Int32) -> WorkTile:
        params = self.params
        num_rows = params.num_heads * params.num_batch
        is_valid = index < num_rows * params.num_blocks
        block, row = self._locate_in_groups(index, num_rows, params.num_blocks)
        if self.entries_first:
            head_idx = row // params.num_batch
            return WorkTile(block, head_idx, row - head_idx * params.num_batch, is_valid)
        batch_idx = row // params.num_heads
        return WorkTile(block, row - batch_idx * params.num_heads, batch_idx, is_valid)

    def _locate_in_groups(self, index: Int32, num_rows: Int32, num_blocks: Int32) -> tuple:
        """Block and row (a head of a sequence) of a tile among num_rows rows of num_blocks."""
        rows_per_group = self.params.heads_per_group
        first_row = index // (rows_per_group * num_blocks) * rows_per_group
        in_group = index - first_row * num_blocks
        group_size = cutlass.min(rows_per_group, cutlass.max(num_rows - first_row, 1))
        block = in_group // group_size
        row = first_row + in_group - block * group_size
        return self._walk_order(block, num_blocks), row

    @cute.jit
    def _locate_varlen(self, search: Search, num_blocks_of: cutlass.Constexpr) -> tuple:
        """`locate` for sequences with different numbers of blocks, 32 at a time, only forwards."""
        params = self.params
        lane = cute.arch.lane_idx()
        index, batch_start, tiles_before = search
        blocks = self._blocks_in_window(batch_start + lane, num_blocks_of)
        ends = running(blocks, operator.add) * params.num_heads
        in_window = cute.arch.shuffle_sync(ends, WARP - 1)
        while index >= tiles_before + in_window and batch_start + WARP < params.num_batch:
            batch_start += WARP
            tiles_before += in_window
            blocks = self._blocks_in_window(batch_start + lane, num_blocks_of)
            ends = running(blocks, operator.add) * params.num_heads
            in_window = cute.arch.shuffle_sync(ends, WARP - 1)
        offset = index - tiles_before
        passed = cute.arch.vote_ballot_sync(offset >= ends)
        owner = cutlass.min(cute.arch.popc(passed), WARP - 1)
        num_blocks = cutlass.max(cute.arch.shuffle_sync(blocks, owner), 1)
        tiles_end = cute.arch.shuffle_sync(ends, owner)
        in_sequence = offset - (tiles_end - num_blocks * params.num_heads)
        block, head_idx = self._locate_in_groups(in_sequence, params.num_heads, num_blocks)
        work = WorkTile(block, head_idx, batch_start + owner, offset < in_window)
        return work, Search(index, batch_start, tiles_before)

    @cute.jit
    def _blocks_in_window(self, batch_idx: Int32, num_blocks_of: cutlass.Constexpr) -> Int32:
        blocks = Int32(0)
        if batch_idx < self.params.num_batch:
            blocks = num_blocks_of(batch_idx)
        return blocks
