"""The scheduler warp and the mask warps, on every architecture."""

from functools import partial

import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.lengths import Lengths, describe
from flash_mask_cute.core.tile_scheduler import TileScheduler
from flash_mask_cute.core.walk_ring import Block, WalkRing
from flash_mask_cute.core.work_ring import NO_WORK, Work, WorkRing
from flash_mask_cute.rules.backward_mask import BackwardMask
from flash_mask_cute.rules.forward_mask import ForwardMask
from flash_mask_cute.rules.mask_rules import MaskWarpRows


@cute.jit
def send_walks(
    scheduler: TileScheduler,
    rules: ForwardMask | BackwardMask,
    lengths: Lengths,
    ring: WorkRing,
    walk: WalkRing,
    claims_late: Boolean | None = None,
    num_splits: Int32 | None = None,
) -> None:
    """Choose work tiles and the blocks that they visit, and announce both. Run by one warp.

    num_splits: splits of each work tile, which count as heads; None: they are computed as a whole.
    claims_late: a work tile is claimed when the last chunk of the previous one's walk is read, not
    as soon as the ring has room; None: it never is.
    """
    is_by_keys = isinstance(rules, BackwardMask)
    blocks_of = partial(rules.num_blocks, lengths), rules.first_block
    tiles, chunks = Int32(0), Int32(0)
    tile, search = scheduler.locate(scheduler.start(), *blocks_of)
    while tile.is_valid:
        if scheduler.longest is None or tile.block >= 0:
            work = describe(tile, lengths, is_by_keys)
            walked: tuple = (work,)
            if const_expr(num_splits is not None):
                walked = rules.split(work, scheduler.params.num_heads // num_splits, num_splits)
                work = walked[0]
            ring.write(tiles, work._replace(block=scheduler.own_block(work.block)))
            chunks = rules.send_walk(walk, chunks, *walked)
            tiles += 1
            wait_to_claim(ring, tiles, walk, chunks, claims_late)
        tile, search = scheduler.locate(scheduler.advance(search, tiles - 1), *blocks_of)
    scheduler.finish()
    ring.write(tiles, NO_WORK)


@cute.jit
def send_claimed_walks(
    scheduler: TileScheduler,
    rules: BackwardMask,
    lengths: Lengths,
    ring: WorkRing,
    walk: WalkRing,
) -> None:
    """`send_walks` of a CTA that claims all work tiles, also the first one, and each late.

    The first one is found in the loop: with a second copy of the search of packed sequences,
    predicates of the whole kernel spill.
    """
    blocks_of = partial(rules.num_blocks, lengths), rules.first_block
    tiles, chunks = Int32(0), Int32(0)
    search, is_valid = scheduler.before_start(), Boolean(True)
    while is_valid:
        wait_to_claim(ring, tiles, walk, chunks, Boolean(True))
        tile, search = scheduler.locate(scheduler.advance(search, tiles), *blocks_of)
        is_valid = tile.is_valid
        if is_valid:
            work = describe(tile, lengths, True)
            ring.write(tiles, work._replace(block=scheduler.own_block(work.block)))
            chunks = rules.send_walk(walk, chunks, work)
            tiles += 1
    scheduler.finish()
    ring.write(tiles, NO_WORK)


@cute.jit
def wait_to_claim(
    ring: WorkRing, entries: Int32, walk: WalkRing, chunks: Int32, claims_late: Boolean | None
) -> None:
    """Wait until the next work tile is to be claimed, which is as late as can be: another CTA may
    be free for it sooner. claims_late: as in `send_walks`."""
    ring.acquire(entries)
    if const_expr(claims_late is not None):  # noqa: SIM102 (decided while tracing)
        if claims_late:
            walk.wait_until_read(chunks)


@cute.jit
def make_mask_bits(
    rules: ForwardMask | BackwardMask,
    warp_rows: MaskWarpRows,
    bit_tile: cute.Tensor,
    bits: Channel,
    ring: WorkRing,
    walk: WalkRing,
    any_bits: cute.Tensor | None = None,
) -> None:
    """Make this mask warp's share of the bits of every partial block. any_bits: int32, one word for
    32 lines: the OR of their words."""
    # work tiles, chunks and cut blocks so far
    tile, chunk, cuts = Int32(0), Int32(0), Int32(0)
    while ring.wait(tile):
        step = partial(make_block_bits, rules, warp_rows, bit_tile, bits, any_bits, ring.read(tile))
        chunk, cuts = walk.visit(chunk, cuts, step, only_cut=True)
        ring.release(tile)
        tile += 1


@cute.jit
def make_block_bits(
    rules: ForwardMask | BackwardMask,
    warp_rows: MaskWarpRows,
    bit_tile: cute.Tensor,
    bits: Channel,
    any_bits: cute.Tensor | None,
    work: Work | None,
    cuts: Int32,
    block: Block | None = None,
    words: tuple | None = None,
) -> Int32:
    """Make this mask warp's share of a partial block's bits, number `cuts`, or send `words`."""
    if const_expr(words is None):
        words = rules.make_bits(work, block, warp_rows)
    bits.acquire(cuts)
    warp_rows.store(bit_tile, words)
    if const_expr(any_bits is not None):
        warp_rows.store_any_bits(any_bits, words, rules.used_bits)
    bits.publish(cuts)
    return cuts + 1
