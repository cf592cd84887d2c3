"""The end of a work tile of the Hopper forward: stores O and LSE of a warpgroup's rows.

A whole tile is stored by TMA through shared memory. A split (`core/partials.py`), or a tile with
padding rows of no head, is stored from registers, row by row.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_mask_cute.core import tma
from flash_mask_cute.core.cta import WARPS_PER_WARPGROUP, thread_in_warpgroup
from flash_mask_cute.core.lengths import Lengths, LseTensors
from flash_mask_cute.core.partials import OutputRows, Partials
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.mods.calling import head_of_row
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_fwd_mainloop import KeyBlocks, tile_rows
from flash_mask_cute.sm90.flash_fwd_traits import Barrier, FwdTraits
from flash_mask_cute.sm90.warpgroups import mma_warpgroup_idx, store_rows, sync_warpgroup


@dataclass(frozen=True)
class Epilogue:
    """The destination of results. sink: logits (heads_q,), or None. mO: the output if a tile may
    have padding rows, else None."""

    traits: cutlass.Constexpr[FwdTraits]
    operands: tma.Operands
    lse: LseTensors
    lengths: Lengths
    sink: cute.Tensor | None
    partials: Partials | None
    mO: cute.Tensor | None

    @cute.jit
    def run(self, blocks: KeyBlocks, sO: cute.Tensor, work: Work):
        """Scale the accumulator, and store it (through sO) and the LSE of this warpgroup's rows."""
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
        for r, (factor, row_lse, low) in enumerate(blocks.softmax.finalize(sinks)):
            if const_expr(lengths.seqused_q is not None):
                used = q_idx[r] < work.seqlen_q
                row_lse = cutlass.select_(used, row_lse, -Float32.inf)
                if const_expr(low is not None):
                    low = cutlass.select_(used, low, Float32(0.0))
                for c in cutlass.range_constexpr(cute.size(output, mode=[1])):
                    output[r, c] = cutlass.select_(used, output[r, c] * factor, Float32(0.0))
            else:
                # adding 0 makes the zeros of a row that saw nothing positive, however they came
                for c in cutlass.range_constexpr(cute.size(output, mode=[1])):
                    output[r, c] = cute.math.fma(output[r, c], factor, Float32(0.0))
            is_told = (thread % 4 == 0) & self._is_row(work, rows[r])
            if const_expr(partials is not None):
                if is_told & partials.is_split(work):
                    tile_row = rows[r] - work.block * traits.tile_m
                    place = partials.row(work, is_packed, heads[r], q_idx[r], tile_row)
                    partials.store_lse(place, row_lse, low)
                is_told = is_told & (partials.is_split(work) == Boolean(False))
            if const_expr(self.lse.lse is not None):  # noqa: SIM102 (decided while tracing)
                if is_told:
                    self.lse.store(lengths, work, heads[r], q_idx[r], row_lse, low)
        if const_expr(self.lse.largest is not None):
            for r, largest in enumerate(blocks.softmax.largest()):
                if (thread % 4 == 0) & self._is_head(rows[r]):
                    self.lse.store_largest(lengths, work, heads[r], q_idx[r], largest)
        if const_expr(partials is None):
            self._store_output(sO, acc_O, work)
        elif const_expr(partials.by_slots):
            if partials.is_split(work):
                self._store_rows(output, work, partials)
            else:
                self._store_output(sO, acc_O, work)
        else:
            self._store_rows(output, work, partials)

    def _is_row(self, work: Work, row: Int32) -> Boolean:
        """Whether a row of a tile belongs to a query head, in use or not."""
        return (row // self.traits.packed_heads < work.slot) & self._is_head(row)

    def _is_head(self, row: Int32) -> Boolean | bool:
        """Whether a row of a tile belongs to a query head, if the query exists."""
        traits = self.traits
        return row % traits.packed_heads < traits.group_size if traits.is_padded else True

    @cute.jit
    def _store_output(self, sO: cute.Tensor, acc_O: cute.Tensor, work: Work):
        """Store this warpgroup's rows of the output."""
        if const_expr(self.mO is None):
            self._store_tile(sO, acc_O, work)
        else:
            self._store_rows(wgmma.rows_by_cols(acc_O), work, OutputRows(self.mO))

    @cute.jit
    def _store_tile(self, sO: cute.Tensor, acc_O: cute.Tensor, work: Work):
        """Store this warpgroup's rows of the output through sO."""
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
            dst, src = tma.tile_of(
                self.operands.o_atom, gO, first, (traits.row_tile, traits.tile_dv), sO
            )
            cute.copy(self.operands.o_atom, src, dst)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _store_rows(self, output: cute.Tensor, work: Work, target: Partials | OutputRows):
        """Store this thread's rows and columns directly from registers."""
        traits, thread = self.traits, thread_in_warpgroup()
        is_packed = self.lengths.cu_seqlens_q is not None
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
                        _store_pair(columns, column, output[r, c], output[r, c + 1])


def _store_pair(target: cute.Tensor, column: Int32, first: Float32, second: Float32) -> None:
    """Write two values to a row, starting at an even column."""
    values = cute.make_rmem_tensor((2,), target.element_type)
    values[0], values[1] = (x.to(target.element_type) for x in (first, second))
    cute.autovec_copy(values, cute.local_tile(target, (2,), (column // 2,)))
