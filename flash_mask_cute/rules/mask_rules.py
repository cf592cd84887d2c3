"""All masks of a call as one rule, for single scores and for tiles.

A score counts if every given mask allows it: the lengths, causal and window (`Band`), column
intervals, block lists, mask_mod. Kernels apply the rule in two directions: in the forward a block
of queries walks over keys (`forward_mask`), in the backward a block of keys walks over queries
(`backward_mask`). Each direction sends walks and makes the bits of partial blocks, in warps that
compute no scores.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr

from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.tile_state import has_hidden, has_visible, state_of_warp
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.limits import LONGEST
from flash_mask_cute.mods.calling import ScorePlace, call_mask_mod
from flash_mask_cute.rules.band import right_side
from flash_mask_cute.rules.bit_tile import ALL, WORD, Columns
from flash_mask_cute.rules.block_info import BlockInfo
from flash_mask_cute.rules.intervals import Intervals, rows_of_call
from flash_mask_cute.seqlen_info import SeqlenInfoQK


class ColumnArgs(NamedTuple):
    """Column intervals: indices (batch | 1, heads_mask, seqlen_k, n) int32, and bounds (batch | 1,
    heads_mask, 2 n, num_n_blocks), their smallest and largest values per key block.

    heads_per_mask_head: consecutive heads of walks that share a mask head. If keys are packed, both
    tensors have one batch entry for all sequences (`ColumnMask.bounds`).
    """

    indices: cute.Tensor
    bounds: cute.Tensor
    heads_per_mask_head: Int32


class ListArgs(NamedTuple):
    """Block lists, cnt (batch | 1, heads | 1, num_q_blocks), idx (..., num_k_blocks), of blocks of
    block_q x block_k scores, multiples of the kernel's tiles. full_* may be absent."""

    mask_cnt: cute.Tensor
    mask_idx: cute.Tensor
    full_cnt: cute.Tensor | None
    full_idx: cute.Tensor | None
    block_q: Int32
    block_k: Int32


class BitArgs(NamedTuple):
    """State of logical blocks of any size: bit kb % 32 of word kb // 32 of visible, full (batch |
    1, heads | 1, num_q_blocks, words). Kernel tiles need not nest in these blocks.

    A selection of each query (`SelectedBlocks`) has blocks of one query and no `full`: of what is
    chosen the other masks decide. Its rows are those of the call (of all sequences together, if
    they are packed). of_any, of_every: the bits that any or every query of a tile of the walk has,
    (batch | 1, heads, tiles, words), as `SelectionBits` numbers tiles. most_tiles: key tiles that a
    tile of the walk may have chosen. Without of_any and of_every there is one query, and `visible`
    are its entries (batch | 1, heads, 1, k), int32 or int64.
    heads_per_selection: consecutive heads of walks that share a head of the selection. numbers,
    counts: `UnionLists`, in place of of_any and of_every where keys of small blocks are gathered.
    """

    visible: cute.Tensor
    full: cute.Tensor | None
    block_q: Int32
    block_k: Int32
    of_any: cute.Tensor | None = None
    of_every: cute.Tensor | None = None
    most_tiles: Int32 | None = None
    numbers: cute.Tensor | None = None
    counts: cute.Tensor | None = None
    heads_per_selection: Int32 | None = None

    @property
    def is_selection(self) -> bool:
        return self.full is None

    @property
    def are_entries(self) -> bool:
        return self.is_selection and self.of_any is self.counts is None


