"""Stores of gradients from MMA registers: dK and dV to memory, dQ to its staging memory."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import thread_in_warpgroup
from flash_mask_cute.core.row_blocks import ColumnPart, RowBlocks, by_lanes, by_queries
from flash_mask_cute.core.warp_scan import WARP
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_bwd_traits import BwdSmem, BwdTraits
from flash_mask_cute.sm90.warpgroups import ROWS_PER_WARP, mma_warp, send_rows


class KeyGradients(NamedTuple):
    """Each (row, d, head, batch), or (row, d, head) where sequences are packed. Sums of a split
    group are fp32 (part of the group, key block, sums), in an order of `bwd_add_parts`, and
    `blocks` numbers the key blocks. With query lists CTAs add to one part."""

    dk: cute.Tensor
    dv: cute.Tensor
    blocks: RowBlocks | None = None


@cute.jit
def scale(acc: cute.Tensor, factor: Float32) -> None:
    for i in cutlass.range_constexpr(cute.size(acc)):
        acc[i] = acc[i] * factor


def rows_of(target: cute.Tensor, work: Work, offset: Int32) -> cute.Tensor:
    """The (row, d) tensor of a work tile's sequence, which begins at `offset` if it is packed."""
    if cute.rank(target) == 4:
        return target[None, None, work.head_idx, work.batch_idx]
    return cute.domain_offset((offset, 0), target[None, None, work.head_idx])


def send_gradient(
    traits: Any,
    acc: cute.Tensor,
    smem: cute.Tensor,
    target: cute.Tensor,
    first: Int32,
    count: Int32,
    first_col: Int32 | int = 0,
) -> None:
    """Store 64 rows of a gradient, the first `count` of them, by way of this warpgroup's `smem`.

    traits: with dtype and mma_words. smem: (rows, columns), at least 64 each. target: (row, d).
    first, first_col: where in it the rows and their columns begin.
    """
    start, end = 0, wgmma.num_cols(acc)
    gmem = cute.domain_offset((first, 0), target)
    while start < end:
        width = next(n for n in (64, 32, 16) if n <= end - start)
        values = wgmma.rounded(wgmma.columns(acc, start, start + width), traits.dtype)
        staged = cute.local_tile(smem, (wgmma.ROWS_PER_WARPGROUP, width), (0, 0))
        send_rows(values, traits.mma_words(width), staged, gmem, count, first_col + start)
        start += width


def send_gradients(
    traits: BwdTraits,
    accs: list,
    columns: tuple[ColumnPart, ...],
    target: cute.Tensor,
    tiles: BwdSmem,
    block: Int32,
    work: Work,
    has_sums: Boolean,
) -> None:
    """Store this warpgroup's columns of dK or dV, for a work tile that ended before query `block`.

    They go through the place of this warpgroup's part of dS of that block. Nothing has used it
    since both warpgroups met in the last block, after summing the dS before it, and only this
    warpgroup uses it until they meet again. If the last block was skipped, adding its dQ needed
    both warpgroups' sums of the previous block. If dS has one place, it has been acquired for that
    block.
    """
    rows, cols = wgmma.ROWS_PER_WARPGROUP, wgmma.ROWS_PER_WARPGROUP // traits.column_groups
    unit = traits.ds_unit(traits.ds_stage(block), traits.key_group(), 0)
    smem = cute.local_tile(tiles.ds[None, None, unit], (rows, cols), (0, traits.column_group()))
    first_key = work.block * traits.tile_n + traits.first_key()
    gmem = cute.domain_offset((first_key, 0), rows_of(target, work, work.offset_k))
    for acc, part in zip(accs, columns, strict=True):
        start, end = 0, part.width
        first_col = part.first
        if part.sharers > 1:
            first_col += traits.column_group() * end
        while start < end:
            width = next(n for n in (64, 32, 16) if n <= min(cols, end - start))
            values = wgmma.rounded(wgmma.columns(acc, start, start + width), traits.dtype)
            words = cute.recast_tensor(values, Int32)
            for i in range(cute.size(words)):
                # without scores, what was loaded is another sequence's, perhaps not even finite
                words[i] = cutlass.select_(has_sums, words[i], Int32(0))
            mma, staged = traits.mma_words(width), cute.local_tile(smem, (rows, width), (0, 0))
            # not in common with `send_gradient`: another order gives other machine code
            send_rows(values, mma, staged, gmem, work.slot - first_key, first_col + start)
            start += width


