"""The scheduler warp of a forward whose key blocks are distributed evenly (`core/stream_k.py`).

The scheduler warp of each CTA computes the line of key blocks from the lengths on the device, and
walks along its chunk. So a captured launch is right for all later lengths.
"""

import operator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core import clusters
from flash_mask_cute.core.fixed_splits import FIRST, LAST, ONE_FIXED_SPLIT, SEQUENTIAL_SPLITS
from flash_mask_cute.core.lengths import Lengths, describe
from flash_mask_cute.core.ordered_sums import RunningSums
from flash_mask_cute.core.partials import WHOLE, Partials, PendingCombine
from flash_mask_cute.core.query_schedule import QuerySchedule
from flash_mask_cute.core.stream_k import (
    BY_STREAM_K,
    StreamKChunks,
    TileOnLine,
    partial_tile_of_first,
    partial_tile_of_later,
    tile_cost,
)
from flash_mask_cute.core.tile_scheduler import TileScheduler, WorkTile, alternating_params
from flash_mask_cute.core.walk_ring import WalkRing
from flash_mask_cute.core.warp_scan import WARP, running
from flash_mask_cute.core.work_ring import NO_WORK, Work, WorkRing
from flash_mask_cute.rules import selection_walk
from flash_mask_cute.rules.forward_mask import ForwardMask
from flash_mask_cute.rules.mask_warps import send_walks, wait_to_claim

# Work tiles are few up to so many for each CTA. Few unequal ones are claimed late, if heads have at
# least LATE_BLOCKS query blocks: short walks leave no time to wait.
FEW_TILES, LATE_BLOCKS = 16, 16


class Window(NamedTuple):
    """32 sequences of a search: the first one, and the place of the line where it begins."""

    batch_start: Int32
    place: Int32


class Found(NamedTuple):
    work: Work
    tile: TileOnLine


class CommonTiles(TileScheduler):
    """Of CTAs that compute a work tile together, with the same rows."""

    def own_block(self, block: Int32) -> Int32:
        return block


@dataclass(frozen=True)
class KeyBlockLine:
    """All key blocks of some heads of a launch, in line. heads: work tiles of a query block. cost:
    `tile_cost`."""

    rules: ForwardMask
    lengths: Lengths
    cost: int
    first_head: Int32
    num_heads: Int32
    num_batch: Int32

    def part(self, first_head: Int32, num_heads: Int32) -> "KeyBlockLine":
        return replace(self, first_head=self.first_head + first_head, num_heads=num_heads)

    @cute.jit
    def measure_head(self) -> Int32:
        """Number of places of one head. Run by a whole warp, like everything here."""
        places, batch_start = Int32(0), Int32(0)
        while batch_start < self.num_batch:
            places += self._places_of_head(batch_start + cute.arch.lane_idx())
            batch_start += WARP
        return Int32(cute.arch.warp_redux_sync(places, "add"))

    @cute.jit
    def locate(self, window: Window, place: Int32) -> tuple:
        """The work tile at a place, and the window moved up to it; places must ascend."""
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
        work = self._work(batch_start + owner, self.first_head + head_idx)
        block, num_blocks = Int32(0), self._num_blocks(work)
        while place >= TileOnLine(start, num_blocks, self.cost).end:
            start = TileOnLine(start, num_blocks, self.cost).end
            block += 1
            num_blocks = self._num_blocks(work._replace(block=block))
        tile = TileOnLine(start, num_blocks, self.cost)
        return Found(work._replace(block=block), tile), Window(batch_start, begin)

    @cute.jit
    def _places_of_head(self, batch_idx: Int32) -> Int32:
        """Places of a sequence for one of its heads; each lane may pass another sequence."""
        places = Int32(0)
        if batch_idx < self.num_batch:
            work = self._work(batch_idx, Int32(0))
            block, num_blocks = Int32(0), self.rules.num_query_blocks(work.slot)
            while block < num_blocks:
                blocks_of_tile = self._num_blocks(work._replace(block=block))
                places = TileOnLine(places, blocks_of_tile, self.cost).end
                block += 1
        return places

    def _work(self, batch_idx: Int32, head_idx: Int32) -> Work:
        return describe(WorkTile(Int32(0), head_idx, batch_idx, Boolean(True)), self.lengths, False)

    def _num_blocks(self, work: Work) -> Int32:
        """Key blocks of a work tile, at least 1; if queries chose blocks, at most as many."""
        first, end = self.rules.key_blocks(work)
        bits = self.rules.args.bits
        if bits is not None and bits.most_tiles is not None:
            end = cutlass.min(end, first + bits.most_tiles)
        return cutlass.max(end - first, 1)


