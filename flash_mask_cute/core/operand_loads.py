"""The load warp of the forward: loads queries, keys and values of every walk by TMA.

Where keys lie in pages that TMA cannot load, other warps may copy their share of the rows
(`row_copies`); each arrives for every block.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32, const_expr

from flash_mask_cute.core import clusters, tma
from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import transposed
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.pages import PageRow, Pages
from flash_mask_cute.core.row_copies import BlockRows, CopyShare, RowCopies
from flash_mask_cute.core.stream_k import DECODE_ROWS
from flash_mask_cute.core.value_halves import ValueHalf
from flash_mask_cute.core.walk_ring import OWN_KIND_SHIFT, OWNERS_SHIFT, Block, Kind, WalkRing
from flash_mask_cute.core.warp_scan import WARP
from flash_mask_cute.core.work_ring import Work, WorkRing

# where the number of a key block begins in the word of its stage
N_BLOCK_SHIFT = 4
# Steps of copies by rows, a key block and a value block each, that are not waited for at once, at
# most. There is a stage more, for who reads them to release.
STEPS_IN_FLIGHT = 1
# Boxes of pages whose loads are prepared together. Beside warps that convert from fp8, whose loads
# and stores stand in the same queue, a shuffle takes long.
BOXES_UNROLLED, BOXES_UNROLLED_OF_CODES = 2, 8


class LoadShape(Protocol):
    """The traits of a kernel that concern loads.

    row_tile: the (packed heads, positions) of a box of query rows. group_size, spread_rows: see
    `PackedHeads`. q_fills: fills of the query channel for a work tile; q_boxes: boxes of a fill.
    box_k (keys, d) and box_v ((1, keys), d_v): the part of a block that this CTA loads. bytes_*: of
    a fill, in this CTA. overlaps_tiles: the next tile's query may be loaded before this tile's last
    values. copies_arrive: rows that are copied are published by their copies, and who reads them
    through another proxy puts a fence before; else by the warps, which wait. multicasts_keys: each
    CTA of a cluster loads half of the keys of a block, for both.
    """

    tile_m: int
    tile_n: int
    stages_q: int
    tile_d: int
    tile_dv: int
    packed_heads: int
    group_size: int
    row_tile: tuple[int, int]
    box_k: tuple[int, int]
    box_v: tuple[tuple[int, int], int]
    q_fills: int
    q_boxes: int
    spread_rows: int | None
    bytes_q: int
    bytes_k: int
    bytes_v: int
    overlaps_tiles: bool
    page_box: int | None
    copies_arrive: bool
    multicasts_keys: bool


class Buffer(NamedTuple):
    """Shared memory of an operand, with the stages as its last mode, and its channel."""

    smem: cute.Tensor
    channel: Channel


class HeadKeys(NamedTuple):
    """The keys of a sequence for a KV head. gathered: the line of the list of those to gather."""

    head: Int32
    batch_idx: Int32
    offset: Int32
    length: Int32
    gathered: Int32 | None = None


class LoadState(NamedTuple):
    """Number of key blocks loaded so far, and the value block to load next.

    v_pages, next_pages: looked up for the value block, and for the one that comes next if walks
    report it (next_block), else the block before: the place of this lane's box, or `BlockRows`.
    k_ready, v_ready: blocks that were handed over. cuts: blocks that were cut, for `cut`. bits: of
    the last blocks, the latest first.
    """

    blocks: Int32
    v_block: Int32
    v_place: HeadKeys
    v_pages: PageRow | BlockRows | None = None
    next_pages: PageRow | BlockRows | None = None
    k_ready: Int32 | None = None
    v_ready: Int32 | None = None
    cuts: Int32 | None = None
    bits: tuple | None = None
    next_block: Int32 | None = None


@dataclass(frozen=True)
class OperandLoads:
    """The operands of a forward, their destinations, and the numbering of heads and rows.

    smem: q (rows of a box, d, stages * boxes), k (keys, d, stages), v (d_v, keys, stages). words:
    one word for each key stage, for readers that do not follow walks themselves. It holds the flags
    of the block (`walk_ring`), its number, and its owners. part: the index of this CTA's part of a
    block. share: of the rows of pages, if several warps copy them. cut: for warps that only copy
    rows, and load no query: makes the bits of a block that is cut, from the work tile, the number
    of such blocks before it and the block; returns the next number. make_bits: makes those
    of each block, which `cut` sends as many blocks late as places of values permit, so that no copy
    waits for their readers. no_bits: of no block. scales_k, scales_v: of rows of pages,
    (pages, page_size, heads). half: the columns of V of this CTA, None: all. gathers: None, or
    finds keys that do not follow each other, and the lists of these (`GatheredMask`).
    """

    operands: tma.Operands
    q: Buffer
    k: Buffer
    v: Buffer
    lengths: Lengths
    heads_per_kv: Int32
    shape: cutlass.Constexpr[LoadShape]
    words: cute.Tensor | None = None
    part: int | Int32 = 0
    pages: Pages | None = None
    share: CopyShare = CopyShare()
    cut: cutlass.Constexpr[Callable[..., Int32] | None] = None
    make_bits: cutlass.Constexpr[Callable[[Work, Block], tuple] | None] = None
    no_bits: tuple = ()
    scales_k: cute.Tensor | None = None
    scales_v: cute.Tensor | None = None
    half: ValueHalf | None = None
    gathers: cutlass.Constexpr[Any] = None

    # whether the first block of a walk loads the query, after its keys
    queries_late = False

    @property
    def _first_value_column(self) -> int | Int32:
        return self.part * self.shape.box_v[1] if self.half is None else self.half.first_column

    @property
    def _ctas_of_keys(self) -> dict[str, Any]:
        """The CTAs that a copy of keys goes to, as its argument, if not to this one alone."""
        return {"mcast_mask": Int16((1 << clusters.CTAS) - 1)} if self.shape.multicasts_keys else {}

    @cute.jit
    def stream(self, ring: WorkRing, walk: WalkRing) -> None:
        """Values lag one block behind keys, as in their consumers, across work tiles, too."""
        tile, chunk = Int32(0), Int32(0)
        state = LoadState(Int32(0), Int32(-1), HeadKeys(*[Int32(0)] * 4))
        if const_expr(self.gathers is not None):
            state = state._replace(v_place=state.v_place._replace(gathered=Int32(-1)))
        if const_expr(self.pages is not None):
            state = state._replace(v_pages=PageRow.none(), next_pages=PageRow.none())
            if const_expr(walk.tells_next):
                state = state._replace(next_block=Int32(-1))
        if const_expr(self._by_rows):
            nowhere = self._copies.nowhere()
            state = state._replace(v_pages=nowhere, next_pages=nowhere)
        if const_expr(self._hands_over):
            state = state._replace(k_ready=Int32(0), v_ready=Int32(0))
        if const_expr(self.cut is not None):
            state = state._replace(cuts=Int32(0))
        if const_expr(self.make_bits is not None):
            late = min(self.k.channel.stages, self.v.channel.stages) - 1
            state = state._replace(bits=(self.no_bits,) * late)
        while ring.wait(tile):
            work = ring.read(tile)
            if const_expr(self.cut is None and not self.queries_late):
                self._load_query(tile, work)
            place = HeadKeys(
                work.head_idx // self.heads_per_kv,
                self.lengths.kv_entry(work.batch_idx),
                work.offset_k,
                work.seqlen_k,
                None if self.gathers is None else self.gathers.list_of(work),
            )
            load = partial(self._load_block, place)
            if const_expr(self.queries_late):
                load = partial(self._load_block, place, partial(self._load_query, tile, work))
            if const_expr(self.pages is not None):
                load = partial(self._load_paged_block, place, work)
            first = state.blocks
            chunk, state = walk.visit(chunk, state, load)
            if const_expr(self.make_bits is not None):
                # the next work tile may not be known before this one is read
                for i in cutlass.range_constexpr(len(state.bits) - 1, -1, -1):
                    if state.cuts < state.blocks - i:
                        state = state._replace(cuts=self.cut(None, state.cuts, None, state.bits[i]))
            if const_expr(not self.shape.overlaps_tiles):
                # the next query has to wait for the output, which has to wait for these
                self._load_values(state)
                state = state._replace(v_block=Int32(-1))
            if const_expr(self._hands_over):
                # whoever reads them lets the next query come
                if const_expr(self.share.count == 1 or self.shape.stages_q == 1):
                    state = self._hand_over_rows(state, 0)
                elif state.blocks == first + 1:
                    # with the next tile's first block, which was handed over with its second one
                    state = self._hand_over_rows(state, 0)
            ring.release(tile)
            tile += 1
        self._load_values(state)
        if const_expr(self._hands_over):
            self._hand_over_rows(state._replace(v_block=Int32(-1)), 0)
        elif const_expr(self._by_rows):
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
        if const_expr(self.k.channel.home is not None):
            # releases come from another CTA, and must not come after the end of this one
            self.q.channel.drain(tile * self.shape.q_fills)
            self.k.channel.drain(state.blocks)
            self.v.channel.drain(state.blocks)

    @cute.jit
    def _load_block(self, place: HeadKeys, state: LoadState, block: Block) -> LoadState:
        """Load the keys of a block, and the values of the block before it."""
        shape, number = self.shape, state.blocks
        if const_expr(self.lengths.cu_seqlens_k is None):
            gK = self.operands.k[None, None, place.head, place.batch_idx]
        else:
            gK = cute.domain_offset((place.offset, 0), self.operands.k[None, None, place.head])
        blocks = cute.local_tile(gK, shape.box_k, (None, 0))
        parts = shape.tile_n // shape.box_k[0]
        smem = self.k.smem
        part = self.part
        if const_expr(shape.multicasts_keys):
            part = self.half.rank
            smem = cute.local_tile(smem, shape.box_k, (part, 0, None))
        src, dst = tma.blocks_of(self.operands.k_atom, blocks, smem)
        channel = self._begin_block(number, block)
        channel.expect(number, shape.bytes_k)
        src, dst = src[None, block.index * parts + part], dst[None, channel.index(number)]
        barrier = channel.barrier(number)
        cute.copy(self.operands.k_atom, src, dst, tma_bar_ptr=barrier, **self._ctas_of_keys)
        self._load_values(state)
        return LoadState(number + 1, block.index, place)

    @cute.jit
    def _begin_block(self, number: Int32, block: Block) -> Channel:
        """Wait for a stage of keys, and announce the block that is loaded into it."""
        # all that can be known before the stage is free, since from then on time counts
        word = block.follower | (block.kind << OWN_KIND_SHIFT) | (block.index << N_BLOCK_SHIFT)
        if const_expr(block.owners is not None):
            word = word | (block.owners << OWNERS_SHIFT)
        channel = self.k.channel
        channel.acquire(number)
        if const_expr(self.words is not None and self.cut is None):  # noqa: SIM102 (while tracing)
            if cute.arch.lane_idx() == 0:
                self.words[channel.index(number)] = word
        return channel

    # -- pages ----------------------------------------------------------------------------------

    @cute.jit
    def _load_paged_block(
        self, place: HeadKeys, work: Work, state: LoadState, block: Block
    ) -> LoadState:
        number, pages = state.blocks, state.next_pages
        awaited, following = state.v_block - 1, block.index - 1
        if const_expr(block.next_index is not None):
            awaited, following = state.next_block, block.next_index
            state = state._replace(next_block=following)
        is_next = (block.index == awaited) & (place.batch_idx == state.v_place.batch_idx)
        if const_expr(self.gathers is not None):
            is_next = is_next & (place.gathered == state.v_place.gathered)
        if is_next == Boolean(False):
            pages = self._look_up(place, block.index)
            if const_expr(not self._settles_late):
                pages = self._settled(pages)
        if const_expr(self._settles_late):
            pages = self._settled(pages)
        # the table is read while this block is loaded
        next_pages = self._look_up(place, following)
        channel = self._begin_block(number, block)
        if const_expr(self._by_rows):
            smem = self.k.smem[None, None, channel.index(number)]
            self._copies.copy(self.pages.k, place.head, pages, smem)
            if const_expr(not self._hands_over):
                channel.publish_copies(number)
        else:
            load = partial(self._load_key_box, place.head)
            of_k = self.shape.bytes_k, load, self.shape.multicasts_keys
            self._load_boxes(pages, number, channel, *of_k)
        self._ask_for_scales(self.scales_k, place, pages)
        self._load_paged_values(state)
        state = state._replace(
            blocks=number + 1,
            v_block=block.index,
            v_place=place,
            v_pages=pages,
            next_pages=next_pages if self._settles_late else self._settled(next_pages),
        )
        if const_expr(self._hands_over):
            stages = min(self.k.channel.stages, self.v.channel.stages)
            in_flight = min(STEPS_IN_FLIGHT, stages - 1)
            state = self._hand_over_rows(state, in_flight)
        if const_expr(self.make_bits is not None):
            if state.cuts <= number - len(state.bits):
                state = state._replace(cuts=self.cut(None, state.cuts, None, state.bits[-1]))
            state = state._replace(bits=(self.make_bits(work, block), *state.bits[:-1]))
        elif const_expr(self.cut is not None):  # noqa: SIM102 (decided while tracing)
            # those of the cut block before become free, since its keys were handed over
            if block.kind == Kind.PARTIAL:
                state = state._replace(cuts=self.cut(work, state.cuts, block))
        return state

    @cute.jit
    def _load_boxes(
        self,
        pages: PageRow,
        number: Int32,
        channel: Channel,
        num_bytes: int,
        load: cutlass.Constexpr[Callable[[PageRow, Int32, Int32], None]],
        is_multicast: cutlass.Constexpr[bool] = False,
    ) -> None:
        """Load this warp's share of the boxes of a block. num_bytes: of all. is_multicast: the
        others come from the other CTA."""
        boxes, share = self.shape.tile_n // self.shape.page_box, self.share
        own = (boxes - share.index + share.count - 1) // share.count
        if const_expr(is_multicast):
            share, own = CopyShare(self.half.rank, clusters.CTAS), boxes
        channel.expect(number, own * (num_bytes // boxes))
        is_of_codes = self.k.smem.element_type.width == 8
        unroll = BOXES_UNROLLED_OF_CODES if is_of_codes else BOXES_UNROLLED
        for turn in cutlass.range(-(-boxes // share.count), unroll=unroll):
            box = turn * share.count + share.index
            at = pages.of_lane(box)
            if const_expr(boxes % share.count == 0):  # noqa: SIM114 (decided while tracing)
                load(at, box, number)
            elif box < boxes:
                load(at, box, number)

    def _load_key_box(self, head: Int32, at: PageRow, box: Int32, number: Int32) -> None:
        gK = self.operands.k[None, None, head, at.page]
        gK = cute.domain_offset((at.row, 0), gK)
        channel, tile = self.k.channel, self.shape.box_k
        to = tile, box, number, channel
        self._load_box(self.operands.k_atom, gK, self.k.smem, *to, self._ctas_of_keys)

    def _load_value_box(
        self, head: Int32, smem: cute.Tensor, at: PageRow, box: Int32, number: Int32
    ) -> None:
        gV = self.operands.v[None, None, None, at.page]
        gV = tma.at_ragged_sequence(gV, Int32(0), at.in_use, self.pages.page_size)
        gV = cute.domain_offset(((head, at.row), self._first_value_column), gV)
        channel, tile = self.v.channel, self.shape.box_v
        self._load_box(self.operands.v_atom, gV, smem, tile, box, number, channel)

    @cute.jit
    def _load_paged_values(self, state: LoadState) -> None:
        """Load the pending value block, if any, without unused rows."""
        if state.v_block >= 0:
            shape, place, channel = self.shape, state.v_place, self.v.channel
            number = state.blocks - 1
            channel.acquire(number)
            # (d_v, keys) to products, (keys, d_v) to copies
            smem = transposed(self.v.smem)
            if const_expr(self._by_rows):
                stage = smem[None, None, channel.index(number)]
                self._ask_for_scales(self.scales_v, place, state.v_pages)
                pool = self.pages.v
                if const_expr(self.half is not None):
                    pool = cute.domain_offset((0, 0, 0, self.half.first_column), pool)
                self._copies.copy(pool, place.head, state.v_pages, stage)
                if const_expr(not self._hands_over):
                    channel.publish_copies(number)
            else:
                self._ask_for_scales(self.scales_v, place, state.v_pages)
                load = partial(self._load_value_box, place.head, smem)
                self._load_boxes(state.v_pages, number, channel, shape.bytes_v, load)

    def _load_box(
        self,
        atom: cute.CopyAtom,
        gmem: cute.Tensor,
        smem: cute.Tensor,
        tile: tuple,
        box: Int32,
        number: Int32,
        channel: Channel,
        more: dict[str, Any] | None = None,
    ) -> None:
        """Load the first rows of gmem into a box of a stage. more: arguments of the copy."""
        rows_and_columns = self.shape.page_box, cute.size(smem, mode=[1])
        of_box = cute.local_tile(smem, rows_and_columns, (box, 0, None))
        src, dst = tma.blocks_of(atom, cute.local_tile(gmem, tile, (0, 0)), of_box)
        stage, barrier = channel.index(number), channel.barrier(number)
        cute.copy(atom, src, dst[None, stage], tma_bar_ptr=barrier, **more or {})

    def _key(self, place: HeadKeys, block: Int32, row: Int32) -> Int32:
        """The key at a row of a block, or behind it; after the sequence's end, its last key."""
        key = block * self.shape.tile_n + row
        if self.gathers is not None:
            key = self.gathers.key(place.gathered, block, row, place.length)
        return cutlass.max(cutlass.min(key, place.length - 1), 0)

    def _look_up(self, place: HeadKeys, block: Int32) -> PageRow | BlockRows:
        """The place of this lane's box of a block, or the places of its rows; not `_settled` yet.

        Done when a box is loaded, the divisions and clamps would take longer than its load.
        """
        if self._by_rows:
            of_block = place.batch_idx, cutlass.max(block, 0), place.length
            return self._copies.look_up(*of_block, partial(self._key, place))
        last = self.shape.tile_n // self.shape.page_box - 1
        box = cutlass.min(cute.arch.lane_idx(), last)
        key = self._key(place, cutlass.max(block, 0), box * self.shape.page_box)
        return self.pages.place(self.pages.entry(place.batch_idx, key), key, place.length)

    def _ask_for_scales(
        self, scales: cute.Tensor | None, place: HeadKeys, pages: PageRow | BlockRows
    ) -> None:
        """Prefetch the scales of a block's rows into the L2 cache for the warps that convert it."""
        if scales is None:
            return
        for page, row in zip(*pages, strict=True) if self._by_rows else self._rows_of_boxes(pages):
            at = cute.crd2idx((page, row, place.head), scales.layout)
            cute.arch.prefetch((scales.iterator + at).to_llvm_ptr(), cache_level="L2")

    def _rows_of_boxes(self, pages: PageRow) -> Iterator[tuple[Int32, Int32]]:
        """The page and the row of each row of this lane, of those of all boxes of a block."""
        for first in range(0, self.shape.tile_n, WARP):
            row = cutlass.min(first + cute.arch.lane_idx(), self.shape.tile_n - 1)
            at = pages.of_lane(row // self.shape.page_box)
            yield at.page, at.row + row % self.shape.page_box

    @property
    def _settles_late(self) -> bool:
        """Whether pages are settled when their block is loaded: not between fences that wait."""
        return self._by_rows and not self._hands_over

    def _settled(self, pages: PageRow | BlockRows) -> PageRow | BlockRows:
        """Pages of the pool, from what was read in the table."""
        if self._by_rows:
            return self._copies.settled(pages)
        return pages._replace(page=self.pages.number(pages.page))

    # -- rows of pages --------------------------------------------------------------------------

    @property
    def _by_rows(self) -> bool:
        return self.pages is not None and self.pages.k is not None

    @property
    def _hands_over(self) -> bool:
        """Whether copies by rows are waited for before they are handed over."""
        return self._by_rows and not self.shape.copies_arrive

    @property
    def _copies(self) -> RowCopies:
        shape = self.shape
        return RowCopies(self.pages, shape.tile_n, shape.tile_m <= DECODE_ROWS, self.share)

    @cute.jit
    def _hand_over_rows(self, state: LoadState, in_flight: cutlass.Constexpr[int]) -> LoadState:
        """End a copy step (a block of keys and the values before it), and hand over the blocks of
        all steps but the last ones.

        The copying threads wait for their rows, because products read them through another proxy.
        """
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(in_flight)
        cute.arch.fence_proxy("async.shared", space="cta")
        k_ready, v_ready = state.k_ready, state.v_ready
        values = cutlass.select_(state.v_block >= 0, state.blocks - 1, state.blocks)
        while k_ready < state.blocks - in_flight:
            self.k.channel.publish(k_ready)
            k_ready += 1
        while v_ready < values - in_flight:
            self.v.channel.publish(v_ready)
            v_ready += 1
        return state._replace(k_ready=k_ready, v_ready=v_ready)

    # -- values and queries ---------------------------------------------------------------------

    @cute.jit
    def _load_values(self, state: LoadState) -> None:
        if const_expr(self.operands.v is None and self.pages is None):
            pass  # the kernel has no values
        elif const_expr(self.pages is not None):
            self._load_paged_values(state)
        elif state.v_block >= 0:
            shape, place, atom = self.shape, state.v_place, self.operands.v_atom
            row = state.v_block * shape.tile_n
            # other rows may hold NaN, which probabilities of 0 keep
            side, keys = tma.RowSide.of_keys(self.lengths), (place.offset, place.length)
            gV, row = tma.readable_rows(self.operands.v, side, place.batch_idx, *keys, row)
            # (d_v, keys) to products, (keys, d_v) to TMA
            smem, first = transposed(self.v.smem), (place.head, row)
            src, dst = tma.tile_of(atom, gV, first, shape.box_v, smem, self._first_value_column)
            number, channel = state.blocks - 1, self.v.channel
            channel.acquire(number)
            channel.expect(number, shape.bytes_v)
            stage, barrier = channel.index(number), channel.barrier(number)
            cute.copy(atom, src, dst[None, stage], tma_bar_ptr=barrier)

    @cute.jit
    def _load_query(self, tile: Int32, work: Work) -> None:
        shape, channel = self.shape, self.q.channel
        gQ = self.operands.q
        if const_expr(self.lengths.cu_seqlens_q is None):
            gQ = gQ[None, None, work.batch_idx]
        rows_of_box = shape.row_tile[0] * shape.row_tile[1]
        # rolled: each copy in flight of an unrolled loop would take uniform registers of its own
        for fill in cutlass.range(shape.q_fills, unroll=1):
            number = tile * shape.q_fills + fill
            channel.acquire(number)
            channel.expect(number, shape.bytes_q)
            for box in cutlass.range_constexpr(shape.q_boxes):
                tile_row = work.block * shape.tile_m + (fill * shape.q_boxes + box) * rows_of_box
                first_head = work.head_idx * shape.group_size
                if const_expr(rows_of_box < shape.packed_heads):
                    first_head += tile_row % shape.packed_heads
                first = first_head, work.offset_q + tile_row // shape.packed_heads
                smem, stage = self.q.smem, channel.index(number) * shape.q_boxes + box
                if const_expr(shape.spread_rows is not None):
                    place = 2 * box, 0, None
                    smem = cute.local_tile(smem, (shape.spread_rows, shape.tile_d), place)
                    stage = channel.index(number)
                size, barrier = (shape.row_tile, shape.tile_d), channel.barrier(number)
                src, dst = tma.tile_of(self.operands.q_atom, gQ, first, size, smem)
                cute.copy(self.operands.q_atom, src, dst[None, stage], tma_bar_ptr=barrier)
