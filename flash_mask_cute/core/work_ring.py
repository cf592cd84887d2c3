"""A ring in shared memory through which the planning warp tells all others what to do next.

Each entry holds the coordinates of a work tile and the lengths of its sequence, so that only one
warp decides, and only that warp waits for `cu_seqlens` to arrive from global memory. An entry with
a negative block ends the work.
"""

from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Boolean, Int32

from flash_mask_cute.core.ring import Ring
from flash_mask_cute.seqlen_info import SeqlenInfoQK


class Work(NamedTuple):
    """A work tile and its sequence.

    block: of queries in the forward, of keys in the backward; head_idx counts KV heads in the
    backward, and where query heads are packed.
    slot: rows that the sequence occupies on the block's side, in use or not.
    """

    block: Int32
    head_idx: Int32
    batch_idx: Int32
    offset_q: Int32
    slot: Int32
    seqlen_q: Int32
    offset_k: Int32
    seqlen_k: Int32

    @property
    def has_scores(self) -> Boolean:
        return (self.seqlen_q > 0) & (self.seqlen_k > 0)

    @property
    def seqlen(self) -> SeqlenInfoQK:
        return SeqlenInfoQK(self.offset_q, self.offset_k, self.seqlen_q, self.seqlen_k)


NO_WORK = Work(-1, *[0] * (len(Work._fields) - 1))


@dataclass(frozen=True)
class WorkRing:
    """A ring of `Work`."""

    ring: Ring

    def acquire(self, number: Int32) -> None:
        """Wait until entry `number` may be written."""
        self.ring.channel.acquire(number)

    def write(self, number: Int32, work: Work) -> None:
        """Write entry `number` (from 0)."""
        self.ring.write(number, work)

    def wait(self, number: Int32) -> Boolean:
        """Wait for entry `number`; whether it holds work (False: there is no more)."""
        self.ring.channel.wait(number)
        return self.read(number).block >= 0

    def read(self, number: Int32) -> Work:
        """Entry `number`, between `wait` and `release`.

        Read it where it is used instead of keeping it: its loads are cheap, registers are not.
        """
        return Work(*self.ring.read(number, len(Work._fields)))

    def release(self, number: Int32) -> None:
        """This warp has read entry `number` for the last time."""
        self.ring.release(number)
