"""Mask bits of a `mask_mod` that does not depend on the head, evaluated once for all heads.

This kernel runs before attention. It evaluates the callable for each tile that may be partial, and
writes the bits and the state of the tile to global memory. Tiles outside causal masking and window
count as empty and are not evaluated: no walk of attention visits them.

`mask_bits_varlen_kernel.py` does the same for sequences of different lengths, and
`mask_bits_documents_kernel.py` for documents that are found in the bits.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.tile_state import EMPTY, FULL
from flash_mask_cute.core.walk_ring import Block, Kind
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.rules import bit_tile
from flash_mask_cute.rules.backward_mask import BackwardMask
from flash_mask_cute.rules.bit_tile import WORD, Columns
from flash_mask_cute.rules.forward_mask import ForwardMask
from flash_mask_cute.rules.intervals import Intervals
from flash_mask_cute.rules.mask_rules import (
    MaskArgs,
    MaskBitsArgs,
    MaskRules,
    MaskWarpRows,
    WindowArgs,
)


class Tiling(NamedTuple):
    """The fields of a plan that `MaskRules` reads."""

    tile_m: int
    tile_n: int
    packed_heads: int = 1
    group_size: int = 1


class TileCoord(NamedTuple):
    """The tile of a CTA, and its sequence.

    sequence: its number in `MaskBitsArgs`. entry: the batch entry that the callable gets, in which
    the sequence begins at offset. any_head: 0, as a value that the compiler does not know.
    """

    sequence: Int32
    m_block: Int32
    n_block: Int32
    any_head: Int32
    entry: Int32
    offset: Int32
    seqlen_q: Int32
    seqlen_k: Int32

    @property
    def tile(self) -> tuple[Int32, Int32, Int32]:
        return self.sequence, self.m_block, self.n_block

    def work(self, block: Int32) -> Work:
        """The tile as a work tile of a walk."""
        lengths = self.offset, self.seqlen_q, self.seqlen_q, self.offset, self.seqlen_k
        return Work(block, self.any_head, self.entry, *lengths)


class MaskBitsKernel:
    """Fills a `MaskBitsArgs`; its subclasses are to be passed to `cute.compile`.

    The results are valid only if the callable does not use the head (`mods.traits`). If it does not
    use the batch entry either, the results of one entry serve all.

    :param mask_mod: the user's callable (`mods/calling.py`)
    :param tile_m, tile_n: query rows and keys of a tile of the attention kernel
    :param columns: the column of each bit in its bit tiles
    :param has_aux_tensors: the call passes aux_tensors to the callable
    :param is_causal, is_local: of attention: they exclude tiles from evaluation. The band is not
        part of the bits
    """

    intervals: Intervals | None = None
    skip_blocks = True

    def __init__(
        self,
        mask_mod: Callable[..., Any],
        tile_m: int,
        tile_n: int,
        columns: Columns,
        has_aux_tensors: bool,
        is_causal: bool,
        is_local: bool,
    ):
        self.mask_mod = mask_mod
        self.traits = Tiling(tile_m, tile_n)
        self.columns = columns
        self.has_aux_tensors = has_aux_tensors
        self.is_causal = is_causal
        self.is_local = is_local

    @cute.jit
    def __call__(
        self,
        mask_bit_tensors: tuple,
        seqlen_q: Int32,
        seqlen_k: Int32,
        block_bits,
        aux_tensors,
        window: tuple | None,
        query_chunk: tuple,
        stream,
    ):
        """Launch on `stream`.

        :param mask_bit_tensors: the fields of a `MaskBitsArgs` to fill, contiguous; bits are
            written for the tiles that the callable is evaluated for
        :param seqlen_q, seqlen_k: of each sequence
        :param block_bits: of all logical blocks, the same for all heads (`BitArgs`), or None
        :param aux_tensors: what the callable reads
        :param window: the sides of that of attention, Int32 or None; None if both are open
        :param query_chunk: the query blocks that mask_bit_tensors covers: the first one, and their
            number
        """
        masks = self.masks_of(block_bits, aux_tensors, window)
        mask_bits = MaskBitsArgs(*mask_bit_tensors).with_query_chunk(*query_chunk)
        first_block, m_blocks = query_chunk
        batch, _, n_blocks, lines, _ = mask_bits.tiles.shape
        extents = m_blocks, n_blocks, first_block, seqlen_q, seqlen_k
        self.kernel(mask_bits, *extents, masks, Int32(0)).launch(
            grid=(batch * m_blocks * n_blocks, 1, 1), block=(lines, 1, 1), stream=stream
        )

    def masks_of(self, block_bits, aux_tensors, window: tuple | None) -> MaskArgs:
        sides = WindowArgs(*(window or (None, None)))
        return MaskArgs.create(self, sides, None, Int32(1), None, block_bits, aux_tensors)

    @cute.kernel
    def kernel(
        self,
        mask_bits: MaskBitsArgs,
        m_blocks: Int32,
        n_blocks: Int32,
        first_block: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
        masks: MaskArgs,
        any_head: Int32,
    ):
        """A warp makes the bits of 32 lines of a tile.

        The extents are arguments. Divisions of a value that a kernel takes from a shape, and of all
        values computed from it, round towards zero.
        """
        cta, _, _ = cute.arch.block_idx()
        row = cta // n_blocks
        entry, m_block = row // m_blocks, first_block + row % m_blocks
        offset = Int32(0)
        place = TileCoord(
            entry, m_block, cta % n_blocks, any_head, entry, offset, seqlen_q, seqlen_k
        )
        self.fill(mask_bits, masks, place)

    @cute.jit
    def fill(self, mask_bits: MaskBitsArgs, masks: MaskArgs, place: TileCoord) -> None:
        """Store the bits and state of a tile. Run by all threads of a CTA, one for each line."""
        rules = self.rules_of(masks)
        is_listed, needs_mask_mod = self.judge(rules, place)
        state = cutlass.select_(is_listed, Int32(FULL), Int32(EMPTY))
        if is_listed & needs_mask_mod:
            state = self.store_bits(mask_bits, rules, place)
        self.store_state(mask_bits, place, state)

    def store_bits(self, mask_bits: MaskBitsArgs, rules: MaskRules, place: TileCoord) -> Int32:
        """Store a warp's bits of a tile, and return their state."""
        lines = mask_bits.tiles.shape[3]
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warp_rows = MaskWarpRows.create(warp_idx, lines // WORD, lines, self.columns)
        words = self.words(rules, place, warp_rows)
        state = rules.state_of_words(words)
        if const_expr(rules.has_halves):
            words = bit_tile.join_halves(words)
        warp_rows.store(mask_bits.tile(*place.tile), words)
        return state

    @cute.jit
    def store_state(self, mask_bits: MaskBitsArgs, place: TileCoord, state: Int32) -> None:
        """Store the state of a tile by those of all warps' parts."""
        num_warps = mask_bits.tiles.shape[3] // WORD
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        sStates = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(num_warps))
        if cute.arch.lane_idx() == 0:
            sStates[warp_idx] = state
        cute.arch.sync_threads()
        if warp_idx == 0:
            for i in cutlass.range_constexpr(num_warps):
                state = state | sStates[i]
            mask_bits.states[mask_bits.index(*place.tile)] = state
        # the CTA may go on to another tile
        cute.arch.sync_threads()

    def judge(self, rules: MaskRules, place: TileCoord) -> tuple[Boolean, Boolean]:
        """See `MaskRules.judge_listed`; a tile outside of the band counts as not listed."""
        work = self.work_of(place)
        is_listed, needs_mask_mod = rules.judge_listed(
            work, place.any_head, place.m_block, place.n_block
        )
        if const_expr(self.is_causal or self.is_local):
            first, end = rules.block_info.get_n_block_min_max(work.seqlen, place.m_block)
            is_listed = is_listed & (place.n_block >= first) & (place.n_block < end)
        return is_listed, needs_mask_mod

    def rules_of(self, masks: MaskArgs) -> MaskRules:
        # lengths are those of a `TileCoord`, whose offset is 0 where a sequence is an entry
        none = Int32(0)
        lengths = Lengths(None, None, None, None, none, none)
        return replace(self.walks_of(masks, lengths), counts_offsets=True)


