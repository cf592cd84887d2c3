"""Gradients of elements that differences determine, if neighbouring diagonals often share an
element: buckets of distances, and clipped ones.

Far from the diagonal, all of a block that a warp has is of one element. Then its sum stays in a
register of each thread, from block to block, until the element or the head is another one
(`UniformDiagonals`). Scores do not decide which blocks these are, so bits do not depend on how many
heads a CTA walks over. Elsewhere, a warp adds to memory once for each run of diagonals with the
same element (`add_runs`), because additions to the same element wait for each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from flash_mask_cute.mods.aux_gradients import FULL_WARP, add_to_memory
from flash_mask_cute.mods.line_sums import LineGroup
from flash_mask_cute.mods.walk_sums import NO_HEAD

WARP = 32


class Ahead(NamedTuple):
    """What a warp knows of a block beforehand. is_uniform: all of its diagonals have the same
    element of each read of a group; offsets: of these (`aux_gradients.offset_in`)."""

    is_uniform: Boolean
    offsets: tuple[Int64, ...]


@dataclass(frozen=True)
class UniformDiagonals:
    """The sum over a head's blocks with one element of each read of a group.

    targets: of each read, the sums of its tensor (`AuxSums`). In registers: total of this thread,
    offsets of the elements, head of the blocks.
    """

    group: cutlass.Constexpr[LineGroup]
    targets: tuple
    total: cute.Tensor
    offsets: cute.Tensor
    head: cute.Tensor

    @staticmethod
    def create(group: LineGroup, targets: tuple) -> "UniformDiagonals":
        count = len(group.reads)
        sizes = (1, Float32), (count, Int64), (1, Int32)
        found = UniformDiagonals(group, targets, *(cute.make_rmem_tensor(*x) for x in sizes))
        found.total.fill(0.0)
        found.offsets.fill(0)
        found.head.fill(NO_HEAD)
        return found

    def ahead(self, offsets: Sequence[Sequence[Int64]]) -> Ahead:
        """offsets: of each read, of the elements of diagonals of this lane; those of all lanes
        together are all diagonals that a warp has."""
        is_uniform = Boolean(True)
        for of_read in offsets:
            for offset in of_read[1:]:
                is_uniform = is_uniform & (offset == of_read[0])
            is_uniform = is_uniform & (cute.arch.match_sync(FULL_WARP, of_read[0], "all") != 0)
        is_uniform = cute.arch.vote_all_sync(is_uniform)
        return Ahead(is_uniform, tuple(of_read[0] for of_read in offsets))

    @cute.jit
    def add(self, ahead: Ahead, head_idx: Int32, total: Float32) -> None:
        """Add this thread's sum of an even block."""
        is_other = self.head[0] != head_idx
        for i in cutlass.range_constexpr(len(self.targets)):
            is_other = is_other | (self.offsets[i] != ahead.offsets[i])
        if is_other:
            self.send()
            self.head[0] = head_idx
            for i in cutlass.range_constexpr(len(self.targets)):
                self.offsets[i] = ahead.offsets[i]
        self.total[0] = self.total[0] + total

    def send(self) -> None:
        """Add the sum to memory, and begin with 0. All threads of the warp must call it."""
        total = cute.arch.warp_reduction_sum(self.total[0])
        is_sender = (cute.arch.lane_idx() == 0) & (total != 0.0)
        for i, target in enumerate(self.targets):
            add_to_memory(is_sender, target, self.offsets[i], total * factor_of(self.group, i))
        self.total[0] = Float32(0.0)


def factor_of(group: LineGroup, i: int) -> float:
    """What the sums of lines are multiplied by for a read of their group."""
    return group.reads[i].factor.constant if group.is_constant else 1.0


def total_of(parts: Sequence[Float32]) -> Float32:
    """Their sum, in few steps that wait for each other."""
    values = list(parts)
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [x + y for x, y in pairs] + values[len(values) // 2 * 2 :]
    return values[0]


def add_runs(target: cute.Tensor, totals: Sequence[tuple[Float32, Int64]]) -> None:
    """Add the totals of diagonals to their elements, one addition for each run of neighbouring
    lanes with the same element. totals: of this lane, with offsets of the elements."""
    lane = cute.arch.lane_idx()
    for total, offset in totals:
        before = cute.arch.shuffle_sync_up(offset, offset=1, mask_and_clamp=0)
        heads = cute.arch.vote_ballot_sync((lane == 0) | (offset != before))
        # lanes of the same run, before this one and with it
        upto = Int32(heads) & ~(Int32(-2) << lane)
        place = lane - (WARP - 1 - Int32(cute.arch.clz(upto)))
        for step in (1, 2, 4, 8, 16):
            other = cute.arch.shuffle_sync_up(total, offset=step, mask_and_clamp=0)
            total = total + cutlass.select_(place >= step, other, Float32(0.0))
        is_last = ((Int32(heads) >> cutlass.min(lane + 1, WARP - 1)) & 1) != 0
        is_last = is_last | (lane == WARP - 1)
        add_to_memory(is_last & (total != 0.0), target, offset, total)
