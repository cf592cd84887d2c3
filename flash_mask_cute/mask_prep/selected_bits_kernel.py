"""A bit for each query and key block: whether the query chose the block.

A thread makes one word of a query, of 32 neighbouring blocks. It reads all entries of the query,
which are few, and whose order and repetitions then do not matter. So there are no atomics, and the
result is the same in every run.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

NUM_THREADS = 256
WORD, LOG_WORD = 32, 5
# entries that a thread loads before it compares
UNROLL = 4


class SelectedBits:
    """Fills the visible bits of a `BitArgs` of a choice; to be passed to `cute.compile`."""

    @cute.jit
    def __call__(self, mIndices: cute.Tensor, mBits: cute.Tensor, stream):
        """Launch on `stream`.

        :param mIndices: int32 or int64 (batch, heads, rows, k), any strides
        :param mBits: int32 (batch, heads, rows, words)
        """
        batch, heads, rows, words = mBits.shape
        num_words = batch * heads * rows * words
        self.kernel(mIndices, mBits).launch(
            grid=((num_words + NUM_THREADS - 1) // NUM_THREADS, 1, 1),
            block=(NUM_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mIndices: cute.Tensor, mBits: cute.Tensor):
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        batch, heads, rows, words = mBits.shape
        index = cta * NUM_THREADS + thread
        line = index // words
        word = index - line * words
        head = line // rows
        row = line - head * rows
        batch_idx = head // heads
        head_idx = head - batch_idx * heads
        if batch_idx < batch:
            bits = Int32(0)
            for i in cutlass.range(mIndices.shape[3], unroll=UNROLL):
                block = mIndices[batch_idx, head_idx, row, i]
                # a number that is negative, or behind the last word, is in no word
                if (block >> LOG_WORD) == word:
                    bits = bits | (Int32(1) << (Int32(block) & (WORD - 1)))
            mBits[batch_idx, head_idx, row, word] = bits
