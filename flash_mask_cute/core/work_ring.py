"""A ring in shared memory through which the planning warp tells all others what to do next.

Each entry holds the coordinates of a work tile and the lengths of its sequence, so that only one
warp decides, and only that warp waits for `cu_seqlens` to arrive from global memory. An entry with
a negative m_block ends the work.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from flash_mask_cute.core.channel import Channel
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
    def has_scores(self) -> Boolean:
        return (self.seqlen_q > 0) & (self.seqlen_k > 0)

    @property
    def seqlen(self) -> SeqlenInfoQK:
        return SeqlenInfoQK(self.offset_q, self.offset_k, self.seqlen_q, self.seqlen_k)


NO_WORK = Work(-1, *[0] * (FIELDS - 1))


@dataclass(frozen=True)
class WorkRing:
    """Entries (FIELDS, stages) int32 and their channel."""

    entries: cute.Tensor
    channel: Channel

    @staticmethod
    def create(
        entries: cute.Pointer, barriers: cute.Pointer, stages: int, num_readers: int
    ) -> "WorkRing":
        """num_readers: warps that read every entry."""
        layout = cute.make_layout((FIELDS, stages))
        channel = Channel.create(barriers, stages, 1, num_readers)
        return WorkRing(cute.make_tensor(entries, layout), channel)

    def acquire(self, number: Int32) -> None:
        """Wait until entry `number` may be written."""
        self.channel.acquire(number)

    @cute.jit
    def write(self, number: Int32, work: Work) -> None:
        """Write entry `number` (from 0)."""
        self.channel.acquire(number)
        index = self.channel.index(number)
        if cute.arch.lane_idx() == 0:
            for field in cutlass.range_constexpr(FIELDS):
                self.entries[field, index] = Int32(work[field])
        self.channel.publish(number)

    def wait(self, number: Int32) -> Boolean:
        """Wait for entry `number`; whether it holds work (False: there is no more)."""
        self.channel.wait(number)
        return self.entries[0, self.channel.index(number)] >= 0

    def read(self, number: Int32) -> Work:
        """Entry `number`, between `wait` and `release`.

        Read it where it is used instead of keeping it: its loads are cheap, registers are not.
        """
        index = self.channel.index(number)
        return Work(*(self.entries[field, index] for field in range(FIELDS)))

    def release(self, number: Int32) -> None:
        """This warp has read entry `number` for the last time."""
        cute.arch.sync_warp()
        self.channel.release(number)