@cute.jit
def schedule_stream_k(
    line: KeyBlockLine,
    tile_m: cutlass.Constexpr[int],
    ring: WorkRing,
    walk: WalkRing,
    pending: cute.Tensor,
    ctas_per_tile: cutlass.Constexpr[int] = 1,
) -> None:
    """Walk along this CTA's chunk, and announce its splits of work tiles and their walks.

    line: of all heads. pending: (CTAs, PENDING_WORDS) int32. ctas_per_tile: neighbouring CTAs that
    have the same share; they count as one.
    """
    rules, lengths = line.rules, line.lengths
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    if const_expr(ctas_per_tile > 1):
        cta, num_ctas = cta // ctas_per_tile, num_ctas // ctas_per_tile
    of_head = line.measure_head()
    # queries choose few blocks
    least_places = 1 if rules.has_selection else 0
    stream_k = StreamKChunks.create(of_head, line.num_heads, num_ctas, tile_m, least_places)
    first_head, chunk = stream_k.of_cta(cta)
    line = line.part(first_head, line.num_heads // stream_k.num_lines)
    size = stream_k.size
    place, end = chunk * size, cutlass.min((chunk + 1) * size, of_head * line.num_heads)
    PendingCombine.none().write(pending, cta)
    tiles, chunks = Int32(0), Int32(0)
    window = Window(Int32(0), Int32(0))
    while place < end:
        found, window = line.locate(window, place)
        tile = found.tile
        first, stop = tile.split(chunk, size)
        is_whole = (first == 0) & (stop == tile.num_blocks)
        partial_tile = cutlass.select_(
            first == 0, partial_tile_of_first(cta), partial_tile_of_later(cta)
        )
        n_block_min, _ = rules.key_blocks(found.work)
        first_block, end_block = n_block_min + first, n_block_min + stop
        if const_expr(rules.has_selection):
            places = first, stop, tile.num_blocks
            first_block, end_block, _ = selection_walk.cut(rules, found.work, *places)
        work = found.work._replace(
            first_block=first_block,
            end_block=end_block,
            place=cutlass.select_(is_whole, Int32(WHOLE), partial_tile),
        )
        if first < stop:
            ring.write(tiles, work)
            chunks = rules.send_walk(walk, chunks, work)
            tiles += 1
            if (first == 0) & (stop < tile.num_blocks):
                is_packed = const_expr(lengths.cu_seqlens_q is not None)
                splits = tile.num_splits(size)
                PendingCombine.create(work, splits, stream_k.num_lines, is_packed).write(
                    pending, cta
                )
        place = tile.end
    ring.write(tiles, NO_WORK)


@cute.jit
def send_fixed_splits(
    scheduler: TileScheduler,
    rules: ForwardMask,
    lengths: Lengths,
    ring: WorkRing,
    walk: WalkRing,
    split_blocks: Int32,
    claims_late: Boolean | None = None,
) -> None:
    """As `send_walks`, for the fixed splits of each work tile. split_blocks: key blocks of one."""
    blocks_of = partial(rules.num_blocks, lengths), rules.first_block
    claims, entries, chunks = Int32(0), Int32(0), Int32(0)
    tile, search = scheduler.locate(scheduler.start(), *blocks_of)
    while tile.is_valid:
        work = describe(tile, lengths, False)
        first, end = rules.key_blocks(work)
        lowest = first // split_blocks
        split_idx, last = lowest, (cutlass.max(end, first + 1) - 1) // split_blocks
        while split_idx <= last:
            place = cutlass.select_(split_idx == lowest, Int32(FIRST), Int32(0))
            place = place | cutlass.select_(split_idx == last, Int32(LAST), Int32(0))
            part = rules.within_fixed_split(work._replace(place=place), split_idx, split_blocks)
            ring.write(entries, part)
            chunks = rules.send_walk(walk, chunks, part)
            entries += 1
            split_idx += 1
        wait_to_claim(ring, entries, walk, chunks, claims_late)
        tile, search = scheduler.locate(scheduler.advance(search, claims), *blocks_of)
        claims += 1
    scheduler.finish()
    ring.write(entries, NO_WORK)


@cute.jit
def send_any_fixed_splits(
    scheduler: TileScheduler,
    rules: ForwardMask,
    lengths: Lengths,
    ring: WorkRing,
    walk: WalkRing,
    partials: Partials,
    num_heads: Int32,
    split_blocks: Int32,
) -> None:
    """As `send_walks`: choose fixed splits of any work tiles, which the scheduler counts as heads,
    fixed split by fixed split. Those that a tile does not see are left out."""
    blocks_of = partial(rules.num_blocks, lengths), rules.first_block
    is_packed = const_expr(lengths.cu_seqlens_q is not None)
    claims, entries, chunks = Int32(0), Int32(0), Int32(0)
    tile, search = scheduler.locate(scheduler.start(), *blocks_of)
    while tile.is_valid:
        work = describe(tile, lengths, False)
        split_idx = work.head_idx // num_heads
        work = work._replace(head_idx=work.head_idx - split_idx * num_heads, place=split_idx)
        work = rules.within_fixed_split(work, split_idx, split_blocks)
        if rules.has_blocks(work):
            ring.write(entries, work)
            chunks = rules.send_walk(walk, chunks, work)
            entries += 1
            # claimed as late as can be: another CTA may be free for it sooner
            ring.acquire(entries)
        else:
            rules.leave_unseen(work, partials, is_packed)
        tile, search = scheduler.locate(scheduler.advance(search, claims), *blocks_of)
        claims += 1
    scheduler.finish()
    ring.write(entries, NO_WORK)


def schedule_forward(
    kernel: Any,
    rules: ForwardMask,
    rings: tuple[WorkRing, WalkRing],
    lengths: Lengths,
    schedule: QuerySchedule,
    tile_counter: cute.Tensor | None,
    partials: Partials | RunningSums | None,
    ctas_per_tile: int = 1,
    alternating: bool = False,
    claims: clusters.Claims | None = None,
) -> None:
    """The scheduler warp of a forward: choose work tiles, or splits of them, and their walks.

    kernel: says how work tiles are split, and which mask makes their walks unequal. alternating:
    see `TileScheduler`. claims: of CTAs that have the same work tiles (`core/value_halves.py`).
    """
    params = schedule.params
    if const_expr(isinstance(partials, Partials)):
        # the combination is launched now, and waits for the results
        cute.arch.griddepcontrol_launch_dependents()
    if const_expr(kernel.split == BY_STREAM_K):
        assert isinstance(partials, Partials)
        cost = tile_cost(kernel.traits.tile_m)
        line = KeyBlockLine(rules, lengths, cost, Int32(0), schedule.num_heads, params.num_batch)
        num_same = 1 if const_expr(claims is None) else clusters.CTAS
        schedule_stream_k(line, kernel.traits.tile_m, *rings, partials.pending, num_same)
    else:
        last_first = kernel.is_causal or kernel.is_local
        varlen = lengths.cu_seqlens_q is not None
        mirrored = late = None
        is_whole = kernel.split in (None, ONE_FIXED_SPLIT, SEQUENTIAL_SPLITS)
        if const_expr(last_first and is_whole and not varlen):
            num_ctas, _, _ = cute.arch.grid_dim()
            num_tiles = params.num_blocks * params.num_heads * params.num_batch
            mirrored = num_tiles <= num_ctas * FEW_TILES
            late = mirrored & (params.num_blocks >= LATE_BLOCKS)
        if alternating:
            params = alternating_params(params)
        kind, longest, bits = TileScheduler, None, rules.args.mask_bits
        if claims is partials is None and bits is not None and bits.places is not None:
            longest = bits.longest_walks()
        if const_expr(claims is not None):
            kind, ctas_per_tile = CommonTiles, clusters.CTAS
        scheduler = kind(
            params, tile_counter, last_first, varlen, ctas_per_tile, claims, mirrored=mirrored,
            entries_first=alternating, alternating=alternating, longest=longest,
        )  # fmt: skip
        if isinstance(partials, RunningSums):
            blocks = partials.split_blocks
            send_fixed_splits(scheduler, rules, lengths, *rings, blocks, claims_late=late)
        elif partials is not None and partials.split_blocks is not None:
            of_splits = schedule.num_heads, partials.split_blocks
            send_any_fixed_splits(scheduler, rules, lengths, *rings, partials, *of_splits)
        else:
            num_splits = None if partials is None else partials.num_splits
            send_walks(scheduler, rules, lengths, *rings, claims_late=late, num_splits=num_splits)
