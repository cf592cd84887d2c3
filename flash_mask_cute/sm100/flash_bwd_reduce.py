"""The reduce warps of the Blackwell backward: dQ of a block, out of TMEM to where it leaves."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import thread_in_warpgroup
from flash_mask_cute.core.walk_ring import Block
from flash_mask_cute.core.warp_scan import WARP
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.sm100 import umma
from flash_mask_cute.sm100.flash_bwd_registers import MOST_HELD, Registers
from flash_mask_cute.sm100.flash_bwd_storage import BwdSmem, Channels, visit_walks
from flash_mask_cute.sm100.flash_bwd_traits import BwdTraits


@dataclass(frozen=True)
class DqParts:
    """State of a reduce warp, which has 32 queries of every block, one for each thread; of 64
    queries it has 16, and for each query two threads with columns of their own."""

    traits: cutlass.Constexpr[BwdTraits]
    registers: cutlass.Constexpr[Registers]
    tiles: BwdSmem
    channels: Channels

    @cute.jit
    def run(self):
        visit_walks(self.channels, self._stage_dq)

    @cute.jit
    def _stage_dq(self, work: Work, first: Int32, number: Int32, block: Block):
        """Move dQ of a block out of TMEM, part by part to the memory that the send warp adds."""
        traits, channels, parts = self.traits, self.channels, self.traits.parts_dq
        held = traits.held_parts if const_expr(self.registers.reduce > MOST_HELD) else 0
        alternating = len(parts) - held
        # -- dQ of the block is complete: (tile_m queries, tile_d)
        channels.dq.wait(number)
        umma.fence_after_wait()
        if const_expr(traits.is_wide_pair):
            # first what lies over S of the next block, then what lies over its dP
            over_s = traits.parts_over_scores
            self._stage_together(number, range(over_s), channels.dq)
            rest = range(over_s, len(parts))
            self._stage_together(number, rest, channels.dq_left)
            return number + 1
        for i in cutlass.range_constexpr(alternating):
            channels.out.acquire(number * len(parts) + i)
            umma.fence_after_wait()
            staged = self._staged(i)
            # not unrolled, since ptxas would fetch all at once
            for c in cutlass.range(self._loads_of(i), unroll=1):
                values = self._load_dq(i, c)
                umma.wait_loads()
                self._stage_chunk(values, staged, c)
            umma.fence_before_arrival()
            if const_expr(i + 1 == len(parts)):
                self._release(channels.dq, number)
            self._publish_part(number * len(parts) + i)
        if const_expr(held):
            # -- the rest into registers; dQ of the next block may replace it in TMEM
            self._stage_together(number, range(alternating, len(parts)), channels.dq)
        return number + 1

    @cute.jit
    def _stage_together(self, number: Int32, parts: cutlass.Constexpr[range], channel: Channel):
        """Move parts of dQ out of TMEM together, release them by `channel`, and stage them."""
        num_parts = len(self.traits.parts_dq)
        umma.fence_after_wait()
        chunks = [[self._load_dq(i, c) for c in range(self._loads_of(i))] for i in parts]
        umma.wait_loads()
        umma.fence_before_arrival()
        self._release(channel, number)
        for i in cutlass.range_constexpr(parts.start, parts.stop):
            self.channels.out.acquire(number * num_parts + i)
            staged = self._staged(i)
            for c in cutlass.range_constexpr(self._loads_of(i)):
                self._stage_chunk(chunks[i - parts[0]][c], staged, c)
            self._publish_part(number * num_parts + i)

    def _loads_of(self, part: int) -> int:
        """How many times a thread loads of a part."""
        width = self.traits.parts_dq[part]
        return width // umma.CHUNK if self.traits.rows_of_cta == umma.ROWS else 1

    def _load_dq(self, part: int, load: int | Int32) -> cute.Tensor:
        """This thread's values of a part: 32 columns of a query, or half of those of 64 queries."""
        traits, first = self.traits, sum(self.traits.parts_dq[:part])
        if traits.cta_pair:
            at = traits.column_dq + first // 2
            return umma.load_columns(at, traits.parts_dq[part] // 2, thread_in_warpgroup())
        if traits.tile_m == umma.ROWS:
            at = traits.column_dq + first + load * umma.CHUNK
            return umma.load_columns(at, umma.CHUNK, thread_in_warpgroup())
        product, column = first // traits.widths_dq[0], first % traits.widths_dq[0]
        at = traits.column_dq + column + product * umma.HALF_LANES
        return umma.load_half_lanes(at, traits.parts_dq[part], thread_in_warpgroup())

    def _staged(self, part: int) -> cute.Tensor:
        """(4, rows, pieces): a thread's row of a part, in pieces of 4 columns, tile_m apart."""
        shape = 4, self.traits.rows_of_cta, self.traits.parts_dq[part] // 4
        return cute.make_tensor(self.tiles.dq.iterator, cute.make_layout(shape))

    def _stage_chunk(self, values: cute.Tensor, staged: cute.Tensor, load: int | Int32) -> None:
        row, num_quads = thread_in_warpgroup(), cute.size(values) // 4
        first = load * num_quads
        if self.traits.cta_pair:
            # the second half of the columns is in lanes 64 to 127
            rows = self.traits.rows_of_cta
            row, first = row % rows, row // rows * num_quads
        elif self.traits.tile_m != umma.ROWS:
            lane, lanes = row % WARP, WARP // 2
            row, first = row // WARP * lanes + lane % lanes, lane // lanes * num_quads
        quads = cute.make_tensor(values.iterator, cute.make_layout((4, num_quads)))
        for g in range(num_quads):
            cute.autovec_copy(quads[None, g], staged[None, row, first + g])

    def _release(self, channel: Channel, number: Int32) -> None:
        """Signal that this warp has its rows of dQ out of TMEM, behind a fence."""
        cute.arch.sync_warp()
        channel.release(number)

    def _publish_part(self, fill: Int32) -> None:
        """Signal that this warp has staged its rows of a part: the send warp may add it."""
        cute.arch.fence_proxy("async.shared", space="cta")
        self.channels.out.publish(fill)
