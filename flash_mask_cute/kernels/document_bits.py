"""Answers of a `mask_mod`, stored by documents: tokens that only see each other.

Tiles of the whole score matrix are shared by documents and visited for both. Who asks about all
pairs beforehand (`stored_bits.py`) can tell where documents begin, so attention may take them as
sequences of a packed batch, whose tiles begin where these begin (docs/masks.md).

First of each query is found which keys it sees first and last. Those are what `DocumentSplit` needs
to know of the queries that see a key, with queries and keys exchanged, which documents do not mind.
Then the tiles inside the documents are asked about.
"""

import operator
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from flash_mask_cute.core.mods import Reliance
from flash_mask_cute.core.warp_scan import WARP, running
from flash_mask_cute.kernels.document_split import DocumentSplit
from flash_mask_cute.masks.bit_tile import ALL, WORD, Columns
from flash_mask_cute.masks.rules import MaskArgs, Share, StoredArgs
from flash_mask_cute.masks.stored_bits import BitStore, Place, QueryBitStore

SPANS_TILE = 128


class DocumentBitStore:
    """Finds documents, and fills a `StoredArgs` of them; to be passed to `cute.compile`.

    :param store: for the tiles of the attention kernel; its `reliance` is known afterwards
    :param slot, bounds_tile: see `DocumentSplit`
    """

    def __init__(self, store: BitStore, slot: int, bounds_tile: int):
        mod = store.mask_mod, store.columns, store.has_aux_tensors
        self.store = store
        self.spans = KeySpans(*mod)
        self.split = DocumentSplit(KeySpans.NUM_VECTORS, False, slot, bounds_tile)

    @property
    def reliance(self) -> Reliance | None:
        return self.store.reliance

    @cute.jit
    def __call__(
        self,
        stored_bits: tuple,
        mCuSeqlens: cute.Tensor,
        mSpans: cute.Tensor,
        mSpanBounds: cute.Tensor,
        mBegins: cute.Tensor,
        block_bits,
        aux_tensors,
        stream,
    ):
        """Launch on `stream`.

        :param stored_bits: the fields of a `StoredArgs` with places to fill, contiguous: as many
            tiles for each entry as its documents may have, whatever they are; of each sequence
            places
        :param mCuSeqlens: int32 (batch * slots + 1,) to fill, a sequence for each slot of tokens
        :param mSpans, mSpanBounds, mBegins: scratch, int32 (entries, 1, seqlen, 2), (entries, 1, 4,
            blocks) and (entries, slots). The batch has as many entries, or all are the same one
        :param block_bits, aux_tensors: see `BitStore`
        """
        masks = self.store.masks_of(block_bits, aux_tensors)
        stored = StoredArgs(*stored_bits)
        entries, slots = mBegins.shape
        num_sequences = mCuSeqlens.shape[0] - 1
        tiles = stored.tiles.shape[2] // entries
        extents = Int32(entries), Int32(slots), Int32(tiles), Int32(mSpans.shape[2])

        self.spans(mSpans, masks, stream)
        self.split(mSpans, mSpanBounds, mBegins, mCuSeqlens, None, None, stream)
        self.number(stored.places, mCuSeqlens, *extents[:3]).launch(
            grid=(num_sequences // slots, 1, 1), block=(WARP, 1, 1), stream=stream
        )
        self.fill(stored, mCuSeqlens, *extents[1:], masks, Int32(0)).launch(
            grid=(stored.tiles.shape[2], 1, 1),
            block=(stored.tiles.shape[3], 1, 1),
            stream=stream,
        )

    @cute.kernel
    def number(
        self,
        mPlaces: cute.Tensor,
        mCuSeqlens: cute.Tensor,
        entries: Int32,
        slots: Int32,
        tiles: Int32,
    ):
        """Number the tiles of all sequences; those of one entry, if it serves all, only once."""
        batch_idx, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        first = cutlass.min(batch_idx, entries - 1) * tiles
        for base in cutlass.range(0, slots, WARP):
            slot = base + lane
            sequence = batch_idx * slots + cutlass.min(slot, slots - 1)
            length = mCuSeqlens[sequence + 1] - mCuSeqlens[sequence]
            length = cutlass.select_(slot < slots, length, Int32(0))
            in_row = cute.ceil_div(length, self.store.plan.tile_n)
            count = in_row * cute.ceil_div(length, self.store.plan.tile_m)
            up_to = running(count, operator.add)
            if slot < slots:
                mPlaces[sequence, 0] = first + up_to - count
                mPlaces[sequence, 1] = in_row
            first += cute.arch.shuffle_sync(up_to, WARP - 1)

    @cute.kernel
    def fill(
        self,
        stored: StoredArgs,
        mCuSeqlens: cute.Tensor,
        slots: Int32,
        tiles: Int32,
        seqlen: Int32,
        masks: MaskArgs,
        any_head: Int32,
    ):
        """A CTA asks about a tile, if a sequence has one of its number."""
        number, _, _ = cute.arch.block_idx()
        entry = number // tiles
        sequence = entry * slots + self._owner(stored.places, number, entry * slots, slots)
        begin = mCuSeqlens[sequence]
        length = mCuSeqlens[sequence + 1] - begin
        in_row = cutlass.max(stored.places[sequence, 1], 1)
        in_sequence = number - stored.places[sequence, 0]
        m_block = in_sequence // in_row
        if m_block * self.store.plan.tile_m < length:
            n_block, offset = in_sequence - m_block * in_row, begin - entry * seqlen
            place = Place(sequence, m_block, n_block, any_head, entry, offset, length, length)
            self.store.fill(stored, masks, place)

    @cute.jit
    def _owner(self, mPlaces: cute.Tensor, number: Int32, first: Int32, slots: Int32) -> Int32:
        """The last one of the sequences from first on whose tiles begin at number or before."""
        lane = cute.arch.lane_idx()
        passed = Int32(0)
        for base in cutlass.range(0, slots, WARP, unroll=4):
            slot = base + lane
            begins = mPlaces[first + cutlass.min(slot, slots - 1), 0] <= number
            word = Int32(cute.arch.vote_ballot_sync(begins & (slot < slots)))
            passed += Int32(cute.arch.popc(word))
        return passed - 1


class KeySpans(QueryBitStore):
    """Finds which keys each query sees first and last, by `mask_mod` and block lists.

    They are written as column intervals are that hide all but a span (`Intervals`): one past the
    last one, 0 if there is none, and the first one, seqlen if there is none.
    """

    NUM_VECTORS = 2

    def __init__(self, mask_mod: Callable[..., Any], columns: Columns, has_aux_tensors: bool):
        super().__init__(mask_mod, SPANS_TILE, SPANS_TILE, columns, has_aux_tensors)

    @cute.jit
    def __call__(self, mSpans: cute.Tensor, masks: MaskArgs, stream):
        """Launch on `stream`, two kernels, to fill mSpans, int32 (entries, 1, seqlen, 2)."""
        entries, _, seqlen, _ = mSpans.shape
        blocks = cute.ceil_div(seqlen, SPANS_TILE)
        rows = Int32(entries * seqlen)
        self.clear(mSpans, rows, Int32(seqlen)).launch(
            grid=(cute.ceil_div(rows, SPANS_TILE), 1, 1), block=(SPANS_TILE, 1, 1), stream=stream
        )
        self.widen(mSpans, Int32(blocks), Int32(seqlen), masks, Int32(0)).launch(
            grid=(entries * blocks * blocks, 1, 1), block=(SPANS_TILE, 1, 1), stream=stream
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
        """Widen the spans of a tile's queries to what they see of it."""
        cta, _, _ = cute.arch.block_idx()
        row = cta // blocks
        entry = row // blocks
        m_block, n_block = row - entry * blocks, cta - row * blocks
        seqlens = seqlen, seqlen
        place = Place(entry, m_block, n_block, any_head, entry, Int32(0), *seqlens)
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        share = Share.create(warp_idx, SPANS_TILE // WORD, SPANS_TILE, self.columns)
        rules = self.rules_of(masks)
        is_listed, asks = self.judge(rules, masks, place)
        if is_listed:
            words = share.fill(ALL)
            if asks:
                words = self.words(rules, place, share)
            query = share.line(self.work_of(place), 0)
            begin = n_block * SPANS_TILE
            end = cutlass.min(begin + SPANS_TILE, seqlen)
            sees_any, first, last = Boolean(False), end, begin
            for w, word in enumerate(words):
                lowest = WORD - 1 - Int32(cute.arch.clz(word & (0 - word)))
                highest = WORD - 1 - Int32(cute.arch.clz(word))
                is_any = word != 0
                at = begin + self.columns.col_of(w, lowest)
                first = cutlass.select_(is_any, cutlass.min(first, at), first)
                at = begin + self.columns.col_of(w, highest)
                last = cutlass.select_(is_any, cutlass.max(last, at), last)
                sees_any = sees_any | is_any
            if sees_any & (query < seqlen):
                span = mSpans[entry, 0, query, None]
                cute.arch.atomic_max(span.iterator, cutlass.min(last + 1, end))
                begins = cute.domain_offset((1,), span)
                cute.arch.atomic_min(begins.iterator, first)
