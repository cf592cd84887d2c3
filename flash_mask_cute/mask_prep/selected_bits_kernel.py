"""Bits of key blocks: whether a query chose a block, and whether a query of a tile did, or all; and
lists of the blocks of tiles.

A warp that makes bits has the queries of a tile, and a word of 32 neighbouring blocks for each
lane. Its lanes set the bits of a few queries at a time in shared memory.
"""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_mask_cute.core.warp_scan import WARP, running
from flash_mask_cute.mask_prep.column_bounds_kernel import sequence_of_block

NUM_THREADS = 128
NUM_WARPS = NUM_THREADS // WARP
WORD = 32
# key blocks of a warp
SPAN = WARP * WORD
# queries whose bits a warp makes at a time, and entries that a lane loads before it uses them
ROWS, IN_FLIGHT = 8, 4


class SelectedBits:
    """Fills the bits of a selection as `BitArgs` has them; to be passed to `cute.compile`."""

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
        :param tile_m: rows of a tile; `pack` neighbouring ones belong to a query
        :param mCuSeqlensQ: int32 (num_sequences + 1,), where rows of all sequences are in one entry
        """
        batch, heads, tiles, words = mAny.shape
        num_warps = batch * heads * tiles * cute.ceil_div(words, WARP)
        self.kernel(mIndices, mRows, mAny, mEvery, tile_m, pack, mCuSeqlensQ).launch(
            grid=(cute.ceil_div(num_warps, NUM_WARPS), 1, 1),
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
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        layout = cute.make_layout((WARP, ROWS, NUM_WARPS))
        smem = cutlass.memory.SmemAllocator().allocate_tensor(Int32, layout)
        sBits = smem[None, None, warp]
        batch, heads, tiles, words = mAny.shape
        spans = cute.ceil_div(words, WARP)
        index = cta * NUM_WARPS + warp
        line = index // spans
        first_word = (index - line * spans) * WARP
        head = line // tiles
        tile = line - head * tiles
        batch_idx = head // heads
        head_idx = head - batch_idx * heads
        word = first_word + lane
        if batch_idx < batch:
            for i in cutlass.range_constexpr(ROWS):
                sBits[lane, i] = Int32(0)
            mEntries = mIndices[batch_idx, head_idx, None, None]
            start, end = self._rows_of(tile, tile_m, pack, mIndices.shape[2], mCuSeqlensQ)
            of_any, of_every = Int32(0), Int32(-1)
            for first in cutlass.range(start, end, ROWS, unroll=1):
                cute.arch.sync_warp()
                self._set_bits(mEntries, sBits, first, end, first_word * WORD)
                cute.arch.sync_warp()
                for i in cutlass.range_constexpr(ROWS):
                    bits = sBits[lane, i]
                    sBits[lane, i] = Int32(0)
                    if first + i < end:
                        of_any, of_every = of_any | bits, of_every & bits
                        if word < words:
                            mRows[batch_idx, head_idx, first + i, word] = bits
            if word < words:
                mAny[batch_idx, head_idx, tile, word] = of_any
                mEvery[batch_idx, head_idx, tile, word] = of_every & of_any

    @cute.jit
    def _set_bits(
        self, mEntries: cute.Tensor, sBits: cute.Tensor, first: Int32, end: Int32, base: Int32
    ):
        """Set bits of ROWS queries from `first` on, before `end`, of blocks from `base` on."""
        lane, k = cute.arch.lane_idx(), mEntries.shape[1]
        lanes = cutlass.max(cutlass.min(k, WARP), 1)
        rows = cutlass.min(WARP // lanes, ROWS)
        own_row, own_entry = lane // lanes, lane % lanes
        end = cutlass.min(end, first + cutlass.select_(own_row < rows, Int32(ROWS), Int32(0)))
        for start in cutlass.range(0, k, WARP, unroll=1):
            for step in cutlass.range(0, ROWS, IN_FLIGHT * rows, unroll=1):
                blocks = []
                for i in cutlass.range_constexpr(IN_FLIGHT):
                    row = first + step + i * rows + own_row
                    blocks.append(self._entry(mEntries, row, end, start + own_entry, base))
                for i in cutlass.range_constexpr(IN_FLIGHT):
                    if blocks[i] >= 0:
                        row = step + i * rows + own_row
                        place = cute.crd2idx((blocks[i] // WORD, row), sBits.layout)
                        bit = Int32(1) << (blocks[i] % WORD)
                        cute.arch.atomic_or(sBits.iterator + place, bit, sem="relaxed", scope="cta")

    @cute.jit
    def _entry(self, mEntries: cute.Tensor, row: Int32, end: Int32, i: Int32, base: Int32) -> Int32:
        """Entry i of a query, counted from block `base`; negative outside of SPAN blocks."""
        found = Int32(-1)
        if (row < end) & (i < mEntries.shape[1]):
            block = mEntries[row, i] - base
            found = cutlass.select_((block >= 0) & (block < SPAN), Int32(block), found)
        return found

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
            found = sequence_of_block(tile, tile_m, mCuSeqlensQ, pack)
            start, stop = mCuSeqlensQ[found], cutlass.min(mCuSeqlensQ[found + 1], num_rows)
            tile -= start * pack // tile_m + found
        first = start + tile * tile_m // pack
        end = start + ((tile + 1) * tile_m + pack - 1) // pack
        return first, cutlass.min(end, stop)


class UnionLists:
    """Lists the blocks that any query of a tile chose; to be passed to `cute.compile`.

    A warp has a tile, and a word of blocks for each lane. How many blocks the words before it have
    says where a lane writes its own.
    """

    @cute.jit
    def __call__(self, mAny: cute.Tensor, mNumbers: cute.Tensor, mCounts: cute.Tensor, stream):
        """Launch on `stream`.

        :param mAny: int32 (batch, heads, tiles, words)
        :param mNumbers: int32 (batch * heads * tiles, length), `UnionLists.numbers`
        :param mCounts: int32 (batch, heads, tiles)
        """
        self.kernel(mAny, mNumbers, mCounts).launch(
            grid=(cute.ceil_div(mNumbers.shape[0], NUM_WARPS), 1, 1),
            block=(NUM_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mAny: cute.Tensor, mNumbers: cute.Tensor, mCounts: cute.Tensor):
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane, (_, heads, tiles) = thread % WARP, mCounts.shape
        line = cta * NUM_WARPS + cute.arch.make_warp_uniform(thread // WARP)
        if line < mNumbers.shape[0]:
            batch_idx = line // (heads * tiles)
            head = line // tiles - batch_idx * heads
            place, row = (batch_idx, head, line % tiles), mNumbers[line, None]
            count, last = self._list_blocks(mAny[(*place, None)], row)
            row[count + lane] = last ^ -1
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
            ends = running(cute.arch.popc(bits), operator.add)
            rank = count + ends - cute.arch.popc(bits)
            while bits != 0:
                last = (first + lane) * WORD + cute.arch.popc((bits & -bits) - 1)
                mBlocks[rank] = last
                rank += 1
                bits = bits & (bits - 1)
            count += cute.arch.shuffle_sync(ends, WARP - 1)
        return count, Int32(cute.arch.warp_redux_sync(last, "max"))
