"""Query lists of a selection: count, add up, weigh, cut into items, fill.

A CTA has the queries of a chunk, and in shared memory a bit for each key block and query that chose
it. Queries are counted chunk by chunk. From the sums of these counts, each chunk knows the places
of its queries, which it sorts by blocks before it stores them, so that neighbours leave together.
So lists are ascending and the same in every run.

A query is in the list of a block only if causal masking, the window and the lengths in use let it
see some key of the block.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.query_lists import SEGMENT
from flash_mask_cute.core.warp_scan import WARP, running
from flash_mask_cute.mask_prep.column_bounds_kernel import sequence_of_block
from flash_mask_cute.rules.band import Band
from flash_mask_cute.rules.bit_tile import WORD, bit_range, low_bits
from flash_mask_cute.seqlen_info import SeqlenInfoQK

# queries that are counted together, and words of a block's bits of them
CHUNK_ROWS = 256
ROW_WORDS = CHUNK_ROWS // WORD
# of a CTA that has a chunk
NUM_THREADS = 256
NUM_WARPS = NUM_THREADS // WARP
# key blocks of a CTA that has a chunk: a power of two
SPAN = 1024
# entries that are sorted at a time: those of a chunk, if a query has 16
STAGED = 4096
# of a CTA that scans: a warp scans the sums of all warps
SCAN_THREADS = WARP * WARP
# entries or counts that a thread loads before it uses them
IN_FLIGHT = 8


class Sequence(NamedTuple):
    """A sequence of the launch: its number, where its queries start in a line of the selection, how
    many there are, used or not, and what is in use."""

    number: Int32
    offset_q: Int32
    slot_q: Int32
    used: SeqlenInfoQK


class QueryListArgs(NamedTuple):
    """Arguments of the kernels, see `MakeQueryLists.__call__`."""

    mIndices: cute.Tensor
    mCounts: cute.Tensor
    mTotals: cute.Tensor
    mWeights: cute.Tensor
    mStarts: cute.Tensor
    mTokens: cute.Tensor
    mItems: cute.Tensor
    mNumItems: cute.Tensor
    block_size: Int32
    tile_n: Int32
    num_tiles: Int32
    range_rows: Int32
    lengths: Lengths
    window_left: Int32 | None
    window_right: Int32 | None
    mLSE: cute.Tensor | None


class Chunk(NamedTuple):
    """What a CTA has of a selection: the queries of its chunk from `first` on; num_queries
    are in use, their entries (query, k), and the key blocks from `base` on, num_blocks of them. Of
    these the first num_seen are not hidden by other masks from all queries."""

    head_idx: Int32
    number: Int32
    sequence: Sequence
    first: Int32
    num_queries: Int32
    mEntries: cute.Tensor
    base: Int32
    num_blocks: Int32
    num_seen: Int32


class ChunkBits(NamedTuple):
    """Shared memory of a chunk, of each block of its span.

    bits (SPAN, ROW_WORDS): of its queries. Only to fill lists: before (SPAN, ROW_WORDS // 4), a
    byte for each word, the bits in words before it; first (SPAN,), where the block begins among the
    sorted entries; places (SPAN,), what to add for its place in mTokens; sorted (STAGED,), block
    and query in the chunk.
    """

    bits: cute.Tensor
    before: cute.Tensor | None = None
    first: cute.Tensor | None = None
    places: cute.Tensor | None = None
    sorted: cute.Tensor | None = None


class MakeQueryLists:
    """Makes query lists and their items; to be passed to `cute.compile`.

    :param is_causal: bottom-right aligned causal masking, beside which there is no right side
    """

    def __init__(self, is_causal: bool):
        self.is_causal = is_causal

    @cute.jit
    def __call__(
        self, mIndices: cute.Tensor, mCounts: cute.Tensor, mTotals: cute.Tensor,
        mWeights: cute.Tensor, mStarts: cute.Tensor, mTokens: cute.Tensor, mItems: cute.Tensor,
        mNumItems: cute.Tensor, block_size: Int32, tile_n: Int32, num_tiles: Int32,
        range_rows: Int32, seqlen_q: Int32, seqlen_k: Int32, stream,
        mCuSeqlensQ: cute.Tensor | None = None, mCuSeqlensK: cute.Tensor | None = None,
        mSeqUsedQ: cute.Tensor | None = None, mSeqUsedK: cute.Tensor | None = None,
        window_size_left: Int32 | None = None, window_size_right: Int32 | None = None,
        mQStart: cute.Tensor | Int32 | None = None, mLSE: cute.Tensor | None = None,
    ):  # fmt: skip
        """Launch five kernels on `stream`.

        :param mIndices: int32 or int64 (batch | 1, heads, rows, k), any strides
        :param mCounts: int32 (heads, chunks, blocks of the longest sequence): memory for counts.
            Chunks of a packed sequence are numbered as row blocks of `CHUNK_ROWS`
            (`core/row_blocks.py`).
        :param mTotals: int32 (heads, blocks): memory for the lengths of lists
        :param mWeights: int32 (heads, ranges of the longest sequence): memory for numbers of items
        :param mStarts: int32 (heads, blocks): gets the first entry of each list. Key blocks of
            all sequences are numbered in the same way, and so are key tiles.
        :param mTokens: int32 (heads, entries): gets the lists, one after the other
        :param mItems: int32 (heads, items, ITEM_WORDS): gets an `Item` each
        :param mNumItems: int32 (heads,): gets the number of items
        :param block_size: keys of a block, a multiple of tile_n
        :param num_tiles: key tiles of all sequences, as they are numbered
        :param range_rows: queries of a sequence at which all lists are cut, a multiple of
            `CHUNK_ROWS`
        :param mLSE: fp32 (batch, heads_q, seqlen_q) or (heads_q, total_q): queries with -inf are in
            no list; given where masks that lists do not know may hide all keys of a query, for all
            heads alike
        :param seqlen_q, seqlen_k: extents of dense tensors, not read for packed sequences
        """
        of_sequences = mCuSeqlensQ, mCuSeqlensK, mSeqUsedQ, mSeqUsedK
        lengths = Lengths(*of_sequences, seqlen_q, seqlen_k, mQStart)
        args = QueryListArgs(
            *(mIndices, mCounts, mTotals, mWeights, mStarts, mTokens, mItems, mNumItems),
            block_size=block_size,
            tile_n=tile_n,
            num_tiles=num_tiles,
            range_rows=range_rows,
            lengths=lengths,
            window_left=window_size_left,
            window_right=window_size_right,
            mLSE=mLSE,
        )
        heads, chunks, columns = mCounts.shape
        of_chunks = {
            "grid": (chunks, heads, cute.ceil_div(columns, SPAN)),
            "block": (NUM_THREADS, 1, 1),
            "stream": stream,
        }
        groups, ranges = cute.ceil_div(mTotals.shape[1], WARP), mWeights.shape[1]
        scans = {"block": (SCAN_THREADS, 1, 1), "stream": stream}
        self.count(args).launch(**of_chunks)
        self.add_up(args).launch(grid=(groups, heads, 1), **scans)
        self.weigh(args).launch(grid=(ranges + 1, heads, 1), **scans)
        self.cut(args).launch(grid=(ranges, heads, 1), **scans)
        self.fill(args).launch(**of_chunks)

    # -- queries of a chunk ---------------------------------------------------------------------

    @cute.kernel
    def count(self, args: QueryListArgs):
        """mCounts = the queries of each chunk that chose a block."""
        thread, _, _ = cute.arch.thread_idx()
        layout = cute.make_layout((SPAN, ROW_WORDS))
        smem = ChunkBits(cutlass.memory.SmemAllocator().allocate_tensor(Int32, layout))
        chunk = self._chunk_of(args)
        self._set_bits(args, chunk, smem)
        for block in cutlass.range(thread, chunk.num_blocks, NUM_THREADS, unroll=1):
            found = Int32(0)
            if block < chunk.num_seen:
                words = self._words_of(args, chunk, smem, block)
                found = sum(map(cute.arch.popc, words), found)
            args.mCounts[chunk.head_idx, chunk.number, chunk.base + block] = found

    @cute.kernel
    def fill(self, args: QueryListArgs):
        """mTokens = the queries; mCounts has how many are in chunks before."""
        thread, _, _ = cute.arch.thread_idx()
        allocate = partial(cutlass.memory.SmemAllocator().allocate_tensor, Int32)
        smem = ChunkBits(
            allocate(cute.make_layout((SPAN, ROW_WORDS))),
            allocate(cute.make_layout((SPAN, ROW_WORDS // 4))),
            *(allocate(cute.make_layout(size)) for size in (SPAN, SPAN, STAGED)),
        )
        sums = allocate(cute.make_layout(NUM_WARPS))
        chunk = self._chunk_of(args)
        self._set_bits(args, chunk, smem)
        total = self._rank(args, chunk, smem, sums)
        for window in cutlass.range(0, total, STAGED, unroll=1):
            self._each_entry(args, chunk, partial(self._sort, smem, window))
            cute.arch.sync_threads()
            end = cutlass.min(total - window, STAGED)
            for i in cutlass.range(thread, end, NUM_THREADS, unroll=4):
                block, query = smem.sorted[i] // CHUNK_ROWS, smem.sorted[i] % CHUNK_ROWS
                place = smem.places[block] + window + i
                args.mTokens[chunk.head_idx, place] = chunk.first + query
            cute.arch.sync_threads()

    @cute.jit
    def _chunk_of(self, args: QueryListArgs) -> Chunk:
        """What this CTA has."""
        number, head_idx, span = cute.arch.block_idx()
        lengths = args.lengths
        of_sequence = _sequence_of(number, CHUNK_ROWS, lengths.cu_seqlens_q, lengths.seqlen_q)
        sequence = _describe(of_sequence, lengths)
        first = (number - _first_of_queries(sequence, lengths)) * CHUNK_ROWS
        num_queries = cutlass.min(sequence.used.seqlen_q - first, CHUNK_ROWS)
        entry = cutlass.min(sequence.number, args.mIndices.shape[0] - 1)
        mEntries = cute.domain_offset(
            (sequence.offset_q + first, 0), args.mIndices[entry, head_idx, None, None]
        )
        base = span * SPAN
        num_blocks = cutlass.min(args.mCounts.shape[2] - base, SPAN)
        end = cutlass.max(self._band_of(args, sequence).k_range(first + num_queries - 1)[1], 0)
        num_seen = cute.ceil_div(Int32(end), args.block_size) - base
        num_seen = cutlass.max(cutlass.min(num_seen, num_blocks), 0)
        in_use = first, num_queries, mEntries
        return Chunk(head_idx, number, sequence, *in_use, base, num_blocks, num_seen)

    @cute.jit
    def _set_bits(self, args: QueryListArgs, chunk: Chunk, smem: ChunkBits):
        """Set the bits of all entries of a chunk, for all threads to read."""
        thread, _, _ = cute.arch.thread_idx()
        for block in cutlass.range(thread, chunk.num_seen, NUM_THREADS, unroll=1):
            for w in cutlass.range_constexpr(ROW_WORDS):
                smem.bits[block, w] = Int32(0)
        cute.arch.sync_threads()
        self._each_entry(args, chunk, partial(self._set_bit, smem))
        cute.arch.sync_threads()

    def _set_bit(self, smem: ChunkBits, row: Int32, block: Int32) -> None:
        word = smem.bits.iterator + cute.crd2idx((block, row // WORD), smem.bits.layout)
        cute.arch.atomic_or(word, Int32(1) << (row % WORD), sem="relaxed", scope="cta")

    @cute.jit
    def _sort(self, smem: ChunkBits, window: Int32, row: Int32, block: Int32):
        """Put an entry at its place among the sorted ones from `window` on."""
        word, bit = row // WORD, row % WORD
        bits = smem.bits[block, word]
        if (bits >> bit) & 1 != 0:
            before = (smem.before[block, word // 4] >> (word % 4 * 8)) & 0xFF
            before += cute.arch.popc(bits & low_bits(bit))
            place = smem.first[block] + before - window
            if (place >= 0) & (place < STAGED):
                smem.sorted[place] = block * CHUNK_ROWS + row

    @cute.jit
    def _each_entry(
        self,
        args: QueryListArgs,
        chunk: Chunk,
        act: cutlass.Constexpr[Callable[[Int32, Int32], None]],
    ):
        """act(query in the chunk, block in the span), for all entries that are in the span."""
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // WARP, thread % WARP
        k = args.mIndices.shape[3]
        lanes = cutlass.max(cutlass.min(k, WARP), 1)
        rows = WARP // lanes
        own_row, own_entry = lane // lanes, lane % lanes
        stop = cutlass.select_(own_row < rows, chunk.num_queries, Int32(0))
        step = NUM_WARPS * rows
        for start in cutlass.range(0, k, WARP, unroll=1):
            for first in cutlass.range(warp * rows, CHUNK_ROWS, IN_FLIGHT * step, unroll=1):
                found = []
                for i in cutlass.range_constexpr(IN_FLIGHT):
                    row = first + i * step + own_row
                    found.append(self._entry(args, chunk, row, stop, start + own_entry))
                for i in cutlass.range_constexpr(IN_FLIGHT):
                    if found[i] >= 0:
                        act(first + i * step + own_row, found[i])

    @cute.jit
    def _entry(self, args: QueryListArgs, chunk: Chunk, row: Int32, stop: Int32, i: Int32) -> Int32:
        """Entry i of a query of the chunk, as a block of the span; negative if it has no use."""
        found, sequence = Int32(-1), chunk.sequence
        if (row < stop) & (i < args.mIndices.shape[3]):
            block = chunk.mEntries[row, i] - chunk.base
            is_there = (block >= 0) & (block < chunk.num_seen)
            if const_expr(args.mLSE is not None):
                query = sequence.offset_q + chunk.first + row
                lse = self._lse_of(args, sequence.number, chunk.head_idx, query)
                is_there = is_there & (lse != -Float32.inf)
            found = cutlass.select_(is_there, Int32(block), found)
        return found

    @cute.jit
    def _words_of(
        self, args: QueryListArgs, chunk: Chunk, smem: ChunkBits, block: Int32
    ) -> list[Int32]:
        """The bits of a block of the span, of queries that other masks let see some key of it."""
        lo, hi = self._queries_of(args, chunk.sequence, chunk.base + block)
        lo, hi = lo - chunk.first, hi - chunk.first
        words = [smem.bits[block, w] for w in range(ROW_WORDS)]
        if (lo > 0) | (hi < CHUNK_ROWS):
            for w in cutlass.range_constexpr(ROW_WORDS):
                words[w] = words[w] & bit_range(lo - w * WORD, hi - w * WORD)
        return words

    @cute.jit
    def _rank(self, args: QueryListArgs, chunk: Chunk, smem: ChunkBits, sums: cute.Tensor) -> Int32:
        """Tell all threads where each block's queries go. Returns how many there are."""
        thread, _, _ = cute.arch.thread_idx()
        lengths, total = args.lengths, Int32(0)
        first_of_keys = _first_of_keys(chunk.sequence, lengths, args.block_size) + chunk.base
        for start in cutlass.range(0, chunk.num_seen, NUM_THREADS, unroll=1):
            block, found = start + thread, Int32(0)
            if block < chunk.num_seen:
                words = self._words_of(args, chunk, smem, block)
                for w in cutlass.range_constexpr(ROW_WORDS):
                    smem.bits[block, w] = words[w]
                for part in cutlass.range_constexpr(ROW_WORDS // 4):
                    packed = Int32(0)
                    for i in cutlass.range_constexpr(4):
                        packed = packed | (found << (i * 8))
                        found += cute.arch.popc(words[part * 4 + i])
                    smem.before[block, part] = packed
            own, of_all = _running_in_cta(found, sums, thread)
            if block < chunk.num_seen:
                first = total + own - found
                # what lies after the last block has no queries
                at = cutlass.min(first_of_keys + block, args.mTotals.shape[1] - 1)
                place = args.mStarts[chunk.head_idx, at]
                place += args.mCounts[chunk.head_idx, chunk.number, chunk.base + block]
                smem.first[block], smem.places[block] = first, place - first
            total += of_all
        cute.arch.sync_threads()
        return total

    def _lse_of(self, args: QueryListArgs, sequence: Int32, head_idx: Int32, row: Int32) -> Float32:
        """Of a query, perhaps one of packed ones, and the first head with the list's selection."""
        lse = (
            args.mLSE if args.lengths.cu_seqlens_q is not None else args.mLSE[sequence, None, None]
        )
        heads_per_selection = cute.size(lse, mode=[0]) // args.mCounts.shape[0]
        return lse[head_idx * heads_per_selection, row]

    def _band_of(self, args: QueryListArgs, sequence: Sequence) -> Band:
        used = sequence.used
        right = Int32(0) if self.is_causal else args.window_right
        return Band(used.seqlen_q, used.seqlen_k, args.window_left, right, used.q_start)

    @cute.jit
    def _queries_of(
        self, args: QueryListArgs, sequence: Sequence, block: Int32
    ) -> tuple[Int32, Int32]:
        """The queries [first, end) that other masks let see some key of a block."""
        used, band = sequence.used, self._band_of(args, sequence)
        first_key = block * args.block_size
        last_key = cutlass.min(first_key + args.block_size, used.seqlen_k) - 1
        lo, hi = Int32(band.q_range(first_key)[0]), Int32(band.q_range(last_key)[1])
        return lo, cutlass.select_(first_key < used.seqlen_k, hi, lo)

    # -- all chunks -----------------------------------------------------------------------------

    @cute.kernel
    def add_up(self, args: QueryListArgs):
        """mCounts = the queries in chunks before; mTotals = the queries of each block. Each lane
        has a block, and each warp a part of the chunks."""
        group, head_idx, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // WARP, thread % WARP
        sums = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout((WARP, WARP)))
        number, counts = group * WARP + lane, args.mCounts
        first, end, block = Int32(0), Int32(0), Int32(0)
        if number < args.mTotals.shape[1]:
            first, end, block = self._chunks_of(args, number)
        part = cute.ceil_div(end - first, WARP)
        first = cutlass.min(first + warp * part, end)
        end = cutlass.min(first + part, end)
        total = Int32(0)
        for start in cutlass.range(first, end, IN_FLIGHT, unroll=1):
            for i in cutlass.range_constexpr(IN_FLIGHT):
                count = counts[head_idx, cutlass.min(start + i, end - 1), block]
                total += cutlass.select_(start + i < end, count, Int32(0))
        sums[lane, warp] = total
        cute.arch.sync_threads()
        before, total = Int32(0), Int32(0)
        for i in cutlass.range(WARP, unroll=8):
            before += cutlass.select_(i < warp, sums[lane, i], Int32(0))
            total += sums[lane, i]
        for start in cutlass.range(first, end, IN_FLIGHT, unroll=1):
            found = []
            for i in cutlass.range_constexpr(IN_FLIGHT):
                found.append(counts[head_idx, cutlass.min(start + i, end - 1), block])
            for i in cutlass.range_constexpr(IN_FLIGHT):
                if start + i < end:
                    counts[head_idx, start + i, block] = before
                    before += found[i]
        if (warp == 0) & (number < args.mTotals.shape[1]):
            args.mTotals[head_idx, number] = total

    @cute.jit
    def _chunks_of(self, args: QueryListArgs, number: Int32) -> tuple[Int32, Int32, Int32]:
        """The chunks [first, end) of a block's sequence, and the block's number in it."""
        lengths = args.lengths
        of_sequence = _sequence_of(number, args.block_size, lengths.cu_seqlens_k, lengths.seqlen_k)
        sequence = _describe(of_sequence, lengths)
        block = number - _first_of_keys(sequence, lengths, args.block_size)
        first = _first_of_queries(sequence, lengths)
        end = first + cute.ceil_div(sequence.slot_q, CHUNK_ROWS)
        # a sequence may be longer than it was said to be
        return first, cutlass.select_(block < args.mCounts.shape[2], end, first), block

    @cute.kernel
    def weigh(self, args: QueryListArgs):
        """mWeights = the items of each range of queries; by the last CTA of a head, mStarts = the
        first entry of each list."""
        nth, head_idx, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        sums = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARP))
        if nth < args.mWeights.shape[1]:
            total = Int32(0)
            for tile in cutlass.range(thread, args.num_tiles, SCAN_THREADS, unroll=1):
                *_, first, end = self._part_of(args, head_idx, tile, nth * args.range_rows)
                total += cute.ceil_div(end - first, SEGMENT)
            _, of_all = _running_in_cta(total, sums, thread)
            if thread == 0:
                args.mWeights[head_idx, nth] = of_all
        else:
            self._start_lists(args, head_idx, sums)

    @cute.jit
    def _start_lists(self, args: QueryListArgs, head_idx: Int32, sums: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        num_blocks, before = args.mTotals.shape[1], Int32(0)
        for base in cutlass.range(0, num_blocks, SCAN_THREADS, unroll=1):
            number, total = base + thread, Int32(0)
            if number < num_blocks:
                total = args.mTotals[head_idx, number]
            own, of_all = _running_in_cta(total, sums, thread)
            if number < num_blocks:
                args.mStarts[head_idx, number] = before + own - total
            before += of_all

    @cute.kernel
    def cut(self, args: QueryListArgs):
        """mItems and mNumItems. A CTA has the queries of a range."""
        nth, head_idx, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        sums = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARP))
        number = Int32(0)
        for base in cutlass.range(0, nth, SCAN_THREADS, unroll=1):
            weight = Int32(0)
            if base + thread < nth:
                weight = args.mWeights[head_idx, base + thread]
            _, of_all = _running_in_cta(weight, sums, thread)
            number += of_all
        number = self._cut_range(args, head_idx, nth * args.range_rows, number, sums)
        if (thread == 0) & (nth == args.mWeights.shape[1] - 1):
            args.mNumItems[head_idx] = number

    @cute.jit
    def _cut_range(
        self,
        args: QueryListArgs,
        head_idx: Int32,
        first_row: Int32,
        number: Int32,
        sums: cute.Tensor,
    ) -> Int32:
        """Write the items of queries from first_row on, from item `number`; the next number."""
        thread, _, _ = cute.arch.thread_idx()
        for base in cutlass.range(0, args.num_tiles, SCAN_THREADS, unroll=1):
            tile = base + thread
            of_sequence, block, at, first, end = self._part_of(args, head_idx, tile, first_row)
            count = cute.ceil_div(end - first, SEGMENT)
            own, of_all = _running_in_cta(count, sums, thread)
            item = number + own - count
            if first < end:
                start = args.mStarts[head_idx, at]
                first, end = start + first, start + end
            while first < end:
                words = (of_sequence, block, first, cutlass.min(end, first + SEGMENT))
                self._store(args, head_idx, item, words)
                first += SEGMENT
                item += 1
            number += of_all
        return number

    @cute.jit
    def _part_of(
        self, args: QueryListArgs, head_idx: Int32, tile: Int32, first_row: Int32
    ) -> tuple[Int32, Int32, Int32, Int32, Int32]:
        """A key tile's sequence, its number in it, the number of its block among all, and the
        entries [first, end) of this block's list that are of range_rows queries from first_row
        on. None if there is no such tile."""
        lengths, of_sequence = args.lengths, Int32(0)
        block, at, first, end = Int32(0), Int32(0), Int32(0), Int32(0)
        if tile < args.num_tiles:
            of_sequence = _sequence_of(tile, args.tile_n, lengths.cu_seqlens_k, lengths.seqlen_k)
            sequence = _describe(of_sequence, lengths)
            block = tile - _first_of_keys(sequence, lengths, args.tile_n)
            if (block * args.tile_n < sequence.used.seqlen_k) & (first_row < sequence.slot_q):
                of_list = block * args.tile_n // args.block_size
                at = _first_of_keys(sequence, lengths, args.block_size) + of_list
                chunk = _first_of_queries(sequence, lengths) + first_row // CHUNK_ROWS
                end = args.mTotals[head_idx, at]
                # a sequence may be longer than it was said to be
                if of_list < args.mCounts.shape[2]:
                    first = args.mCounts[head_idx, chunk, of_list]
                    if first_row + args.range_rows < sequence.slot_q:
                        chunk += args.range_rows // CHUNK_ROWS
                        end = args.mCounts[head_idx, chunk, of_list]
        return of_sequence, block, at, first, end

    def _store(self, args: QueryListArgs, head_idx: Int32, item: Int32, words: tuple) -> None:
        for i, word in enumerate(words):
            args.mItems[head_idx, item, i] = Int32(word)


