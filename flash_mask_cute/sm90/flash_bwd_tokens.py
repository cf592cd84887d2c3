"""Blocks of listed queries in the Hopper backward: their loads, and their sums of dQ.

A block has all heads of a few queries that chose the keys of a work tile (`core/query_lists.py`).
Each of these queries is loaded by boxes of its own, and its sums go to a place of its own. Lane i
has query i of a block (`WalkRing.tokens`). A block that is not filled gets its first query once
more: the bits hide everything of it, and its sums are not sent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.experimental import primitives

from flash_mask_cute.core import tma
from flash_mask_cute.core.dq_sums import NOTHING, UNSENT, DqSums, Scratch, Summed
from flash_mask_cute.core.query_loads import QUERY_WORDS, QueryLoads, Visited
from flash_mask_cute.core.row_blocks import RowBlocks
from flash_mask_cute.core.walk_ring import Block
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.sm90.flash_bwd_traits import BwdTraits

# boxes whose copies are unrolled; more take a loop
MAX_UNROLLED = 16


def by_query_lists(traits: BwdTraits, scratch: Scratch) -> Scratch:
    """Scratch memory of row blocks as that of queries: (KV head, query, values of all heads)."""
    return scratch._replace(
        stats=_split_blocks(scratch.stats, traits), dq=_split_blocks(scratch.dq, traits)
    )


def _split_blocks(tensor: cute.Tensor, traits: BwdTraits) -> cute.Tensor:
    heads, blocks, size = tensor.shape
    tokens = traits.tokens_per_block
    shape, stride = (heads, blocks * tokens, size // tokens), (tensor.stride[0], size // tokens, 1)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def _of_first(value: Int32) -> Int32:
    """This lane's number, or the first lane's if it is negative."""
    return cutlass.select_(value < 0, cute.arch.shuffle_sync(value, 0), value)


@dataclass(frozen=True)
class TokenLoads(QueryLoads):
    """stats (heads_kv, queries, -1). In place of a row block each lane has the place of its query
    in scratch memory, or UNSENT."""

    def row_block(self, work: Work, block: Block) -> Int32:
        tokens = self.traits.tokens_per_block
        blocks = RowBlocks(self.lengths, tokens)
        first = blocks.first_of(work.batch_idx, work.offset_q) * tokens
        return cutlass.select_(block.token < 0, Int32(UNSENT), first + block.token)

    def _rows_copy(
        self, atom: cute.CopyAtom, source: cute.Tensor, smem: cute.Tensor, dim: int, at: Visited
    ) -> Callable[[Int32, cute.Pointer], None]:
        row = _of_first(at.block.token)
        if self.lengths.cu_seqlens_q is None:
            source = source[None, None, at.work.batch_idx]
        else:
            row += at.work.offset_q
        of_query = atom, source, smem, dim, at.block.head_idx, row
        return partial(self._copy_block, partial(self._copy_query, *of_query))

    @cute.jit
    def _copy_block(
        self,
        copy_query: cutlass.Constexpr[Callable[[int | Int32, Int32, cute.Pointer], None]],
        stage: Int32,
        barrier: cute.Pointer,
    ) -> None:
        tokens = self.traits.tokens_per_block
        if const_expr(tokens <= MAX_UNROLLED):
            for i in cutlass.range_constexpr(tokens):
                copy_query(i, stage, barrier)
        else:
            for i in cutlass.range(tokens, unroll=1):
                copy_query(i, stage, barrier)

    def _copy_query(
        self,
        atom: cute.CopyAtom,
        source: cute.Tensor,
        smem: cute.Tensor,
        dim: int,
        group: Int32,
        row_of_lane: Int32,
        i: int | Int32,
        stage: Int32,
        barrier: cute.Pointer,
    ) -> None:
        """Copy the rows of query i of a block, of `dim` columns."""
        rows = self.traits.packed_heads
        row = cute.arch.shuffle_sync(row_of_lane, i)
        box = cute.local_tile(smem, (rows, dim), (i, 0, None))
        first, tile = (group * rows, row), (rows, 1)
        if self.traits.group_size < rows:
            first, tile = (0, row, group), (rows, 1, 1)
        src, dst = tma.tile_of(atom, source, first, (tile, dim), box)
        cute.copy(atom, src, dst[None, stage], tma_bar_ptr=barrier)

    @cute.jit
    def _tell_queries(self, block: Block, stage: Int32) -> None:
        if const_expr(self.traits.tells_queries):
            if cute.arch.lane_idx() < self.traits.tokens_per_block:
                place = QUERY_WORDS + cute.arch.lane_idx(), stage
                self.tiles.words[place] = cutlass.max(block.token, 0)
            cute.arch.sync_warp()

    @cute.jit
    def _load_stats(self, at: Visited, stage: Int32, barrier: cute.Pointer) -> None:
        place, lane = _of_first(at.row_block), cute.arch.lane_idx()
        size = cute.size(self.stats, mode=[2])
        if lane < self.traits.tokens_per_block:
            atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
            of_token = self.tiles.stats[None, stage].iterator + lane * size
            smem = cute.make_tensor(of_token, cute.make_layout(size))
            gmem = self.stats[at.block.head_idx, place, None]
            cute.copy(atom, gmem, smem, mbar_ptr=barrier)
        cute.arch.sync_warp()


@dataclass(frozen=True)
class TokenSums(DqSums):
    """Without an order: each lane adds the sums of its query. products: of each part, where a
    product begins in staging memory and among the sums of a query, and how many of these it has.
    num_tokens: queries of a block."""

    products: cutlass.Constexpr[tuple[tuple[tuple[int, int, int], ...], ...]] = ()
    num_tokens: cutlass.Constexpr[int] = 1

    def _is_block(self, summed: Summed) -> Boolean:
        return cute.arch.shuffle_sync(summed.row_block, 0) != NOTHING

    @cute.jit
    def send(self, own_number: Int32, number: Int32, sent: Summed, summed: Summed):
        """Start adding the dQ of block `number`, if it is one, to the scratch memory."""
        lane, parts = cute.arch.lane_idx(), len(self.products)
        if self._is_block(summed):
            for i in cutlass.range_constexpr(parts):
                if const_expr(i > 0):
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.sync_warp()
                    self.channel.release(number * parts + i - 1)
                self.channel.wait(number * parts + i)
                if (lane < self.num_tokens) & (summed.row_block >= 0):
                    target = self.scratch.dq[summed.head_idx, summed.row_block, None].iterator
                    for start, place, size in self.products[i]:
                        primitives.cp_reduce_async_bulk_global_shared_cta(
                            target + place,
                            self.staged + (start + lane * size),
                            size * 4,
                            op=primitives.CpReduceOp.ADD,
                            type=primitives.CpReduceType.F32,
                        )
                cute.arch.sync_warp()
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def free_staging(self, number: Int32, sent: Summed):
        """Wait until the last part of the dQ of block `number`, if it exists, has left."""
        if self._is_block(sent):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            self.channel.release((number + 1) * len(self.products) - 1)
