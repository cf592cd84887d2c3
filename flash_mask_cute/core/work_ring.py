"""A ring in shared memory through which the load warp tells the MMA warps what to do next.

Each entry holds the coordinates of a work tile and the lengths of its sequence, so that only one
warp decides, and only that warp waits for `cu_seqlens` to arrive from global memory. An entry with
a negative m_block ends the work.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from flash_mask_cute.core.cursor import Cursor
from flash_mask_cute.seqlen_info import SeqlenInfoQK

FIELDS = 8


class Work(NamedTuple):
    """A work tile and its sequence.

    slot_q: rows that the sequence occupies in Q and O; seqlen_q: how many of them are in use.
    """

    m_block: Int32
    head_idx: Int32
    batch_idx: Int32
    offset_q: Int32
    slot_q: Int32
    seqlen_q: Int32
    offset_k: Int32
    seqlen_k: Int32

    @property
    def seqlen(self) -> SeqlenInfoQK:
        return SeqlenInfoQK(self.offset_q, self.offset_k, self.seqlen_q, self.seqlen_k)


NO_WORK = Work(-1, *[0] * (FIELDS - 1))


class WorkRing(NamedTuple):
    """Entries (FIELDS, stages) int32, and a full and an empty mbarrier per stage."""

    entries: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer

    @property
    def stages(self) -> int:
        return cute.size(self.entries, mode=[1])

    @staticmethod
    def create(
        entries: cute.Pointer, barriers: cute.Pointer, stages: int, num_readers: int
    ) -> "WorkRing":
        """Make the ring and let warp 0 initialise its barriers.

        num_readers: warps that read every entry.
        """
        layout = cute.make_layout((FIELDS, stages))
        ring = WorkRing(cute.make_tensor(entries, layout), barriers, barriers + stages)
        ring._init_barriers(num_readers)
        return ring

    @cute.jit
    def _init_barriers(self, num_readers: cutlass.Constexpr) -> None:
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(self.full + stage, 1)
                    cute.arch.mbarrier_init(self.empty + stage, num_readers)

    @cute.jit
    def write(self, number: Int32, work: Work) -> None:
        """Write entry `number` (from 0); run by one converged warp."""
        at = Cursor(number, self.stages, is_producer=True)
        cute.arch.mbarrier_wait(self.empty + at.index, at.phase)
        if cute.arch.lane_idx() == 0:
            for field in cutlass.range_constexpr(FIELDS):
                self.entries[field, at.index] = Int32(work[field])
            cute.arch.mbarrier_arrive(self.full + at.index)

    def wait(self, number: Int32) -> Boolean:
        """Wait for entry `number`; whether it holds work (False: there is no more)."""
        at = Cursor(number, self.stages)
        cute.arch.mbarrier_wait(self.full + at.index, at.phase)
        return self.entries[0, at.index] >= 0

    def read(self, number: Int32) -> Work:
        """Entry `number`, between `wait` and `release`.

        Read it where it is used instead of keeping it: its loads are cheap, registers are not.
        """
        index = Cursor(number, self.stages).index
        return Work(*(self.entries[field, index] for field in range(FIELDS)))

    @cute.jit
    def release(self, number: Int32) -> None:
        """This warp has read entry `number` for the last time."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.empty + Cursor(number, self.stages).index)