def _sequence_of(number: Int32, size: Int32, starts: cute.Tensor | None, rows: Int32) -> Int32:
    """The sequence of a block of `size` rows, dense (`rows` each) or packed."""
    if const_expr(starts is None):
        return number // cute.ceil_div(rows, size)
    return sequence_of_block(number, size, starts)


def _describe(number: Int32, lengths: Lengths) -> Sequence:
    of_rows = lengths.seqlen_q, lengths.seqlen_k, lengths.cu_seqlens_q, lengths.cu_seqlens_k
    slot = SeqlenInfoQK.create(number, *of_rows)
    used = SeqlenInfoQK.create(number, *of_rows, lengths.seqused_q, lengths.seqused_k)
    in_use = cutlass.min(Int32(used.seqlen_q), Int32(slot.seqlen_q))
    used = SeqlenInfoQK(
        Int32(used.offset_q), Int32(used.offset_k), in_use, Int32(used.seqlen_k),
        q_start=lengths.first_position(number, used),
    )  # fmt: skip
    return Sequence(number, used.offset_q, Int32(slot.seqlen_q), used)


def _first_of_queries(sequence: Sequence, lengths: Lengths) -> Int32:
    """The first chunk of a sequence."""
    if lengths.cu_seqlens_q is None:
        return sequence.number * cute.ceil_div(lengths.seqlen_q, CHUNK_ROWS)
    return sequence.offset_q // CHUNK_ROWS + sequence.number


def _first_of_keys(sequence: Sequence, lengths: Lengths, size: Int32) -> Int32:
    """The first block of `size` keys of a sequence."""
    if lengths.cu_seqlens_k is None:
        return sequence.number * cute.ceil_div(lengths.seqlen_k, size)
    return sequence.used.offset_k // size + sequence.number


@cute.jit
def _running_in_cta(value: Int32, sums: cute.Tensor, thread: Int32) -> tuple[Int32, Int32]:
    """The sum of the values up to this thread's, and of all. sums: memory, a word for each warp."""
    warp, lane, num_warps = thread // WARP, thread % WARP, cute.size(sums)
    own = running(value, operator.add)
    if lane == WARP - 1:
        sums[warp] = own
    cute.arch.sync_threads()
    of_warps = running(sums[cutlass.min(lane, num_warps - 1)], operator.add)
    before = cute.arch.shuffle_sync(of_warps, cutlass.max(warp - 1, 0))
    of_all = cute.arch.shuffle_sync(of_warps, num_warps - 1)
    cute.arch.sync_threads()
    return own + cutlass.select_(warp > 0, before, Int32(0)), of_all
