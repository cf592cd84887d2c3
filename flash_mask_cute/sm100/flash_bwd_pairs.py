"""Pairs of CTAs in the Blackwell backward: what a CTA of a pair loads and sends.

Two CTAs of a cluster have neighbouring keys, and walk over the same query blocks. Products have
the 256 keys of both as rows. Operands B are shared: each CTA loads half of the queries of a block,
for S and dP, and half of the columns of its Q and dO, for dK and dV. dQ sums over the keys of both:
each CTA has half of the queries, the dS of these for all keys, and half of the columns of all keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_mask_cute.core import clusters, tma
from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import thread_in_warpgroup
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.marked_rows import any_mark, clear_row, is_marked
from flash_mask_cute.core.query_loads import BwdOperands
from flash_mask_cute.core.row_blocks import RowBlocks, marks_of
from flash_mask_cute.core.walk_ring import Block
from flash_mask_cute.core.warp_scan import WARP
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.sm100 import umma
from flash_mask_cute.sm100.flash_bwd_registers import HALVES
from flash_mask_cute.sm100.flash_bwd_storage import BwdSmem, Channels, visit_walks
from flash_mask_cute.sm100.flash_bwd_traits import BwdTraits

# bytes of a key in dS: 64 queries; how many lines until the swizzle repeats, and what it moves
LINE, SWIZZLED_LINES, VECTOR = 128, 8, 16
# the same of lines of 32 queries, and their vectors
SHORT_LINE, SHORT_VECTORS = 64, 4


class _Columns(NamedTuple):
    """The boxes of half of the columns (`QueryShape.boxes`)."""

    traits: BwdTraits

    def boxes(self) -> tuple[tuple[cute.ComposedLayout, int, int], ...]:
        traits = self.traits
        box = traits.layout_columns(), umma.ROWS, traits.columns_of_cta
        of_do = traits.layout_value_columns(), umma.ROWS, traits.value_columns_of_cta
        keys = traits.layout_key_columns(), traits.tile_n, traits.key_columns
        return box, of_do, keys, of_do


class PairOperands(NamedTuple):
    """rows: boxes of half of the queries of a block, and of a CTA's keys. columns: of half of the
    columns of both."""

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


class _Operand(NamedTuple):
    atom: cute.CopyAtom
    source: cute.Tensor
    smem: cute.Tensor


class _BoxCoord(NamedTuple):
    """Where a box begins: its head, the row of the sequence, and the column. stage: of memory."""

    head_idx: Int32
    row: Int32
    column: int | Int32 = 0
    stage: int | Int32 = 0


@dataclass(frozen=True)
class PairLoads:
    """State of the load warp of a CTA of a pair. stats: see `QueryLoads`."""

    traits: cutlass.Constexpr[BwdTraits]
    operands: PairOperands
    tiles: BwdSmem
    channels: Channels
    stats: cute.Tensor
    lengths: Lengths

    @cute.jit
    def run(self):
        channels = self.channels
        number = visit_walks(channels, self._load_block)
        # the products of the other CTA may still signal that they have read the last blocks
        for channel in (channels.q, channels.do, channels.q_columns, channels.do_columns):
            if const_expr(channel is not None):
                channel.drain(number)

    @cute.jit
    def _load_block(self, work: Work, first: Int32, number: Int32, block: Block):
        traits, operands, tiles, channels = self.traits, self.operands, self.tiles, self.channels
        rank, is_first = traits.group.rank(), number == first
        of_block = self.lengths.of_block(work, block)
        row_block = RowBlocks(self.lengths, traits.tile_m).of(of_block, block)
        head, kv_head = block.head_idx, work.head_idx
        row = block.index * traits.tile_m
        own_row = row + traits.query_of(0, rank)
        column = rank * traits.columns_of_cta
        rows, columns = operands.rows, operands.columns
        key = work.block * traits.tile_n
        pair_key = (work.block - rank) * traits.tile_n
        queries = of_block.batch_idx, of_block.offset_q, of_block.seqlen_q
        load_queries = partial(self._load_box, tma.RowSide.of_queries(self.lengths), queries)
        keys = work.batch_idx, work.offset_k, work.seqlen_k
        load_keys = partial(self._load_box, tma.RowSide.of_keys(self.lengths), keys)
        query_box = traits.box_rows, traits.box_columns
        # -- half of the queries, and the keys
        if const_expr(traits.is_folded):
            # the block before by columns, in the same place
            channels.q_columns.wait_until_released(number - 1)
        q_bytes = traits.bytes_q + cutlass.select_(is_first, Int32(traits.bytes_with_q), Int32(0))
        barrier = self._expect(channels.q, number, q_bytes)
        q_rows = _Operand(rows.q_atom, rows.q, tiles.q)
        self._load_boxes(load_queries, query_box, q_rows, _BoxCoord(head, own_row), barrier)
        if is_first:
            k_rows = _Operand(rows.k_atom, rows.k, tiles.k)
            key_box = traits.tile_n, traits.key_box_columns(traits.tile_d)
            self._load_boxes(load_keys, key_box, k_rows, _BoxCoord(kv_head, key), barrier)
        # -- statistics of all queries
        stage = channels.stats.index(number)
        barrier = self._expect(channels.stats, number, Int32(traits.bytes_stats))
        tma.copy_bulk(self.stats[head, row_block, None], tiles.stats[None, stage], barrier)
        # -- dO both ways, and the values
        ways = traits.group.size
        if const_expr(traits.is_folded):
            # one way after the other
            ways = 1
            channels.do_columns.wait_until_released(number - 1)
        do_bytes = ways * traits.bytes_do
        do_bytes += cutlass.select_(is_first, Int32(traits.bytes_with_do), Int32(0))
        barrier = self._expect(channels.do, number, do_bytes)
        do_rows = _Operand(rows.do_atom, rows.do, tiles.do)
        self._load_boxes(load_queries, query_box, do_rows, _BoxCoord(head, own_row), barrier)
        do_columns = _Operand(columns.do_atom, columns.do, tiles.do_columns)
        do_column = rank * traits.value_columns_of_cta
        if const_expr(not traits.is_folded):
            load_queries(do_columns, _BoxCoord(head, row, do_column), barrier)
        if is_first:
            v_rows = _Operand(rows.v_atom, rows.v, tiles.v)
            key_box = traits.tile_n, traits.key_box_columns(traits.tile_dv)
            self._load_boxes(load_keys, key_box, v_rows, _BoxCoord(kv_head, key), barrier)
        # -- half of the columns of Q, and of the keys of both CTAs
        if const_expr(traits.is_folded):
            channels.q.wait_until_released(number)
        bytes_k = cutlass.select_(is_first, Int32(traits.bytes_with_q), Int32(0))
        barrier = self._expect(channels.q_columns, number, traits.bytes_q + bytes_k)
        q_columns = _Operand(columns.q_atom, columns.q, tiles.q_columns)
        load_queries(q_columns, _BoxCoord(head, row, column), barrier)
        if is_first:
            k_columns = _Operand(columns.k_atom, columns.k, tiles.k_columns)
            num_boxes, size = cute.size(tiles.k_columns, mode=[2]), traits.group.size
            # rolled, since addresses and coordinates of all boxes do not fit into registers
            for i in cutlass.range(num_boxes, unroll=1):
                at = pair_key + i % size * traits.tile_n, column + i // size * traits.key_columns
                load_keys(k_columns, _BoxCoord(kv_head, *at, i), barrier)
        if const_expr(traits.is_folded):
            channels.do.wait_until_released(number)
            barrier = self._expect(channels.do_columns, number, Int32(traits.bytes_do))
            load_queries(do_columns, _BoxCoord(head, row, do_column), barrier)
        return number + 1

    def _expect(self, channel: Channel, number: Int32, num_bytes: Int32) -> cute.Pointer:
        channel.acquire(number)
        channel.expect(number, num_bytes)
        return channel.barrier(number)

    @cute.jit
    def _load_boxes(
        self,
        load: cutlass.Constexpr[Callable[..., None]],
        box: cutlass.Constexpr[tuple[int, int | None]],
        operand: _Operand,
        place: _BoxCoord,
        barrier: cute.Pointer,
    ):
        """Start the copies of all boxes of an operand; rolled, since the coordinates of all of them
        do not fit into uniform registers. box: rows, and columns if not all of them. place: of the
        first box."""
        smem, rows = operand.smem, box[0]
        columns = cute.size(smem, mode=[1])
        width = columns if const_expr(box[1] is None) else box[1]
        across, down = columns // width, cute.size(smem, mode=[0]) // rows
        if const_expr(across * down == 1):
            load(operand, place, barrier)
        else:
            for i in cutlass.range(across * down, unroll=1):
                row, column = i // across, i % across
                part = cute.local_tile(smem, (rows, width, 1), (row, column, 0))
                first = place.row + row * rows * self.traits.group.size
                at = place._replace(row=first, column=column * width)
                load(operand._replace(smem=part), at, barrier)

    def _load_box(
        self,
        side: tma.RowSide,
        sequence: tuple[Int32, Int32, Int32],
        operand: _Operand,
        place: _BoxCoord,
        barrier: cute.Pointer,
    ) -> None:
        """Start the copy of a box of a sequence: its batch entry, first row and length."""
        gmem, row = tma.readable_rows(operand.source, side, *sequence, place.row)
        smem = operand.smem
        box = (1, cute.size(smem, mode=[0])), cute.size(smem, mode=[1])
        start = place.head_idx, row
        src, dst = tma.tile_of(operand.atom, gmem, start, box, smem, place.column)
        cute.copy(operand.atom, src, dst[None, place.stage], tma_bar_ptr=barrier)


@dataclass(frozen=True)
class Arrivals:
    """Waits of the mma warps of a pair. TMA completes on mbarriers of its own CTA, so the CTA that
    issues no products passes each arrival on. passes_on: in that CTA."""

    traits: cutlass.Constexpr[BwdTraits]
    passes_on: cutlass.Constexpr[bool]
    tiles: BwdSmem
    channels: Channels

    @cute.jit
    def follow(self):
        """For the mma warp of the CTA that issues no products, in the order of `BlockProducts`."""
        tile, chunk, number = Int32(0), Int32(0), Int32(0)
        while self.channels.ring.wait(tile):
            step = partial(self._pass_on, number)
            chunk, number = self.channels.walk.visit(chunk, number, step)
            if const_expr(not self.traits.is_serial):
                self._pass_on_gradients(number - 1)
            self.channels.ring.release(tile)
            tile += 1

    @cute.jit
    def _pass_on(self, first: Int32, number: Int32, block: Block):
        self.q(number)
        if const_expr(self.traits.is_folded):
            self.do(number)
            self.scores(number)
            self.q_columns(number)
            self.do_columns(number)
            self.ds(number)
        elif const_expr(self.traits.is_serial):
            self.do(number)
            self._pass_on_gradients(number)
        else:
            if number > first:
                self._pass_on_gradients(number - 1)
            self.do(number)
        return number + 1

    def _pass_on_gradients(self, number: Int32) -> None:
        self.q_columns(number)
        self.ds(number)

    def q(self, number: Int32) -> None:
        tiles = ((self.tiles.q, True),)
        self._await(self.channels.q, self.channels.q_there, number, tiles)

    def do(self, number: Int32) -> None:
        """dO both ways, or by rows if one way comes after the other."""
        tiles = (self.tiles.do, True), (self.tiles.do_columns, False)
        if self.traits.is_folded:
            tiles = tiles[:1]
        self._await(self.channels.do, self.channels.do_there, number, tiles)

    def q_columns(self, number: Int32) -> None:
        """Q by columns, and with the first one of a work tile K by columns."""
        tiles = ((self.tiles.q_columns, False),)
        self._await(self.channels.q_columns, self.channels.q_columns_there, number, tiles)
        if self.traits.has_marks and not self.traits.is_folded:
            self._release_marks(number)

    def do_columns(self, number: Int32) -> None:
        """dO by columns, which comes last."""
        tiles = ((self.tiles.do_columns, False),)
        self._await(self.channels.do_columns, self.channels.do_columns_there, number, tiles)
        if self.traits.has_marks:
            self._release_marks(number)

    def scores(self, number: Int32) -> None:
        """P and dS of the CTAs' own keys, in shared memory."""
        self.channels.scores.wait(number)
        self._tell(self.channels.scores_there, number, orders_memory=True)

    def ds(self, number: Int32) -> None:
        """dS, in shared memory of both CTAs."""
        self.channels.ds.wait(number)
        self._tell(self.channels.ds_there, number, orders_memory=True)

    @cute.jit
    def _await(self, channel: Channel, there: Channel, number: Int32, tiles: cutlass.Constexpr):
        """Wait for a fill of both CTAs. tiles: what it has, and if that is this CTA's alone."""
        channel.wait(number)
        if const_expr(self.traits.has_marks):
            self._clear_marked_rows(number, tiles)
        # rows that are cleared are written by this warp
        self._tell(there, number, self.traits.has_marks)

    @cute.jit
    def _tell(self, there: Channel, number: Int32, orders_memory: cutlass.Constexpr[bool]):
        if const_expr(self.passes_on):
            there.publish(number, orders_memory)
        else:
            there.wait(number)

    @cute.jit
    def _clear_marked_rows(self, number: Int32, tiles: cutlass.Constexpr):
        traits = self.traits
        self.channels.stats.wait(number)
        stage = self.channels.stats.index(number)
        marks = marks_of(self.tiles.stats[None, stage], traits.tile_m, traits.num_stats)
        if any_mark(marks, traits.tile_m):
            for smem, has_half in tiles:
                for row in cutlass.range(cute.size(smem, mode=[0]), unroll=1):
                    query = row
                    if const_expr(has_half):
                        query = traits.query_of(row, int(self.passes_on))
                    if is_marked(marks, query):
                        clear_row(smem[row, None, 0])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()

    @cute.jit
    def _release_marks(self, number: Int32):
        cute.arch.sync_warp()
        self.channels.stats.release(number)