class QueryMaskBits(MaskBitsKernel):
    """Mask bits for query blocks: lines are queries."""

    def walks_of(self, masks: MaskArgs, lengths: Lengths) -> ForwardMask:
        return ForwardMask.from_kernel(self, self.columns, masks, lengths)

    def work_of(self, place: TileCoord) -> Work:
        return place.work(place.m_block)

    def words(self, rules: ForwardMask, place: TileCoord, warp_rows: MaskWarpRows) -> tuple:
        return rules.mask_mod_words(self.work_of(place), place.n_block, warp_rows)


class KeyMaskBits(MaskBitsKernel):
    """Mask bits for key blocks: lines are keys."""

    def walks_of(self, masks: MaskArgs, lengths: Lengths) -> BackwardMask:
        return BackwardMask.from_kernel(
            self, self.columns, masks, lengths, group=Int32(1), is_ordered=False
        )

    def work_of(self, place: TileCoord) -> Work:
        return place.work(place.n_block)

    def words(self, rules: BackwardMask, place: TileCoord, warp_rows: MaskWarpRows) -> tuple:
        no, needs_mask_mod = Boolean(False), Boolean(True)
        kinds = Int32(Kind.PARTIAL), Int32(Kind.END)
        block = Block(place.m_block, place.any_head, no, no, no, needs_mask_mod, *kinds, Int32(0))
        return rules.mask_mod_words(self.work_of(place), block, warp_rows)
