"""Tables of all differences, for reads of a score_mod (`difference_reads.py`)."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from flash_mask_cute.mods.difference_reads import read_of_difference
from flash_mask_cute.mods.read_classes import DifferenceRead

NUM_THREADS = 128


class DifferenceTables:
    """Fills the tables, an element a thread; to be passed to `cute.compile`."""

    def __init__(self, score_mod: Callable[..., Any], reads: tuple[DifferenceRead, ...]):
        self.score_mod = score_mod
        self.reads = reads

    @cute.jit
    def __call__(self, tables: tuple, aux_tensors: tuple, stream):
        """Launch on `stream`.

        :param tables: of each read (batch | 1, heads | 1, differences), of the dtype of the tensor
            that is read. The middle one is of the difference 0.
        :param aux_tensors: of the score_mod, which have elements
        """
        extents = [Int32(1), Int32(1), Int32(1)]
        for i in range_constexpr(len(self.reads)):
            for mode in range_constexpr(3):
                extents[mode] = cutlass.max(extents[mode], tables[i].shape[mode])
        batch, heads, most = extents
        self.kernel(tables, aux_tensors, batch).launch(
            grid=(cute.ceil_div(most, NUM_THREADS), heads, batch * len(self.reads)),
            block=(NUM_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tables: tuple, aux_tensors: tuple, batch: Int32):
        block, head_idx, place = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        number = place // batch
        for i in range_constexpr(len(self.reads)):
            if number == i:
                at = place - number * batch, head_idx, block * NUM_THREADS + thread
                self._fill(i, tables[i], aux_tensors, at)

    @cute.jit
    def _fill(self, i: cutlass.Constexpr[int], table: cute.Tensor, aux_tensors: tuple, at: tuple):
        batch_idx, head_idx, number = at
        batch, heads, size = table.shape
        if (batch_idx < batch) & (head_idx < heads) & (number < size):
            element = read_of_difference(
                self.score_mod, self.reads[i], batch_idx, head_idx, number - size // 2,
                aux_tensors,
            ).element  # fmt: skip
            table[batch_idx, head_idx, number] = element