class MaskBitsArgs(NamedTuple):
    """The precomputed result of a mask_mod and block lists for each tile (`mask_bits_kernel.py`).

    states: the state of each tile (`core/tile_state.py`), int32 (batch | 1, m_blocks, n_blocks).
    tiles: the bits of partial tiles, int32 (batch | 1, m_blocks, n_blocks, lines, words).
    places: for sequences of different lengths, int32 (sequences + LONGEST + 1, 2): the number of a
    sequence's first tile, and how many tiles it has in a row. tiles and states are then (1, 1,
    tiles, ...). After them the sequence and number of LONGEST or fewer blocks of queries whose
    walks are much longer than others, and last how many are such.
    query_chunk: the part that a launch computes, None for all: the first block of queries, and the
    number of blocks. With places it is the first tile and the number of tiles; the launch computes
    the blocks whose first tile is among these. The tensors begin with the chunk.
    """

    tiles: cute.Tensor
    states: cute.Tensor
    places: cute.Tensor | None = None
    query_chunk: tuple[Int32, Int32] | None = None

    def with_query_chunk(self, first: Int32, count: Int32) -> "MaskBitsArgs":
        if self.places is not None:
            return self._replace(query_chunk=(first, count))
        tiles, states = (
            cute.domain_offset((0, -first, *(0 for _ in x.shape[2:])), x)
            for x in (self.tiles, self.states)
        )
        return MaskBitsArgs(tiles, states, query_chunk=(first, count))

    def rows_of_query_chunk(self, sequence: Int32) -> tuple[Int32, Int32]:
        """The blocks [first, end) of queries of a sequence in a launch, perhaps after its end."""
        first, count = self.query_chunk
        begin, in_row = self.places[sequence, 0], cutlass.max(self.places[sequence, 1], 1)
        ends = (cutlass.max(x - begin, 0) for x in (first, first + count))
        return tuple(cute.ceil_div(x, in_row) for x in ends)

    def longest_walks(self) -> tuple[Int32, Int32, Int32]:
        """How many there are of these blocks, and the sequence, or -1, and number of a lane's."""
        lane, first = cute.arch.lane_idx(), cute.size(self.places, mode=[0]) - LONGEST - 1
        count = cutlass.min(self.places[first + LONGEST, 0], LONGEST)
        sequence = cutlass.select_(lane < count, self.places[first + lane, 0], Int32(-1))
        return count, sequence, self.places[first + lane, 1]

    def tile(self, batch_idx: Int32, m_block: Int32, n_block: Int32) -> cute.Tensor:
        lines = self.tiles[(*self.index(batch_idx, m_block, n_block), None, None)]
        return cute.make_tensor(lines.iterator, cute.select(lines.layout, [1, 0]))

    def state(self, batch_idx: Int32, m_block: Int32, n_block: Int32) -> Int32:
        return self.states[self.index(batch_idx, m_block, n_block)]

    def index(self, batch_idx: Int32, m_block: Int32, n_block: Int32) -> tuple:
        if self.places is None:
            return cutlass.min(batch_idx, cute.size(self.states, mode=[0]) - 1), m_block, n_block
        first, in_row = self.places[batch_idx, 0], self.places[batch_idx, 1]
        number = first + m_block * in_row + n_block
        if self.query_chunk is not None:
            number -= self.query_chunk[0]
        # a sequence may be longer than it was said to be
        return 0, 0, cutlass.min(number, cute.size(self.states, mode=[2]) - 1)


class MaskedKernel(Protocol):
    """A kernel's masks. traits: tile_m, tile_n, packed_heads, in a forward cluster_tile_m."""

    traits: Any
    is_causal: bool
    is_local: bool
    intervals: Intervals | None
    mask_mod: Callable[..., Any] | None
    has_aux_tensors: bool
    skip_blocks: bool


def check_given(name: str, given: Any, is_wanted: bool) -> None:
    """Refuse a launch argument that the kernel was not made for, or that is missing. Raises
    ValueError naming the argument."""
    if (given is not None) != is_wanted:
        raise ValueError(f"{name} must {'' if is_wanted else 'not '}be given to this kernel")


class WindowArgs(NamedTuple):
    """The sides of a launch's window, None if open. causal_per_seq: int32 (batch,), not 0 where a
    sequence is causal, beside a right side; absent if all are alike."""

    left: Int32 | None
    right: Int32 | None
    causal_per_seq: cute.Tensor | None = None


