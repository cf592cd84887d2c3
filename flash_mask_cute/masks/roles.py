"""What the warps do that plan and paint while others multiply, on every architecture."""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.lengths import Lengths, describe
from flash_mask_cute.core.tile_scheduler import TileScheduler
from flash_mask_cute.core.walk_ring import Block, WalkRing
from flash_mask_cute.core.work_ring import NO_WORK, Work, WorkRing
from flash_mask_cute.masks.rules import MaskRules, Share


@cute.jit
def plan_walks(
    scheduler: TileScheduler, rules: MaskRules, lengths: Lengths, ring: WorkRing, walk: WalkRing
) -> None:
    """One warp: decide on work tiles and the key blocks they visit, and announce both."""
    info = rules.block_info
    num_m_blocks_of = partial(
        _num_m_blocks, info.tile_m, info.qhead_per_kvhead_packgqa, lengths.cu_seqlens_q
    )
    tiles, chunks = Int32(0), Int32(0)
    tile, search = scheduler.locate(scheduler.start(), num_m_blocks_of)
    while tile.is_valid:
        work = describe(tile, lengths)
        ring.write(tiles, work)
        chunks = rules.plan(walk, chunks, work)
        tiles += 1
        # a tile is claimed as late as can be: another CTA may be free for it sooner
        ring.acquire(tiles)
        tile, search = scheduler.locate(scheduler.advance(search), num_m_blocks_of)
    scheduler.finish()
    ring.write(tiles, NO_WORK)


@cute.jit
def _num_m_blocks(
    tile_m: cutlass.Constexpr,
    heads: cutlass.Constexpr,
    cu_seqlens_q: cute.Tensor,
    batch_idx: Int32,
) -> Int32:
    slot = cu_seqlens_q[batch_idx + 1] - cu_seqlens_q[batch_idx]
    return cute.ceil_div(slot * heads, tile_m)


@cute.jit
def paint_walks(
    rules: MaskRules,
    share: Share,
    bit_tile: cute.Tensor,
    bits: Channel,
    ring: WorkRing,
    walk: WalkRing,
) -> None:
    """One of the painting warps: its share of the bits of every block that something cuts."""
    # work tiles, chunks and cut blocks so far
    tile, chunk, cuts = Int32(0), Int32(0), Int32(0)
    while ring.wait(tile):
        step = partial(_paint_block, rules, share, bit_tile, bits, ring.read(tile))
        chunk, cuts = walk.visit(chunk, cuts, step, only_cut=True)
        ring.release(tile)
        tile += 1


@cute.jit
def _paint_block(
    rules: MaskRules,
    share: Share,
    bit_tile: cute.Tensor,
    bits: Channel,
    work: Work,
    cuts: Int32,
    block: Block,
) -> Int32:
    words = rules.paint(work, block, share)
    bits.acquire(cuts)
    share.store(bit_tile, words)
    bits.publish(cuts)
    return cuts + 1
