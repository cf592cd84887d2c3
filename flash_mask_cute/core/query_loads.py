"""TMA loads of the backward: queries, output gradients and statistics, block by block.

Keys and values of a work tile come with its first query block: their bytes complete the fills of
its Q and dO.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from flash_mask_cute.core import tma
from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.row_blocks import RowBlocks
from flash_mask_cute.core.walk_ring import OWN_KIND_SHIFT, OWNERS_SHIFT, Block
from flash_mask_cute.core.work_ring import Work

# of a query block: its flags, number, head, and row block or, if a walk visits several, sequence
QUERY_WORDS = 4


class BwdOperands(NamedTuple):
    """TMA atoms with their coordinate tensors.

    q, do: ((1 head, row), d, ...), or those of `tma.group_rows`; k, v: ((head, row), d, ...). The
    last mode is the batch, or that of `tma.ragged_rows` if lengths vary. peer_k: k in halves of its
    columns.
    """

    q_atom: cute.CopyAtom
    q: cute.Tensor
    do_atom: cute.CopyAtom
    do: cute.Tensor
    k_atom: cute.CopyAtom
    k: cute.Tensor
    v_atom: cute.CopyAtom
    v: cute.Tensor
    peer_k_atom: cute.CopyAtom | None = None
    peer_k: cute.Tensor | None = None

    @staticmethod
    def create(
        traits: "QueryShape",
        tensors: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor],
        lengths: Lengths,
        listed: tuple[int, int] = (1, 1),
    ) -> "BwdOperands":
        """Made from Q, dO, K and V, with the layouts of a kernel's traits.

        listed: for listed queries, rows of one, which a box of Q and dO has, and the heads of its
        group, which these rows begin with; after them, TMA writes zeros.
        """
        load = cpasync.CopyBulkTensorTileG2SOp()
        queries = lengths.cu_seqlens_q is not None, lengths.seqused_q is not None
        keys = lengths.cu_seqlens_k is not None, lengths.seqused_k is not None
        operands: list = []
        for tensor, side, of_query, (layout, rows, d) in zip(
            (*tensors, tensors[2]),
            (queries, queries, keys, keys, keys),
            (listed[0], listed[0], 1, 1, 1),
            traits.boxes(),
            strict=False,
        ):
            if of_query > 1:
                if of_query == listed[1]:
                    view, box = tma.head_rows(tensor, side[0]), ((of_query, 1), d)
                else:
                    view, box = tma.group_rows(tensor, listed[1]), ((of_query, 1, 1), d)
                in_box = tma.rows_of_stage(tma.one_stage(layout), of_query)
            else:
                view, box = tma.sequence_rows(tensor, *side), ((1, rows), d)
                in_box = tma.one_stage(layout)
            operands += cpasync.make_tiled_tma_atom(load, view, in_box, box)
        return BwdOperands(*operands)


class QueryShape(Protocol):
    """boxes: for Q, dO, K, V, and the peer's K if there is one: the layout with stages in shared
    memory, and rows and columns of a box. bytes_with_q, bytes_with_do: additional bytes of a work
    tile's first block."""

    tile_m: int
    tile_d: int
    tile_dv: int
    bytes_q: int
    bytes_do: int
    bytes_stats: int
    bytes_with_q: int
    bytes_with_do: int

    def boxes(self) -> tuple[tuple[cute.ComposedLayout, int, int], ...]: ...


class QueryTiles(Protocol):
    """Shared memory with stages. stats: statistics of a query block; words: `QUERY_WORDS`, for
    readers that do not follow walks themselves, or None."""

    q: cute.Tensor
    do: cute.Tensor
    stats: cute.Tensor
    words: cute.Tensor | None


class QueryChannels(Protocol):
    q: Channel
    do: Channel


class Visited(NamedTuple):
    """A query block of a work tile: its number, whether it is the first one, and its row block.
    work: with the lengths of the block's sequence (`Lengths.of_block`)."""

    work: Work
    block: Block
    number: Int32
    is_first: Boolean
    row_block: Int32


