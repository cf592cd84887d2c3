"""Which work tile a persistent CTA computes next.

A work tile is one block of tile_m query rows of one head of one sequence. CTAs take tiles of a fixed linear order in
turns, back and forth (CTA c takes c in even rounds and the last minus c in odd ones), so that lists sorted by length
come out balanced without an atomic counter.

Linear order, dense: heads in groups whose keys and values fit the L2 cache together; inside a group the query blocks,
longest walk first where masking makes them differ; inside a block the heads. Varlen: sequence by sequence, head by
head. Only the load warp runs this; everyone else reads its decision from the ring (`work_ring`).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

WARP = 32


class WorkTile(NamedTuple):
    """Coordinates of a work tile; head_idx counts KV heads when query heads are packed."""

    m_block: Int32
    head_idx: Int32
    batch_idx: Int32
    is_valid: Boolean


class ScheduleParams(NamedTuple):
    """Run-time extents of the schedule, made on the host side of the launch."""

    num_m_blocks: Int32
    num_heads: Int32
    num_batch: Int32
    heads_per_group: Int32


class SchedulerState(NamedTuple):
    """Round of this CTA, and where the varlen search stands: first sequence of its window, tiles before that."""

    round: Int32
    batch_start: Int32
    tiles_before: Int32


def initial_state() -> SchedulerState:
    return SchedulerState(Int32(0), Int32(0), Int32(0))


def _linear_index(round_: Int32) -> Int32:
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    backwards = round_ % 2 == 1
    return round_ * ctas + cutlass.select_(backwards, ctas - 1 - cta, cta)


@cute.jit
def dense_tile(params: ScheduleParams, round_: Int32, longest_last: cutlass.Constexpr) -> WorkTile:
    """The tile of this CTA's round; `longest_last`: later query blocks have longer walks, so start with them."""
    index = _linear_index(round_)
    num_rows = params.num_heads * params.num_batch
    is_valid = index < num_rows * params.num_m_blocks
    group = index // (params.heads_per_group * params.num_m_blocks)
    first_row = group * params.heads_per_group
    in_group = index - first_row * params.num_m_blocks
    group_size = cutlass.min(params.heads_per_group, cutlass.max(num_rows - first_row, 1))
    m_block = in_group // group_size
    row = first_row + in_group - m_block * group_size
    if const_expr(longest_last):
        m_block = params.num_m_blocks - 1 - m_block
    batch_idx = row // params.num_heads
    return WorkTile(m_block, row - batch_idx * params.num_heads, batch_idx, is_valid)


@cute.jit
def varlen_tile(
    params: ScheduleParams,
    state: SchedulerState,
    num_m_blocks_of: cutlass.Constexpr,
    longest_last: cutlass.Constexpr,
):
    """The tile of this CTA's round and the advanced search state. Run by a whole warp.

    num_m_blocks_of(batch_idx) gives a sequence's query blocks; 32 sequences are looked at together, a lane each.
    """
    lane = cute.arch.lane_idx()
    index = _linear_index(state.round)
    batch_start, tiles_before = state.batch_start, state.tiles_before
    blocks = _blocks_in_window(params, batch_start + lane, num_m_blocks_of)
    ends = _inclusive_scan(blocks, lane) * params.num_heads
    in_window = cute.arch.shuffle_sync(ends, WARP - 1)
    while index >= tiles_before + in_window and batch_start + WARP < params.num_batch:
        batch_start += WARP
        tiles_before += in_window
        blocks = _blocks_in_window(params, batch_start + lane, num_m_blocks_of)
        ends = _inclusive_scan(blocks, lane) * params.num_heads
        in_window = cute.arch.shuffle_sync(ends, WARP - 1)
    offset = index - tiles_before
    is_valid = offset < in_window
    passed = cute.arch.vote_ballot_sync(offset >= ends)
    owner = cutlass.min(cute.arch.popc(passed), WARP - 1)
    num_blocks = cutlass.max(cute.arch.shuffle_sync(blocks, owner), 1)
    tiles_end = cute.arch.shuffle_sync(ends, owner)
    in_sequence = offset - (tiles_end - num_blocks * params.num_heads)
    head_idx = in_sequence // num_blocks
    m_block = in_sequence - head_idx * num_blocks
    if const_expr(longest_last):
        m_block = num_blocks - 1 - m_block
    work = WorkTile(m_block, head_idx, batch_start + owner, is_valid)
    return work, SchedulerState(state.round, batch_start, tiles_before)


@cute.jit
def _blocks_in_window(
    params: ScheduleParams, batch_idx: Int32, num_m_blocks_of: cutlass.Constexpr
) -> Int32:
    blocks = Int32(0)
    if batch_idx < params.num_batch:
        blocks = num_m_blocks_of(batch_idx)
    return blocks


@cute.jit
def _inclusive_scan(value: Int32, lane: Int32) -> Int32:
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, offset=1 << step, mask_and_clamp=0)
        value += cutlass.select_(lane >= (1 << step), below, Int32(0))
    return value
