"""The planning warp of a forward whose key blocks are distributed evenly (`core/shares.py`).

The planning warp of each CTA computes the line of all key blocks from the lengths on the device,
walks along the first share of its segment, and then claims shares from a counter. So the host needs
no lengths, and a captured launch is right for all later lengths.
"""

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core.lengths import Lengths, describe
from flash_mask_cute.core.partials import WHOLE, Merge, Partials
from flash_mask_cute.core.query_schedule import QuerySchedule
from flash_mask_cute.core.shares import (
    BY_SLOTS,
    Shares,
    TileOnLine,
    slot_of_first,
    slot_of_later,
)
from flash_mask_cute.core.tile_scheduler import TileScheduler, WorkTile
from flash_mask_cute.core.walk_ring import WalkRing
from flash_mask_cute.core.warp_scan import WARP, running
from flash_mask_cute.core.work_ring import NO_WORK, Work, WorkRing
from flash_mask_cute.rules.forward_mask import ForwardMask
from flash_mask_cute.rules.mask_warps import plan_walks


class Window(NamedTuple):
    """32 sequences of a search: the first one, and the place of the line where it begins."""

    batch_start: Int32
    place: Int32


class Found(NamedTuple):
    """A work tile and its place on the line."""

    work: Work
    start: Int32
    num_blocks: Int32

    @property
    def tile(self) -> TileOnLine:
        return TileOnLine(self.start, self.num_blocks)


@dataclass(frozen=True)
class KeyBlockLine:
    """The line of all key blocks of a launch. heads: work tiles of a block of queries."""

    rules: ForwardMask
    lengths: Lengths
    num_heads: Int32
    num_batch: Int32

    @cute.jit
    def measure(self) -> Int32:
        """Number of places on the line. Run by a whole warp, like everything here."""
        places, batch_start = Int32(0), Int32(0)
        while batch_start < self.num_batch:
            places += self._places_of_head(batch_start + cute.arch.lane_idx())
            batch_start += WARP
        return Int32(cute.arch.warp_redux_sync(places, "add")) * self.num_heads

    @cute.jit
    def locate(self, window: Window, place: Int32) -> tuple:
        """The work tile at a place of the line, and the window moved up to it. Places must be
        requested in ascending order."""
        batch_start, begin = window
        lane = cute.arch.lane_idx()
        of_head = self._places_of_head(batch_start + lane)
        ends = running(of_head, operator.add) * self.num_heads
        in_window = cute.arch.shuffle_sync(ends, WARP - 1)
        while place >= begin + in_window and batch_start + WARP < self.num_batch:
            batch_start += WARP
            begin += in_window
            of_head = self._places_of_head(batch_start + lane)
            ends = running(of_head, operator.add) * self.num_heads
            in_window = cute.arch.shuffle_sync(ends, WARP - 1)
        passed = cute.arch.vote_ballot_sync(place - begin >= ends)
        owner = cutlass.min(cute.arch.popc(passed), WARP - 1)
        places = cutlass.max(cute.arch.shuffle_sync(of_head, owner), 1)
        start = begin + cute.arch.shuffle_sync(ends, owner) - places * self.num_heads
        head_idx = (place - start) // places
        start += head_idx * places
        work = self._work(batch_start + owner, head_idx)
        block, num_blocks = Int32(0), self._num_blocks(work)
        while place >= TileOnLine(start, num_blocks).end:
            start = TileOnLine(start, num_blocks).end
            block += 1
            num_blocks = self._num_blocks(work._replace(block=block))
        return Found(work._replace(block=block), start, num_blocks), Window(batch_start, begin)

    @cute.jit
    def _places_of_head(self, batch_idx: Int32) -> Int32:
        """Places of a sequence for one of its heads; each lane may pass another sequence."""
        places = Int32(0)
        if batch_idx < self.num_batch:
            work = self._work(batch_idx, Int32(0))
            block, num_blocks = Int32(0), self.rules.num_query_blocks(work.slot)
            while block < num_blocks:
                places = TileOnLine(places, self._num_blocks(work._replace(block=block))).end
                block += 1
        return places

    def _work(self, batch_idx: Int32, head_idx: Int32) -> Work:
        return describe(WorkTile(Int32(0), head_idx, batch_idx, Boolean(True)), self.lengths, False)

    def _num_blocks(self, work: Work) -> Int32:
        """Key blocks of a work tile; a work tile that sees nothing visits one."""
        first, end = self.rules.key_blocks(work)
        return cutlass.max(end - first, 1)


