"""The output warps of the Blackwell forward: they store O and LSE of a work tile.

A whole tile is stored by TMA through shared memory. A split (`core/partials.py`), or a tile with
padding rows of no head, is stored from registers, one row per thread.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_mask_cute.core import tma
from flash_mask_cute.core.cta import thread_in_warpgroup
from flash_mask_cute.core.lengths import Lengths, LseTensors
from flash_mask_cute.core.partials import OutputRows, Partials
from flash_mask_cute.core.softmax import OnlineSoftmax
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.mods.calling import head_of_row
from flash_mask_cute.sm100 import umma
from flash_mask_cute.sm100.flash_fwd_traits import (
    ROWS_PER_WARP,
    Channels,
    FwdSmem,
    FwdTraits,
    Role,
)

# columns of the output that a thread holds at a time; few, as its warps have few registers
OUTPUT_CHUNK = 16
# columns that a thread stores together: rows have a multiple of them
VECTOR = 8


class RowAt(NamedTuple):
    """A thread's row: its query head, its query in the sequence, its row in the tile."""

    work: Work
    head_idx: Int32
    q_idx: Int32
    tile_row: Int32

    def place_in(self, target: Partials | OutputRows, is_packed: bool) -> tuple:
        return target.row(self.work, is_packed, self.head_idx, self.q_idx, self.tile_row)


