"""Token lists of a choice: count, add up, cut into items, fill.

The bits of a choice (`selected_bits`) have a word for each query and 32 blocks. A warp reads those
of 32 queries and transposes them, so that each lane has the queries of one block. Queries are
counted chunk by chunk. From the sums of these counts, each chunk knows the places of its queries.
There are no atomics, so lists are ascending and the same in every run.

A query is in the list of a block only if causal masking, the window and the lengths in use let it
see some key of the block. So whoever is in a list sees something.
"""

import operator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.token_lists import SEGMENT
from flash_mask_cute.core.warp_scan import WARP, running
from flash_mask_cute.rules.band import Band
from flash_mask_cute.rules.bit_tile import WORD, bit_range, transpose
from flash_mask_cute.seqlen_info import SeqlenInfoQK

NUM_THREADS = 128
# of the only CTA of a head that scans: a warp scans the sums of all warps
SCAN_THREADS = WARP * WARP
# queries that are counted together
CHUNK_ROWS = 256
# counts that a thread loads before it adds them
IN_FLIGHT = 8


class Sequence(NamedTuple):
    """A sequence of the launch: its number, where its queries start in a line of bits, how many
    there are, used or not, and what is in use."""

    number: Int32
    offset_q: Int32
    slot_q: Int32
    used: SeqlenInfoQK


class TokenListArgs(NamedTuple):
    """Arguments of the kernels, see `MakeTokenLists.__call__`."""

    mBits: cute.Tensor
    mCounts: cute.Tensor
    mStarts: cute.Tensor
    mTokens: cute.Tensor
    mItems: cute.Tensor
    mNumItems: cute.Tensor
    block_size: Int32
    tile_n: Int32
    num_tiles: Int32
    longest_q: Int32
    range_rows: Int32
    lengths: Lengths
    window_left: Int32 | None
    window_right: Int32 | None
    mLSE: cute.Tensor | None


