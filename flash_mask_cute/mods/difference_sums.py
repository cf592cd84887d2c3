"""Gradients of elements that few differences determine: sums of each warp in shared memory.

Along a diagonal of scores between two cuts (`line_sums.py`), the difference is the same. Added to
memory, the sums of two lines often are for one element, and such additions wait for each other. So
a warp adds them up by difference, in shared memory of its own, until the walk turns to another
head, and at the end of the walk. Then the elements of the differences are found, and the sums are
added to memory: a few hundred additions for a walk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from flash_mask_cute.mods.aux_gradients import add_to_memory, offset_in
from flash_mask_cute.mods.difference_reads import ModWithTables, coordinates_of_difference
from flash_mask_cute.mods.read_classes import (
    MOST_SUMMED,
    SUMS_OF_READ,
    DifferenceRead,
    ModReads,
)

NO_HEAD = -1


class SummedRead(NamedTuple):
    """A read that is summed by difference. number: of the tensor. of_tensor: its number among the
    reads of the tensor. factor: the derivative by the element."""

    number: int
    of_tensor: int
    factor: float
    read: DifferenceRead

    @property
    def is_of_rectangle(self) -> bool:
        """Whether the difference is the same between cuts, not only along diagonals."""
        return all(x.divisor != 1 for x in self.read.terms)


def summed_reads(score_mod: Any, reads: ModReads) -> tuple[SummedRead, ...]:
    """Of reads that are summed along lines between cuts."""
    if not isinstance(score_mod, ModWithTables):
        return ()
    found = []
    for number, tensor in reads.tensors.items():
        own = [x for x in score_mod.summed if x.tensor == number]
        if tensor.is_between_cuts and len(own) == len(tensor.factors):
            for i, (factor, read) in enumerate(zip(tensor.factors, own, strict=True)):
                assert factor.constant is not None, "lines with cuts have constant factors"
                found.append(SummedRead(number, i, factor.constant, read))
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

    targets: of each read, the sums of its tensor (`AuxSums`). sums: fp32 (SUMS_OF_READ, reads) in
    shared memory, that of the difference 0 in the middle. head: of the sums, or NO_HEAD, in a
    register.
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
        for i in cutlass.range_constexpr(len(self.reads)):
            for at in cutlass.range(cute.arch.lane_idx(), SUMS_OF_READ, cute.arch.WARP_SIZE):
                self.sums[at, i] = Float32(0.0)

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
            for value, q_idx, k_idx in lines:
                self._add(i, value != 0.0, value, q_idx, k_idx)

    @cute.jit
    def _add(
        self,
        i: cutlass.Constexpr[int],
        condition: Boolean,
        value: Float32,
        q_idx: Int32,
        k_idx: Int32,
    ) -> None:
        summed = self.reads[i]
        if condition:
            at = MOST_SUMMED + difference_at(summed.read, q_idx, k_idx)
            self.sums[at, i] = self.sums[at, i] + value * summed.factor

    @cute.jit
    def send(self, batch_idx: Int32) -> None:
        """Add the sums to their elements, if there are any, and begin with 0."""
        head_idx = self.head[0]
        cute.arch.sync_warp()
        if head_idx != NO_HEAD:
            for i in cutlass.range_constexpr(len(self.reads)):
                lane = cute.arch.lane_idx()
                for at in cutlass.range(lane, SUMS_OF_READ, cute.arch.WARP_SIZE, unroll=1):
                    total = self.sums[at, i]
                    if total != 0.0:
                        coordinates = coordinates_of_difference(
                            self.func, self.reads[i].read.number, batch_idx, head_idx,
                            at - MOST_SUMMED, self.aux_tensors,
                        )  # fmt: skip
                        target = self.targets[i]
                        offset = offset_in(target, coordinates)
                        add_to_memory(Boolean(True), target, offset, total)
                        self.sums[at, i] = Float32(0.0)
        cute.arch.sync_warp()
