"""Starts of documents in a mask of column intervals, and the mask's rows counted from them.

A document begins at row r under two conditions. No row from r on sees a key before r. And, without
causal masking, no row before r sees a key from r on. A running maximum and a running minimum over
the keys check this (`Intervals.seen_span`). For each slot of tokens, the start of its first
document is found. Later documents of the slot stay parts of it. Keys and queries may be exchanged
(`mask_bits_documents_kernel.py` has a span of keys for each query).

One warp examines a slot. Outside of the slot it uses the smallest and largest values of each block
of keys. They may join documents, but never split one.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_mask_cute.core.warp_scan import WARP, running
from flash_mask_cute.mask_prep.column_bounds_kernel import KeyBlockBounds
from flash_mask_cute.rules.intervals import Intervals

NOWHERE = -1


class DocumentSplit:
    """Splits the documents of a mask; to be passed to `cute.compile`.

    :param num_vectors, causal: see `Intervals`
    :param slot: tokens of a slot, a multiple of 32 and of bounds_tile
    :param bounds_tile: keys of a block of bounds
    """

    def __init__(self, num_vectors: int, causal: bool, slot: int, bounds_tile: int):
        self.num_vectors = num_vectors
        self.causal = causal
        self.slot = slot
        self.bounds_tile = bounds_tile
        self.groups = slot // WARP
        self.blocks_of_slot = slot // bounds_tile

    @cute.jit
    def __call__(
        self,
        mIndices: cute.Tensor,
        mKeyBounds: cute.Tensor,
        mBegins: cute.Tensor,
        mCuSeqlens: cute.Tensor,
        mRows: cute.Tensor | None,
        mBounds: cute.Tensor | None,
        stream,
    ):
        """Launch on `stream`: four kernels, or three without mRows and mBounds.

        :param mIndices: int32 (batch | 1, 1, seqlen, num_vectors), any strides
        :param mKeyBounds: int32 (batch | 1, 1, 2 * num_vectors, blocks), scratch: as
            `ColumnMask.bounds` of mIndices
        :param mBegins: int32 (batch | 1, slots), scratch: the first row of a slot at which a
            document begins, or NOWHERE
        :param mCuSeqlens: int32 (batch * slots + 1,), a sequence for each slot, many of them empty
        :param mRows: int32 (1, 1, batch * seqlen, num_vectors): mIndices, counted from the start of
            each document
        :param mBounds: int32 (1, 1, 2 * num_vectors, packed blocks), as `ColumnMask.bounds` of
            mRows and mCuSeqlens
        """
        bounds, tile_n = KeyBlockBounds(self.num_vectors), Int32(self.bounds_tile)
        bounds(mIndices, mKeyBounds, tile_n, None, stream)
        num_begins = mBegins.shape[0] * mBegins.shape[1]
        self.find(mIndices, mKeyBounds, mBegins).launch(
            grid=(num_begins, 1, 1), block=(WARP, 1, 1), stream=stream
        )
        self.split(mIndices, mBegins, mCuSeqlens, mRows).launch(
            grid=(mCuSeqlens.shape[0] - 1, 1, 1), block=(WARP, 1, 1), stream=stream
        )
        if const_expr(mRows is not None):
            bounds(mRows, mBounds, tile_n, mCuSeqlens, stream)

    @cute.kernel
    def find(self, mIndices: cute.Tensor, mBounds: cute.Tensor, mBegins: cute.Tensor):
        cta, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        batch_idx = cta // mBegins.shape[1]
        slot = cta - batch_idx * mBegins.shape[1]
        seqlen = mIndices.shape[2]
        outside = self._outside(mBounds[batch_idx, 0, None, None], slot, seqlen)
        begin = self._first_begin(mIndices[batch_idx, 0, None, None], slot, *outside)
        if lane == 0:
            mBegins[batch_idx, slot] = begin

    def _first_begin(
        self, indices: cute.Tensor, slot: Int32, last_before: Int32, first_after: Int32
    ) -> Int32:
        """The first row of a slot at which a document begins, by facts from outside of it."""
        lane, seqlen = cute.arch.lane_idx(), indices.shape[0]
        keys = [slot * self.slot + group * WARP + lane for group in range(self.groups)]
        spans = [self._key_span(indices, key) for key in keys]
        begins = []
        for key, (_, last) in zip(keys, spans, strict=True):
            up_to = running(last, cutlass.max, upwards=True)
            before = cute.arch.shuffle_sync_up(up_to, offset=1, mask_and_clamp=0)
            before = cutlass.select_(lane == 0, last_before, cutlass.max(before, last_before))
            begins.append((key < seqlen) & (before < key))
            last_before = cutlass.max(last_before, cute.arch.shuffle_sync(up_to, WARP - 1))
        found = Int32(NOWHERE)
        for group in reversed(range(self.groups)):
            key = keys[group]
            if not self.causal:
                onwards = running(spans[group][0], cutlass.min, upwards=False)
                begins[group] &= cutlass.min(onwards, first_after) >= key
                first_after = cutlass.min(first_after, cute.arch.shuffle_sync(onwards, 0))
            word = Int32(cute.arch.vote_ballot_sync(begins[group]))
            lowest = WARP - 1 - Int32(cute.arch.clz(word & -word))
            found = cutlass.select_(word != 0, key - lane + lowest, found)
        return found

    def _key_span(self, indices: cute.Tensor, key: Int32) -> tuple[Int32, Int32]:
        """First and last row that may see a key; none for keys past the end."""
        seqlen = indices.shape[0]
        at = cutlass.min(key, seqlen - 1)
        values = [indices[at, v] for v in range(self.num_vectors)]
        first, last = self._intervals().seen_span(values, values, seqlen)
        is_there = key < seqlen
        return (
            cutlass.select_(is_there, Int32(first), Int32(seqlen)),
            cutlass.select_(is_there, Int32(last), Int32(-1)),
        )

    @cute.jit
    def _outside(self, bounds: cute.Tensor, slot: Int32, seqlen: Int32) -> tuple[Int32, Int32]:
        """The last row that sees a key before the slot, and the first that sees one after it."""
        lane = cute.arch.lane_idx()
        last_before, first_after = Int32(-1), Int32(seqlen)
        for block in cutlass.range(lane, slot * self.blocks_of_slot, WARP, unroll=4):
            last_before = cutlass.max(last_before, self._block_span(bounds, block, seqlen)[1])
        if const_expr(not self.causal):
            begin = (slot + 1) * self.blocks_of_slot
            for block in cutlass.range(begin + lane, bounds.shape[1], WARP, unroll=4):
                first_after = cutlass.min(first_after, self._block_span(bounds, block, seqlen)[0])
        return (
            cute.arch.warp_redux_sync(last_before, "max"),
            cute.arch.warp_redux_sync(first_after, "min"),
        )

    def _block_span(self, bounds: cute.Tensor, block: Int32, seqlen: Int32) -> tuple[Int32, Int32]:
        smallest = [bounds[2 * v, block] for v in range(self.num_vectors)]
        largest = [bounds[2 * v + 1, block] for v in range(self.num_vectors)]
        first, last = self._intervals().seen_span(largest, smallest, seqlen)
        return Int32(first), Int32(last)

    def _intervals(self) -> Intervals:
        return Intervals(self.num_vectors, self.causal)

    @cute.kernel
    def split(
        self,
        mIndices: cute.Tensor,
        mBegins: cute.Tensor,
        mCuSeqlens: cute.Tensor,
        mRows: cute.Tensor | None,
    ):
        cta, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        seqlen, max_documents = mIndices.shape[2], mBegins.shape[1]
        batch_idx = cta // max_documents
        slot = cta - batch_idx * max_documents
        of_mask = cutlass.min(batch_idx, mIndices.shape[0] - 1)
        previous = Int32(0)
        for other in cutlass.range(lane, slot, WARP, unroll=4):
            previous = cutlass.max(previous, mBegins[of_mask, other])
        previous = cute.arch.warp_redux_sync(previous, "max")
        own = mBegins[of_mask, slot]
        # with none in this slot, the sequence before it is empty
        begin = cutlass.max(own, previous)
        if lane == 0:
            mCuSeqlens[cta] = batch_idx * seqlen + begin
            if cta == mCuSeqlens.shape[0] - 2:
                mCuSeqlens[cta + 1] = (batch_idx + 1) * seqlen
        if const_expr(mRows is not None):
            for group in cutlass.range(self.groups, unroll=4):
                key = slot * self.slot + group * WARP + lane
                if key < seqlen:
                    first_row = cutlass.select_((own != NOWHERE) & (key >= own), own, previous)
                    for v in cutlass.range_constexpr(self.num_vectors):
                        value = cutlass.max(mIndices[of_mask, 0, key, v], first_row) - first_row
                        mRows[0, 0, batch_idx * seqlen + key, v] = value