class MakeTokenLists:
    """Makes token lists and their items; to be passed to `cute.compile`.

    :param is_causal: bottom-right aligned causal masking, beside which there is no right side
    """

    def __init__(self, is_causal: bool):
        self.is_causal = is_causal

    @cute.jit
    def __call__(
        self,
        mBits: cute.Tensor,
        mCounts: cute.Tensor,
        mStarts: cute.Tensor,
        mTokens: cute.Tensor,
        mItems: cute.Tensor,
        mNumItems: cute.Tensor,
        block_size: Int32,
        tile_n: Int32,
        num_tiles: Int32,
        longest_q: Int32,
        range_rows: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
        stream,
        mCuSeqlensQ: cute.Tensor | None = None,
        mCuSeqlensK: cute.Tensor | None = None,
        mSeqUsedQ: cute.Tensor | None = None,
        mSeqUsedK: cute.Tensor | None = None,
        window_size_left: Int32 | None = None,
        window_size_right: Int32 | None = None,
        mQStart: cute.Tensor | Int32 | None = None,
        mLSE: cute.Tensor | None = None,
    ):
        """Launch four kernels on `stream`.

        :param mBits: int32 (batch | 1, heads, rows, words): `ChoiceBits.rows`
        :param mCounts: int32 (heads, chunks, words * 32): memory for counts. Chunks of a packed
            sequence are numbered as row blocks of `CHUNK_ROWS` (`core/row_blocks.py`).
        :param mStarts: int32 (heads, blocks + 1): gets the first entry of each list. Key blocks of
            all sequences are numbered in the same way, and so are key tiles.
        :param mTokens: int32 (heads, entries): gets the lists, one after the other
        :param mItems: int32 (heads, items, ITEM_WORDS): gets an `Item` each
        :param mNumItems: int32 (heads,): gets the number of items
        :param block_size: keys of a block, a multiple of tile_n
        :param num_tiles: key tiles of all sequences, as they are numbered
        :param longest_q: queries of the longest sequence, or more
        :param range_rows: queries of a sequence at which all lists are cut, a multiple of
            `CHUNK_ROWS`
        :param mLSE: fp32 (batch, heads_q, seqlen_q) or (heads_q, total_q): queries with -inf are in
            no list; given where masks that lists do not know may hide all keys of a query, for all
            heads alike
        :param seqlen_q, seqlen_k: extents of dense tensors, not read for packed sequences
        """
        of_sequences = mCuSeqlensQ, mCuSeqlensK, mSeqUsedQ, mSeqUsedK
        lengths = Lengths(*of_sequences, seqlen_q, seqlen_k, mQStart)
        args = TokenListArgs(
            *(mBits, mCounts, mStarts, mTokens, mItems, mNumItems),
            block_size=block_size,
            tile_n=tile_n,
            num_tiles=num_tiles,
            longest_q=longest_q,
            range_rows=range_rows,
            lengths=lengths,
            window_left=window_size_left,
            window_right=window_size_right,
            mLSE=mLSE,
        )
        heads, chunks, columns = mCounts.shape
        warps = cute.ceil_div(heads * chunks * (columns // WORD) * WARP, NUM_THREADS)
        lists = cute.ceil_div(heads * (mStarts.shape[1] - 1), NUM_THREADS)
        self.count(args).launch(grid=(warps, 1, 1), block=(NUM_THREADS, 1, 1), stream=stream)
        self.add_up(args).launch(grid=(lists, 1, 1), block=(NUM_THREADS, 1, 1), stream=stream)
        self.cut(args).launch(grid=(heads, 1, 1), block=(SCAN_THREADS, 1, 1), stream=stream)
        self.fill(args).launch(grid=(warps, 1, 1), block=(NUM_THREADS, 1, 1), stream=stream)

    # -- queries of a chunk ---------------------------------------------------------------------

    @cute.kernel
    def count(self, args: TokenListArgs):
        """mCounts = the queries of each chunk that chose a block."""
        self._visit_chunk(args, False)

    @cute.kernel
    def fill(self, args: TokenListArgs):
        """mTokens = the queries; mCounts has how many are in chunks before."""
        self._visit_chunk(args, True)

    @cute.jit
    def _visit_chunk(self, args: TokenListArgs, fills: cutlass.Constexpr[bool]):
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        heads, chunks, columns = args.mCounts.shape
        words = columns // WORD
        warp = cta * (NUM_THREADS // WARP) + cute.arch.make_warp_uniform(thread // WARP)
        line, lane = warp // words, thread % WARP
        word = warp - line * words
        head_idx = line // chunks
        chunk = line - head_idx * chunks
        if head_idx < heads:
            lengths = args.lengths
            number = _sequence_of(
                chunk, CHUNK_ROWS, lengths.cu_seqlens_q, lengths.seqlen_q, _num_sequences(args)
            )
            sequence = _describe(number, lengths)
            first = (chunk - _first_of_queries(sequence, lengths)) * CHUNK_ROWS
            block = word * WORD + lane
            lo, hi = self._queries_of(args, sequence, block)
            found, place = Int32(0), Int32(0)
            if const_expr(fills):
                at = _first_of_keys(sequence, lengths, args.block_size) + block
                # what lies behind the last block has no queries
                at = cutlass.min(at, args.mStarts.shape[1] - 1)
                place = args.mStarts[head_idx, at] + args.mCounts[head_idx, chunk, block]
            entry = cutlass.min(number, args.mBits.shape[0] - 1)
            for step in cutlass.range(CHUNK_ROWS // WORD, unroll=1):
                start = first + step * WORD
                bits = Int32(0)
                if start + lane < sequence.used.seqlen_q:
                    row = sequence.offset_q + start + lane
                    bits = args.mBits[entry, head_idx, row, word]
                    if const_expr(args.mLSE is not None):
                        sees = self._lse_of(args, number, head_idx, row) != -Float32.inf
                        bits = cutlass.select_(sees, bits, Int32(0))
                (chose,) = transpose((bits,), lane)
                chose = chose & bit_range(lo - start, hi - start)
                found += cute.arch.popc(chose)
                if const_expr(fills):
                    while chose != 0:
                        bit = cute.arch.popc((chose & -chose) - 1)
                        args.mTokens[head_idx, place] = start + bit
                        place += 1
                        chose = chose & (chose - 1)
            if const_expr(not fills):
                args.mCounts[head_idx, chunk, block] = found

    def _lse_of(self, args: TokenListArgs, sequence: Int32, head_idx: Int32, row: Int32) -> Float32:
        """Of a query, perhaps one of packed ones, and the first head with the list's choice."""
        lse = (
            args.mLSE if args.lengths.cu_seqlens_q is not None else args.mLSE[sequence, None, None]
        )
        heads_per_choice = cute.size(lse, mode=[0]) // args.mCounts.shape[0]
        return lse[head_idx * heads_per_choice, row]

    @cute.jit
    def _queries_of(
        self, args: TokenListArgs, sequence: Sequence, block: Int32
    ) -> tuple[Int32, Int32]:
        """The queries [first, end) that other masks let see some key of a block."""
        used = sequence.used
        right = Int32(0) if const_expr(self.is_causal) else args.window_right
        band = Band(used.seqlen_q, used.seqlen_k, args.window_left, right, used.q_start)
        first_key = block * args.block_size
        last_key = cutlass.min(first_key + args.block_size, used.seqlen_k) - 1
        lo, hi = Int32(band.q_range(first_key)[0]), Int32(band.q_range(last_key)[1])
        return lo, cutlass.select_(first_key < used.seqlen_k, hi, lo)

    # -- all chunks -----------------------------------------------------------------------------

    @cute.kernel
    def add_up(self, args: TokenListArgs):
        """mCounts = the queries in chunks before; mStarts = the queries of each block."""
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        index = cta * NUM_THREADS + thread
        num_blocks, columns = args.mStarts.shape[1] - 1, args.mCounts.shape[2]
        head_idx = index // num_blocks
        number = index - head_idx * num_blocks
        if head_idx < args.mStarts.shape[0]:
            lengths = args.lengths
            sequence = _describe(
                _sequence_of(
                    number, args.block_size, lengths.cu_seqlens_k, lengths.seqlen_k,
                    _num_sequences(args),
                ), lengths,
            )  # fmt: skip
            block = number - _first_of_keys(sequence, lengths, args.block_size)
            first = _first_of_queries(sequence, lengths)
            end = first + cute.ceil_div(sequence.slot_q, CHUNK_ROWS)
            # a sequence may be longer than it was said to be
            end = cutlass.select_(block < columns, end, first)
            total = Int32(0)
            for start in cutlass.range(first, end, IN_FLIGHT, unroll=1):
                counts = []
                for i in cutlass.range_constexpr(IN_FLIGHT):
                    chunk = cutlass.min(start + i, end - 1)
                    counts.append(args.mCounts[head_idx, chunk, block])
                for i in cutlass.range_constexpr(IN_FLIGHT):
                    if start + i < end:
                        args.mCounts[head_idx, start + i, block] = total
                        total += counts[i]
            args.mStarts[head_idx, number] = total

    @cute.kernel
    def cut(self, args: TokenListArgs):
        """mStarts = the first entry of each list; mItems and mNumItems."""
        head_idx, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        sums = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARP))
        starts = args.mStarts
        num_blocks = starts.shape[1] - 1
        before = Int32(0)
        for base in cutlass.range(0, num_blocks, SCAN_THREADS, unroll=1):
            number = base + thread
            total = Int32(0)
            if number < num_blocks:
                total = starts[head_idx, number]
            own, of_all = _running_in_cta(total, sums, thread)
            if number < num_blocks:
                starts[head_idx, number] = before + own - total
            before += of_all
        if thread == 0:
            starts[head_idx, num_blocks] = before
        cute.arch.sync_threads()
        number = Int32(0)
        for first in cutlass.range(0, args.longest_q, args.range_rows, unroll=1):
            number = self._cut_range(args, head_idx, first, number, sums)
        if thread == 0:
            args.mNumItems[head_idx] = number

    @cute.jit
    def _cut_range(
        self,
        args: TokenListArgs,
        head_idx: Int32,
        first_row: Int32,
        number: Int32,
        sums: cute.Tensor,
    ) -> Int32:
        """Write the items of the queries from first_row on of all sequences, the first of which is
        item `number`. Returns the number of the next item."""
        thread, _, _ = cute.arch.thread_idx()
        lengths = args.lengths
        for base in cutlass.range(0, args.num_tiles, SCAN_THREADS, unroll=1):
            tile = base + thread
            first, end, of_sequence, block = Int32(0), Int32(0), Int32(0), Int32(0)
            if tile < args.num_tiles:
                of_sequence = _sequence_of(
                    tile, args.tile_n, lengths.cu_seqlens_k, lengths.seqlen_k, _num_sequences(args)
                )
                sequence = _describe(of_sequence, lengths)
                block = tile - _first_of_keys(sequence, lengths, args.tile_n)
                if (block * args.tile_n < sequence.used.seqlen_k) & (first_row < sequence.slot_q):
                    first, end = self._entries_of(args, head_idx, sequence, block, first_row)
            count = cute.ceil_div(end - first, SEGMENT)
            own, of_all = _running_in_cta(count, sums, thread)
            item = number + own - count
            while first < end:
                words = (of_sequence, block, first, cutlass.min(end, first + SEGMENT))
                self._store(args, head_idx, item, words)
                first += SEGMENT
                item += 1
            number += of_all
        return number

    @cute.jit
    def _entries_of(
        self,
        args: TokenListArgs,
        head_idx: Int32,
        sequence: Sequence,
        tile: Int32,
        first_row: Int32,
    ) -> tuple[Int32, Int32]:
        """The entries [first, end) of a key tile's list, of range_rows queries from first_row
        on."""
        block = tile * args.tile_n // args.block_size
        at = _first_of_keys(sequence, args.lengths, args.block_size) + block
        chunk = _first_of_queries(sequence, args.lengths) + first_row // CHUNK_ROWS
        start, end = args.mStarts[head_idx, at], args.mStarts[head_idx, at + 1]
        first = start
        # a sequence may be longer than it was said to be
        if block < args.mCounts.shape[2]:
            first += args.mCounts[head_idx, chunk, block]
            if first_row + args.range_rows < sequence.slot_q:
                chunk += args.range_rows // CHUNK_ROWS
                end = start + args.mCounts[head_idx, chunk, block]
        return first, end

    def _store(self, args: TokenListArgs, head_idx: Int32, item: Int32, words: tuple) -> None:
        for i, word in enumerate(words):
            args.mItems[head_idx, item, i] = Int32(word)


def _num_sequences(args: TokenListArgs) -> Int32:
    for starts in (args.lengths.cu_seqlens_q, args.lengths.cu_seqlens_k):
        if starts is not None:
            return Int32(starts.shape[0] - 1)
    # more than there are: numbers of dense chunks and blocks say how many
    return Int32(1 << 30)


@cute.jit
def _sequence_of(
    number: Int32,
    size: Int32,
    starts: cute.Tensor | None,
    rows: Int32,
    num_sequences: Int32,
) -> Int32:
    """The sequence of a block of `size` rows, by the numbering of `core/row_blocks.py`."""
    found = Int32(0)
    if const_expr(starts is None):
        found = number // cute.ceil_div(rows, size)
    else:
        # the last sequence whose first block is not after this one
        beyond = num_sequences
        while found + 1 < beyond:
            middle = (found + beyond) // 2
            if starts[middle] // size + middle <= number:
                found = middle
            else:
                beyond = middle
    return found


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
    """The sum of the values of this thread and of those before it, and of all."""
    warp, lane = thread // WARP, thread % WARP
    own = running(value, operator.add)
    if lane == WARP - 1:
        sums[warp] = own
    cute.arch.sync_threads()
    of_warps = running(sums[lane], operator.add)
    before = cute.arch.shuffle_sync(of_warps, cutlass.max(warp - 1, 0))
    of_all = cute.arch.shuffle_sync(of_warps, WARP - 1)
    cute.arch.sync_threads()
    return own + cutlass.select_(warp > 0, before, Int32(0)), of_all