@dataclass(frozen=True)
class OutputWarps:
    """Source and destination of results. rows: the softmax of a thread's row. sink: logits
    (heads_q,), or None. mO: the output if a tile may have padding rows, else None."""

    traits: cutlass.Constexpr[FwdTraits]
    operands: tma.Operands
    tiles: FwdSmem
    channels: Channels
    lse: LseTensors
    lengths: Lengths
    sink: cute.Tensor | None
    rows: OnlineSoftmax
    partials: Partials | None
    mO: cute.Tensor | None

    @cute.jit
    def run(self):
        """Output warp: 32 rows of both halves of every work tile."""
        rows, channels = self.rows, self.channels
        tile = Int32(0)
        while channels.ring.wait(tile):
            for half in cutlass.range(self.traits.halves, unroll=1):
                self._store_half(rows, tile, half)
            channels.ring.release(tile)
            tile += 1
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _store_half(self, rows: OnlineSoftmax, tile: Int32, half: Int32):
        traits, channels, tiles, lengths = self.traits, self.channels, self.tiles, self.lengths
        partials = self.partials
        # -- this thread's row: its query head, and its query in the sequence
        half_tile = traits.halves * tile + half
        work = channels.ring.read(tile)
        thread = thread_in_warpgroup()
        row = work.block * traits.tile_m + half * umma.ROWS + thread
        q_idx = row // traits.packed_heads
        head_idx = head_of_row(work, row, traits.packed_heads, traits.group_size)
        # -- final factor and LSE of the row
        sinks = None
        if const_expr(self.sink is not None):
            sink = self.sink[head_idx].to(Float32)
            if const_expr(partials is not None):
                sink = cutlass.select_(partials.is_first(work), sink, -Float32.inf)
            sinks = (sink,)
        channels.sums.wait(half_tile)
        rows.row_max[0] = tiles.sums[0, half * umma.ROWS + thread]
        rows.row_sum[0] = tiles.sums[1, half * umma.ROWS + thread]
        cute.arch.sync_warp()
        channels.sums.release(half_tile)
        factor, row_lse, low = rows.finalize(sinks)[0]
        # -- whether the row is in use, and whether it is a query head's
        # what was loaded for an empty sequence is a row that is not in use, or a neighbour's
        is_used = work.has_scores
        if const_expr(lengths.seqused_q is not None):
            is_used = is_used & (q_idx < work.seqlen_q)
            row_lse = cutlass.select_(q_idx < work.seqlen_q, row_lse, -Float32.inf)
            if const_expr(low is not None):
                low = cutlass.select_(q_idx < work.seqlen_q, low, Float32(0.0))
        is_row = q_idx < work.slot
        if const_expr(traits.is_padded):
            is_row = is_row & (row % traits.packed_heads < traits.group_size)
        # -- LSE leaves: to the tensor, or to the partial tile of a split
        is_whole = is_row
        is_packed = lengths.cu_seqlens_q is not None
        at = RowAt(work, head_idx, q_idx, half * umma.ROWS + thread)
        if const_expr(partials is not None):
            is_whole = is_row & (partials.is_split(work) == Boolean(False))
            if is_row & partials.is_split(work):
                partials.store_lse(at.place_in(partials, is_packed), row_lse, low)
        if const_expr(self.lse.lse is not None):  # noqa: SIM102 (decided while tracing)
            if is_whole:
                self.lse.store(lengths, work, head_idx, q_idx, row_lse, low)

        # -- O leaves, (128, head_dim_v) of the half: columns_o columns at a time
        zeroes = lengths.seqused_q is not None or lengths.keys_may_be_absent
        channels.o.wait(half_tile)
        umma.fence_after_wait()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - Role.OUTPUT
        sO = cute.flat_divide(tiles.o[lane, None, warp], (OUTPUT_CHUNK,))
        used = is_used if const_expr(zeroes) else None
        if const_expr(traits.halves > 1):
            for first in cutlass.range_constexpr(0, traits.head_dim_v, traits.columns_o):
                self._stage_columns(sO, half, first, factor, used, at, is_row)
                if const_expr(first + traits.columns_o >= traits.head_dim_v):
                    self._release_output(half_tile)
                if self._is_staged(work):
                    self._send_columns(work, half, first, warp)
        else:
            # rolled, since the columns of so many parts would take a register each
            for first in cutlass.range(0, traits.head_dim_v, traits.columns_o, unroll=1):
                self._stage_columns(sO, half, first, factor, used, at, is_row)
                if first + traits.columns_o >= traits.head_dim_v:
                    self._release_output(half_tile)
                if self._is_staged(work):
                    self._send_columns(work, half, first, warp)

    def _stage_columns(
        self,
        sO: cute.Tensor,
        half: Int32,
        first: int | Int32,
        factor: Float32,
        is_used: Boolean | None,
        at: RowAt,
        is_row: Boolean,
    ) -> None:
        """Scale, round, and stage or store some columns of this thread's row.

        is_used: None if all rows are, or if it does not matter. is_row: it is a query head's.
        """
        traits = self.traits
        # what was staged here before must have left
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        for c in range(traits.columns_o // OUTPUT_CHUNK):
            column = first + c * OUTPUT_CHUNK
            values = umma.load_columns(
                traits.column_o(half) + column, OUTPUT_CHUNK, thread_in_warpgroup()
            )
            umma.wait_loads()
            for i in range(OUTPUT_CHUNK):
                # adding 0 makes the zeros of a row that saw nothing positive
                value = cute.math.fma(values[0, i], factor, Float32(0.0))
                if is_used is not None:
                    value = cutlass.select_(is_used, value, Float32(0.0))
                values[0, i] = value
            self._keep_chunk(values, sO[None, c], at, column, is_row)
        umma.fence_before_arrival()

    def _release_output(self, half_tile: Int32) -> None:
        cute.arch.sync_warp()
        self.channels.o.release(half_tile)

    def _is_staged(self, work: Work) -> Boolean:
        """Whether a tile is stored through shared memory."""
        if self.mO is not None:
            return Boolean(False)
        if self.partials is None:
            return Boolean(True)
        return self.partials.is_split(work) == Boolean(False)

    @cute.jit
    def _keep_chunk(
        self,
        values: cute.Tensor,
        staged: cute.Tensor,
        at: RowAt,
        column: Int32 | int,
        is_row: Boolean,
    ):
        is_packed = self.lengths.cu_seqlens_q is not None
        if const_expr(self.partials is not None):  # noqa: SIM102 (decided while tracing)
            if is_row & self.partials.is_split(at.work):
                _store_chunk(self.partials.o, at.place_in(self.partials, is_packed), values, column)
        if const_expr(self.mO is not None):
            is_whole = is_row
            if const_expr(self.partials is not None):
                is_whole = is_row & (self.partials.is_split(at.work) == Boolean(False))
            if is_whole:
                output = OutputRows(self.mO)
                _store_chunk(self.mO, at.place_in(output, is_packed), values, column)
        else:
            rounded = cute.make_rmem_tensor(OUTPUT_CHUNK, self.traits.dtype)
            values = cute.make_tensor(values.iterator, rounded.layout)
            rounded.store(values.load().to(self.traits.dtype))
            cute.autovec_copy(rounded, staged)

    def _send_columns(self, work: Work, half: Int32, first: int | Int32, warp: Int32) -> None:
        """Store a warp's staged part of sO to some columns of its rows."""
        traits, sO, operands = self.traits, self.tiles.o, self.operands
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        tile_row = work.block * traits.tile_m + half * umma.ROWS + warp * ROWS_PER_WARP
        start = (work.head_idx * traits.group_size, tile_row // traits.packed_heads)
        is_packed = self.lengths.cu_seqlens_q is not None
        gO = tma.of_sequence(operands.o, is_packed, work.batch_idx, work.offset_q, work.slot)
        gO = cute.domain_offset(((0, 0), first), gO)
        dst, src = tma.tile_of(operands.o_atom, gO, start, traits.box_o, sO)
        cute.copy(operands.o_atom, src[None, warp], dst)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _store_chunk(target: cute.Tensor, row: tuple, values: cute.Tensor, column: Int32 | int):
    """Write OUTPUT_CHUNK columns of a row starting at a column; fewer at the end of the row."""
    of_row = target[(*row, None)]
    for first in cutlass.range_constexpr(0, OUTPUT_CHUNK, VECTOR):
        if column + first < cute.size(of_row):
            stored = cute.make_rmem_tensor(VECTOR, target.element_type)
            part = cute.make_tensor(values.iterator + first, stored.layout)
            stored.store(part.load().to(target.element_type))
            place = ((column + first) // VECTOR,)
            cute.autovec_copy(stored, cute.local_tile(of_row, (VECTOR,), place))
