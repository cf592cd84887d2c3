"""Statistics that the backward needs of each query row before it starts: LSE and delta.

A CTA processes one row block (`core.row_blocks`) of one head. The grid covers all row blocks, so
nothing has to be cleared beforehand. A row block of no sequence gets zeros. The kernel is bound by
memory, so it keeps many 16-byte accesses in flight.

Queries that see nothing have P = 0, which would not hide a NaN in their rows of Q or dO: 0 * NaN is
NaN. If masks may leave such queries, their rows of Q and dO whose sum of squares is not finite are
marked, and the main kernel clears them. With a sink the LSE of such rows is the sink's, and not
-inf: then O, which is 0 there, identifies them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, range_constexpr

from flash_mask_cute.core.exp2 import LOG2_E
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.row_blocks import (
    MARKS_PER_WORD,
    RowBlocks,
    mark_words_of_query,
    marks_of,
    stats_words,
)
from flash_mask_cute.core.warp_scan import WARP
from flash_mask_cute.limits import MAX_WIDE_HEAD_DIM, SINK_RTOL

NUM_THREADS = 256
# LSE from which on it is a reference: before, its product with LOG2_E is rounded by 2**-14 at most
FAR = 2.0**10
# elements of one access of 16 bytes
VECTOR_16_BITS = 8
VECTOR_32_BITS = 4
# threads that share a row: they read a line of 128 bytes together
LANES_PER_ROW = 8
ROWS_PER_ROUND = NUM_THREADS // LANES_PER_ROW
# accesses a thread starts before it waits for one, 4 registers each
IN_FLIGHT = 16
# of a row that may see nothing: Q or dO are not finite, or their squares not; O is not 0
HOSTILE, SEES = 1, 2


class BlockRows(NamedTuple):
    batch_idx: Int32
    first: Int32
    """Where they start: in the sequence, or, where sequences are packed, in the tensor."""
    in_slot: Int32
    """How many belong to the sequence, at most tile_m; not positive: the block has no sequence."""
    in_use: Int32
    """How many of those are in use (seqused_q); may be negative."""


class LseOfRow(NamedTuple):
    """For a row in use: LSE, its rounding error, and its gradient. For another: -inf, 0, 0."""

    lse: Float32
    low: Float32 | None
    """None: not given."""
    dlse: Float32

    @property
    def sees_something(self) -> Boolean:
        return self.lse != -Float32.inf


class Packing(NamedTuple):
    """How the heads of a group share a row block: a query has `rows` of them, where the first
    `heads` are its heads. The others are padding."""

    rows: int = 1
    heads: int = 1

    @property
    def is_there(self) -> bool:
        return self.rows > 1

    def is_head(self, row: Int32) -> Boolean:
        return Boolean(True) if self.rows == self.heads else row % self.rows < self.heads

    def place(self, row: Int32) -> Int32:
        """A row's place among the heads of queries; a padding row has its query's last head's."""
        if self.rows == self.heads:
            return row
        return row // self.rows * self.heads + cutlass.min(row % self.rows, self.heads - 1)


ALONE = Packing()


