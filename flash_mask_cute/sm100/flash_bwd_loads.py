"""Two warps of the Blackwell backward: the load warp, and the send warp for the sums of dQ."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_mask_cute.core import tma
from flash_mask_cute.core.dq_sums import UNSENT, DqSums, Summed
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.query_loads import BwdOperands, QueryLoads, Visited
from flash_mask_cute.core.row_blocks import RowBlocks
from flash_mask_cute.core.walk_ring import Block
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.sm100.flash_bwd_storage import BwdSmem, Channels, visit_walks
from flash_mask_cute.sm100.flash_bwd_traits import BwdTraits


@dataclass(frozen=True)
class KeyLoads:
    traits: cutlass.Constexpr[BwdTraits]
    operands: BwdOperands
    tiles: BwdSmem
    channels: Channels
    queries: QueryLoads
    lengths: Lengths

    @cute.jit
    def run(self):
        visit_walks(self.channels, self._load_block)

    @cute.jit
    def _load_block(self, work: Work, first: Int32, number: Int32, block: Block):
        """Keys and values of a work tile come with its first block."""
        of_block = self.lengths.of_block(work, block)
        row_block = self.queries.row_block(of_block, block)
        at = Visited(of_block, block, number, number == first, row_block)
        self.queries.load_query(at)
        self.queries.load_do(at)
        if at.is_first:
            self._load_keys(work, first)
        return number + 1

    def _load_keys(self, work: Work, first: Int32) -> None:
        """The last dQ of the work tile before releases Q when it has read the keys there."""
        traits, operands, tiles, channels = self.traits, self.operands, self.tiles, self.channels
        side, copies = tma.RowSide.of_keys(self.lengths), []
        place = work.batch_idx, work.offset_k, work.seqlen_k, work.block * traits.tile_n
        wanted = [(operands.k_atom, operands.k, tiles.k, channels.q)]
        if traits.makes_dk:
            wanted += [(operands.v_atom, operands.v, tiles.v, channels.do)]
        for atom, source, smem, channel in wanted:
            gmem, row = tma.readable_rows(source, side, *place)
            copies.append((atom, gmem, (work.head_idx, row), smem, channel.barrier(first)))
        with cute.arch.elect_one():
            for atom, gmem, start, smem, _ in copies:
                # brought into L2 meanwhile
                self._copy_boxes(atom, gmem, start, smem, None)
        channels.q.wait_until_released(first - 1)
        for copy in copies:
            self._copy_boxes(*copy)

    @cute.jit
    def _copy_boxes(
        self,
        atom: cute.CopyAtom,
        gmem: cute.Tensor,
        start: tuple[Int32, Int32],
        smem: cute.Tensor,
        barrier: cute.Pointer | None,
    ):
        """Start the copies of all boxes of K or V. barrier: None to prefetch them."""
        rows, columns = self.traits.tile_n, cute.size(smem, mode=[1])
        width = self.traits.key_box_columns(columns)
        if const_expr(width == columns):
            _copy_box(atom, gmem, start, ((1, rows), width), smem, 0, barrier)
        else:
            # rolled, since the coordinates of all of them do not fit into uniform registers
            for i in cutlass.range(columns // width, unroll=1):
                part = cute.local_tile(smem, (rows, width, 1), (0, i, 0))
                _copy_box(atom, gmem, start, ((1, rows), width), part, i * width, barrier)


def _copy_box(atom, gmem, start, box, smem, column, barrier) -> None:
    src, dst = tma.tile_of(atom, gmem, start, box, smem, column)
    if barrier is None:
        cute.prefetch(atom, src)
    else:
        cute.copy(atom, src, dst[None, 0], tma_bar_ptr=barrier)


class Sent(NamedTuple):
    """Number of query blocks so far, and the row block of the last one."""

    number: Int32
    last: Summed


@dataclass(frozen=True)
class SumsOut:
    traits: cutlass.Constexpr[BwdTraits]
    channels: Channels
    sums: DqSums

    @cute.jit
    def run(self):
        channels = self.channels
        tile, chunk = Int32(0), Int32(0)
        state = Sent(Int32(0), Summed.nothing())
        while channels.ring.wait(tile):
            work = channels.ring.read(tile)
            chunk, state = channels.walk.visit(chunk, state, partial(self._send_block, work))
            if const_expr(self.sums.deterministic):
                # now, for others wait for it
                cute.arch.cp_async_bulk_wait_group(0)
                self.sums.release(self._own_number(work), state.last)
                state = Sent(state.number, Summed.nothing())
            channels.ring.release(tile)
            tile += 1
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def _send_block(self, work: Work, state: Sent, block: Block):
        sums, number = self.sums, state.number
        of_block = sums.lengths.of_block(work, block)
        row_block = RowBlocks(sums.lengths, self.traits.tile_m).of(of_block, block)
        if const_expr(sums.lengths.seqused_k is not None):
            # what was loaded for the keys of none is not in use, perhaps not even finite
            row_block = cutlass.select_(work.seqlen_k > 0, row_block, Int32(UNSENT))
        # who comes first to a row block keeps others waiting from then on
        self.channels.out.wait(number * len(self.traits.parts_dq))
        summed = sums.with_predecessor(Summed(block.head_idx, row_block, block.predecessor))
        sums.send(self._own_number(work), number, state.last, summed)
        sums.free_staging(number, summed)
        return Sent(number + 1, summed)

    def _own_number(self, work: Work) -> Int32:
        """1 + the key block of the walk, which is that of both CTAs in a pair."""
        return work.block // self.traits.group.size + 1
