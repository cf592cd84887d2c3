"""Mask bits by documents: runs of tokens that see only each other.

First, the first and the last visible key of each query are found, and from them the documents.
`DocumentSplit` takes queries that see a key: queries and keys are exchanged here, which makes no
difference for documents. Then the callable is evaluated for the tiles inside the documents
(`mask_bits_varlen_kernel.py`), which attention takes as sequences of a packed batch.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core.walk_ring import highest_bit
from flash_mask_cute.mask_prep.documents_kernel import DocumentSplit
from flash_mask_cute.mask_prep.mask_bits_kernel import MaskBitsKernel, QueryMaskBits, TileCoord
from flash_mask_cute.mask_prep.mask_bits_varlen_kernel import TILES_JUDGED, SequenceMaskBits
from flash_mask_cute.rules.bit_tile import ALL, WORD
from flash_mask_cute.rules.mask_rules import MaskArgs, MaskBitsArgs, MaskWarpRows

# keys that the words of a line have bits for, and as many queries
SPANS_TILE = 128


class DocumentMaskBits:
    """Finds documents, and fills a `MaskBitsArgs` of them; to be passed to `cute.compile`.

    :param tile_kernel: for the tiles of the attention kernel
    :param slot, bounds_tile: see `DocumentSplit`
    """

    def __init__(self, tile_kernel: MaskBitsKernel, slot: int, bounds_tile: int):
        self.spans = KeySpans(tile_kernel)
        self.split = DocumentSplit(KeySpans.NUM_VECTORS, False, slot, bounds_tile)
        self.sequences = SequenceMaskBits(tile_kernel, are_parts=True)

    @cute.jit
    def __call__(
        self,
        mask_bit_tensors: tuple,
        mCuSeqlens: cute.Tensor,
        mSpans: cute.Tensor,
        mSpanBounds: cute.Tensor,
        mBegins: cute.Tensor,
        block_bits,
        aux_tensors,
        window: tuple | None,
        tiles: Int32,
        query_chunk: tuple,
        stream,
    ):
        """Launch on `stream`. Documents are found with the first chunk.

        :param mask_bit_tensors, block_bits, aux_tensors, window: see `SequenceMaskBits`
        :param tiles: the most tiles that the documents of an entry may have
        :param query_chunk: see `MaskBitsArgs`; mask_bit_tensors has room for it and for the rest of
            a block's tiles
        :param mCuSeqlens: int32 (batch * slots + 1,) to fill, a sequence for each slot of tokens
        :param mSpans, mSpanBounds, mBegins: scratch, int32 (entries, 1, seqlen, 2), (entries, 1, 4,
            blocks) and (entries, slots). The batch has as many entries, or all are the same one
        """
        masks = self.sequences.tile_kernel.masks_of(block_bits, aux_tensors, window)
        mask_bits = MaskBitsArgs(*mask_bit_tensors).with_query_chunk(*query_chunk)
        starts, (entries, slots) = (mCuSeqlens, mCuSeqlens), mBegins.shape
        if query_chunk[0] == 0:
            self.spans(mSpans, masks, stream)
            self.split(mSpans, mSpanBounds, mBegins, mCuSeqlens, None, None, stream)
            extents = Int32(entries), Int32(slots), tiles
            self.sequences.launch_number(mask_bits.places, *starts, *extents, stream)
        extents = Int32(slots), tiles, Int32(mSpans.shape[2])
        self.sequences.launch_fill(mask_bits, *starts, *extents, masks, stream)


class KeySpans:
    """Finds the first and the last key that each query sees, by `mask_mod` and block lists.

    They are written as column intervals that hide all but a span (`Intervals`): one past the last
    key, 0 if there is none, and the first key, seqlen if there is none. Keys outside causal masking
    and window are hidden, regardless of the callable.

    A tile inside the known spans of its queries is not evaluated. So the outermost keys are first.
    """

    NUM_VECTORS = 2

    def __init__(self, tile_kernel: MaskBitsKernel):
        tile, band = (SPANS_TILE, SPANS_TILE), (tile_kernel.is_causal, tile_kernel.is_local)
        self.columns = tile_kernel.columns
        self.all_tiles = QueryMaskBits(
            tile_kernel.mask_mod, *tile, self.columns, tile_kernel.has_aux_tensors, *band
        )

    @cute.jit
    def __call__(self, mSpans: cute.Tensor, masks: MaskArgs, stream):
        """Launch on `stream`, two kernels, to fill mSpans, int32 (entries, 1, seqlen, 2)."""
        entries, _, seqlen, _ = mSpans.shape
        blocks = cute.ceil_div(seqlen, SPANS_TILE)
        rows = Int32(entries * seqlen)
        self.clear(mSpans, rows, Int32(seqlen)).launch(
            grid=(cute.ceil_div(rows, SPANS_TILE), 1, 1), block=(SPANS_TILE, 1, 1), stream=stream
        )
        groups = cute.ceil_div(blocks, TILES_JUDGED)
        self.widen(mSpans, Int32(blocks), Int32(seqlen), masks, Int32(0)).launch(
            grid=(entries * blocks * groups, 1, 1), block=(SPANS_TILE, 1, 1), stream=stream
        )

    @cute.kernel
    def clear(self, mSpans: cute.Tensor, rows: Int32, seqlen: Int32):
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        row = cta * SPANS_TILE + thread
        if row < rows:
            entry = row // seqlen
            mSpans[entry, 0, row - entry * seqlen, 0] = Int32(0)
            mSpans[entry, 0, row - entry * seqlen, 1] = seqlen

    @cute.kernel
    def widen(
        self, mSpans: cute.Tensor, blocks: Int32, seqlen: Int32, masks: MaskArgs, any_head: Int32
    ):
        """Widen the spans of a block of queries to the keys that they see in neighbouring tiles,
        the outermost ones first. CTAs proceed likewise: the first group of tiles, the last one or
        that with the queries' own keys, then the others. Lanes judge a tile each."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        groups = cute.ceil_div(blocks, TILES_JUDGED)
        rows = ctas // groups
        nth_group = cta // rows
        row = cta - nth_group * rows
        entry = row // blocks
        m_block = row - entry * blocks
        outermost = m_block // TILES_JUDGED
        if const_expr(not self.all_tiles.is_causal):
            outermost = groups - 1
        group = cutlass.select_(nth_group > outermost, nth_group, nth_group - 1)
        group = cutlass.select_(nth_group == 1, outermost, group)
        first_block = cutlass.max(group, 0) * TILES_JUDGED
        lane, rules = cute.arch.lane_idx(), self.all_tiles.rules_of(masks)
        seqlens = seqlen, seqlen
        place = TileCoord(entry, m_block, first_block, any_head, entry, Int32(0), *seqlens)
        is_listed, needs_mask_mod = Boolean(False), Boolean(False)
        if (lane < TILES_JUDGED) & (first_block + lane < blocks):
            own = place._replace(n_block=first_block + lane)
            is_listed, needs_mask_mod = self.all_tiles.judge(rules, own)
        todo = Int32(cute.arch.vote_ballot_sync(is_listed))
        partial = Int32(cute.arch.vote_ballot_sync(needs_mask_mod))
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warp_rows = MaskWarpRows.create(warp_idx, SPANS_TILE // WORD, SPANS_TILE, self.columns)
        work = self.all_tiles.work_of(place)
        query = warp_rows.line(work, 0)
        # a row past the end is as wide as can be
        known_first, known_end = Int32(0), seqlen
        if query < seqlen:
            known_first, known_end = mSpans[entry, 0, query, 1], mSpans[entry, 0, query, 0]
        first, end = known_first, known_end
        takes_last = Boolean(False)
        while todo != 0:
            at = cutlass.select_(takes_last, highest_bit(todo), highest_bit(todo & -todo))
            takes_last = takes_last == Boolean(False)
            todo = todo & ~(Int32(1) << at)
            n_block = first_block + at
            begin = n_block * SPANS_TILE
            tile_end = cutlass.min(begin + SPANS_TILE, seqlen)
            if cute.arch.vote_any_sync((first > begin) | (end < tile_end)):
                words = warp_rows.fill(ALL)
                if ((partial >> at) & 1) != 0:
                    words = self.all_tiles.words(rules, place._replace(n_block=n_block), warp_rows)
                lowest, highest = tile_end, begin - 1
                for w, word in enumerate(words):
                    key = begin + self.columns.col_of(w, highest_bit(word & (0 - word)))
                    lowest = cutlass.select_(word != 0, cutlass.min(lowest, key), lowest)
                    key = begin + self.columns.col_of(w, highest_bit(word))
                    highest = cutlass.select_(word != 0, cutlass.max(highest, key), highest)
                if const_expr(self.all_tiles.is_causal or self.all_tiles.is_local):
                    low, high = rules.block_info.band(work.seqlen).k_range(query)
                    lowest, highest = cutlass.max(lowest, low), cutlass.min(highest, high - 1)
                if (lowest <= highest) & (query < seqlen):
                    first = cutlass.min(first, lowest)
                    end = cutlass.max(end, cutlass.min(highest + 1, tile_end))
        span = mSpans[entry, 0, query, None]
        if end > known_end:
            cute.arch.atomic_max(span.iterator, end)
        if first < known_first:
            begins = cute.domain_offset((1,), span)
            cute.arch.atomic_min(begins.iterator, first)
