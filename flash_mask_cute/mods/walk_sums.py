"""Gradients of aux tensor elements that stay the same along a walk: sums in registers.

A work tile of a backward has some keys, and walks over the queries of one head after another. An
element that the head determines, or head and key, is the same in all blocks of a head. So a thread
sums in registers. When the walk turns to another head, and at its end, the sums of a row's threads,
or of a warp, are added up: an addition to memory for each warp or key.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from flash_mask_cute.mods.aux_gradients import add_to_memory, offset_in
from flash_mask_cute.mods.read_classes import Factor, ModReads, ReadClass

NO_HEAD = -1


class WalkRead(NamedTuple):
    """term: the number of the read among the terms that `differentiate` returns. number: of the
    tensor. of_tensor: among the reads of the tensor. factor: the derivative by the element."""

    term: int
    number: int
    of_tensor: int
    by_key: bool
    factor: Factor


def walk_reads(reads: ModReads) -> tuple[WalkRead, ...]:
    found, term = [], 0
    for number, tensor in sorted(reads.tensors.items()):
        for of_tensor, factor in enumerate(tensor.factors):
            if tensor.is_of_walks:
                by_key = tensor.read_class is ReadClass.KEY
                found.append(WalkRead(term, number, of_tensor, by_key, factor))
            term += 1
    return tuple(found)


@dataclass(frozen=True)
class WalkSums:
    """The sums of a thread over a walk. targets: of each read, the sums of its tensor (`AuxSums`).
    num_rows: keys of a thread. sums, head: registers; head: of the sums, or NO_HEAD."""

    reads: cutlass.Constexpr[tuple[WalkRead, ...]]
    num_rows: cutlass.Constexpr[int]
    targets: tuple
    sums: cute.Tensor
    head: cute.Tensor

    @staticmethod
    def create(reads: tuple[WalkRead, ...], num_rows: int, targets: tuple) -> "WalkSums":
        count = sum(num_rows if read.by_key else 1 for read in reads)
        registers = cute.make_rmem_tensor(count, Float32)
        found = WalkSums(reads, num_rows, targets, registers, cute.make_rmem_tensor(1, Int32))
        found.clear()
        return found

    def clear(self) -> None:
        self.sums.fill(0.0)
        self.head[0] = Int32(NO_HEAD)

    def add(self, i: int, of_rows: list[Float32]) -> None:
        """Add what a block gives to read i, from each of the thread's rows."""
        first = self._first(i)
        if self.reads[i].by_key:
            for r, value in enumerate(of_rows):
                self.sums[first + r] = self.sums[first + r] + value
        else:
            total = of_rows[0]
            for value in of_rows[1:]:
                total = total + value
            self.sums[first] = self.sums[first] + total

    def of_row(self, i: int, r: int) -> Float32:
        """The sum of read i, of row r if it is by key."""
        return self.sums[self._first(i) + (r if self.reads[i].by_key else 0)]

    def send(
        self, i: int, coordinates: tuple[Int32, ...], total: Float32, is_sender: Boolean
    ) -> None:
        """Add a sum of read i to its element, given by its coordinates."""
        target = self.targets[i]
        offset = offset_in(target, coordinates)
        add_to_memory(is_sender & (total != 0.0), target, offset, total)

    def _first(self, i: int) -> int:
        return sum(self.num_rows if read.by_key else 1 for read in self.reads[:i])
