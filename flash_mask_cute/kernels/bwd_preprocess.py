"""What the backward needs to know about each query row before it starts: its LSE and its delta.

Where scores may be of any size, an LSE far from 0 is kept as a reference that the main kernel
subtracts from scores first, and only what rounding has taken from it as LSE.

A CTA takes one row block (`core.row_blocks`) of one head. The grid covers all of them, so nothing
has to be cleared beforehand: those of packed sequences find theirs by a search, and one that
belongs to none just writes zeros. The kernel is bound by memory; what it does about that is to keep
many 16-byte accesses in flight.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.row_blocks import RowBlocks

NUM_THREADS = 256
WARP = 32
LOG2_E = math.log2(math.e)
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


class BlockRows(NamedTuple):
    """The query rows of a row block."""

    batch_idx: Int32
    first: Int32
    """Where they start: in the sequence, or, where sequences are packed, in the tensor."""
    in_slot: Int32
    """How many belong to the sequence, at most tile_m; not positive: the block has no sequence."""
    in_use: Int32
    """How many of those are in use (seqused_q); may be negative."""


@cute.jit
def rows_of(block: Int32, lengths: Lengths, tile_m: cutlass.Constexpr) -> BlockRows:
    """The rows of a row block. All lanes of a warp must ask for the same one."""
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
    """The last of the packed sequences whose first row block is not after this one."""
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


def rows_of_head(tensor: cute.Tensor, head_idx: Int32, rows: BlockRows) -> cute.Tensor:
    """(rows, dim) of a tensor (batch, seqlen, heads, dim) or (total, heads, dim), from the block's
    first row on."""
    if cute.rank(tensor) == 4:
        tensor = tensor[rows.batch_idx, None, None, None]
    return cute.domain_offset((rows.first, 0), tensor[None, head_idx, None])


def vector_of(tensor: cute.Tensor, index: Int32, size: int) -> cute.Tensor:
    """`size` elements of a contiguous vector, the first at index * size."""
    return cute.local_tile(tensor, (size,), (index,))


class BwdPreprocess:
    """Fills the row statistics, and clears the sums of dQ or says that there are none yet; to be
    passed to `cute.compile`.

    :param dtype: of O and dO, 16 bits
    :param head_dim_v: a multiple of 8, at most 256
    :param tile_m: query rows of a row block, a multiple of 16 up to 256
    :raises ValueError: a size is none of these
    """

    def __init__(self, dtype: type[cutlass.Numeric], head_dim_v: int, tile_m: int):
        if tile_m % 16 or not 0 < tile_m <= NUM_THREADS:
            raise ValueError(f"tile_m must be a multiple of 16 up to {NUM_THREADS}, got {tile_m}")
        if head_dim_v % VECTOR_16_BITS or not 0 < head_dim_v <= 256:
            raise ValueError(f"head_dim_v must be a multiple of 8 up to 256, got {head_dim_v}")
        self.dtype = dtype
        self.tile_m = tile_m
        # rows that whole warps and whole rounds see to, the last of them for nothing
        self.padded_rows = -(-tile_m // WARP) * WARP
        self.vectors_per_row = head_dim_v // VECTOR_16_BITS
        self.vectors_per_lane = -(-self.vectors_per_row // LANES_PER_ROW)

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: cute.Tensor | None,
        mStats: cute.Tensor,
        mdQaccum: cute.Tensor | None,
        mTurns: cute.Tensor | None,
        mSink: cute.Tensor | None,
        mSinkParts: cute.Tensor | None,
        stream,
        mCuSeqlensQ: cute.Tensor | None,
        mSeqUsedQ: cute.Tensor | None,
        mLSELow: cute.Tensor | None = None,
    ):
        """Launch on `stream`, for at least one head and row block. Nothing has to be
        cleared beforehand.

        :param mO: (batch, seqlen_q, heads_q, head_dim_v) or packed (total_q, heads_q, head_dim_v),
            rows contiguous and aligned to 16 bytes, other strides free
        :param mdO: as mO
        :param mLSE: fp32 (batch, heads_q, seqlen_q) or (heads_q, total_q), any strides
        :param mdLSE: as mLSE
        :param mStats: fp32 (heads_q, num_row_blocks, 2 or 3, tile_m). [0]: LSE by base 2, inf for
            rows that see nothing and rows that no sequence uses; [1]: delta, the sum of O * dO less
            dLSE, 0 for those rows; [2], if there: what is to be subtracted from scores beforehand,
            of which [0] is less then, 0 where LSE is near 0 and for those rows
        :param mdQaccum: fp32 (heads_q, num_row_blocks, a multiple of 1024), contiguous and aligned
            to 16 bytes; zeroed, if given
        :param mTurns: int32 (heads_q, num_row_blocks); zeroed, if given
        :param mSink: (heads_q,), the learnable sinks; with mSinkParts or not at all
        :param mSinkParts: fp32 (heads_q, num_row_blocks): what each row block adds to the gradient
            of its head's sink; 0 where it belongs to no sequence
        :param mCuSeqlensQ: int32 (num_sequences + 1,), with at least one sequence; packed only
        :param mSeqUsedQ: int32 (batch,) or (num_sequences,)
        :param mLSELow: as mLSE, what rounding has taken from it; for mStats with three rows
        """
        # the rows of packed tensors are of no interest: lengths come from mCuSeqlensQ
        seqlen_q = Int32(mO.shape[0 if const_expr(mCuSeqlensQ is not None) else 1])
        lengths = Lengths(mCuSeqlensQ, None, mSeqUsedQ, None, seqlen_q, Int32(0))
        heads, num_row_blocks = mStats.shape[0], mStats.shape[1]
        self.kernel(
            mO, mdO, mLSE, mdLSE, mStats, mdQaccum, mTurns, mSink, mSinkParts, lengths, mLSELow
        ).launch(grid=(heads * num_row_blocks, 1, 1), block=(NUM_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: cute.Tensor | None,
        mStats: cute.Tensor,
        mdQaccum: cute.Tensor | None,
        mTurns: cute.Tensor | None,
        mSink: cute.Tensor | None,
        mSinkParts: cute.Tensor | None,
        lengths: Lengths,
        mLSELow: cute.Tensor | None,
    ):
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        # heads change fastest, as they do in memory
        block = cta // mStats.shape[0]
        head_idx = cta - block * mStats.shape[0]
        smem = cutlass.memory.SmemAllocator()
        sDelta = smem.allocate_tensor(Float32, cute.make_layout(self.padded_rows))
        sParts = smem.allocate_tensor(Float32, cute.make_layout(self.padded_rows // WARP))
        if const_expr(mdQaccum is not None):
            self._clear(mdQaccum[head_idx, block, None], thread)
        if const_expr(mTurns is not None):  # noqa: SIM102 (decided while tracing)
            if thread == 0:
                mTurns[head_idx, block] = Int32(0)
        if const_expr(mSink is not None):
            sink = mSink[head_idx].to(Float32)
        rows = rows_of(block, lengths, self.tile_m)
        sink_part = Float32(0.0)
        if rows.in_slot > 0:
            lse = -Float32.inf
            lse_low = Float32(0.0)
            dlse = Float32(0.0)
            if thread < rows.in_use:
                lse = self._row_value(mLSE, head_idx, rows, thread)
                if const_expr(mLSELow is not None):
                    lse_low = self._row_value(mLSELow, head_idx, rows, thread)
                if const_expr(mdLSE is not None):
                    dlse = self._row_value(mdLSE, head_idx, rows, thread)
            gO = rows_of_head(mO, head_idx, rows)
            self._sum_products(gO, rows_of_head(mdO, head_idx, rows), sDelta, rows, thread)
            cute.arch.sync_threads()
            if thread < self.padded_rows:
                sees_something = lse != -Float32.inf
                delta = cutlass.select_(sees_something, sDelta[thread] - dlse, Float32(0.0))
                if thread < self.tile_m:
                    lse_log2 = lse * LOG2_E
                    if const_expr(mStats.shape[2] == 3):
                        is_far = sees_something & (cute.math.abs(lse) >= FAR)
                        own = cutlass.select_(is_far, Float32(0.0), lse)
                        lse_log2 = (own + lse_low) * LOG2_E
                        reference = cutlass.select_(is_far, lse, Float32(0.0))
                        mStats[head_idx, block, 2, thread] = reference
                    mStats[head_idx, block, 0, thread] = cutlass.select_(
                        sees_something, lse_log2, Float32.inf
                    )
                    mStats[head_idx, block, 1, thread] = delta
                if const_expr(mSink is not None):
                    exponent = (sink - lse) * LOG2_E
                    if const_expr(mLSELow is not None):
                        exponent = (sink - lse - lse_low) * LOG2_E
                    part = -cute.math.exp2(exponent, fastmath=True) * delta
                    part = cutlass.select_(sees_something, part, Float32(0.0))
                    part = cute.arch.warp_reduction_sum(part)
                    if thread % WARP == 0:
                        sParts[thread // WARP] = part
            if const_expr(mSink is not None):
                cute.arch.sync_threads()
                for i in range_constexpr(self.padded_rows // WARP):
                    sink_part += sParts[i]
        elif thread < self.tile_m:
            # keys of a sequence without queries visit this block, hidden as it is
            mStats[head_idx, block, 0, thread] = Float32.inf
            mStats[head_idx, block, 1, thread] = Float32(0.0)
            if const_expr(mStats.shape[2] == 3):
                mStats[head_idx, block, 2, thread] = Float32(0.0)
        if const_expr(mSink is not None):  # noqa: SIM102 (decided while tracing)
            if thread == 0:
                mSinkParts[head_idx, block] = sink_part

    def _row_value(
        self, tensor: cute.Tensor, head_idx: Int32, rows: BlockRows, row: Int32
    ) -> Float32:
        if cute.rank(tensor) == 3:
            tensor = tensor[rows.batch_idx, None, None]
        return tensor[head_idx, rows.first + row]

    @cute.jit
    def _sum_products(
        self,
        gO: cute.Tensor,
        gdO: cute.Tensor,
        sDelta: cute.Tensor,
        rows: BlockRows,
        thread: Int32,
    ):
        """sDelta = the sum of O * dO of each row in use; of another row where one is not."""
        row_in_round = thread // LANES_PER_ROW
        rounds = self.padded_rows // ROWS_PER_ROUND
        rounds_in_flight = max(1, IN_FLIGHT // (2 * self.vectors_per_lane))
        # Rows not in use are replaced by one that may be read: a clamp costs less than a branch.
        last_row = cutlass.max(rows.in_use, 1) - 1
        for start in range_constexpr(0, rounds, rounds_in_flight):
            batch = range(start, min(start + rounds_in_flight, rounds))
            pairs = []
            for i in batch:
                row = cutlass.min(i * ROWS_PER_ROUND + row_in_round, last_row)
                pairs.append((self._load(gO, row, thread), self._load(gdO, row, thread)))
            for i, (o, do) in zip(batch, pairs, strict=True):
                delta = cute.arch.warp_reduction_sum(
                    self._dot(o, do, thread), threads_in_group=LANES_PER_ROW
                )
                if thread % LANES_PER_ROW == 0:
                    sDelta[i * ROWS_PER_ROUND + row_in_round] = delta

    def _vector_idx(self, thread: Int32, i: int) -> Int32:
        return i * LANES_PER_ROW + thread % LANES_PER_ROW

    def _load(self, gX: cute.Tensor, row: Int32, thread: Int32) -> cute.Tensor:
        """This lane's vectors of a row; (8, vectors_per_lane)."""
        values = cute.make_rmem_tensor((VECTOR_16_BITS, self.vectors_per_lane), self.dtype)
        for i in range(self.vectors_per_lane):
            vector = cutlass.min(self._vector_idx(thread, i), self.vectors_per_row - 1)
            source = vector_of(gX[row, None], vector, VECTOR_16_BITS)
            cute.autovec_copy(source, values[None, i])
        return values

    def _dot(self, o: cute.Tensor, do: cute.Tensor, thread: Int32) -> Float32:
        """This lane's share of a row's product."""
        total = Float32(0.0)
        for i in range(self.vectors_per_lane):
            products = o[None, i].load().to(Float32) * do[None, i].load().to(Float32)
            share = products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            # lanes past the end of the row hold its last vector once more
            is_mine = self._vector_idx(thread, i) < self.vectors_per_row
            total += cutlass.select_(is_mine, share, Float32(0.0))
        return total

    def _clear(self, gX: cute.Tensor, thread: Int32) -> None:
        zeros = cute.make_rmem_tensor((VECTOR_32_BITS,), Float32)
        zeros.fill(0.0)
        for i in range(cute.size(gX) // (VECTOR_32_BITS * NUM_THREADS)):
            cute.autovec_copy(zeros, vector_of(gX, i * NUM_THREADS + thread, VECTOR_32_BITS))
