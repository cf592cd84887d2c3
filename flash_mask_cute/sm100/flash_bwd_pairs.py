"""Pairs of CTAs in the Blackwell backward: what a CTA of a pair loads, and what it tells the other.

Two CTAs of a cluster have neighbouring keys, and walk over the same query blocks. Products have
the 256 keys of both as rows. Operands B are shared: each CTA loads half of the queries of a block,
for S and dP, and half of the columns of its Q and dO, for dK and dV. dQ sums over the keys of both:
each CTA has half of the queries, the dS of these for all keys, and half of the columns of all keys.

TMA completes on mbarriers of its own CTA. The CTA that does not issue products passes on each
arrival to the one that does (`Arrivals`).
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Int32, const_expr

from flash_mask_cute.core import tma
from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import swizzled
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.marked_rows import any_mark, clear_row, is_marked
from flash_mask_cute.core.query_loads import BwdOperands
from flash_mask_cute.core.row_blocks import RowBlocks, marks_of
from flash_mask_cute.core.walk_ring import Block
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.sm100 import umma
from flash_mask_cute.sm100.flash_bwd_traits import (
    HALVES,
    BwdTraits,
    Channels,
    PartOfDq,
    Products,
    Tiles,
)


class _Columns(NamedTuple):
    """The boxes of half of the columns (`QueryShape.boxes`)."""

    traits: BwdTraits

    def boxes(self) -> tuple[tuple[cute.ComposedLayout, int, int], ...]:
        box = self.traits.layout_columns(), umma.ROWS, self.traits.columns_of_cta
        return box, box, box, box


class PairOperands(NamedTuple):
    """rows: boxes of half of the queries of a block, and of the keys of a CTA. columns: boxes of
    half of the columns of a block, and of the keys of a CTA."""

    rows: BwdOperands
    columns: BwdOperands

    @staticmethod
    def create(
        traits: BwdTraits, rows: BwdOperands, tensors: tuple, lengths: Lengths
    ) -> "PairOperands":
        return PairOperands(rows, BwdOperands.create(_Columns(traits), tensors, lengths))

    @property
    def atoms(self) -> tuple[cute.CopyAtom, ...]:
        return (*self.rows[:8:2], *self.columns[:6:2])


def pair_products(traits: BwdTraits, storage) -> Products:
    """`BwdTraits.products` of a pair: the layouts of its operands as products see them, in the same
    bytes as TMA does."""
    scores, of_dq = traits.mma_scores(), traits.mma_dq(traits.tile_d)
    by_d, by_dv = traits.mma_sums(traits.tile_d), traits.mma_sums(traits.tile_dv)
    rows, keys = traits.group.rows, traits.cluster_tile_n

    def operand_a(mma, memory, m: int, n: int, k: int) -> cute.Tensor:
        layout = blackwell.make_smem_layout_a(mma, (m, n, k), traits.dtype, 1)
        return mma.make_fragment_A(swizzled(memory, layout, traits.dtype))

    def operand_b(mma, memory, m: int, n: int, k: int) -> cute.Tensor:
        layout = blackwell.make_smem_layout_b(mma, (m, n, k), traits.dtype, 1)
        return mma.make_fragment_B(swizzled(memory, layout, traits.dtype))

    def halves(mma, n: int, first: int) -> tuple[cute.Tensor, ...]:
        layout = blackwell.make_smem_layout_a(mma, (rows, n, traits.queries), traits.dtype, 1)
        return tuple(
            umma.operand_a(mma, layout, traits.dtype, first + half * traits.queries)
            for half in range(HALVES)
        )

    of_s, of_dp = (rows, traits.tile_m, traits.tile_d), (rows, traits.tile_m, traits.tile_dv)
    dq_shape = traits.tile_m, traits.tile_d
    dq_k = operand_b(of_dq, storage.k_columns, *dq_shape, keys)
    return Products(
        s=umma.accumulator(scores, of_s[:2], traits.column_s),
        s_k=operand_a(scores, storage.k, *of_s)[None, None, None, 0],
        s_q=operand_b(scores, storage.q, *of_s),
        dp=umma.accumulator(scores, of_dp[:2], traits.column_dp),
        dp_v=operand_a(scores, storage.v, *of_dp)[None, None, None, 0],
        dp_do=operand_b(scores, storage.do, *of_dp),
        dv=umma.accumulator(by_dv, (rows, traits.tile_dv), traits.column_dv),
        p=halves(by_dv, traits.tile_dv, traits.column_s),
        dv_do=operand_b(by_dv, storage.do_columns, rows, traits.tile_dv, traits.tile_m),
        dk=umma.accumulator(by_d, (rows, traits.tile_d), traits.column_dk),
        ds=halves(by_d, traits.tile_d, traits.column_dp),
        dk_q=operand_b(by_d, storage.q_columns, rows, traits.tile_d, traits.tile_m),
        dq=(PartOfDq(umma.accumulator(of_dq, dq_shape, traits.column_dq), dq_k),),
        dq_ds=operand_a(of_dq, storage.ds, *dq_shape, keys),
    )


@dataclass(frozen=True)
class PairLoads:
    """State of the load warp of a CTA of a pair. stats: see `QueryLoads`."""

    traits: cutlass.Constexpr[BwdTraits]
    operands: PairOperands
    tiles: Tiles
    channels: Channels
    stats: cute.Tensor
    lengths: Lengths

    @cute.jit
    def run(self):
        """Load keys and values of every work tile, and the query blocks of its walk."""
        channels = self.channels
        tile, chunk, number = Int32(0), Int32(0), Int32(0)
        while channels.ring.wait(tile):
            step = partial(self._load_block, channels.ring.read(tile), number)
            chunk, number = channels.walk.visit(chunk, number, step)
            channels.ring.release(tile)
            tile += 1
        # the products of the other CTA may still signal that they have read the last blocks
        for channel in (channels.q, channels.do, channels.q_columns):
            channel.drain(number)

    @cute.jit
    def _load_block(self, work: Work, first: Int32, number: Int32, block: Block):
        traits, operands, tiles, channels = self.traits, self.operands, self.tiles, self.channels
        rank, is_first = traits.group.rank(), number == first
        row_blocks = RowBlocks(self.lengths, traits.tile_m)
        row_block = block.index + row_blocks.first_of(work.batch_idx, work.offset_q)
        row, head = block.index * traits.tile_m, block.head_idx
        own_row = row + rank * traits.rows_of_cta
        column = rank * traits.columns_of_cta
        rows, columns = operands.rows, operands.columns
        key, kv_head = work.block * traits.tile_n, work.head_idx
        pair_key = (work.block - rank) * traits.tile_n
        # -- half of the queries, and the keys
        q_bytes = traits.bytes_q + cutlass.select_(is_first, Int32(traits.bytes_with_q), Int32(0))
        barrier = self._expect(channels.q, number, q_bytes)
        self._copy(work, False, rows.q_atom, rows.q, tiles.q, head, own_row, 0, 0, barrier)
        if is_first:
            self._copy(work, True, rows.k_atom, rows.k, tiles.k, kv_head, key, 0, 0, barrier)
        # -- statistics of all queries
        stage = channels.stats.index(number)
        barrier = self._expect(channels.stats, number, Int32(traits.bytes_stats))
        stats = self.stats[head, row_block, None]
        tma.copy_bulk(stats, tiles.stats[None, stage], barrier)
        # -- dO both ways, and the values
        do_bytes = 2 * traits.bytes_do
        do_bytes += cutlass.select_(is_first, Int32(traits.bytes_with_do), Int32(0))
        barrier = self._expect(channels.do, number, do_bytes)
        self._copy(work, False, rows.do_atom, rows.do, tiles.do, head, own_row, 0, 0, barrier)
        self._copy(
            work, False, columns.do_atom, columns.do, tiles.do_columns, head, row, column, 0,
            barrier,
        )  # fmt: skip
        if is_first:
            self._copy(work, True, rows.v_atom, rows.v, tiles.v, kv_head, key, 0, 0, barrier)
        # -- half of the columns of Q, and of the keys of both CTAs
        bytes_k = cutlass.select_(is_first, Int32(traits.bytes_with_q), Int32(0))
        barrier = self._expect(channels.q_columns, number, traits.bytes_q + bytes_k)
        self._copy(
            work, False, columns.q_atom, columns.q, tiles.q_columns, head, row, column, 0, barrier
        )  # fmt: skip
        if is_first:
            for cta in cutlass.range_constexpr(traits.group.size):
                self._copy(
                    work, True, columns.k_atom, columns.k, tiles.k_columns, kv_head,
                    pair_key + cta * traits.tile_n, column, cta, barrier,
                )  # fmt: skip
        return number + 1

    def _expect(self, channel: Channel, number: Int32, num_bytes: Int32) -> cute.Pointer:
        channel.acquire(number)
        channel.expect(number, num_bytes)
        return channel.barrier(number)

    def _copy(
        self, work, is_keys, atom, source, smem, head, row, column, stage, barrier
    ) -> None:  # fmt: skip
        """Copy a box of Q, dO, K or V that begins at a row of the sequence and at a column."""
        if is_keys:
            side, place = tma.Side.of_keys(self.lengths), (work.offset_k, work.seqlen_k)
        else:
            side, place = tma.Side.of_queries(self.lengths), (work.offset_q, work.seqlen_q)
        gmem, row = tma.readable_rows(source, side, work.batch_idx, *place, row)
        rows, columns = cute.size(smem, mode=[0]), cute.size(smem, mode=[1])
        src, dst = tma.tile_of(atom, gmem, (head, row), ((1, rows), columns), smem, column)
        cute.copy(atom, src, dst[None, stage], tma_bar_ptr=barrier)


@dataclass(frozen=True)
class Arrivals:
    """Waits of the mma warps of a pair for what was loaded. The CTA that does not issue products
    passes each arrival on."""

    traits: cutlass.Constexpr[BwdTraits]
    tiles: Tiles
    channels: Channels

    @cute.jit
    def follow(self):
        """Run by the mma warp of the CTA that does not issue products."""
        tile, chunk, number = Int32(0), Int32(0), Int32(0)
        while self.channels.ring.wait(tile):
            chunk, number = self.channels.walk.visit(chunk, number, self._pass_on)
            self.channels.ring.release(tile)
            tile += 1

    def _pass_on(self, number: Int32, block: Block):
        for await_load in (self.q, self.do, self.q_columns):
            await_load(number)
        return number + 1

    def q(self, number: Int32) -> None:
        rows = self.traits.rows_of_cta
        self._await(
            self.channels.q, self.channels.q_there, number, ((self.tiles.q, rows),)
        )  # fmt: skip

    def do(self, number: Int32) -> None:
        rows = self.traits.rows_of_cta
        tiles = (self.tiles.do, rows), (self.tiles.do_columns, 0)
        self._await(self.channels.do, self.channels.do_there, number, tiles)

    def q_columns(self, number: Int32) -> None:
        tiles = ((self.tiles.q_columns, 0),)
        self._await(self.channels.q_columns, self.channels.q_columns_there, number, tiles)
        if self.traits.has_marks:
            self._release_marks(number)

    @cute.jit
    def _await(self, channel: Channel, there: Channel, number: Int32, tiles: cutlass.Constexpr):
        """Wait for a fill of both CTAs. tiles: what it has, and how many rows of a block lie before
        those of the second CTA."""
        channel.wait(number)
        if const_expr(self.traits.has_marks):
            self._clear_marked_rows(number, tiles)
        if self.traits.group.is_leader():
            there.wait(number)
        else:
            there.publish(number)

    @cute.jit
    def _clear_marked_rows(self, number: Int32, tiles: cutlass.Constexpr):
        traits = self.traits
        self.channels.stats.wait(number)
        stage = self.channels.stats.index(number)
        marks = marks_of(self.tiles.stats[None, stage], traits.tile_m, traits.num_stats)
        if any_mark(marks, traits.tile_m):
            for smem, rows_before in tiles:
                first = rows_before * traits.group.rank()
                for row in cutlass.range(cute.size(smem, mode=[0]), unroll=1):
                    if is_marked(marks, first + row):
                        clear_row(smem[row, None, 0])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()

    @cute.jit
    def _release_marks(self, number: Int32):
        cute.arch.sync_warp()
        self.channels.stats.release(number)


def store_grads(target: cute.Pointer, rank: Int32, key: Int32, words: cute.Tensor, first: int):
    """Write dS of 32 queries of a key to shared memory of the CTA `rank` of a cluster.

    target: the place of dS in this CTA's memory, lines of 128 bytes for each key of both CTAs,
    swizzled. key: among those of both CTAs. first: the first query, among those of the CTA.
    """
    base = cute.arch.map_dsmem_ptr(target, rank).toint() + key * 128
    for i in range(cute.size(words) // 4):
        at = base + (((first // 8 + i) ^ (key % 8)) * 16)
        values = [Int32(words[4 * i + j]) for j in range(4)]
        cute.arch.inline_ptx(
            "st.shared::cluster.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
            read_only_args=[Int32(at), *values],
        )