class MaskArgs(NamedTuple):
    """The tensors of a launch's masks; any may be absent. mask_bits: replaces block lists and a
    mask_mod. causal_per_seq: as in `WindowArgs`."""

    window_left: Int32 | None
    window_right: Int32 | None
    columns: ColumnArgs | None
    lists: ListArgs | None
    bits: BitArgs | None
    aux_tensors: Any
    mask_bits: MaskBitsArgs | None = None
    causal_per_seq: cute.Tensor | None = None

    @staticmethod
    def create(
        kernel: "MaskedKernel",
        window: WindowArgs,
        column_tensors: tuple | None,
        num_heads: Int32,
        block_lists: tuple[tuple, tuple | None] | None,
        block_bits: tuple | None,
        aux_tensors: Any,
        mask_bits: MaskBitsArgs | None = None,
    ) -> "MaskArgs":
        """num_heads: heads of walks. block_lists: the tensors of the lists, and the size of their
        blocks (None: that of the kernel's tiles). Raises ValueError: the given tensors do not match
        the kernel, or mask bits are given to one with a mask_mod, or beside block lists."""
        check_given("aux_tensors", aux_tensors, kernel.has_aux_tensors)
        check_given("column_tensors", column_tensors, kernel.intervals is not None)
        if any(x is not None for x in (kernel.mask_mod, block_lists, block_bits)):
            check_given("mask_bit_tensors", mask_bits, False)
        if window.causal_per_seq is not None:
            check_given("window_size_right", window.right, True)
        columns, lists, bits = None, None, None
        if column_tensors is not None:
            indices, bounds = column_tensors
            columns = ColumnArgs(indices, bounds, num_heads // indices.shape[1])
        if block_lists is not None:
            tensors, block_size = block_lists
            if block_size is None:
                block_size = kernel.traits.cluster_tile_m, kernel.traits.tile_n
            lists = ListArgs(*tensors, *(Int32(size) for size in block_size))
        if block_bits is not None:
            bits = BitArgs(*block_bits)
            if bits.is_selection:
                bits = bits._replace(heads_per_selection=num_heads // bits.visible.shape[1])
        left, right, causal_per_seq = window
        return MaskArgs(left, right, columns, lists, bits, aux_tensors, mask_bits, causal_per_seq)

    def may_shorten(self, kernel: "MaskedKernel") -> bool:
        """Whether intervals, lists or a callable may shorten walks a lot."""
        shorteners = (self.columns, self.bits, self.mask_bits, kernel.mask_mod)
        return any(x is not None for x in shorteners)


class TileVerdict(NamedTuple):
    """The verdict of band and column intervals on a tile of scores. is_visible may be true for a
    tile without visible scores (`Intervals.classify`)."""

    is_visible: Boolean
    is_band: Boolean
    is_columns: Boolean


@dataclass(frozen=True)
class MaskRules:
    """The masks of a launch, for one tile shape.

    columns: maps each bit of a bit tile to a column of the tile. skip: empty blocks are skipped and
    full blocks need no bits; without it every block of a sequence is visited as a partial one, with
    the same result. counts_offsets: mask_mod and block lists count positions in a batch entry,
    where the sequence begins at offset_q and offset_k. group_size: number of heads among the packed
    heads of `block_info`.
    """

    args: MaskArgs
    block_info: BlockInfo
    intervals: cutlass.Constexpr[Intervals | None]
    mask_mod: cutlass.Constexpr[Callable[..., Any] | None]
    columns: cutlass.Constexpr[Columns]
    queries_are_packed: cutlass.Constexpr[bool]
    keys_are_packed: cutlass.Constexpr[bool]
    skip: cutlass.Constexpr[bool]
    counts_offsets: cutlass.Constexpr[bool]
    group_size: cutlass.Constexpr[int]

    @classmethod
    def from_kernel(
        cls,
        kernel: MaskedKernel,
        columns: Columns,
        args: MaskArgs,
        lengths: Lengths,
        **more: Any,
    ):
        block_info = BlockInfo(
            kernel.traits.tile_m,
            kernel.traits.tile_n,
            is_causal=kernel.is_causal,
            is_local=kernel.is_local,
            window_size_left=args.window_left,
            window_size_right=args.window_right,
            qhead_per_kvhead_packgqa=kernel.traits.packed_heads,
        )
        return cls(
            args=args,
            block_info=block_info,
            intervals=kernel.intervals,
            mask_mod=kernel.mask_mod,
            columns=columns,
            queries_are_packed=lengths.cu_seqlens_q is not None,
            keys_are_packed=lengths.cu_seqlens_k is not None,
            skip=kernel.skip_blocks,
            counts_offsets=False,
            group_size=kernel.traits.group_size,
            **more,
        )

    def for_tiles(self, **sizes: int):
        """The same rules for tiles with another tile_m or tile_n."""
        return replace(self, block_info=replace(self.block_info, **sizes))

    @property
    def has_selection(self) -> bool:
        """Whether each query chose its key blocks."""
        return self.args.bits is not None and self.args.bits.is_selection

    @property
    def _may_need_mask_mod(self) -> bool:
        args = self.args
        others = args.bits, args.mask_bits
        return self.mask_mod is not None or any(x is not None for x in others)

    def seqlen_of(self, work: Work) -> SeqlenInfoQK:
        """The lengths of a work tile's sequence, as `block_info` takes them."""
        args = self.args
        if args.causal_per_seq is None:
            return work.seqlen
        is_causal = cutlass.select_(args.causal_per_seq[work.batch_idx] != 0, Int32(1), Int32(0))
        return replace(work.seqlen, window_right=right_side(args.window_right, is_causal))

    @cute.jit
    def _judge(self, work: Work, head_idx: Int32, m_block: Int32, n_block: Int32) -> TileVerdict:
        """The verdict on a tile; each lane of a warp may judge another tile."""
        info, seqlen = self.block_info, self.seqlen_of(work)
        n_block_min, n_block_max = info.get_n_block_min_max(seqlen, m_block)
        is_visible = (n_block >= n_block_min) & (n_block < n_block_max)
        is_band = n_block >= info.get_n_block_min_causal_local_mask(seqlen, m_block, n_block_min)
        if const_expr(self.args.window_left is not None):
            is_band = is_band | (
                n_block < info.get_n_block_min_before_local_mask(seqlen, m_block, n_block_min)
            )
        is_columns = Boolean(False)
        if const_expr(self.args.columns is not None):
            hides_all, is_columns = self._judge_columns(work, head_idx, m_block, n_block)
            is_visible = is_visible & (hides_all == Boolean(False))
        return TileVerdict(is_visible, is_band, is_columns)

    @cute.jit
    def judge_listed(
        self, work: Work, head_idx: Int32, m_block: Int32, n_block: Int32
    ) -> tuple[Boolean, Boolean]:
        """Whether a tile touches a listed logical block, and whether mask_mod decides about it."""
        is_listed, needs_mask_mod = Boolean(True), Boolean(const_expr(self._may_need_mask_mod))
        if const_expr(self.has_selection):
            is_listed, needs_mask_mod = self._judge_choice(work, head_idx, m_block, n_block)
        elif const_expr(self.args.bits is not None):
            args, info = self.args.bits, self.block_info
            offset_q, offset_k = self._listed_offsets(work)
            first_q_idx, first_k_idx = m_block * info.tile_m, n_block * info.tile_n
            end_q_idx = cutlass.min(first_q_idx + info.tile_m, work.seqlen_q) + offset_q
            if const_expr(info.qhead_per_kvhead_packgqa > 1):
                first_q_idx, end_q_idx = info.query_range(work.seqlen, m_block)
                end_q_idx += offset_q
            end_k_idx = cutlass.min(first_k_idx + info.tile_n, work.seqlen_k) + offset_k
            first_q_idx, first_k_idx = first_q_idx + offset_q, first_k_idx + offset_k
            any_listed, all_full = Int32(0), Int32(1)
            qb = first_q_idx // args.block_q
            while qb * args.block_q < end_q_idx:
                kb = first_k_idx // args.block_k
                while kb * args.block_k < end_k_idx:
                    block_is_listed, block_is_full = self._block_bits(work, head_idx, qb, kb)
                    any_listed = any_listed | block_is_listed
                    all_full = all_full & block_is_full
                    kb += 1
                qb += 1
            is_listed, needs_mask_mod = any_listed != 0, all_full == 0
        elif const_expr(self.prefix_mod is not None):
            needs_mask_mod = self.ends_prefix(work, n_block)
        return is_listed, needs_mask_mod

    @property
    def prefix_mod(self) -> Callable[..., Any] | None:
        """A mask_mod of a key alone, or None. Where it holds, all queries see this key and those
        before it by mask_mod (`lowering/prefix.py`)."""
        return getattr(self.mask_mod, "__flash_mask_prefix__", None)

    def ends_prefix(self, work: Work, n_block: Int32) -> Boolean:
        """Whether a block of keys has one for which `prefix_mod` does not hold."""
        last, any_place = (n_block + 1) * self.block_info.tile_n - 1, Int32(0)
        holds = self._eval_mod(self.prefix_mod, work, any_place, any_place, last)
        return holds == Boolean(False)

    @cute.jit
    def _look_up(
        self, work: Work, m_block: Int32, n_block: Int32, is_visible: Boolean
    ) -> tuple[Boolean, Boolean]:
        """Whether the stored state of a tile shows it, and whether it is partial."""
        state = Int32(0)
        if is_visible:
            for i in cutlass.range_constexpr(self._bit_tiles_per_tile):
                at = n_block * self._bit_tiles_per_tile + i
                at = cutlass.min(at, cute.size(self.args.mask_bits.states, mode=[2]) - 1)
                state = state | self.args.mask_bits.state(work.batch_idx, m_block, at)
        return has_visible(state), has_hidden(state)

    @cute.jit
    def state_of_words(self, words: tuple) -> Int32:
        """The state of the part of a tile that a warp's words cover."""
        is_any_visible, is_any_hidden = Boolean(False), Boolean(False)
        for word in words:
            used = word & self.used_bits
            is_any_visible = is_any_visible | (used != 0)
            is_any_hidden = is_any_hidden | (used != self.used_bits)
        return state_of_warp(is_any_visible, is_any_hidden)

    @property
    def used_bits(self) -> int:
        return ALL if self._bits_per_word == WORD else (1 << self._bits_per_word) - 1

    @property
    def has_halves(self) -> bool:
        """Whether words have 16 bits, which are stored two to a word."""
        return False

    @property
    def _bits_per_word(self) -> int:
        raise NotImplementedError

    @property
    def _bit_tiles_per_tile(self) -> int:
        """Number of stored tiles, side by side, in each of these tiles."""
        return 1

    def _judge_columns(self, work: Work, head_idx: Int32, m_block: Int32, n_block: Int32) -> tuple:
        """Whether the intervals hide all of a tile, and whether they cut it."""
        args = self.args.columns
        first_row, end_row = self.block_info.query_range(work.seqlen, m_block)
        batch_idx, mask_head, k_start = self._column_place(work, head_idx)
        at = n_block
        if const_expr(self.keys_are_packed):
            at = n_block + k_start // self.block_info.tile_n + work.batch_idx
        at = cutlass.min(at, cute.size(args.bounds, mode=[3]) - 1)
        bounds = tuple(
            args.bounds[batch_idx, mask_head, i, at] for i in range(2 * self.intervals.num_vectors)
        )
        bounds = rows_of_call(bounds, work.q_start, work.seqlen_q)
        return self.intervals.classify(bounds, first_row, end_row, work.seqlen_q)

    def _column_values(self, work: Work, head_idx: Int32, k_idx: Int32) -> tuple[Int32, ...]:
        """The interval vectors of a key, which may lie past the end, as rows of the call."""
        batch_idx, mask_head, k_start = self._column_place(work, head_idx)
        at = k_start + cutlass.min(k_idx, work.seqlen_k - 1)
        values = tuple(
            self.args.columns.indices[batch_idx, mask_head, at, i]
            for i in range(self.intervals.num_vectors)
        )
        return rows_of_call(values, work.q_start, work.seqlen_q)

    def _column_place(self, work: Work, head_idx: Int32) -> tuple[Int32, Int32, Int32]:
        """Batch, head and first key of a sequence in the interval tensors."""
        args = self.args.columns
        batch_idx = cutlass.min(work.batch_idx, cute.size(args.indices, mode=[0]) - 1)
        k_start = work.offset_k if self.keys_are_packed else Int32(0)
        # unsigned, for which it takes half as many instructions
        mask_head = Int32(Uint32(head_idx) // Uint32(args.heads_per_mask_head))
        return batch_idx, mask_head, k_start

    def _eval_mask_mod(self, work: Work, head_idx: Int32, q_idx: Int32, k_idx: Int32) -> Boolean:
        """The result of mask_mod, at positions that are clamped to the tensors' extents."""
        return self._eval_mod(self.mask_mod, work, head_idx, q_idx, k_idx)

    def _eval_mod(
        self, mod: Any, work: Work, head_idx: Int32, q_idx: Int32, k_idx: Int32
    ) -> Boolean:
        offset_q, offset_k = (work.offset_q, work.offset_k) if self.counts_offsets else (0, 0)
        q_idx = work.position(cutlass.min(q_idx, work.seqlen_q - 1)) + offset_q
        k_idx = cutlass.min(k_idx, work.seqlen_k - 1) + offset_k
        place = ScorePlace(work.batch_idx, head_idx, q_idx, k_idx)
        return call_mask_mod(mod, place, self.args.aux_tensors)

    def _listed_offsets(self, work: Work) -> tuple[int | Int32, int | Int32]:
        """The offsets from positions to those that block lists, or rows of a selection, count."""
        if self.has_selection:
            return work.offset_q, 0
        if work.q_start is not None:
            return work.q_start, 0
        return (work.offset_q, work.offset_k) if self.counts_offsets else (0, 0)

    def _block_bits(self, work: Work, head_idx: Int32, q_block: Int32, k_block: Int32) -> tuple:
        """Whether a logical block is listed, and whether it is full: 0 or 1 each."""
        args = self.args.bits
        if args.is_selection:
            is_chosen = self.chosen_bit(work, head_idx, q_block, k_block)
            # of what is chosen mask_mod decides
            return is_chosen, is_chosen if self.mask_mod is None else Int32(0)
        if work.q_start is not None:
            # rows before the mask, or after it
            last = cute.size(args.visible, mode=[2]) - 1
            q_block = cutlass.max(cutlass.min(q_block, last), 0)
        place = (*broadcast_place(args.visible, work, head_idx), q_block, k_block // WORD)
        bit = k_block % WORD
        return (args.visible[place] >> bit) & 1, (args.full[place] >> bit) & 1

    def chosen_bit(self, work: Work, head_idx: Int32, row: Int32, k_block: Int32) -> Int32:
        """1 where a row of a selection has a block, else 0."""
        rows = self.args.bits.visible
        word = rows[self.selection_place(rows, work, head_idx, row, k_block)]
        return (word >> (k_block % WORD)) & 1

    @cute.jit
    def _judge_choice(
        self, work: Work, head_idx: Int32, m_block: Int32, n_block: Int32
    ) -> tuple[Boolean, Boolean]:
        """Whether a query of a tile chose a block of it, and whether scores may be hidden."""
        args, info = self.args.bits, self.block_info
        tile = self.selection_tile(work, m_block)
        first_k_idx = n_block * info.tile_n
        end_k_idx = cutlass.min(first_k_idx + info.tile_n, work.seqlen_k)
        of_any, of_every = Int32(0), Int32(1)
        kb = first_k_idx // args.block_k
        while kb * args.block_k < end_k_idx:
            place = self.selection_place(args.of_any, work, head_idx, tile, kb)
            of_any = of_any | (args.of_any[place] >> (kb % WORD))
            of_every = of_every & (args.of_every[place] >> (kb % WORD))
            kb += 1
        needs_bits = Boolean(True)
        if const_expr(self.mask_mod is None):
            needs_bits = (of_every & 1) == 0
        return (of_any & 1) != 0, needs_bits

    def selection_tile(self, work: Work, m_block: Int32) -> Int32:
        """The number of a tile of queries in the bits of a selection."""
        tile, info = m_block, self.block_info
        if self.queries_are_packed:
            rows = work.offset_q * info.qhead_per_kvhead_packgqa
            tile = m_block + rows // info.tile_m + work.batch_idx
        bits = self.args.bits
        of_tiles = bits.of_any if bits.counts is None else bits.counts
        return cutlass.min(tile, cute.size(of_tiles, mode=[2]) - 1)

    def selection_place(
        self, tensor: cute.Tensor, work: Work, head_idx: Int32, line: Int32, k_block: Int32
    ) -> tuple:
        """The place of a block's word in bits (batch | 1, heads, lines, words) of a selection."""
        batch_idx = cutlass.min(work.batch_idx, cute.size(tensor, mode=[0]) - 1)
        head_idx = Int32(Uint32(head_idx) // Uint32(self.args.bits.heads_per_selection))
        # a sequence may be longer than it was said to be
        word = cutlass.min(k_block // WORD, cute.size(tensor, mode=[3]) - 1)
        return batch_idx, head_idx, line, word


@dataclass(frozen=True)
class MaskWarpRows:
    """The lines of a work tile that one of several mask warps handles, and their words.

    A line of a bit tile is a query row in the forward, a key in the backward. num_groups: groups of
    32 neighbouring lines, one for each lane; their words follow each other, group by group.
    """

    mask_warp: Int32
    tile_lines: cutlass.Constexpr[int]
    num_groups: cutlass.Constexpr[int]
    num_words: cutlass.Constexpr[int]

    @staticmethod
    def create(
        mask_warp: Int32, num_mask_warps: int, tile_lines: int, columns: Columns
    ) -> "MaskWarpRows":
        num_groups = tile_lines // WORD // num_mask_warps
        return MaskWarpRows(mask_warp, tile_lines, num_groups, columns.num_words)

    def fill(self, word: int) -> tuple:
        return tuple(Int32(word) for _ in range(self.num_groups * self.num_words))

    def tile_line(self, group: int) -> Int32:
        """This lane's line of a group, counted in the tile."""
        return (self.mask_warp * self.num_groups + group) * WORD + cute.arch.lane_idx()

    def line(self, work: Work, group: int) -> Int32:
        """This lane's line of a group, counted in the sequence."""
        return work.block * self.tile_lines + self.tile_line(group)

    def store(self, tile: cute.Tensor, words: tuple) -> None:
        """Write the words, num_words or fewer of each line, into tile (words, tile_lines) int32."""
        num_words = cute.size(tile, mode=[0])
        for group in range(self.num_groups):
            for w in range(num_words):
                tile[w, self.tile_line(group)] = words[group * num_words + w]

    @cute.jit
    def store_any_bits(
        self, any_bits: cute.Tensor, words: tuple, mask: cutlass.Constexpr[int]
    ) -> None:
        """Write the OR of the words of each group of lines, AND the mask, into any_bits, int32."""
        for group in cutlass.range_constexpr(self.num_groups):
            word = words[group * self.num_words]
            for w in cutlass.range_constexpr(1, self.num_words):
                word = word | words[group * self.num_words + w]
            word = Int32(cute.arch.warp_redux_sync(word & mask, "or"))
            if cute.arch.lane_idx() == 0:
                any_bits[self.mask_warp * self.num_groups + group] = word

    def load(self, tile: cute.Tensor) -> tuple:
        """The words that `store` wrote."""
        return tuple(
            tile[w, self.tile_line(group)]
            for group in range(self.num_groups)
            for w in range(cute.size(tile, mode=[0]))
        )


def both(words: tuple, others: tuple) -> tuple:
    return tuple(a & b for a, b in zip(words, others, strict=True))


def broadcast_place(tensor: cute.Tensor, work: Work, head_idx: Int32) -> tuple[Int32, Int32]:
    """Batch and head indices into a tensor that may have only one of either."""
    return (
        cutlass.min(work.batch_idx, cute.size(tensor, mode=[0]) - 1),
        cutlass.min(head_idx, cute.size(tensor, mode=[1]) - 1),
    )
