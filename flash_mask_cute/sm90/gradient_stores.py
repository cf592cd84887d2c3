"""Gradients from the registers of an MMA warpgroup: dK and dV to memory, dQ to where it leaves."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_bwd_plan import BwdPlan, Tiles
from flash_mask_cute.sm90.warpgroups import Role, send_rows


class KeyGradients(NamedTuple):
    """Each (row, d, head, batch), or (row, d, head) where sequences are packed."""

    dk: cute.Tensor
    dv: cute.Tensor


@cute.jit
def scale(acc: cute.Tensor, factor: Float32) -> None:
    """Multiply sums by a factor."""
    for i in cutlass.range_constexpr(cute.size(acc)):
        acc[i] = acc[i] * factor


def send_gradients(
    plan: BwdPlan,
    accs: list,
    target: cute.Tensor,
    tiles: Tiles,
    block: Int32,
    work: Work,
    has_sums: Boolean,
) -> None:
    """Store this warpgroup's parts of dK or dV of a work tile that ended before query `block`.

    They go by way of where this warpgroup has its part of dS of that block. Nobody has used it
    since both met in the last block, having summed the dS before, and only this warpgroup will
    until they meet again. Of a block that was passed over, adding its dQ took both warpgroups'
    sums of the block before. Where dS has one place, it has been acquired for that block.
    """
    rows, cols = wgmma.ROWS_PER_WARPGROUP, wgmma.ROWS_PER_WARPGROUP // plan.column_groups
    unit = plan.ds_unit(plan.ds_stage(block), plan.key_group(), 0)
    smem = cute.local_tile(tiles.ds[None, None, unit], (rows, cols), (0, plan.column_group()))
    first_key = work.block * plan.tile_n + plan.first_key()
    if cute.rank(target) == 4:
        gmem = target[None, None, work.head_idx, work.batch_idx]
    else:
        gmem = cute.domain_offset((work.offset_k, 0), target[None, None, work.head_idx])
    gmem = cute.domain_offset((first_key, 0), gmem)
    first = 0
    for acc in accs:
        start, end = 0, wgmma.num_cols(acc)
        first_col = first + plan.column_group() * end
        while start < end:
            width = next(n for n in (64, 32, 16) if n <= min(cols, end - start))
            values = wgmma.rounded(wgmma.columns(acc, start, start + width), plan.dtype)
            words = cute.recast_tensor(values, Int32)
            for i in range(cute.size(words)):
                # without scores, what was loaded is another sequence's, perhaps not even finite
                words[i] = cutlass.select_(has_sums, words[i], Int32(0))
            send_rows(
                values,
                plan.mma_keys(width),
                cute.local_tile(smem, (rows, width), (0, 0)),
                gmem,
                work.slot - first_key,
                first_col + start,
            )
            start += width
        first += plan.column_groups * end


@cute.jit
def stage_dq(
    plan: cutlass.Constexpr[BwdPlan],
    tiles: Tiles,
    channel: Channel,
    block: Int32,
    part: cutlass.Constexpr[int],
    acc_dQ: cute.Tensor,
):
    """Write this warp's sums of a part of dQ where the load warp adds them from."""
    parts = plan.parts_dq
    layout = cute.make_layout(plan.shape_dq(parts[part]))
    staged = cute.make_tensor(tiles.dq.iterator, layout)
    lane = cute.arch.lane_idx()
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - Role.MMA
    groups = parts[part] // 8
    quads = cute.make_tensor(acc_dQ.iterator, cute.make_layout((4, groups)))
    number = block * len(parts) + part
    channel.acquire(number)
    for g in cutlass.range_constexpr(groups):
        cute.autovec_copy(quads[None, g], staged[None, lane, g, warp_idx])
    cute.arch.fence_proxy("async.shared", space="cta")
    channel.publish(number)
