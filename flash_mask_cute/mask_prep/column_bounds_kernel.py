"""Minimum and maximum interval edges of each block of keys, for classifying the block.

A warp processes the keys of one block, for one batch entry and one head. In a packed batch no block
crosses sequences; a binary search finds the sequence of a block.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from flash_mask_cute.core.warp_scan import WARP

NUM_WARPS = 4
# keys of a block of 128 that a lane loads before it compares
UNROLL = 4


@cute.jit
def sequence_of_block(
    block: Int32, size: Int32, mCuSeqlens: cute.Tensor, pack: Int32 | int = 1
) -> Int32:
    """The sequence of a block of `size` rows, as `core/row_blocks.py` numbers blocks: the last one
    whose first block is not after this one. A token has `pack` rows."""
    found = Int32(0)
    beyond = mCuSeqlens.shape[0] - 1
    while found + 1 < beyond:
        middle = (found + beyond) // 2
        if mCuSeqlens[middle] * pack // size + middle <= block:
            found = middle
        else:
            beyond = middle
    return found


class KeyBlockBounds:
    """Fills the bounds of a `ColumnMask`; to be passed to `cute.compile`.

    :param num_vectors: values of a key: 1, 2 or 4
    """

    def __init__(self, num_vectors: int):
        self.num_vectors = num_vectors

    @cute.jit
    def __call__(
        self,
        mIndices: cute.Tensor,
        mBounds: cute.Tensor,
        tile_n: Int32,
        mCuSeqlensK: cute.Tensor | None,
        stream,
    ):
        """Launch on `stream`.

        :param mIndices: int32 (batch, heads, seqlen_k, num_vectors), any strides
        :param mBounds: int32 (batch, heads, 2 * num_vectors, num_blocks)
        :param tile_n: keys of a block
        :param mCuSeqlensK: int32 (num_sequences + 1,), with at least one sequence
        """
        batch, heads, _, num_blocks = mBounds.shape
        num_warps = batch * heads * num_blocks
        self.kernel(mIndices, mBounds, tile_n, mCuSeqlensK).launch(
            grid=((num_warps + NUM_WARPS - 1) // NUM_WARPS, 1, 1),
            block=(NUM_WARPS * WARP, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mIndices: cute.Tensor,
        mBounds: cute.Tensor,
        tile_n: Int32,
        mCuSeqlensK: cute.Tensor | None,
    ):
        cta, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        batch, heads, _, num_blocks = mBounds.shape
        index = cta * NUM_WARPS + warp_idx
        row = index // num_blocks
        block = index - row * num_blocks
        batch_idx = row // heads
        head_idx = row - batch_idx * heads
        if batch_idx < batch:
            first, end = self._keys_of(block, tile_n, mIndices.shape[2], mCuSeqlensK)
            low = cute.make_rmem_tensor(self.num_vectors, Int32)
            high = cute.make_rmem_tensor(self.num_vectors, Int32)
            low.fill(Int32.max)
            high.fill(Int32.min)
            for key in cutlass.range(first + lane, end, WARP, unroll=UNROLL):
                for v in range_constexpr(self.num_vectors):
                    value = mIndices[batch_idx, head_idx, key, v]
                    low[v] = cutlass.min(low[v], value)
                    high[v] = cutlass.max(high[v], value)
            for v in range_constexpr(self.num_vectors):
                low[v] = cute.arch.warp_redux_sync(low[v], "min")
                high[v] = cute.arch.warp_redux_sync(high[v], "max")
            if lane == 0:
                for v in range_constexpr(self.num_vectors):
                    mBounds[batch_idx, head_idx, 2 * v, block] = low[v]
                    mBounds[batch_idx, head_idx, 2 * v + 1, block] = high[v]

    @cute.jit
    def _keys_of(
        self, block: Int32, tile_n: Int32, seqlen_k: Int32, mCuSeqlensK: cute.Tensor | None
    ) -> tuple[Int32, Int32]:
        """The keys [first, end) of a block; none if no sequence has this block."""
        first = block * tile_n
        end = seqlen_k
        if const_expr(mCuSeqlensK is not None):
            found = sequence_of_block(block, tile_n, mCuSeqlensK)
            start = mCuSeqlensK[found]
            first = start + (block - start // tile_n - found) * tile_n
            end = mCuSeqlensK[found + 1]
        return first, cutlass.min(first + tile_n, end)
