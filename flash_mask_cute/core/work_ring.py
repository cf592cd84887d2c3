"""A ring in shared memory through which the load warp tells the MMA warps what to do next.

Each entry holds the coordinates of a work tile and the lengths of its sequence, so that only one warp decides, and only
that warp waits for `cu_seqlens` to arrive from global memory. An entry with a negative m_block ends the work.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32

from flash_mask_cute.seqlen_info import SeqlenInfoQK

FIELDS = 8


class Work(NamedTuple):
    """A work tile. slot_q: rows that the sequence occupies in Q and O; seqlen_q: how many of them are in use."""

    m_block: Int32
    head_idx: Int32
    batch_idx: Int32
    offset_q: Int32
    slot_q: Int32
    seqlen_q: Int32
    offset_k: Int32
    seqlen_k: Int32

    @property
    def is_valid(self) -> Boolean:
        return self.m_block >= 0

    @property
    def seqlen(self) -> SeqlenInfoQK:
        return SeqlenInfoQK(self.offset_q, self.offset_k, self.seqlen_q, self.seqlen_k)


def no_work() -> Work:
    return Work(Int32(-1), *(Int32(0) for _ in range(FIELDS - 1)))


class WorkRing(NamedTuple):
    """Entries (FIELDS, stages) int32, and a full and an empty mbarrier per stage."""

    entries: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer

    @staticmethod
    def create(entries: cute.Pointer, barriers: cute.Pointer, stages: int, num_readers: int):
        """Make the ring and let warp 0 initialise its barriers. num_readers: warps that read every entry."""
        layout = cute.make_layout((FIELDS, stages))
        ring = WorkRing(cute.make_tensor(entries, layout), barriers, barriers + stages)
        ring._init_barriers(stages, num_readers)
        return ring

    @cute.jit
    def _init_barriers(self, stages: cutlass.Constexpr, num_readers: cutlass.Constexpr):
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(self.full + stage, 1)
                    cute.arch.mbarrier_init(self.empty + stage, num_readers)

    @cute.jit
    def write(self, state: pipeline.PipelineState, work: Work) -> pipeline.PipelineState:
        """Append an entry; run by one converged warp with a producer state, returns it advanced."""
        cute.arch.mbarrier_wait(self.empty + state.index, state.phase)
        if cute.arch.lane_idx() == 0:
            for field in cutlass.range_constexpr(FIELDS):
                self.entries[field, state.index] = work[field]
            cute.arch.mbarrier_arrive(self.full + state.index)
        state.advance()
        return state

    @cute.jit
    def write_end(self, state: pipeline.PipelineState) -> pipeline.PipelineState:
        """Append the entry that ends the work."""
        return self.write(state, no_work())

    @cute.jit
    def read(self, state: pipeline.PipelineState):
        """Next entry and the advanced consumer state; run by every reading warp."""
        cute.arch.mbarrier_wait(self.full + state.index, state.phase)
        work = Work(*(self.entries[field, state.index] for field in range(FIELDS)))
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.empty + state.index)
        state.advance()
        return work, state
