"""The blocks that any query of a tile chose, as ascending lists.

A warp has a tile, and a word of 32 neighbouring blocks for each lane. How many blocks the words
before it have says where a lane writes its own.
"""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_mask_cute.core.warp_scan import WARP, running

NUM_THREADS = 128
NUM_WARPS = NUM_THREADS // WARP
WORD = 32


class UnionListsKernel:
    """Makes lists of bits; to be passed to `cute.compile`."""

    @cute.jit
    def __call__(self, mAny: cute.Tensor, mNumbers: cute.Tensor, mCounts: cute.Tensor, stream):
        """Launch on `stream`.

        :param mAny: int32 (batch, heads, tiles, words), as `SelectionBits.of_any`
        :param mNumbers: int32 (batch, heads, tiles, length), `UnionLists.numbers`
        :param mCounts: int32 (batch, heads, tiles), `UnionLists.counts`
        """
        batch, heads, tiles = mCounts.shape
        self.kernel(mAny, mNumbers, mCounts).launch(
            grid=(cute.ceil_div(batch * heads * tiles, NUM_WARPS), 1, 1),
            block=(NUM_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mAny: cute.Tensor, mNumbers: cute.Tensor, mCounts: cute.Tensor):
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        batch, heads, tiles = mCounts.shape
        line = cta * NUM_WARPS + cute.arch.make_warp_uniform(thread // WARP)
        head = line // tiles
        batch_idx, tile = head // heads, line - head * tiles
        place = batch_idx, head - batch_idx * heads, tile
        if batch_idx < batch:
            count, last = self._list_blocks(mAny[(*place, None)], mNumbers[(*place, None)])
            lane, length = cute.arch.lane_idx(), mNumbers.shape[3]
            for rank in cutlass.range(count + lane, cutlass.min(length, count + WARP), WARP):
                mNumbers[(*place, rank)] = last ^ -1
            if lane == 0:
                mCounts[place] = count

    @cute.jit
    def _list_blocks(self, mWords: cute.Tensor, mBlocks: cute.Tensor) -> tuple[Int32, Int32]:
        """Write the blocks of a tile. Returns how many there are, and the last one, or 0."""
        lane, words = cute.arch.lane_idx(), mWords.shape[0]
        count, last = Int32(0), Int32(0)
        for first in cutlass.range(0, words, WARP, unroll=1):
            bits = Int32(0)
            if first + lane < words:
                bits = mWords[first + lane]
            own = cute.arch.popc(bits)
            ends = running(own, operator.add)
            rank = count + ends - own
            while bits != 0:
                last = (first + lane) * WORD + cute.arch.popc((bits & -bits) - 1)
                mBlocks[rank] = last
                rank += 1
                bits = bits & (bits - 1)
            count += cute.arch.shuffle_sync(ends, WARP - 1)
        return count, Int32(cute.arch.warp_redux_sync(last, "max"))
