"""Gradients of elements that few differences determine: sums of a warp in shared memory.

Along a diagonal of scores between two cuts (`line_sums.py`), the difference is the same. The sums
of two lines often are for one element, and additions to memory would wait for each other. So a warp
adds them up by difference, in shared memory of its own. When the walk turns to another head, and at
its end, the sums are added to memory: a few hundred additions. Who sums is a choice (`SummedBy`).

Where cuts are too many, as in small windows, a warp adds each score, those of a column at once:
they are of one query and of different keys. So the order of all additions is fixed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from flash_mask_cute.mods.aux_gradients import add_to_memory, offset_in
from flash_mask_cute.mods.difference_reads import ModWithTables, read_of_difference
from flash_mask_cute.mods.read_classes import (
    MARGIN,
    ROWS_APART,
    DifferenceRead,
    ModReads,
    SummedBy,
    SummedDifference,
)

NO_HEAD = -1


class SummedRead(NamedTuple):
    """number: of the tensor. factor: the derivative by the element. start: of its sums in a warp's
    memory, the place of the least difference. rows: sums of a difference, a stride apart."""

    number: int
    factor: float
    summed: SummedDifference
    start: int
    rows: int

    @property
    def read(self) -> DifferenceRead:
        return self.summed.read

    @property
    def middle(self) -> int:
        """The place of the difference 0."""
        return self.start + self.summed.size // 2


def summed_reads(score_mod: Any, reads: ModReads, of_masks: bool) -> tuple[SummedRead, ...]:
    """Those planned for mask warps, or for MMA warps. reads: all of the wanted tensors."""
    if not isinstance(score_mod, ModWithTables):
        return ()
    found, first = [], 0
    for number, tensor in reads.tensors.items():
        own = [x for x in score_mod.summed if x.read.tensor == number]
        for summed, factor in zip(own, tensor.factors, strict=bool(own)):
            assert factor.constant is not None, "the plan has chosen constant factors"
            words = summed.mask_words if of_masks else summed.mma_words
            if words > 0:
                rows = ROWS_APART if words > summed.size else 1
                start = first + (MARGIN if rows > 1 else 0)
                found.append(SummedRead(number, factor.constant, summed, start, rows))
                first += words
    return tuple(found)


def is_mma_turn(m_block: Int32) -> Boolean:
    """Whether MMA warps sum a block, if mask warps, which sum rounded dS, take turns with them: by
    its number in the sequence, because bits must not depend on what else a CTA computes."""
    return m_block % 2 == 0


def difference_at(read: DifferenceRead, q_idx: Int32, k_idx: Int32) -> Int32:
    """The difference of a query and a key."""
    total = Int32(0)
    for term in read.terms:
        place = k_idx if term.is_key else q_idx
        total += (place if term.divisor == 1 else place // term.divisor) * term.factor
    return total


@dataclass(frozen=True)
class DifferenceSums:
    """The sums of a warp.

    targets: of each read, the sums of its tensor (`AuxSums`). sums: fp32 in shared memory, those of
    one read after the other. head: of the sums, or NO_HEAD, in a register.
    """

    func: cutlass.Constexpr[Callable[..., Any]]
    reads: cutlass.Constexpr[tuple[SummedRead, ...]]
    aux_tensors: Any
    targets: tuple
    sums: cute.Tensor
    head: cute.Tensor

    @staticmethod
    def create(
        score_mod: ModWithTables,
        reads: tuple[SummedRead, ...],
        aux_tensors: Any,
        targets: tuple,
        sums: cute.Tensor,
    ) -> "DifferenceSums":
        head = cute.make_rmem_tensor(1, Int32)
        head[0] = Int32(NO_HEAD)
        own = type(aux_tensors)(aux_tensors[: score_mod.num_tensors])
        found = DifferenceSums(score_mod.func, reads, own, targets, sums, head)
        found.clear()
        return found

    @property
    def takes_turns(self) -> bool:
        return any(read.summed.by is SummedBy.TURNS for read in self.reads)

    @cute.jit
    def clear(self) -> None:
        words = cute.size(self.sums)
        for at in cutlass.range(cute.arch.lane_idx(), words, cute.arch.WARP_SIZE):
            self.sums[at] = Float32(0.0)

    @cute.jit
    def add(self, i: cutlass.Constexpr[int], rectangles: tuple) -> None:
        """Add sums of lines of one or two rectangles to read i.

        rectangles: of each, the lines that this lane has, and a query and a key of its corner. A
        line is a sum, and how much farther queries are from keys than there; any number if the sum
        is 0.
        """
        read = self.reads[i]
        firsts = [difference_at(read.read, *corner) for _, corner in rectangles]
        if cutlass.const_expr(read.summed.step == 0):
            totals = []
            for lines, _ in rectangles:
                total = Float32(0.0)
                for value, _ in lines:
                    total = total + value
                totals.append(total)
            if cutlass.const_expr(len(totals) == 1):
                self.add_one(i, cute.arch.warp_reduction_sum(totals[0]), firsts[0])
            else:
                self._add_two(i, tuple(totals), tuple(firsts))
        else:
            for n in cutlass.range_constexpr(len(rectangles)):
                self._add_lines(i, rectangles[n][0], firsts[n])

    @cute.jit
    def _add_lines(self, i: cutlass.Constexpr[int], lines: tuple, first: Int32) -> None:
        read = self.reads[i]
        cute.arch.sync_warp()
        # differences of a lane's lines differ, so its sums are read before any is written
        ways = [
            cutlass.select_(
                value != 0.0, read.middle + first - apart * read.summed.step, Int32(read.start)
            )
            for value, apart in lines
        ]
        before = [self.sums[at] for at in ways]
        for (value, _), at, known in zip(lines, ways, before, strict=True):
            if value != 0.0:
                self.sums[at] = known + value

    @cute.jit
    def _add_two(self, i: cutlass.Constexpr[int], totals: tuple, differences: tuple) -> None:
        """Add the warp's sums of two values of each lane, by a half of the warp each."""
        half = cute.arch.WARP_SIZE // 2
        lane = cute.arch.lane_idx()
        is_second = lane >= half
        kept = cutlass.select_(is_second, totals[1], totals[0])
        sent = cutlass.select_(is_second, totals[0], totals[1])
        total = kept + cute.arch.shuffle_sync_bfly(sent, half)
        total = cute.arch.warp_reduction_sum(total, threads_in_group=half)
        # a difference that both have is added to by the first half alone
        other = cute.arch.shuffle_sync_bfly(total, half)
        is_same = differences[0] == differences[1]
        total = cutlass.select_(is_same, total + other, total)
        is_adder = (lane == 0) | ((lane == half) & (differences[0] != differences[1]))
        cute.arch.sync_warp()
        if is_adder & (total != 0.0):
            at = self.reads[i].middle + cutlass.select_(is_second, differences[1], differences[0])
            self.sums[at] = self.sums[at] + total

    def add_run(self, i: int, values: Sequence[Float32], difference: Int32, row: Int32) -> None:
        """Add a lane's sums of neighbouring diagonals to read i of a mask warp. difference: of the
        first one; the others belong to the keys after it. row: the query of this lane, by which its
        diagonals are farther. Diagonals outside have the sum 0."""
        read = self.reads[i]
        first = read.middle + difference + row % ROWS_APART * read.summed.stride
        for start in range(0, len(values), ROWS_APART):
            # so many of each lane with the same sums are of different diagonals
            places = [first + (start + c) * read.summed.step for c in range(ROWS_APART)]
            cute.arch.sync_warp()
            before = [self.sums[at] for at in places]
            for at, value, known in zip(places, values[start:], before, strict=False):
                self.sums[at] = known + value

    @cute.jit
    def add_one(self, i: cutlass.Constexpr[int], value: Float32, difference: Int32) -> None:
        """Add the first lane's value to the sum of a difference of read i, any if it is 0."""
        cute.arch.sync_warp()
        if (cute.arch.lane_idx() == 0) & (value != 0.0):
            at = self.reads[i].middle + difference
            self.sums[at] = self.sums[at] + value

    @cute.jit
    def add_column(
        self,
        i: cutlass.Constexpr[int],
        scores: tuple[tuple[Float32, Int32, Int32], ...],
        lanes_per_row: cutlass.Constexpr[int],
    ) -> None:
        """Add gradients of scores to read i, one column after another. scores: of this lane; a
        gradient, the query and the key, any if it is 0. lanes_per_row: columns of a warp."""
        read, lane = self.reads[i], cute.arch.lane_idx()
        places = [read.middle + difference_at(read.read, q, k) for _, q, k in scores]
        for column in cutlass.range_constexpr(lanes_per_row):
            cute.arch.sync_warp()
            if lane % lanes_per_row == column:
                # keys of a lane differ, too, where their gradients are not 0
                before = [self.sums[at] for at in places]
                for (value, _, _), at, known in zip(scores, places, before, strict=True):
                    if value != 0.0:
                        self.sums[at] = known + value

    @cute.jit
    def send(self, batch_idx: Int32) -> None:
        """Add the sums to their elements, if there are any, and begin with 0."""
        head_idx = self.head[0]
        cute.arch.sync_warp()
        if head_idx != NO_HEAD:
            for i in cutlass.range_constexpr(len(self.reads)):
                lane = cute.arch.lane_idx()
                stride, start = self.reads[i].summed.stride, self.reads[i].start
                for at in cutlass.range(
                    start + lane, start + self.reads[i].summed.size, cute.arch.WARP_SIZE, unroll=1
                ):
                    total = self.sums[at]
                    for row in cutlass.range_constexpr(1, self.reads[i].rows):
                        total = total + self.sums[at + row * stride]
                    if total != 0.0:
                        coordinates = read_of_difference(
                            self.func, self.reads[i].read, batch_idx, head_idx,
                            at - self.reads[i].middle, self.aux_tensors,
                        ).coordinates  # fmt: skip
                        target = self.targets[i]
                        offset = offset_in(target, coordinates)
                        total = total * self.reads[i].factor
                        add_to_memory(Boolean(True), target, offset, total)
                    for row in cutlass.range_constexpr(self.reads[i].rows):
                        self.sums[at + row * stride] = Float32(0.0)
        cute.arch.sync_warp()
