"""A ring in shared memory through which the scheduler warp assigns work to all other warps.

Each entry holds the coordinates of a work tile and the lengths of its sequence, so that only one
warp decides, and only that warp waits for `cu_seqlens` to arrive from global memory. An entry with
a negative block ends the work.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32

from flash_mask_cute.core.ring import Ring
from flash_mask_cute.seqlen_info import SeqlenInfoQK


class Work(NamedTuple):
    """A work tile and its sequence.

    block: a query block in the forward, a key block in the backward. head_idx counts KV heads in
    the backward, and in the forward if query heads are packed.
    slot: rows that the sequence occupies on the block's side, used or not.
    q_start: the position of its first query. first_block, end_block: the key blocks that this CTA's
    split may visit, and place, the destination of the split (`core/partials.py`); with query lists
    the entries of the work tile's segment, and its item (`core/query_lists.py`). Ring entries hold
    a field that may be None only if the launch has it (`WorkRing.fields`).
    """

    block: Int32
    head_idx: Int32
    batch_idx: Int32
    offset_q: Int32
    slot: Int32
    seqlen_q: Int32
    offset_k: Int32
    seqlen_k: Int32
    q_start: Int32 | None = None
    first_block: Int32 | None = None
    end_block: Int32 | None = None
    place: Int32 | None = None

    @property
    def has_scores(self) -> Boolean:
        return (self.seqlen_q > 0) & (self.seqlen_k > 0)

    @property
    def seqlen(self) -> SeqlenInfoQK:
        lengths = self.offset_q, self.offset_k, self.seqlen_q, self.seqlen_k
        return SeqlenInfoQK(*lengths, q_start=self.q_start)

    def position(self, q_idx: Int32) -> Int32:
        """The position of a query of the call, as masks and callables count it. A position before 0
        becomes 0, because tensors are indexed with it."""
        return q_idx if self.q_start is None else cutlass.max(q_idx + self.q_start, 0)


# the fields of every launch
WORK_FIELDS = tuple(name for name in Work._fields if name not in Work._field_defaults)
SPLIT_FIELDS = ("first_block", "end_block", "place")
NO_WORK = Work(-1, *[0] * (len(Work._fields) - 1))


@dataclass(frozen=True)
class WorkRing:
    """A ring of `Work`. fields: the fields that an entry carries."""

    ring: Ring
    fields: cutlass.Constexpr[tuple[str, ...]] = WORK_FIELDS

    def acquire(self, number: Int32) -> None:
        self.ring.channel.acquire(number)

    def write(self, number: Int32, work: Work) -> None:
        self.ring.write(number, [getattr(work, name) for name in self.fields])

    def wait(self, number: Int32) -> Boolean:
        """Wait for entry `number`; returns whether it holds work (False: there is no more)."""
        self.ring.channel.wait(number)
        return self.read(number).block >= 0

    def read(self, number: Int32) -> Work:
        """Entry `number`, between `wait` and `release`. Read it at the place of use instead of
        keeping it: its loads are cheap, registers are not."""
        words = self.ring.read(number, len(self.fields))
        return Work(**dict(zip(self.fields, words, strict=True)))

    def release(self, number: Int32) -> None:
        self.ring.release(number)