@cute.jit
def store_sums(
    acc: cute.Tensor,
    target: cute.Tensor,
    blocks: RowBlocks,
    work: Work,
    has_sums: Boolean,
    adds: cutlass.Constexpr[bool],
):
    """Store this warp's sums of dK or dV, one of several with the same keys, or add them to what is
    there, 32 neighbours at a time. Columns of a tile that are not summed stay as they are."""
    row_block = blocks.first_of(work.batch_idx, work.offset_k) + work.block
    lane = cute.arch.lane_idx()
    warp_idx = mma_warp()
    # of the tile, as who adds the parts reads them
    groups, own_groups = cute.size(target, mode=[2]) // (4 * 32 * 8), wgmma.num_cols(acc) // 8
    quads = cute.make_tensor(acc.iterator, cute.make_layout((4, own_groups)))
    sums = target[work.head_idx, row_block, None].iterator
    quads_stored = cute.make_tensor(sums, cute.make_layout((4, 32, groups, 8)))
    if const_expr(adds):
        quads_stored = cute.make_tensor(sums, by_lanes(groups))
    for g in cutlass.range_constexpr(own_groups):
        values = cute.make_rmem_tensor((4,), Float32)
        for i in cutlass.range_constexpr(4):
            # without scores, what was loaded is another sequence's, perhaps not even finite
            values[i] = cutlass.select_(has_sums, quads[i, g], Float32(0.0))
            if const_expr(adds):
                place = cute.domain_offset((i, lane, g, warp_idx), quads_stored).iterator
                cute.arch.red(place, values[i], op="add", dtype="f32", sem="relaxed", scope="gpu")
        if const_expr(not adds):
            cute.autovec_copy(values, quads_stored[None, lane, g, warp_idx])


@cute.jit
def store_sum_rows(
    traits: cutlass.Constexpr[BwdTraits],
    accs: list,
    columns: cutlass.Constexpr[tuple[ColumnPart, ...]],
    target: cute.Tensor,
    blocks: RowBlocks,
    work: Work,
    has_sums: Boolean,
    adds: cutlass.Constexpr[bool],
):
    """`store_sums` of warpgroups with different columns: pairs of columns of 8 rows."""
    row_block = blocks.first_of(work.batch_idx, work.offset_k) + work.block
    sums = target[work.head_idx, row_block, None]
    pairs_of_row = cute.size(sums) // traits.tile_n // 2
    thread = thread_in_warpgroup()
    row = traits.first_key() + thread // WARP * ROWS_PER_WARP + cute.arch.lane_idx() // 4
    # the second CTA of a pair may have a block that no sequence has
    if work.block * traits.tile_n < work.slot:
        for acc, part in zip(accs, columns, strict=True):
            first_col = part.first
            if const_expr(part.sharers > 1):
                first_col += traits.column_group() * part.width
            quads = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, part.width // 8)))
            for g in cutlass.range_constexpr(part.width // 8):
                pair = first_col // 2 + g * 4 + cute.arch.lane_idx() % 4
                for i in cutlass.range_constexpr(2):
                    values = cute.make_rmem_tensor((2,), Float32)
                    for j in cutlass.range_constexpr(2):
                        # without scores, what was loaded is another sequence's
                        values[j] = cutlass.select_(has_sums, quads[j, i, g], Float32(0.0))
                    at = (row + 8 * i) * pairs_of_row + pair
                    stored = cute.make_tensor(sums.iterator, cute.make_layout((2, 2**30)))
                    if const_expr(adds):
                        for j in cutlass.range_constexpr(2):
                            place = stored.iterator + (2 * at + j)
                            more = {"dtype": "f32", "sem": "relaxed", "scope": "gpu"}
                            cute.arch.red(place, values[j], op="add", **more)
                    else:
                        cute.autovec_copy(values, stored[None, at])


def stage_nothing(traits: BwdTraits, tiles: BwdSmem, channel: Channel, block: Int32) -> None:
    for i in range(len(traits.columns.parts_dq)):
        products = traits.columns.products_dq(i)
        nothing = [wgmma.make_accumulator(part.width) for part, _ in products]
        for acc in nothing:
            acc.fill(0.0)
        stage_dq(traits, tiles, channel, block, i, nothing)


@cute.jit
def stage_dq(
    traits: cutlass.Constexpr[BwdTraits],
    tiles: BwdSmem,
    channel: Channel,
    block: Int32,
    part: cutlass.Constexpr[int],
    accs: list,
):
    """Write this warp's sums of a part of dQ to staging memory, for each width."""
    lane = cute.arch.lane_idx()
    warp_idx = mma_warp()
    if const_expr(traits.staging_warps < traits.num_mma_warps):
        warp_idx = warp_idx % traits.staging_warps
    number = block * len(traits.columns.parts_dq) + part
    channel.acquire(number)
    for acc, (columns, first) in zip(accs, traits.columns.products_dq(part), strict=True):
        groups = columns.width // 8
        # (2 columns, 2 rows, lane, column group, warp), as the threads hold the sums
        layout = cute.make_layout((2, 2, 32, groups, traits.staging_warps))
        if const_expr(traits.by_query_lists):
            layout = by_queries(traits.packed_heads, columns.width)
        staged = cute.make_tensor(tiles.dq.iterator + first, layout)
        quads = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, groups)))
        for g in cutlass.range_constexpr(groups):
            cute.autovec_copy(quads[None, None, g], staged[None, None, lane, g, warp_idx])
    cute.arch.fence_proxy("async.shared", space="cta")
    channel.publish(number)