@dataclass(frozen=True)
class PeerGrads:
    """dS of half of the queries, which the CTA with the number of the half multiplies.

    line: the address of this thread's key, 64 queries in 128 bytes, with the part of its swizzle.

    A compute warp writes dS of its own CTA's half among the keys of both CTAs. That of the other
    half it writes behind these, and sends it as one copy. A fill of the channel `ds` has both. It
    needs no release: dS of a block is written when dP of the block, and so dQ of the block before,
    is complete.
    """

    traits: cutlass.Constexpr[BwdTraits]
    tiles: BwdSmem
    channels: Channels
    half: Int32
    line: Int32

    @staticmethod
    def create(traits: BwdTraits, tiles: BwdSmem, channels: Channels, half: Int32) -> "PeerGrads":
        rank = traits.group.rank()
        first = cutlass.select_(half == rank, rank * traits.tile_n, Int32(traits.cluster_tile_n))
        key = first + thread_in_warpgroup()
        line = tiles.ds.iterator.toint() + key * LINE + key % SWIZZLED_LINES * VECTOR
        return PeerGrads(traits, tiles, channels, half, Int32(line))

    def keep(self, words: cute.Tensor, first: int) -> None:
        """Write the words of dS of 32 queries, from `first` on among those of the half."""
        _write_line(self.line, words, first * 2)

    @cute.jit
    def send(self, number: Int32):
        """Report the place of this warp's dS of 32 keys, all written, after a fence."""
        if self.half == self.traits.group.rank():
            self._expect(number)
        else:
            self._copy(number)

    @cute.jit
    def keep_and_send(self, number: Int32, words: cutlass.Constexpr[list[cute.Tensor]]):
        """`keep` and `send` for a wide pair. What is sent lies over Q by rows, which S has read. It
        goes to where dO was, so dV of both CTAs has to be complete."""
        if self.half == self.traits.group.rank():
            self._await_values(number)
            self._keep_all(words)
            self._expect(number)
        else:
            self._keep_all(words)
            self._await_values(number)
            self._copy(number)

    def _await_values(self, number: Int32) -> None:
        self.channels.dv.wait(number)

    def _keep_all(self, words: list[cute.Tensor]) -> None:
        for chunk, of_chunk in enumerate(words):
            self.keep(of_chunk, chunk * umma.CHUNK)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    def _expect(self, number: Int32) -> None:
        # the bytes are those of a warp of the other CTA
        self.channels.ds.expect(number, WARP * LINE)

    def _copy(self, number: Int32) -> None:
        traits, ds = self.traits, self.tiles.ds
        with cute.arch.elect_one():
            first = thread_in_warpgroup() // WARP * WARP
            source = ds[None, traits.cluster_tile_n + first, 0].iterator
            target = ds[None, traits.group.rank() * traits.tile_n + first, 0].iterator
            barrier = self.channels.ds.barrier(number)
            clusters.send(source, target, barrier, WARP * LINE, self.half)


