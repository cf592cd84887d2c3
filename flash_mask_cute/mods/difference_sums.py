"""Gradients of elements that few differences determine: sums of each warp in shared memory.

Along a diagonal of scores between two cuts (`line_sums.py`), the difference is the same. Added to
memory, the sums of two lines often are for one element, and such additions wait for each other. So
a warp adds them up by difference, in shared memory of its own, until the walk turns to another
head, and at the end of the walk. Then the elements of the differences are found, and the sums are
added to memory: a few hundred additions for a walk.

Where cuts are too many, as in small windows, a warp adds each score, those of a column at once:
they are of one query and of different keys. So the order of all additions is fixed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from flash_mask_cute.mods.aux_gradients import add_to_memory, offset_in
from flash_mask_cute.mods.difference_reads import ModWithTables, coordinates_of_difference
from flash_mask_cute.mods.read_classes import DifferenceRead, ModReads

NO_HEAD = -1


class SummedRead(NamedTuple):
    """A read that is summed by difference. number: of the tensor. factor: the derivative by the
    element. first, middle: of its sums, the first one, and that of the difference 0. by_score: as
    in `SummedDifference`."""

    number: int
    factor: float
    read: DifferenceRead
    first: int
    middle: int
    end: int
    by_score: bool

    @property
    def is_of_rectangle(self) -> bool:
        """Whether the difference is the same between cuts, not only along diagonals."""
        return all(x.divisor != 1 for x in self.read.terms)


def summed_reads(score_mod: Any, reads: ModReads) -> tuple[SummedRead, ...]:
    """Those that the plan has chosen. reads: all of the wanted tensors."""
    if not isinstance(score_mod, ModWithTables):
        return ()
    found, first = [], 0
    for number, tensor in reads.tensors.items():
        own = [x for x in score_mod.summed if x.read.tensor == number]
        for (read, size, by_score), factor in zip(own, tensor.factors, strict=bool(own)):
            assert factor.constant is not None, "the plan has chosen constant factors"
            place = first, first + size // 2, first + size
            found.append(SummedRead(number, factor.constant, read, *place, by_score))
            first += size
    return tuple(found)


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

    @cute.jit
    def clear(self) -> None:
        for at in cutlass.range(cute.arch.lane_idx(), self.reads[-1].end, cute.arch.WARP_SIZE):
            self.sums[at] = Float32(0.0)

    @cute.jit
    def add(
        self,
        i: cutlass.Constexpr[int],
        lines: tuple[tuple[Float32, Int32, Int32], ...],
        corner: tuple[Int32, Int32],
    ) -> None:
        """Add sums of lines to read i. lines: of this lane, a sum, and a query and a key on the
        line, any if the sum is 0. corner: a query and a key of the rectangle that lines are of."""
        summed = self.reads[i]
        cute.arch.sync_warp()
        if cutlass.const_expr(summed.is_of_rectangle):
            total = Float32(0.0)
            for value, _, _ in lines:
                total = total + value
            total = cute.arch.warp_reduction_sum(total)
            is_first = cute.arch.lane_idx() == 0
            self._add(i, is_first & (total != 0.0), total, *corner)
        else:
            # differences of a lane's lines differ, so its sums are read before any is written
            ways = [
                cutlass.select_(value != 0.0, self._place_of(i, q_idx, k_idx), Int32(summed.first))
                for value, q_idx, k_idx in lines
            ]
            before = [self.sums[at] for at in ways]
            for (value, _, _), at, known in zip(lines, ways, before, strict=True):
                if value != 0.0:
                    self.sums[at] = known + value * summed.factor

    def _place_of(self, i: int, q_idx: Int32, k_idx: Int32) -> Int32:
        return self.reads[i].middle + difference_at(self.reads[i].read, q_idx, k_idx)

    @cute.jit
    def _add(
        self,
        i: cutlass.Constexpr[int],
        condition: Boolean,
        value: Float32,
        q_idx: Int32,
        k_idx: Int32,
    ) -> None:
        if condition:
            at = self._place_of(i, q_idx, k_idx)
            self.sums[at] = self.sums[at] + value * self.reads[i].factor

    @cute.jit
    def add_column(
        self,
        i: cutlass.Constexpr[int],
        scores: tuple[tuple[Float32, Int32, Int32], ...],
        lanes_per_row: cutlass.Constexpr[int],
    ) -> None:
        """Add gradients of scores to read i, one column after another. scores: of this lane, in one
        column; a gradient, the query and the key, any if the gradient is 0. lanes_per_row: columns
        of a warp."""
        summed, lane = self.reads[i], cute.arch.lane_idx()
        places = [summed.middle + difference_at(summed.read, q, k) for _, q, k in scores]
        for column in cutlass.range_constexpr(lanes_per_row):
            cute.arch.sync_warp()
            if lane % lanes_per_row == column:
                # keys of a lane differ, too, where their gradients are not 0
                before = [self.sums[at] for at in places]
                for (value, _, _), at, known in zip(scores, places, before, strict=True):
                    if value != 0.0:
                        self.sums[at] = known + value * summed.factor

    @cute.jit
    def send(self, batch_idx: Int32) -> None:
        """Add the sums to their elements, if there are any, and begin with 0."""
        head_idx = self.head[0]
        cute.arch.sync_warp()
        if head_idx != NO_HEAD:
            for i in cutlass.range_constexpr(len(self.reads)):
                lane = cute.arch.lane_idx()
                first, end = self.reads[i].first + lane, self.reads[i].end
                for at in cutlass.range(first, end, cute.arch.WARP_SIZE, unroll=1):
                    total = self.sums[at]
                    if total != 0.0:
                        coordinates = coordinates_of_difference(
                            self.func, self.reads[i].read.number, batch_idx, head_idx,
                            at - self.reads[i].middle, self.aux_tensors,
                        )  # fmt: skip
                        target = self.targets[i]
                        offset = offset_in(target, coordinates)
                        add_to_memory(Boolean(True), target, offset, total)
                        self.sums[at] = Float32(0.0)
        cute.arch.sync_warp()