@cute.jit
def rows_of(
    block: Int32,
    lengths: Lengths,
    tile_m: cutlass.Constexpr,
    packing: cutlass.Constexpr[Packing] = ALONE,
) -> BlockRows:
    """The rows of a row block. All lanes of a warp must ask for the same one. `first` is that of
    the first query's first head among `packed_rows`."""
    rows = _positions_of(block, lengths, tile_m // packing.rows)
    if const_expr(packing.is_there):
        counts = (count * packing.rows for count in rows[2:])
        rows = BlockRows(rows.batch_idx, rows.first * packing.heads, *counts)
    return rows


@cute.jit
def _positions_of(block: Int32, lengths: Lengths, tile_m: cutlass.Constexpr) -> BlockRows:
    row_blocks = RowBlocks(lengths, tile_m)
    slot = lengths.seqlen_q
    offset = Int32(0)
    if const_expr(lengths.cu_seqlens_q is None):
        batch_idx = block // cute.ceil_div(lengths.seqlen_q, tile_m)
    else:
        batch_idx = _sequence_of(block, lengths, tile_m)
        offset = lengths.cu_seqlens_q[batch_idx]
        slot = lengths.cu_seqlens_q[batch_idx + 1] - offset
    used = slot
    if const_expr(lengths.seqused_q is not None):
        used = cutlass.min(lengths.seqused_q[batch_idx], slot)
    first = (block - row_blocks.first_of(batch_idx, offset)) * tile_m
    return BlockRows(
        batch_idx,
        offset + first,
        cutlass.min(slot - first, tile_m),
        cutlass.min(used - first, tile_m),
    )


@cute.jit
def _sequence_of(block: Int32, lengths: Lengths, tile_m: cutlass.Constexpr) -> Int32:
    """The last packed sequence whose first row block is not after this one."""
    row_blocks = RowBlocks(lengths, tile_m)
    starts = lengths.cu_seqlens_q
    lane = cute.arch.lane_idx()
    # [found, found + count) holds it; each lane looks at the start of a part of this range
    found = Int32(0)
    count = Int32(starts.shape[0] - 1)
    while count > 1:
        step = cute.ceil_div(count, WARP)
        sequence = found + cutlass.min(lane * step, count - 1)
        is_before = row_blocks.first_of(sequence, starts[sequence]) <= block
        parts = cute.arch.vote_ballot_sync((lane * step < count) & is_before)
        skipped = (cute.arch.popc(parts) - 1) * step
        found += skipped
        count = cutlass.min(step, count - skipped)
    return found


def packed_rows(tensor: cute.Tensor | None, packed: int) -> cute.Tensor | None:
    """A view of (batch, row, head, dim) or (row, head, dim) in which the query heads of a KV head,
    `packed` neighbours, are rows: query by query, (batch, (head, row), KV head, dim)."""
    if tensor is None or packed == 1:
        return tensor
    (*batch, rows, heads, dim), (*of_batch, of_row, of_head, of_dim) = tensor.shape, tensor.stride
    shape = *batch, (packed, rows), heads // packed, dim
    stride = *of_batch, (of_head, of_row), of_head * packed, of_dim
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def packed_values(tensor: cute.Tensor | None, packed: int) -> cute.Tensor | None:
    """`packed_rows` of a tensor like LSE, (batch, head, row) or (head, row)."""
    if tensor is None or packed == 1:
        return tensor
    (*batch, heads, rows), (*of_batch, of_head, of_row) = tensor.shape, tensor.stride
    shape = *batch, heads // packed, (packed, rows)
    stride = *of_batch, of_head * packed, (of_head, of_row)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def rows_of_head(tensor: cute.Tensor, head_idx: Int32, rows: BlockRows) -> cute.Tensor:
    """(rows, dim) of (batch, seqlen, heads, dim) or (total, heads, dim), from the first row on."""
    if cute.rank(tensor) == 4:
        tensor = tensor[rows.batch_idx, None, None, None]
    return cute.domain_offset((rows.first, 0), tensor[None, head_idx, None])


def _vectors_per_lane(vectors: int) -> int:
    """The most vectors of a row that a lane has."""
    return -(-vectors // LANES_PER_ROW)


def _vector_idx(thread: Int32, i: int) -> Int32:
    return i * LANES_PER_ROW + thread % LANES_PER_ROW


def _is_finite(x: Float32) -> Boolean:
    return (x < Float32.inf) & (x > -Float32.inf)


def _is_near(lse: Float32, sink: Float32) -> Boolean:
    """Whether LSE may come from the sink alone."""
    largest = cute.arch.fmax(cute.arch.fmax(sink, -sink), Float32(1.0)) * SINK_RTOL
    return (lse - sink <= largest) & (sink - lse <= largest)


def vector_of(tensor: cute.Tensor, index: Int32, size: int) -> cute.Tensor:
    """`size` elements of a contiguous vector, the first at index * size."""
    return cute.local_tile(tensor, (size,), (index,))


class PreprocessArgs(NamedTuple):
    """Arguments of the kernel, see `BwdPreprocess.__call__`."""

    mO: cute.Tensor
    mdO: cute.Tensor
    mLSE: cute.Tensor
    mdLSE: cute.Tensor | None
    mStats: cute.Tensor
    mdQaccum: cute.Tensor | None
    mSemaphores: cute.Tensor | None
    mSink: cute.Tensor | None
    mSinkParts: cute.Tensor | None
    lengths: Lengths
    mQ: cute.Tensor | None
    mLSELow: cute.Tensor | None


@dataclass(eq=False, repr=False)
class BwdPreprocess:
    """Fills the row statistics, and prepares the sums of dQ; to be passed to `cute.compile`.

    :param dtype: of O and dO, 16 bits
    :param head_dim_v: a multiple of 8, at most MAX_WIDE_HEAD_DIM
    :param tile_m: query rows of a row block, a multiple of 16 up to 256
    :param has_reference: for scores of any magnitude, see mStats
    :param packing: query heads of a KV head that share a tile's rows, query by query. Heads of
        scratch tensors are then KV heads, and the statistics of a query, of all its heads, follow
        each other (`row_blocks.stats_words`); those of padding rows are of rows that see nothing.
    :param has_marks: mQ is given
    :param num_semaphores: of a row block: one for each CTA that sums a part of its rows
    :raises ValueError: a size is none of these
    """

    dtype: type[cutlass.Numeric]
    head_dim_v: int
    tile_m: int
    has_reference: bool = False
    packing: Packing = ALONE
    has_marks: bool = False
    num_semaphores: int = 1

    def __post_init__(self) -> None:
        tile_m, head_dim_v, packing = self.tile_m, self.head_dim_v, self.packing
        if tile_m % packing.rows or packing.heads > packing.rows:
            raise ValueError(
                f"rows of a query must divide tile_m={tile_m}, and heads be no more, got {packing}"
            )
        if tile_m % 16 or not 0 < tile_m <= NUM_THREADS:
            raise ValueError(f"tile_m must be a multiple of 16 up to {NUM_THREADS}, got {tile_m}")
        if head_dim_v % VECTOR_16_BITS or not 0 < head_dim_v <= MAX_WIDE_HEAD_DIM:
            most = f"a multiple of 8 up to {MAX_WIDE_HEAD_DIM}"
            raise ValueError(f"head_dim_v must be {most}, got {head_dim_v}")
        # rows that whole warps and whole rounds see to, the last of them for nothing
        self.padded_rows = -(-tile_m // WARP) * WARP
        self.vectors_per_row = head_dim_v // VECTOR_16_BITS

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: cute.Tensor | None,
        mStats: cute.Tensor,
        mdQaccum: cute.Tensor | None,
        mSemaphores: cute.Tensor | None,
        mSink: cute.Tensor | None,
        mSinkParts: cute.Tensor | None,
        stream,
        mCuSeqlensQ: cute.Tensor | None,
        mSeqUsedQ: cute.Tensor | None,
        mQ: cute.Tensor | None = None,
        mLSELow: cute.Tensor | None = None,
    ):
        """Launch on `stream`, for at least one head and row block.

        :param mO: (batch, seqlen_q, heads_q, head_dim_v) or packed (total_q, heads_q, head_dim_v),
            rows contiguous and aligned to 16 bytes, other strides free
        :param mdO: as mO
        :param mLSE: fp32 (batch, heads_q, seqlen_q) or (heads_q, total_q), any strides
        :param mdLSE: as mLSE
        :param mStats: fp32 (heads_q, num_row_blocks, words), contiguous and aligned to 16 bytes;
            words: `row_blocks.stats_words`. First LSE by base 2 of tile_m rows, inf for rows that
            see nothing and rows that no sequence uses; then delta, the sum of O * dO minus dLSE, 0
            for those rows; with has_reference, then the reference that is subtracted from scores
            first and by which LSE is reduced to its rounding error, 0 if LSE is near 0 and for
            those rows; with mQ, then `row_blocks.marks_of`
        :param mdQaccum: fp32 (heads_q, num_row_blocks, a multiple of 1024), contiguous and aligned
            to 16 bytes; zeroed, if given
        :param mSemaphores: int32 (heads_q, num_semaphores * num_row_blocks), those of a row block
            side by side; zeroed, if given
        :param mSink: (heads_q,), the learnable sinks; given together with mSinkParts, or not at all
        :param mSinkParts: fp32 (heads_q, num_row_blocks): what each row block adds to the gradient
            of its head's sink; 0 where it belongs to no sequence
        :param mCuSeqlensQ: int32 (num_sequences + 1,), with at least one sequence; packed only
        :param mSeqUsedQ: int32 (batch,) or (num_sequences,)
        :param mQ: as mO, with head_dim: masks may leave queries that see nothing, whose rows are to
            be marked if they are not finite
        :param mLSELow: as mLSE, its rounding error; for mStats with three rows
        """
        # the rows of packed tensors are of no interest: lengths come from mCuSeqlensQ
        seqlen_q = Int32(mO.shape[0 if const_expr(mCuSeqlensQ is not None) else 1])
        lengths = Lengths(mCuSeqlensQ, None, mSeqUsedQ, None, seqlen_q, Int32(0))
        heads, num_row_blocks = mStats.shape[0], mStats.shape[1]
        packed = self.packing.heads
        mO, mdO, mQ = (packed_rows(x, packed) for x in (mO, mdO, mQ))
        mLSE, mdLSE, mLSELow = (packed_values(x, packed) for x in (mLSE, mdLSE, mLSELow))
        args = PreprocessArgs(
            mO=mO, mdO=mdO, mLSE=mLSE, mdLSE=mdLSE, mStats=mStats, mdQaccum=mdQaccum,
            mSemaphores=mSemaphores, mSink=mSink, mSinkParts=mSinkParts, lengths=lengths, mQ=mQ,
            mLSELow=mLSELow,
        )  # fmt: skip
        self.kernel(args).launch(
            grid=(heads * num_row_blocks, 1, 1), block=(NUM_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, args: PreprocessArgs):
        mO, mdO, mQ, mSink = args.mO, args.mdO, args.mQ, args.mSink
        mStats, mdQaccum, mSemaphores = args.mStats, args.mdQaccum, args.mSemaphores
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        # heads change fastest, as they do in memory
        block = cta // mStats.shape[0]
        head_idx = cta - block * mStats.shape[0]
        smem = cutlass.memory.SmemAllocator()
        sDelta = smem.allocate_tensor(Float32, cute.make_layout(self.padded_rows))
        # parts of a warp's rows or, of packed heads, of each row
        num_parts = self.padded_rows // (1 if self.packing.is_there else WARP)
        sParts = smem.allocate_tensor(Float32, cute.make_layout(num_parts))
        if const_expr(mQ is not None):
            # a bit for each row that may see nothing, and what such rows hold
            sEmpty = smem.allocate_tensor(Int32, cute.make_layout(self.padded_rows // WARP))
            sVerdicts = smem.allocate_tensor(Int32, cute.make_layout(self.padded_rows))
        if const_expr(mdQaccum is not None):
            self._clear(mdQaccum[head_idx, block, None], thread)
        if const_expr(mSemaphores is not None):  # noqa: SIM102 (decided while tracing)
            if thread == 0:
                for i in range_constexpr(self.num_semaphores):
                    mSemaphores[head_idx, block * self.num_semaphores + i] = Int32(0)
        if const_expr(mSink is not None):
            sink = mSink[self._query_head(head_idx, thread)].to(Float32)
        if const_expr(mQ is not None):
            marks = marks_of(
                mStats[head_idx, block, None], self.tile_m, self.num_stats, self.packing.rows
            )
        rows = rows_of(block, args.lengths, self.tile_m, self.packing)
        sink_part = Float32(0.0)
        if rows.in_slot > 0:
            of_row = self._read_lse(args, head_idx, rows, thread)
            gO = rows_of_head(mO, head_idx, rows)
            if const_expr(mQ is not None):
                is_empty = of_row.lse == -Float32.inf
                if const_expr(mSink is not None):
                    # it is looked at more closely below
                    is_empty = is_empty | _is_near(of_row.lse, sink)
                is_empty = is_empty & (thread < rows.in_use) & self.packing.is_head(thread)
                self._store_votes(sEmpty, is_empty, thread)
            self._sum_products(gO, rows_of_head(mdO, head_idx, rows), sDelta, rows, thread)
            cute.arch.sync_threads()
            is_marked = Boolean(False)
            if const_expr(mQ is not None):
                is_marked = self._is_marked(
                    rows_of_head(mQ, head_idx, rows),
                    rows_of_head(mdO, head_idx, rows),
                    gO if const_expr(mSink is not None) else None,
                    (sEmpty, sVerdicts),
                    of_row,
                    thread,
                )
                self._store_marks(marks, is_marked, thread)
            if thread < self.padded_rows:
                # O is 0 in rows that are marked
                summed = cutlass.select_(is_marked, Float32(0.0), sDelta[thread])
                delta = cutlass.select_(of_row.sees_something, summed - of_row.dlse, Float32(0.0))
                self._store_statistics(mStats, head_idx, block, of_row, delta, is_marked, thread)
                if const_expr(mSink is not None):
                    self._store_sink_part(sParts, of_row, delta, sink, thread)
            if const_expr(mSink is not None):
                cute.arch.sync_threads()
                if const_expr(not self.packing.is_there):
                    for i in range_constexpr(self.padded_rows // WARP):
                        sink_part += sParts[i]
                else:
                    of_query = self.packing.rows
                    for i in range_constexpr(self.tile_m // of_query):
                        sink_part += sParts[i * of_query + thread % of_query]
        elif thread < self.tile_m:
            # keys of a sequence without queries visit this block, hidden as it is
            lse_at, *others_at = self._places(thread)
            mStats[head_idx, block, lse_at] = Float32.inf
            for at in others_at:
                mStats[head_idx, block, at] = Float32(0.0)
            if const_expr(mQ is not None):
                if const_expr(self.packing.is_there):
                    self._store_marks(marks, Boolean(False), thread)
                elif thread < self.padded_rows // WARP:
                    marks[thread] = Int32(0)
        if const_expr(mSink is not None):  # noqa: SIM102 (decided while tracing)
            if thread < self.packing.heads:
                args.mSinkParts[self._query_head(head_idx, thread), block] = sink_part

    def _query_head(self, head_idx: Int32, row: Int32) -> Int32:
        """The query head of a row, where head_idx may be a KV head."""
        if not self.packing.is_there:
            return head_idx
        return head_idx * self.packing.heads + self.packing.place(row % self.packing.rows)

    @property
    def num_stats(self) -> int:
        return 3 if self.has_reference else 2

    @cute.jit
    def _read_lse(
        self, args: PreprocessArgs, head_idx: Int32, rows: BlockRows, thread: Int32
    ) -> LseOfRow:
        lse, low, dlse = -Float32.inf, Float32(0.0), Float32(0.0)
        if (thread < rows.in_use) & self.packing.is_head(thread):
            lse = self._row_value(args.mLSE, head_idx, rows, thread)
            if const_expr(args.mLSELow is not None):
                low = self._row_value(args.mLSELow, head_idx, rows, thread)
            if const_expr(args.mdLSE is not None):
                dlse = self._row_value(args.mdLSE, head_idx, rows, thread)
        return LseOfRow(lse, low if const_expr(args.mLSELow is not None) else None, dlse)

    @cute.jit
    def _store_statistics(
        self,
        mStats: cute.Tensor,
        head_idx: Int32,
        block: Int32,
        of_row: LseOfRow,
        delta: Float32,
        is_marked: Boolean,
        thread: Int32,
    ):
        """Store the thread's row in mStats, unmarked: LSE, delta, and the reference, if any."""
        if thread < self.tile_m:
            lse_log2 = of_row.lse * LOG2_E
            if const_expr(self.has_reference):
                is_far = of_row.sees_something & (cute.math.abs(of_row.lse) >= FAR)
                own = cutlass.select_(is_far, Float32(0.0), of_row.lse)
                low = Float32(0.0) if const_expr(of_row.low is None) else of_row.low
                lse_log2 = (own + low) * LOG2_E
                reference = cutlass.select_(is_far, of_row.lse, Float32(0.0))
                mStats[head_idx, block, self._places(thread)[2]] = reference
            lse_at, delta_at, *_ = self._places(thread)
            mStats[head_idx, block, lse_at] = cutlass.select_(
                of_row.sees_something, lse_log2, Float32.inf
            )
            mStats[head_idx, block, delta_at] = cutlass.select_(is_marked, Float32(0.0), delta)

    def _places(self, row: Int32) -> tuple[Int32, ...]:
        """The places of a row's LSE, delta, and reference, if any, in a row block's statistics."""
        first, apart = row, self.tile_m
        if self.packing.is_there:
            apart = self.packing.rows
            words_of_query = stats_words(apart, self.num_stats, self.has_marks, apart)
            first = row // apart * words_of_query + row % apart
        return tuple(first + i * apart for i in range(self.num_stats))

    @cute.jit
    def _store_sink_part(
        self, sParts: cute.Tensor, of_row: LseOfRow, delta: Float32, sink: Float32, thread: Int32
    ):
        """Store a warp's part of the gradient of their head's sink, or of each packed row's."""
        exponent = (sink - of_row.lse) * LOG2_E
        if const_expr(of_row.low is not None):
            exponent = (sink - of_row.lse - of_row.low) * LOG2_E
        part = -cute.math.exp2(exponent, fastmath=True) * delta
        part = cutlass.select_(of_row.sees_something, part, Float32(0.0))
        if const_expr(self.packing.is_there):
            sParts[thread] = part
        else:
            part = cute.arch.warp_reduction_sum(part)
            if thread % WARP == 0:
                sParts[thread // WARP] = part

    def _row_value(
        self, tensor: cute.Tensor, head_idx: Int32, rows: BlockRows, row: Int32
    ) -> Float32:
        if cute.rank(tensor) == 3:
            tensor = tensor[rows.batch_idx, None, None]
        return tensor[head_idx, rows.first + self.packing.place(row)]

    @cute.jit
    def _sum_products(
        self,
        gO: cute.Tensor,
        gdO: cute.Tensor,
        sDelta: cute.Tensor,
        rows: BlockRows,
        thread: Int32,
    ):
        """sDelta = the sum of O * dO of each row in use; an unused row takes another row's."""
        row_in_round = thread // LANES_PER_ROW
        rounds = self.padded_rows // ROWS_PER_ROUND
        rounds_in_flight = max(1, IN_FLIGHT // (2 * _vectors_per_lane(self.vectors_per_row)))
        # Rows not in use are replaced by one that may be read: a clamp costs less than a branch.
        last_row = cutlass.max(rows.in_use, 1) - 1
        for start in range_constexpr(0, rounds, rounds_in_flight):
            batch = range(start, min(start + rounds_in_flight, rounds))
            pairs = []
            for i in batch:
                row = self.packing.place(cutlass.min(i * ROWS_PER_ROUND + row_in_round, last_row))
                pairs.append(tuple(self._load(x[row, None], thread) for x in (gO, gdO)))
            for i, (o, do) in zip(batch, pairs, strict=True):
                delta = cute.arch.warp_reduction_sum(
                    self._dot(o, do, self.vectors_per_row, thread), threads_in_group=LANES_PER_ROW
                )
                if thread % LANES_PER_ROW == 0:
                    sDelta[i * ROWS_PER_ROUND + row_in_round] = delta

    @cute.jit
    def _is_marked(
        self,
        gQ: cute.Tensor,
        gdO: cute.Tensor,
        gO: cute.Tensor | None,
        shared: tuple[cute.Tensor, cute.Tensor],
        of_row: LseOfRow,
        thread: Int32,
    ) -> Boolean:
        """Whether the thread's row must be cleared. gO: with a sink. shared: sEmpty, sVerdicts."""
        sEmpty, sVerdicts = shared
        is_marked, any_empty = Boolean(False), sEmpty[0]
        for i in range_constexpr(1, self.padded_rows // WARP):
            any_empty = any_empty | sEmpty[i]
        if any_empty != 0:
            self._judge_rows(gQ, gdO, gO, sEmpty, sVerdicts, thread)
            cute.arch.sync_threads()
            if thread < self.padded_rows:
                verdict = sVerdicts[thread]
                is_marked = (verdict & HOSTILE) != 0
                if const_expr(gO is not None):
                    # LSE may be the sink, and has a gradient then
                    of_sink = of_row.sees_something
                    is_marked = is_marked | (of_sink & (_is_finite(of_row.dlse) == Boolean(False)))
                    is_marked = is_marked & ((of_sink & ((verdict & SEES) != 0)) == Boolean(False))
                is_empty = (sEmpty[thread // WARP] >> (thread % WARP)) & 1 != 0
                is_marked = is_marked & is_empty
        return is_marked

    @cute.jit
    def _judge_rows(
        self,
        gQ: cute.Tensor,
        gdO: cute.Tensor,
        gO: cute.Tensor | None,
        sEmpty: cute.Tensor,
        sVerdicts: cute.Tensor,
        thread: Int32,
    ):
        """sVerdicts = HOSTILE and SEES, of the rows with a bit in sEmpty."""
        row_in_round, vectors = thread // LANES_PER_ROW, gQ.shape[1] // VECTOR_16_BITS
        for i in range_constexpr(self.padded_rows // ROWS_PER_ROUND):
            square, of_output = Float32(0.0), Float32(0.0)
            # a word has the rows of a round
            if (sEmpty[i] >> row_in_round) & 1 != 0:
                row = self.packing.place(i * ROWS_PER_ROUND + row_in_round)
                q, do = self._load(gQ[row, None], thread), self._load(gdO[row, None], thread)
                square = self._dot(q, q, vectors, thread)
                square += self._dot(do, do, self.vectors_per_row, thread)
                if const_expr(gO is not None):
                    o = self._load(gO[row, None], thread)
                    of_output = self._dot(o, o, self.vectors_per_row, thread)
            square, of_output = (
                cute.arch.warp_reduction_sum(x, threads_in_group=LANES_PER_ROW)
                for x in (square, of_output)
            )
            if thread % LANES_PER_ROW == 0:
                sVerdicts[i * ROWS_PER_ROUND + row_in_round] = cutlass.select_(
                    _is_finite(square), Int32(0), Int32(HOSTILE)
                ) | cutlass.select_(of_output > 0.0, Int32(SEES), Int32(0))

    @cute.jit
    def _store_votes(self, words: cute.Tensor, vote: Boolean, thread: Int32):
        """Write the bits of the rows' threads, row r's as bit r % 32 of word r // 32."""
        word = cute.arch.vote_ballot_sync(vote)
        if (thread < self.padded_rows) & (thread % WARP == 0):
            words[thread // WARP] = Int32(word)

    @cute.jit
    def _store_marks(self, marks: cute.Tensor, is_marked: Boolean, thread: Int32):
        """Write whether rows are marked, as `marks_of` says."""
        if const_expr(not self.packing.is_there):
            self._store_votes(marks, is_marked, thread)
        else:
            of_query = self.packing.rows
            # a word has a query's rows, or a part of them
            of_word = min(of_query, MARKS_PER_WORD)
            votes = Int32(cute.arch.vote_ballot_sync(is_marked)) >> (thread % WARP)
            if (thread < self.tile_m) & (thread % of_word == 0):
                place = thread // of_word % mark_words_of_query(of_query), thread // of_query
                of_rows = -1 if of_word == MARKS_PER_WORD else (1 << of_word) - 1
                marks[place] = votes & of_rows

    def _load(self, row: cute.Tensor, thread: Int32) -> cute.Tensor:
        """This lane's vectors of a row; (8, vectors of a lane)."""
        vectors = row.shape[0] // VECTOR_16_BITS
        per_lane = _vectors_per_lane(vectors)
        values = cute.make_rmem_tensor((VECTOR_16_BITS, per_lane), self.dtype)
        for i in range(per_lane):
            vector = cutlass.min(_vector_idx(thread, i), vectors - 1)
            cute.autovec_copy(vector_of(row, vector, VECTOR_16_BITS), values[None, i])
        return values

    def _dot(self, o: cute.Tensor, do: cute.Tensor, vectors: int, thread: Int32) -> Float32:
        """This lane's share of the product of two rows of so many vectors."""
        total = Float32(0.0)
        for i in range(_vectors_per_lane(vectors)):
            products = o[None, i].load().to(Float32) * do[None, i].load().to(Float32)
            share = products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            # lanes past the end of the row hold its last vector once more
            is_mine = _vector_idx(thread, i) < vectors
            total += cutlass.select_(is_mine, share, Float32(0.0))
        return total

    def _clear(self, gX: cute.Tensor, thread: Int32) -> None:
        zeros = cute.make_rmem_tensor((VECTOR_32_BITS,), Float32)
        zeros.fill(0.0)
        for i in range(cute.size(gX) // (VECTOR_32_BITS * NUM_THREADS)):
            cute.autovec_copy(zeros, vector_of(gX, i * NUM_THREADS + thread, VECTOR_32_BITS))
