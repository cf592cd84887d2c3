"""Answers of a `mask_mod` that does not look at its head, asked once for all heads.

Asking is what such a mask costs (docs/masks.md). The bit tiles of all blocks that have to be asked
about are painted into global memory before attention runs, and its painters read them instead of
asking. A kernel that reads them knows nothing of the callable, so one serves all of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.mods import Reliance, find_reliance
from flash_mask_cute.core.walk_ring import Block, Kind
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.masks import bit_tile
from flash_mask_cute.masks.bit_tile import WORD, Columns
from flash_mask_cute.masks.intervals import Intervals
from flash_mask_cute.masks.key_walks import KeyWalks
from flash_mask_cute.masks.query_walks import QueryWalks
from flash_mask_cute.masks.rules import MaskArgs, Share, stored_from, stored_tile


class Tiling(NamedTuple):
    """What `MaskRules` reads of a plan."""

    tile_m: int
    tile_n: int
    packed_heads: int = 1


class Place(NamedTuple):
    """A CTA's part of the bits. nth: of the blocks in a row of them; any_head: 0, but a number that
    the compiler does not know."""

    batch_idx: Int32
    m_block: Int32
    nth: Int32
    any_head: Int32


class BitStore:
    """Fills bit tiles; its subclasses are to be passed to `cute.compile`.

    `reliance`, known after it was compiled: what the callable uses. The bits are of use only where
    that is not the head; where it is not the batch entry either, those of one entry serve all.

    :param mask_mod: the user's callable (`core/mods.py`)
    :param tile_m, tile_n: query rows and keys of a tile of the attention kernel
    :param columns: where its bit tiles have which column
    :param has_aux_tensors: the call passes aux_tensors to the callable
    """

    # the other masks are no part of the bits
    is_causal = False
    is_local = False
    intervals: Intervals | None = None
    skip_blocks = True

    def __init__(
        self,
        mask_mod: Callable[..., Any],
        tile_m: int,
        tile_n: int,
        columns: Columns,
        has_aux_tensors: bool,
    ):
        self.mask_mod = mask_mod
        self.plan = Tiling(tile_m, tile_n)
        self.columns = columns
        self.has_aux_tensors = has_aux_tensors
        self.reliance: Reliance | None = None

    @cute.jit
    def __call__(
        self,
        mBits: cute.Tensor,
        seqlen_q: Int32,
        seqlen_k: Int32,
        block_lists,
        block_size,
        block_bits,
        aux_tensors,
        first_block: Int32,
        stream,
    ):
        """Launch on `stream`.

        :param mBits: int32 (batch | 1, m_blocks, n_blocks, lines, words), contiguous; of blocks
            that are not asked about nothing is written
        :param first_block: the first of these blocks of queries
        :param block_lists: counts and indices of partial blocks, int32 (batch | 1, 1, ...), or None
        :param block_size, block_bits: as for the attention kernel
        """
        masks = MaskArgs.create(
            self,
            (None, None),
            None,
            Int32(1),
            None if const_expr(block_lists is None) else (*block_lists, None, None),
            () if const_expr(block_size is None) else block_size,
            block_bits,
            aux_tensors,
        )
        lengths = Lengths(None, None, None, None, seqlen_q, seqlen_k)
        batch, m_blocks, n_blocks, lines, _ = mBits.shape
        stored = stored_from(mBits, first_block)
        extents = m_blocks, n_blocks, first_block
        self.kernel(stored, *extents, masks, lengths, Int32(0)).launch(
            grid=(batch * m_blocks * n_blocks, 1, 1), block=(lines, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mBits: cute.Tensor,
        m_blocks: Int32,
        n_blocks: Int32,
        first_block: Int32,
        masks: MaskArgs,
        lengths: Lengths,
        any_head: Int32,
    ):
        """A warp paints 32 lines of a tile.

        The extents are arguments, because divisions of what a kernel takes from a shape, and of all
        that is computed from it, round towards zero.
        """
        cta, _, _ = cute.arch.block_idx()
        row = cta // n_blocks
        place = Place(row // m_blocks, first_block + row % m_blocks, cta % n_blocks, any_head)
        self.reliance = find_reliance(
            self.mask_mod,
            place.batch_idx,
            place.any_head,
            place.m_block,
            place.nth,
            masks.aux_tensors,
        )
        lines = mBits.shape[3]
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        share = Share.create(warp_idx, lines // WORD, lines, self.columns)
        self.paint(mBits, masks, lengths, place, share)


class QueryBitStore(BitStore):
    """The bits that a block of queries reads: lines are queries.

    Of partial blocks of the lists, which may be made of several tiles; without lists of all.
    """

    @cute.jit
    def paint(
        self, mBits: cute.Tensor, masks: MaskArgs, lengths: Lengths, place: Place, share: Share
    ) -> None:
        seqlen_q, seqlen_k = lengths.seqlen_q, lengths.seqlen_k
        batch_idx, m_block, nth, any_head = place
        work = Work(m_block, any_head, batch_idx, Int32(0), seqlen_q, seqlen_q, Int32(0), seqlen_k)
        rules = QueryWalks.of_kernel(self, self.columns, masks, lengths)
        n_block = rules.nth_asked(work, nth)
        if (n_block >= 0) & (n_block < cute.size(mBits, mode=[2])):
            words = rules.asked_words(work, n_block, share)
            share.store(stored_tile(mBits, batch_idx, m_block, n_block), words)


class KeyBitStore(BitStore):
    """The bits that a block of keys reads: lines are keys.

    Of blocks that hold something partial, by block_bits; without these of all.
    """

    @cute.jit
    def paint(
        self, mBits: cute.Tensor, masks: MaskArgs, lengths: Lengths, place: Place, share: Share
    ) -> None:
        seqlen_q, seqlen_k = lengths.seqlen_q, lengths.seqlen_k
        batch_idx, m_block, n_block, any_head = place
        work = Work(n_block, any_head, batch_idx, Int32(0), seqlen_k, seqlen_q, Int32(0), seqlen_k)
        rules = KeyWalks.of_kernel(self, self.columns, masks, lengths, Int32(1), False)
        if rules.is_asked(work, any_head, m_block):
            no, asks = Boolean(False), Boolean(True)
            block = Block(
                m_block, any_head, no, no, no, asks, Int32(Kind.CUT), Int32(Kind.END), Int32(0)
            )
            words = rules.asked_words(work, block, share)
            if const_expr(rules.has_halves):
                words = bit_tile.join_halves(words)
            share.store(stored_tile(mBits, batch_idx, m_block, n_block), words)