@cute.jit
def plan_shares(
    line: KeyBlockLine,
    scheduler: TileScheduler,
    ring: WorkRing,
    walk: WalkRing,
    merges: cute.Tensor,
) -> None:
    """Take shares, and announce their pieces of work tiles and the walks of these. Run by one warp.

    scheduler: counts the turns of shares, as it counts work tiles elsewhere. merges: (shares,
    MERGE_WORDS) int32, with room for as many shares as a segment may have, or for one.
    """
    num_ctas, _, _ = cute.arch.grid_dim()
    room = merges.shape[0]
    places = line.measure()
    shares = Shares.create(places, num_ctas, room)
    search = scheduler.start()
    if shares.unit == 0:
        # records of shares that there are not
        for record in cutlass.range(num_ctas + search.index, room, num_ctas, unroll=1):
            Merge.none().write(merges, record)
    tiles, chunks = Int32(0), Int32(0)
    while search.index < shares.number:
        share = shares.of_turn(search.index)
        range_of_share = shares.begin(share), cutlass.min(shares.end(share), places)
        tiles, chunks = _plan_share(
            line, shares, share, range_of_share, ring, walk, merges, tiles, chunks
        )
        if shares.unit == 0:
            search = search._replace(index=shares.number)
        else:
            # claimed as late as can be: another CTA may be free for it sooner
            if chunks > 0:
                walk.wait_until_read(chunks)
            search = scheduler.advance(search, tiles)
    scheduler.finish()
    ring.write(tiles, NO_WORK)


@cute.jit
def _plan_share(
    line: KeyBlockLine,
    shares: Shares,
    share: Int32,
    range_of_share: tuple[Int32, Int32],
    ring: WorkRing,
    walk: WalkRing,
    merges: cute.Tensor,
    tiles: Int32,
    chunks: Int32,
) -> tuple:
    """Announce the pieces in a share, the places [begin, end) of the line. tiles, chunks: announced
    so far; returns both with these."""
    rules, lengths = line.rules, line.lengths
    place, end = range_of_share
    Merge.none().write(merges, share)
    window = Window(Int32(0), Int32(0))
    while place < end:
        found, window = line.locate(window, place)
        tile = found.tile
        first, stop = tile.piece(shares, share)
        is_whole = (first == 0) & (stop == tile.num_blocks)
        slot = cutlass.select_(first == 0, slot_of_first(share), slot_of_later(share))
        n_block_min, _ = rules.key_blocks(found.work)
        work = found.work._replace(
            first_block=n_block_min + first,
            end_block=n_block_min + stop,
            place=cutlass.select_(is_whole, Int32(WHOLE), slot),
        )
        if first < stop:
            ring.write(tiles, work)
            chunks = rules.plan(walk, chunks, work)
            tiles += 1
            if (first == 0) & (stop < tile.num_blocks):
                is_packed = const_expr(lengths.cu_seqlens_q is not None)
                Merge.create(work, tile.num_pieces(shares), is_packed).write(merges, share)
        place = tile.end
    return tiles, chunks


def plan_forward(
    kernel: Any,
    rules: ForwardMask,
    rings: tuple[WorkRing, WalkRing],
    lengths: Lengths,
    schedule: QuerySchedule,
    tile_counter: cute.Tensor | None,
    partials: Partials | None,
    ctas_per_tile: int = 1,
) -> None:
    """The planning warp of a forward: choose work tiles, or pieces of them, and their walks.

    kernel: says how work tiles are split, and which mask makes their walks unequal.
    """
    params = schedule.params
    last_first = kernel.is_causal or kernel.is_local
    varlen = lengths.cu_seqlens_q is not None
    mirrored = last_first and kernel.split is None
    scheduler = TileScheduler(params, tile_counter, last_first, varlen, ctas_per_tile, mirrored)
    if const_expr(partials is not None):
        # the merge is launched now, and waits for the results
        cute.arch.griddepcontrol_launch_dependents()
    if const_expr(kernel.split == BY_SLOTS):
        assert partials is not None
        line = KeyBlockLine(rules, lengths, schedule.num_heads, params.num_batch)
        plan_shares(line, scheduler, *rings, partials.merges)
    else:
        num_splits = None if partials is None else partials.num_splits
        plan_walks(scheduler, rules, lengths, *rings, num_splits=num_splits)