@dataclass(frozen=True)
class FoldedScores:
    """P and dS of a compute thread in shared memory, if results are folded: 32 queries of a key.

    chunk: the number of these queries. p_line, ds_line, dq_line: addresses, each with its part of
    the swizzle. P and dS have lines of the CTA's keys and all queries, dS for dQ those of the keys
    of both CTAs and half of the queries. As for `PeerGrads`, no place needs a release.
    """

    traits: cutlass.Constexpr[BwdTraits]
    channels: Channels
    chunk: Int32
    p_line: Int32
    ds_line: Int32
    dq_line: Int32
    dq_rank: Int32

    @staticmethod
    def create(
        traits: BwdTraits, tiles: BwdSmem, channels: Channels, half: Int32
    ) -> "FoldedScores":
        thread = thread_in_warpgroup()
        key, dq_rank = thread % traits.tile_n, thread // traits.tile_n
        chunk = dq_rank * HALVES + half
        own = chunk * traits.tile_n + key
        # of the rank that this thread's CTA has among keys
        in_pair = half * traits.cluster_tile_n + traits.group.rank() * traits.tile_n + key
        swizzle = key // 2 % SHORT_VECTORS * VECTOR
        of_dq = tiles.ds.iterator.toint()
        of_dk = of_dq + traits.rows_of_cta * traits.cluster_tile_n * 2
        return FoldedScores(
            traits,
            channels,
            chunk,
            Int32(tiles.p.toint() + own * SHORT_LINE + swizzle),
            Int32(of_dk + own * SHORT_LINE + swizzle),
            Int32(of_dq + in_pair * SHORT_LINE + swizzle),
            cute.arch.make_warp_uniform(dq_rank),
        )

    def keep_p(self, words: cute.Tensor) -> None:
        _write_line(self.p_line, words)

    @cute.jit
    def keep_ds(self, words: cute.Tensor):
        _write_line(self.ds_line, words)
        if self.dq_rank == self.traits.group.rank():
            _write_line(self.dq_line, words)

    @cute.jit
    def send(self, number: Int32):
        """As `PeerGrads.send`."""
        rank, ds = self.traits.group.rank(), self.channels.ds
        if self.dq_rank == rank:
            # the bytes are those of a warp of the other CTA
            ds.expect(number, WARP * SHORT_LINE)
        else:
            with cute.arch.elect_one():
                # lines of a warp are aligned, so that the first one has no swizzle
                source, target = (
                    cute.make_ptr(Int32, x, cutlass.AddressSpace.smem, assumed_align=VECTOR)
                    for x in (self.ds_line, self.dq_line)
                )
                barrier = ds.barrier(number)
                clusters.send(source, target, barrier, WARP * SHORT_LINE, self.dq_rank)


def _write_line(line: Int32, words: cute.Tensor, first: int = 0) -> None:
    """Write words to a line, from a byte on. An exclusive or with the byte of a vector swizzles."""
    parts = cute.flat_divide(words, (VECTOR // 4,))
    for i in range(cute.size(parts, mode=[1])):
        address = line ^ (first + i * VECTOR)
        place = cute.make_ptr(Int32, address, cutlass.AddressSpace.smem, assumed_align=VECTOR)
        cute.autovec_copy(parts[None, i], cute.make_tensor(place, cute.make_layout(VECTOR // 4)))
