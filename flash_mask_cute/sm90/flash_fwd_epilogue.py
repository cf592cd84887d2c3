"""The end of a work tile of the Hopper forward: stores O and LSE of a warpgroup's rows.

A whole tile is stored by TMA through shared memory. A split, or a tile with rows of no query, is
stored from registers, row by row. If a CTA computes the fixed splits of a row one after the other
(`core/fixed_splits.py`), its threads reduce each into the sum of those before.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_mask_cute.core import tma
from flash_mask_cute.core.cta import THREADS_PER_WARPGROUP, WARPS_PER_WARPGROUP, thread_in_warpgroup
from flash_mask_cute.core.fixed_splits import FIRST, LAST
from flash_mask_cute.core.lengths import Lengths, LseTensors
from flash_mask_cute.core.ordered_sums import (
    VECTOR,
    RowSums,
    RunningSums,
    normalised,
    read_vectors,
    reduced,
    write_vectors,
)
from flash_mask_cute.core.partials import OutputRows, Partials
from flash_mask_cute.core.softmax import RowResult
from flash_mask_cute.core.value_halves import ValueHalf
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.mods.calling import head_of_row
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_fwd_mainloop import KeyBlocks, tile_rows
from flash_mask_cute.sm90.flash_fwd_traits import Barrier, FwdTraits
from flash_mask_cute.sm90.warpgroups import mma_warpgroup_idx, store_rows, sync_warpgroup


@dataclass(frozen=True)
class Epilogue:
    """sink: logits (heads_q,), or None. partials: the destination of splits or of sums of fixed
    splits, or None. mO: the output if threads store rows, else None. is_ordered: sums are of
    fixed splits. half: the columns of this CTA; None: all.
    """

    traits: cutlass.Constexpr[FwdTraits]
    operands: tma.Operands
    lse: LseTensors
    lengths: Lengths
    sink: cute.Tensor | None
    partials: Partials | RunningSums | None
    mO: cute.Tensor | None
    is_ordered: cutlass.Constexpr[bool]
    half: ValueHalf | None = None

    @cute.jit
    def run(self, blocks: KeyBlocks, sO: cute.Tensor, work: Work):
        """Scale and store this warpgroup's rows, by way of sO (64, tile_dv)."""
        if const_expr(self.lengths.keys_may_be_absent):  # noqa: SIM102 (decided while tracing)
            if not work.has_scores:
                # what was loaded is a row that is not in use, or a neighbour's
                blocks.acc_O.fill(0.0)
        if const_expr(not self.is_ordered):
            self._finish(blocks, sO, work)
        elif const_expr(isinstance(self.partials, Partials)):
            self._store_fixed_split(blocks, work)
        else:
            self._reduce_fixed_split(blocks, sO, work)

    @cute.jit
    def _finish(self, blocks: KeyBlocks, sO: cute.Tensor, work: Work):
        traits, lengths, partials, acc_O = self.traits, self.lengths, self.partials, blocks.acc_O
        thread = thread_in_warpgroup()
        is_packed = lengths.cu_seqlens_q is not None
        rows = tile_rows(traits, work, thread)
        q_idx = tuple(row // traits.packed_heads for row in rows)
        group = traits.packed_heads, traits.group_size
        heads = tuple(head_of_row(work, row, *group) for row in rows)
        sinks = None
        if const_expr(self.sink is not None):
            sinks = tuple(self.sink[head].to(Float32) for head in heads)
            if const_expr(partials is not None):
                adds = partials.is_first(work)
                sinks = tuple(cutlass.select_(adds, sink, -Float32.inf) for sink in sinks)
        output = wgmma.rows_by_cols(acc_O)
        for r, result in enumerate(blocks.softmax.finalize(sinks)):
            factor = result.factor
            if const_expr(lengths.seqused_q is not None):
                used = q_idx[r] < work.seqlen_q
                result = _unless_unused(result, used)
                for c in cutlass.range_constexpr(cute.size(output, mode=[1])):
                    output[r, c] = cutlass.select_(used, output[r, c] * factor, Float32(0.0))
            else:
                # adding 0 makes the zeros of a row that saw nothing positive, however they came
                for c in cutlass.range_constexpr(cute.size(output, mode=[1])):
                    output[r, c] = cute.math.fma(output[r, c], factor, Float32(0.0))
            _, row_lse, low = result
            stores_lse = self._writes_rows(thread) & self._is_row(work, rows[r])
            if const_expr(partials is not None):
                if stores_lse & partials.is_split(work):
                    tile_row = rows[r] - work.block * traits.tile_m
                    place = partials.row(work, is_packed, heads[r], q_idx[r], tile_row)
                    partials.store_lse(place, row_lse, low)
                stores_lse = stores_lse & (partials.is_split(work) == Boolean(False))
            if const_expr(self.lse.lse is not None):  # noqa: SIM102 (decided while tracing)
                if stores_lse:
                    self.lse.store(lengths, work, heads[r], q_idx[r], row_lse, low)
        if const_expr(self.lse.largest is not None):
            for r, largest in enumerate(blocks.softmax.largest()):
                if self._writes_rows(thread) & self._is_head(rows[r]):
                    self.lse.store_largest(lengths, work, heads[r], q_idx[r], largest)
        if const_expr(partials is None):
            self._store_output(sO, acc_O, work)
        elif const_expr(partials.by_stream_k):
            if partials.is_split(work):
                self._store_rows(output, work, partials)
            else:
                self._store_output(sO, acc_O, work)
        else:
            self._store_rows(output, work, partials)

    # -- fixed splits ------------------------------------------------------------------------------

    @cute.jit
    def _results(self, blocks: KeyBlocks) -> tuple:
        """Normalise the accumulator. Returns each row's `RowResult`, without a sink."""
        output, results = wgmma.rows_by_cols(blocks.acc_O), blocks.softmax.finalize(None)
        for r, result in enumerate(results):
            for c in cutlass.range_constexpr(cute.size(output, mode=[1])):
                output[r, c] = normalised(output[r, c], result.factor)
        return results

    @cute.jit
    def _store_fixed_split(self, blocks: KeyBlocks, work: Work):
        """Store a fixed split for another kernel to reduce (`kernels/reduce_splits.py`)."""
        traits, thread, partials = self.traits, thread_in_warpgroup(), self.partials
        is_packed = self.lengths.cu_seqlens_q is not None
        rows = tile_rows(traits, work, thread)
        for r, (_, row_lse, low) in enumerate(self._results(blocks)):
            head_idx = head_of_row(work, rows[r], traits.packed_heads, traits.group_size)
            if self._writes_rows(thread) & self._is_row(work, rows[r]):
                q_idx, tile_row = rows[r] // traits.packed_heads, Int32(0)
                place = partials.row(work, is_packed, head_idx, q_idx, tile_row)
                partials.store_lse(place, row_lse, low)
        self._store_rows(wgmma.rows_by_cols(blocks.acc_O), work, partials)

    @cute.jit
    def _reduce_fixed_split(self, blocks: KeyBlocks, sO: cute.Tensor, work: Work):
        """Reduce a fixed split into those before it, and store the rows after the last one."""
        # `RowSums` of two rows in the first vector, the largest score of each in the second
        sums = cute.make_rmem_tensor((VECTOR, 2), Float32)
        for i in cutlass.range_constexpr(VECTOR):
            sums[i, 0] = -Float32.inf if const_expr(i % 2 == 0) else Float32(0.0)
            sums[i, 1] = -Float32.inf
        if const_expr(self.partials is None):
            self._reduce_rows(blocks, sums, None, work)
            self._store_reduced(blocks, sums, sO, work)
        else:
            memory = self.partials.of_thread(cute.arch.thread_idx()[0] - THREADS_PER_WARPGROUP)
            self._reduce_rows(blocks, sums, memory, work)
            if (work.place & LAST) == 0:
                write_vectors(memory, 0, sums)
            else:
                self._store_reduced(blocks, sums, sO, work)

    @cute.jit
    def _reduce_rows(
        self, blocks: KeyBlocks, sums: cute.Tensor, memory: cute.Tensor | None, work: Work
    ):
        """Reduce the accumulator into the output and `sums` of the fixed splits before. `memory`
        has them unless this is the first split, and gets the new ones unless this is the last."""
        output = wgmma.rows_by_cols(blocks.acc_O)
        columns = cute.size(output, mode=[1])
        total, at_once = self.traits.rows_of_thread * columns, self.traits.reduced_at_once
        factors = []
        for first in cutlass.range_constexpr(0, total, at_once):
            of_part = min(at_once, total - first)
            before = cute.make_rmem_tensor((VECTOR, of_part // VECTOR), Float32)
            before.fill(0.0)
            if const_expr(memory is not None):  # noqa: SIM102 (decided while tracing)
                if (work.place & FIRST) == 0:
                    if const_expr(first == 0):
                        read_vectors(memory, 0, sums)
                    # after the two vectors of `sums`
                    read_vectors(memory, 2 + first // VECTOR, before)
            if const_expr(first == 0):
                factors = self._add_results(blocks, sums)
            for i in cutlass.range_constexpr(of_part):
                r, c = divmod(first + i, columns)
                value = reduced(before[i], factors[r][0], output[r, c], factors[r][1])
                output[r, c], before[i] = value, value
            if const_expr(memory is not None):  # noqa: SIM102 (decided while tracing)
                if (work.place & LAST) == 0:
                    write_vectors(memory, 2 + first // VECTOR, before)

    def _add_results(self, blocks: KeyBlocks, sums: cute.Tensor) -> list[tuple[Float32, Float32]]:
        """Normalise the accumulator, add the rows to `sums`; returns both factors of each row."""
        factors = []
        for r, (_, row_lse, low) in enumerate(self._results(blocks)):
            so_far = RowSums(sums[2 * r, 0], sums[2 * r + 1, 0])
            so_far, scale, weight = so_far.add(row_lse, low)
            sums[2 * r, 0], sums[2 * r + 1, 0] = so_far
            factors.append((scale, weight))
        if self.lse.largest is not None:
            for r, largest in enumerate(blocks.softmax.largest()):
                sums[r, 1] = cute.arch.fmax(sums[r, 1], largest)
        return factors

    @cute.jit
    def _store_reduced(self, blocks: KeyBlocks, sums: cute.Tensor, sO: cute.Tensor, work: Work):
        """Normalise and store the rows of a work tile, all of whose fixed splits were reduced."""
        traits, lengths, thread = self.traits, self.lengths, thread_in_warpgroup()
        output = wgmma.rows_by_cols(blocks.acc_O)
        for r, row in enumerate(tile_rows(traits, work, thread)):
            q_idx = row // traits.packed_heads
            head_idx = head_of_row(work, row, traits.packed_heads, traits.group_size)
            sink = None
            if const_expr(self.sink is not None):
                sink = self.sink[head_idx].to(Float32)
            of_row = RowSums(sums[2 * r, 0], sums[2 * r + 1, 0])
            result = of_row.finish(sink, blocks.softmax.takes_any_size)
            used = Boolean(True)
            if const_expr(lengths.seqused_q is not None):
                used = q_idx < work.seqlen_q
                result = _unless_unused(result, used)
            for c in cutlass.range_constexpr(cute.size(output, mode=[1])):
                value = normalised(output[r, c], result.factor)
                if const_expr(lengths.seqused_q is not None):
                    value = cutlass.select_(used, value, Float32(0.0))
                output[r, c] = value
            if const_expr(self.lse.lse is not None):  # noqa: SIM102 (decided while tracing)
                if self._writes_rows(thread) & self._is_row(work, row):
                    self.lse.store(lengths, work, head_idx, q_idx, result.lse, result.lse_low)
            if const_expr(self.lse.largest is not None):  # noqa: SIM102 (decided while tracing)
                if self._writes_rows(thread) & self._is_head(row):
                    self.lse.store_largest(lengths, work, head_idx, q_idx, sums[r, 1])
        self._store_output(sO, blocks.acc_O, work)

    # -- memory ---------------------------------------------------------------------------------

    def _writes_rows(self, thread: Int32) -> Boolean:
        """Whether a thread writes what its rows have once, such as their LSE."""
        is_first = thread % 4 == 0
        return is_first if self.half is None else is_first & self.half.writes_rows

    def _is_row(self, work: Work, row: Int32) -> Boolean:
        """Whether a row of a tile belongs to a query head, in use or not."""
        return (row // self.traits.packed_heads < work.slot) & self._is_head(row)

    def _is_head(self, row: Int32) -> Boolean | bool:
        """Whether a row of a tile belongs to a query head, if the query exists."""
        traits = self.traits
        return row % traits.packed_heads < traits.group_size if traits.is_padded else True

    @cute.jit
    def _store_output(self, sO: cute.Tensor, acc_O: cute.Tensor, work: Work):
        if const_expr(self.mO is None):
            self._store_tile(sO, acc_O, work)
        else:
            self._store_rows(wgmma.rows_by_cols(acc_O), work, OutputRows(self.mO))

    @cute.jit
    def _store_tile(self, sO: cute.Tensor, acc_O: cute.Tensor, work: Work):
        traits = self.traits
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # the previous tile's store must have read the staging memory, and all warps their queries
        is_storing_warp = warp_idx % WARPS_PER_WARPGROUP == 0
        if is_storing_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        sync_warpgroup(Barrier.EPILOGUE)
        store_rows(wgmma.rounded(acc_O, traits.dtype), traits.mma_pv(), sO)
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_warpgroup(Barrier.EPILOGUE)
        if is_storing_warp:
            tile_row = work.block * traits.tile_m + mma_warpgroup_idx() * wgmma.ROWS_PER_WARPGROUP
            first = (work.head_idx * traits.group_size, tile_row // traits.packed_heads)
            is_packed = self.lengths.cu_seqlens_q is not None
            gO = tma.of_sequence(
                self.operands.o, is_packed, work.batch_idx, work.offset_q, work.slot
            )
            column = 0 if const_expr(self.half is None) else self.half.first_column
            dst, src = tma.tile_of(self.operands.o_atom, gO, first, traits.box_o, sO, column)
            cute.copy(self.operands.o_atom, src, dst)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _store_rows(self, output: cute.Tensor, work: Work, target: Partials | OutputRows):
        traits, thread = self.traits, thread_in_warpgroup()
        is_packed = self.lengths.cu_seqlens_q is not None
        fits = traits.second_column + traits.tile_dv <= traits.head_dim_v
        for r, row in enumerate(tile_rows(traits, work, thread)):
            if self._is_row(work, row):
                head_idx = head_of_row(work, row, traits.packed_heads, traits.group_size)
                tile_row = row - work.block * traits.tile_m
                place = target.row(work, is_packed, head_idx, row // traits.packed_heads, tile_row)
                columns = target.o[(*place, None)]
                for c in cutlass.range_constexpr(0, cute.size(output, mode=[1]), 2):
                    # columns come in groups of 8, as those of the output do
                    if const_expr(wgmma.col_offset(c) < traits.head_dim_v):
                        column = wgmma.first_col_of(thread) + wgmma.col_offset(c)
                        if const_expr(self.half is not None):
                            column += self.half.first_column
                        if const_expr(fits):  # noqa: SIM114 (while tracing)
                            _store_pair(columns, column, output[r, c], output[r, c + 1])
                        elif column < traits.head_dim_v:
                            _store_pair(columns, column, output[r, c], output[r, c + 1])


def _unless_unused(result: RowResult, used: Boolean) -> RowResult:
    low = result.lse_low
    return result._replace(
        lse=cutlass.select_(used, result.lse, -Float32.inf),
        lse_low=None if low is None else cutlass.select_(used, low, Float32(0.0)),
    )


def _store_pair(target: cute.Tensor, column: Int32, first: Float32, second: Float32) -> None:
    """Write two values to a row, from an even column on."""
    values = cute.make_rmem_tensor((2,), target.element_type)
    values[0], values[1] = (x.to(target.element_type) for x in (first, second))
    cute.autovec_copy(values, cute.local_tile(target, (2,), (column // 2,)))