@dataclass(frozen=True)
class QueryLoads:
    """State of a warp that loads query blocks. stats (heads_q, row_blocks, -1)."""

    traits: cutlass.Constexpr[QueryShape]
    operands: BwdOperands
    tiles: QueryTiles
    channels: QueryChannels
    stats: cute.Tensor
    lengths: Lengths

    @cute.jit
    def load_query(self, at: Visited):
        """Load Q of a block with its statistics, and announce the block."""
        traits, operands, tiles, channel = self.traits, self.operands, self.tiles, self.channels.q
        block = at.block
        flags = block.follower | (block.kind << OWN_KIND_SHIFT)
        if const_expr(block.owners is not None):
            flags = flags | (block.owners << OWNERS_SHIFT)
        last = at.row_block if const_expr(block.sequence is None) else block.sequence
        words = (flags, block.index, block.head_idx, last)
        copy = self._rows_copy(operands.q_atom, operands.q, tiles.q, traits.tile_d, at)
        stage = channel.index(at.number)
        channel.acquire(at.number)
        if const_expr(tiles.words is not None):  # noqa: SIM102 (decided while tracing)
            if cute.arch.lane_idx() == 0:
                for i in cutlass.range_constexpr(QUERY_WORDS):
                    tiles.words[i, stage] = Int32(words[i])
        self._tell_queries(block, stage)
        bytes_k = cutlass.select_(at.is_first, Int32(traits.bytes_with_q), Int32(0))
        channel.expect(at.number, bytes_k + traits.bytes_q + traits.bytes_stats)
        barrier = channel.barrier(at.number)
        copy(stage, barrier)
        self._load_stats(at, stage, barrier)

    @cute.jit
    def load_do(self, at: Visited):
        traits, operands, channel = self.traits, self.operands, self.channels.do
        copy = self._rows_copy(operands.do_atom, operands.do, self.tiles.do, traits.tile_dv, at)
        channel.acquire(at.number)
        bytes_v = cutlass.select_(at.is_first, Int32(traits.bytes_with_do), Int32(0))
        channel.expect(at.number, bytes_v + traits.bytes_do)
        stage, barrier = channel.index(at.number), channel.barrier(at.number)
        copy(stage, barrier)

    def _tell_queries(self, block: Block, stage: Int32) -> None:
        """Write the queries of a block, where they are listed, to its words, for who asks."""

    def row_block(self, work: Work, block: Block) -> Int32:
        return RowBlocks(self.lengths, self.traits.tile_m).of(work, block)

    def _rows_copy(
        self, atom: cute.CopyAtom, source: cute.Tensor, smem: cute.Tensor, dim: int, at: Visited
    ) -> Callable[[Int32, cute.Pointer], None]:
        """A function that starts to copy the rows of Q or dO into a stage."""
        work, side, tile_m = at.work, tma.RowSide.of_queries(self.lengths), self.traits.tile_m
        place = work.batch_idx, work.offset_q, work.seqlen_q, at.block.index * tile_m
        gmem, row = tma.readable_rows(source, side, *place)
        src, dst = tma.tile_of(atom, gmem, (at.block.head_idx, row), ((1, tile_m), dim), smem)
        return partial(self._copy_rows, atom, src, dst)

    def _copy_rows(
        self,
        atom: cute.CopyAtom,
        src: cute.Tensor,
        dst: cute.Tensor,
        stage: Int32,
        barrier: cute.Pointer,
    ) -> None:
        cute.copy(atom, src, dst[None, stage], tma_bar_ptr=barrier)

    def _load_stats(self, at: Visited, stage: Int32, barrier: cute.Pointer) -> None:
        stats = self.stats[at.block.head_idx, at.row_block, None]
        tma.copy_bulk(stats, self.tiles.stats[None, stage], barrier)
