"""Bits of key blocks: whether a query chose a block, and whether a query of a tile did, or all.

A thread makes one word, of 32 neighbouring blocks, of all queries of a tile. It reads all entries
of a query, which are few, and whose order and repetitions then do not matter. So there are no
atomics, and the result is the same in every run.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

NUM_THREADS = 128
WORD, LOG_WORD = 32, 5
# entries that a thread loads before it compares
UNROLL = 4


class SelectedBits:
    """Fills the bits of a choice as `BitArgs` has them; to be passed to `cute.compile`."""

    @cute.jit
    def __call__(
        self,
        mIndices: cute.Tensor,
        mRows: cute.Tensor,
        mAny: cute.Tensor,
        mEvery: cute.Tensor,
        tile_m: Int32,
        pack: Int32,
        mCuSeqlensQ: cute.Tensor | None,
        stream,
    ):
        """Launch on `stream`.

        :param mIndices: int32 or int64 (batch, heads, rows, k), any strides
        :param mRows: int32 (batch, heads, rows, words)
        :param mAny: int32 (batch, heads, tiles, words)
        :param mEvery: as mAny
        :param tile_m: rows of a tile, `pack` neighbouring ones of which belong to a query
        :param mCuSeqlensQ: int32 (num_sequences + 1,), where rows of all sequences are in one entry
        """
        batch, heads, tiles, words = mAny.shape
        num_words = batch * heads * tiles * words
        self.kernel(mIndices, mRows, mAny, mEvery, tile_m, pack, mCuSeqlensQ).launch(
            grid=((num_words + NUM_THREADS - 1) // NUM_THREADS, 1, 1),
            block=(NUM_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mIndices: cute.Tensor,
        mRows: cute.Tensor,
        mAny: cute.Tensor,
        mEvery: cute.Tensor,
        tile_m: Int32,
        pack: Int32,
        mCuSeqlensQ: cute.Tensor | None,
    ):
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        batch, heads, tiles, words = mAny.shape
        index = cta * NUM_THREADS + thread
        line = index // words
        word = index - line * words
        head = line // tiles
        tile = line - head * tiles
        batch_idx = head // heads
        head_idx = head - batch_idx * heads
        if batch_idx < batch:
            first, end = self._rows_of(tile, tile_m, pack, mIndices.shape[2], mCuSeqlensQ)
            of_any, of_every = Int32(0), Int32(-1)
            for row in cutlass.range(first, end):
                bits = Int32(0)
                for i in cutlass.range(mIndices.shape[3], unroll=UNROLL):
                    block = mIndices[batch_idx, head_idx, row, i]
                    # a number that is negative, or behind the last word, is in no word
                    if (block >> LOG_WORD) == word:
                        bits = bits | (Int32(1) << (Int32(block) & (WORD - 1)))
                mRows[batch_idx, head_idx, row, word] = bits
                of_any, of_every = of_any | bits, of_every & bits
            mAny[batch_idx, head_idx, tile, word] = of_any
            mEvery[batch_idx, head_idx, tile, word] = of_every & of_any

    @cute.jit
    def _rows_of(
        self,
        tile: Int32,
        tile_m: Int32,
        pack: Int32,
        num_rows: Int32,
        mCuSeqlensQ: cute.Tensor | None,
    ) -> tuple[Int32, Int32]:
        """The queries [first, end) of a tile; none if no sequence has this tile."""
        start, stop = Int32(0), num_rows
        if const_expr(mCuSeqlensQ is not None):
            # the last sequence whose first tile is not after this one
            found = Int32(0)
            beyond = mCuSeqlensQ.shape[0] - 1
            while found + 1 < beyond:
                middle = (found + beyond) // 2
                if mCuSeqlensQ[middle] * pack // tile_m + middle <= tile:
                    found = middle
                else:
                    beyond = middle
            start, stop = mCuSeqlensQ[found], cutlass.min(mCuSeqlensQ[found + 1], num_rows)
            tile -= start * pack // tile_m + found
        first = start + tile * tile_m // pack
        end = start + ((tile + 1) * tile_m + pack - 1) // pack
        return first, cutlass.min(end, stop)
