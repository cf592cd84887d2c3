"""The load warp of the Hopper backward: its loads, and the sums of dQ that it sends.

When the MMA warpgroups begin a block, the load warp requests the next block's Q and dO, waits until
the dQ of the block before last has left its staging memory, and sends the dQ of the last block.
Keys and values of a work tile come with its first block. docs/backward_sm90.md gives the reasons.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_mask_cute.core import clusters, tma
from flash_mask_cute.core.dq_sums import UNSENT, DqSums, Scratch, Summed
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.query_loads import BwdOperands, QueryLoads, Visited
from flash_mask_cute.core.walk_ring import Block
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_bwd_tokens import TokenLoads, TokenSums
from flash_mask_cute.sm90.flash_bwd_traits import BwdSmem, BwdTraits, Channels


class Loaded(NamedTuple):
    """The number of the next query block, and the row blocks of the two before it. The dQ of the
    earlier one has been sent, or there is none."""

    number: Int32
    sent: Summed
    last: Summed


@dataclass(frozen=True)
class BwdLoads:
    """State of the load warp. group_splits: work tiles with the same keys; None: one."""

    traits: cutlass.Constexpr[BwdTraits]
    operands: BwdOperands
    tiles: BwdSmem
    channels: Channels
    queries: QueryLoads
    sums: DqSums
    lengths: Lengths
    group_splits: Int32 | None

    @staticmethod
    def create(
        kernel: Any,
        operands: BwdOperands,
        tiles: BwdSmem,
        channels: Channels,
        scratch: Scratch,
        lengths: Lengths,
        group_splits: Int32 | None,
    ) -> "BwdLoads":
        """kernel: a `FlashAttentionBackwardSm90`."""
        traits = kernel.traits
        of_queries = traits, operands, tiles, channels, scratch.stats, lengths
        share = partial(_share_of_sums, traits) if traits.cta_pair else None
        scheme, sizes = (kernel.deterministic, kernel.clears_dq), traits.columns.sizes_dq
        of_sums = *scheme, tiles.dq.iterator, channels.dq, scratch, lengths, share
        queries, sums = QueryLoads(*of_queries), DqSums(sizes, *of_sums)
        if traits.by_query_lists:
            queries, rows = TokenLoads(*of_queries), traits.packed_heads
            products = tuple(
                tuple((first, x.first * rows, x.num_cols * rows) for x, first in part)
                for part in map(traits.columns.products_dq, range(len(sizes)))
            )
            sums = TokenSums(sizes, *of_sums, products, traits.tokens_per_block)
        return BwdLoads(traits, operands, tiles, channels, queries, sums, lengths, group_splits)

    @cute.jit
    def run(self):
        """Load keys and values of every work tile, and the query blocks of its walk."""
        channels = self.channels
        tile, chunk = Int32(0), Int32(0)
        state = Loaded(Int32(0), Summed.nothing(), Summed.nothing())
        while channels.ring.wait(tile):
            work = channels.ring.read(tile)
            step = partial(self._load_block, work, tile, state.number)
            chunk, state = channels.walk.visit(chunk, state, step)
            # at once, because MMA warpgroups need it before the next work tile is known
            self.sums.free_staging(state.number - 2, state.sent)
            if const_expr(self.sums.deterministic):
                # now, because other CTAs wait for this sum
                last = self.sums.with_predecessor(state.last)
                self.sums.send(work.block + 1, state.number - 1, state.sent, last)
                cute.arch.cp_async_bulk_wait_group(0)
                self.sums.release(work.block + 1, state.last)
                self.sums.free_staging(state.number - 1, state.last)
                state = Loaded(state.number, Summed.nothing(), Summed.nothing())
            else:
                state = Loaded(state.number, Summed.nothing(), state.last)
            channels.ring.release(tile)
            tile += 1
        if const_expr(not self.sums.deterministic):
            last = self.sums.with_predecessor(state.last)
            self.sums.send(Int32(0), state.number - 1, Summed.nothing(), last)
            self.sums.free_staging(state.number - 1, last)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _load_block(
        self, work: Work, tile: Int32, first: Int32, state: Loaded, block: Block
    ) -> Loaded:
        """Load a query block, send the previous dQ. first: the block that comes with keys."""
        traits, queries, number = self.traits, self.queries, state.number
        of_block = self.lengths.of_block(work, block)
        row_block = queries.row_block(of_block, block)
        at = Visited(of_block, block, number, number == first, row_block)
        loads = (partial(queries.load_query, at), partial(queries.load_do, at))
        # An operand with one stage is released by a block whose dQ waits for the staging memory, so
        # its load comes after `free_staging`. The others come first: a late load delays products.
        stages = (traits.stages_q, traits.stages_do)
        num_ahead = stages.index(1) if 1 in stages else len(stages)
        for load in loads[:num_ahead]:
            load()
        self.sums.free_staging(number - 2, state.sent)
        # known by the time the sums are there
        last = self.sums.with_predecessor(state.last)
        for load in loads[num_ahead:]:
            load()
        # Keys wait until the work tile before is complete. If its dQ has several parts, these wait
        # for the staging memory, and the sums are sent before.
        if const_expr(traits.releases_do_after_dq):  # noqa: SIM102 (decided while tracing)
            if at.is_first:
                self._load_keys(work, tile, first)
        self.sums.send(work.block + 1, number - 1, state.sent, last)
        if const_expr(not traits.releases_do_after_dq):  # noqa: SIM102 (decided while tracing)
            if at.is_first:
                self._load_keys(work, tile, first)
        if const_expr(self.lengths.seqused_k is not None):
            # for a sequence without keys, rows were loaded that are not in use, perhaps not finite
            row_block = cutlass.select_(work.seqlen_k > 0, row_block, Int32(UNSENT))
        return Loaded(number + 1, last, Summed(block.head_idx, row_block, block.predecessor))

    def _load_keys(self, work: Work, tile: Int32, first: Int32):
        """Load the keys and values of a work tile, which complete query block `first` and its dO.

        With one stage, the block before reads the previous work tile's until its dQ is complete;
        then it releases dO, or Q if dQ has several parts. With two stages, the readers of the stage
        have already released a Q whose place `first` has taken.
        """
        traits, operands, tiles, channels = self.traits, self.operands, self.tiles, self.channels
        side, copies = tma.RowSide.of_keys(self.lengths), []
        place = work.batch_idx, work.offset_k, work.seqlen_k
        head_idx = work.head_idx
        if self.group_splits is not None:
            head_idx = head_idx // self.group_splits
        with_k, with_v = channels.q.barrier(first), channels.do.barrier(first)
        kinds = [
            (operands.k_atom, operands.k, tiles.k, work.block, (0, traits.tile_d), with_k),
            (operands.v_atom, operands.v, tiles.v, work.block, (0, traits.tile_dv), with_v),
        ]
        if traits.cta_pair:
            columns = traits.columns
            cols = (clusters.rank() * columns.second_dq, columns.cols_dq)
            peer_k = (operands.peer_k_atom, operands.peer_k, tiles.peer_k)
            # blocks of a pair are numbered as its CTAs are
            kinds.append((*peer_k, work.block ^ 1, cols, with_k))
        for atom, source, smem, block, (first_col, d), barrier in kinds:
            for group in range(traits.key_groups):
                row = block * traits.tile_n + group * wgmma.ROWS_PER_WARPGROUP
                gmem, row = tma.readable_rows(source, side, *place, row)
                box = ((1, wgmma.ROWS_PER_WARPGROUP), d)
                src, dst = tma.tile_of(atom, gmem, (head_idx, row), box, smem, first_col)
                copies.append((atom, src, dst[None, traits.keys_unit(tile, group)], barrier))
        if traits.stages_kv == 1:
            with cute.arch.elect_one():
                for atom, src, _, _ in copies:
                    # brought into L2 meanwhile
                    cute.prefetch(atom, src)
            last_read = channels.do if traits.releases_do_after_dq else channels.q
            last_read.wait_until_released(first - 1)
        for atom, src, dst, barrier in copies:
            cute.copy(atom, src, dst, tma_bar_ptr=barrier)


def _share_of_sums(traits: BwdTraits) -> tuple[Int32, tuple[Int32 | int]]:
    """The start of this CTA's columns in a row block's sums, and their size."""
    columns = traits.columns
    first, second = (n * traits.tile_m for n in (columns.cols_dq, columns.second_dq))
    size: Int32 | int = first
    if second < first:
        size = cutlass.select_(clusters.rank() == clusters.LEADER, Int32(first), Int32(second))
    return clusters.rank() * first, (size,)
