"""Mask bits of sequences of different lengths (`mask_bits_kernel.py`).

The tiles of all sequences are numbered consecutively, and a table gives the first tile of each
sequence: `MaskBitsArgs` with places. Only the device knows their number, so CTAs take tiles in
turns.
"""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core.tile_state import EMPTY, FULL
from flash_mask_cute.core.walk_ring import highest_bit
from flash_mask_cute.core.warp_scan import WARP, running
from flash_mask_cute.limits import LONGEST
from flash_mask_cute.mask_prep.mask_bits_kernel import MaskBitsKernel, QueryMaskBits, TileCoord
from flash_mask_cute.rules.mask_rules import MaskArgs, MaskBitsArgs

# CTAs that fill tiles, more than an SM holds of them times the SMs of any GPU
MAX_CTAS = 1 << 13
# neighbouring tiles that the lanes of a warp judge together
TILES_JUDGED = 16


class SequenceMaskBits:
    """Fills a `MaskBitsArgs` with places; to be passed to `cute.compile`.

    :param tile_kernel: for the tiles of the attention kernel
    :param are_parts: sequences are parts of the batch entries that the callable knows, equally many
        in each entry; otherwise each sequence is an entry
    """

    def __init__(self, tile_kernel: MaskBitsKernel, are_parts: bool):
        self.tile_kernel = tile_kernel
        self.are_parts = are_parts

    @cute.jit
    def __call__(
        self,
        mask_bit_tensors: tuple,
        mCuSeqlensQ: cute.Tensor,
        mCuSeqlensK: cute.Tensor,
        block_bits,
        aux_tensors,
        window: tuple | None,
        query_chunk: tuple,
        stream,
    ):
        """Launch two kernels on `stream`, for sequences that are batch entries.

        :param mask_bit_tensors: the fields of a `MaskBitsArgs` with places to fill, contiguous,
            with enough tiles for all sequences
        :param query_chunk: all of them
        :param mCuSeqlensQ, mCuSeqlensK: int32 (sequences + 1,)
        :param block_bits, aux_tensors, window: see `MaskBitsKernel`
        """
        masks = self.tile_kernel.masks_of(block_bits, aux_tensors, window)
        slots = Int32(mCuSeqlensQ.shape[0] - 1)
        mask_bits = MaskBitsArgs(*mask_bit_tensors).with_query_chunk(*query_chunk)
        starts, tiles = (mCuSeqlensQ, mCuSeqlensK), query_chunk[1]
        self.launch_number(mask_bits.places, *starts, Int32(1), slots, tiles, stream)
        self.launch_fill(mask_bits, *starts, slots, tiles, Int32(0), masks, stream)

    def launch_number(
        self,
        mPlaces: cute.Tensor,
        mCuSeqlensQ: cute.Tensor,
        mCuSeqlensK: cute.Tensor,
        entries: Int32,
        slots: Int32,
        tiles: Int32,
        stream,
    ) -> None:
        """entries: with tiles of their own, at most `tiles` each; slots: an entry's sequences."""
        num_sequences = mCuSeqlensQ.shape[0] - 1
        self.number(mPlaces, mCuSeqlensQ, mCuSeqlensK, entries, slots, tiles).launch(
            grid=(num_sequences // slots, 1, 1), block=(WARP, 1, 1), stream=stream
        )

    def launch_fill(
        self,
        mask_bits: MaskBitsArgs,
        mCuSeqlensQ: cute.Tensor,
        mCuSeqlensK: cute.Tensor,
        slots: Int32,
        tiles: Int32,
        seqlen: Int32,
        masks: MaskArgs,
        stream,
    ) -> None:
        """Fill the numbered tiles of mask_bits.query_chunk; seqlen: positions of an entry."""
        starts, extents = (mCuSeqlensQ, mCuSeqlensK), (slots, tiles, seqlen)
        groups = cute.ceil_div(mask_bits.tiles.shape[2], TILES_JUDGED)
        self.fill(mask_bits, *starts, *extents, masks, Int32(0)).launch(
            grid=(cutlass.min(groups, MAX_CTAS), 1, 1),
            block=(mask_bits.tiles.shape[3], 1, 1),
            stream=stream,
        )
        # calls by documents are large
        if self.are_parts and isinstance(self.tile_kernel, QueryMaskBits):
            self.pick(mask_bits, mCuSeqlensQ).launch(
                grid=(mCuSeqlensQ.shape[0] - 1, 1, 1), block=(WARP * WARP, 1, 1), stream=stream
            )

    @cute.kernel
    def number(
        self,
        mPlaces: cute.Tensor,
        mCuSeqlensQ: cute.Tensor,
        mCuSeqlensK: cute.Tensor,
        entries: Int32,
        slots: Int32,
        tiles: Int32,
    ):
        """Number the tiles of all sequences; only once, if the tiles of one entry serve all."""
        batch_idx, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        first = cutlass.min(batch_idx, entries - 1) * tiles
        for base in cutlass.range(0, slots, WARP):
            slot = base + lane
            sequence = batch_idx * slots + cutlass.min(slot, slots - 1)
            in_row = cute.ceil_div(_length(mCuSeqlensK, sequence), self.tile_kernel.traits.tile_n)
            rows = cute.ceil_div(_length(mCuSeqlensQ, sequence), self.tile_kernel.traits.tile_m)
            count = cutlass.select_(slot < slots, rows * in_row, Int32(0))
            up_to = running(count, operator.add)
            if slot < slots:
                mPlaces[sequence, 0] = first + up_to - count
                mPlaces[sequence, 1] = in_row
            first += cute.arch.shuffle_sync(up_to, WARP - 1)

    @cute.kernel
    def fill(
        self,
        mask_bits: MaskBitsArgs,
        mCuSeqlensQ: cute.Tensor,
        mCuSeqlensK: cute.Tensor,
        slots: Int32,
        tiles: Int32,
        seqlen: Int32,
        masks: MaskArgs,
        any_head: Int32,
    ):
        """Each CTA takes every n-th group of tiles of a chunk, and lanes judge a tile each: alone,
        a tile would wait for some ten loads that follow each other."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane, rules = cute.arch.lane_idx(), self.tile_kernel.rules_of(masks)
        is_first_warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0
        first, _ = mask_bits.query_chunk
        last = cute.size(mCuSeqlensQ) - 2
        rows = cute.ceil_div(_length(mCuSeqlensQ, last), self.tile_kernel.traits.tile_m)
        end = mask_bits.places[last, 0] + rows * mask_bits.places[last, 1]
        end = cutlass.min(end, first + cute.size(mask_bits.states, mode=[2]))
        if (cta == 0) & is_first_warp & (lane == 0):
            mask_bits.places[last + 1 + LONGEST, 0] = Int32(0)
        for base in cutlass.range(first + cta * TILES_JUDGED, end, ctas * TILES_JUDGED):
            number = cutlass.min(base + lane, end - 1)
            entry = number // tiles
            sequence = entry * slots + self._owner(mask_bits.places, number, entry * slots, slots)
            offset = Int32(0)
            if const_expr(self.are_parts):
                offset = mCuSeqlensQ[sequence] - entry * seqlen
            else:
                entry = sequence
            lengths = _length(mCuSeqlensQ, sequence), _length(mCuSeqlensK, sequence)
            in_row = mask_bits.places[sequence, 1]
            in_sequence = number - mask_bits.places[sequence, 0]
            m_block = in_sequence // cutlass.max(in_row, 1)
            begin, end_of_chunk = mask_bits.rows_of_query_chunk(sequence)
            is_own = (lane < TILES_JUDGED) & (base + lane < end) & (in_row > 0)
            is_own = is_own & (m_block >= begin) & (m_block < end_of_chunk)
            n_block = in_sequence - m_block * in_row
            place = TileCoord(sequence, m_block, n_block, any_head, entry, offset, *lengths)
            needs_evaluation = Boolean(False)
            if is_own & (m_block * self.tile_kernel.traits.tile_m < lengths[0]):
                is_listed, needs_mask_mod = self.tile_kernel.judge(rules, place)
                needs_evaluation = is_listed & needs_mask_mod
                if is_first_warp & (needs_evaluation == Boolean(False)):
                    state = cutlass.select_(is_listed, Int32(FULL), Int32(EMPTY))
                    mask_bits.states[mask_bits.index(*place.tile)] = state
            todo = Int32(cute.arch.vote_ballot_sync(needs_evaluation))
            while todo != 0:
                at = highest_bit(todo & -todo)
                todo = todo & (todo - 1)
                one = TileCoord(*(cute.arch.shuffle_sync(x, at) for x in place))
                state = self.tile_kernel.store_bits(mask_bits, rules, one)
                self.tile_kernel.store_state(mask_bits, one, state)

    @cute.kernel
    def pick(self, mask_bits: MaskBitsArgs, mCuSeqlensQ: cute.Tensor):
        """List a chunk's blocks of queries with more than twice the visible tiles of the mean in
        their sequence. A CTA has a sequence, or 1024 blocks of it."""
        sequence, _, _ = cute.arch.block_idx()
        warp_idx, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        allocator = cutlass.memory.SmemAllocator()
        sVisible = allocator.allocate_tensor(Int32, cute.make_layout((WARP, WARP)))
        listed = cute.domain_offset((cute.size(mCuSeqlensQ) - 1, 0), mask_bits.places)
        blocks = cute.ceil_div(_length(mCuSeqlensQ, sequence), self.tile_kernel.traits.tile_m)
        begin, end = (cutlass.min(x, blocks) for x in mask_bits.rows_of_query_chunk(sequence))
        rows, in_row = cutlass.min(end - begin, WARP * WARP), mask_bits.places[sequence, 1]
        _, _, first = mask_bits.index(sequence, begin, 0)
        for row in cutlass.range(warp_idx, WARP * WARP, WARP):
            visible = Int32(0)
            if row < rows:
                for n_block in cutlass.range(lane, in_row, WARP, unroll=8):
                    visible += mask_bits.states[0, 0, first + row * in_row + n_block] & FULL
            visible = Int32(cute.arch.warp_redux_sync(visible, "add"))
            if lane == 0:
                sVisible[warp_idx, row // WARP] = visible
        cute.arch.sync_threads()
        of_all = Int32(0)
        for i in cutlass.range_constexpr(WARP):
            of_all += sVisible[lane, i]
        of_all = Int32(cute.arch.warp_redux_sync(of_all, "add"))
        if sVisible[warp_idx, lane] * rows > 2 * of_all:
            at = cute.arch.atomic_add(listed[LONGEST, None].iterator, Int32(1))
            if at < LONGEST:
                listed[at, 0], listed[at, 1] = sequence, begin + lane * WARP + warp_idx

    @cute.jit
    def _owner(self, mPlaces: cute.Tensor, number: Int32, first: Int32, slots: Int32) -> Int32:
        """The last of the sequences from `first` on whose tiles begin at `number` or before."""
        found, beyond = Int32(0), slots
        while found + 1 < beyond:
            middle = (found + beyond) // 2
            if mPlaces[first + middle, 0] <= number:
                found = middle
            else:
                beyond = middle
        return found


def _length(mCuSeqlens: cute.Tensor, sequence: Int32) -> Int32:
    return mCuSeqlens[sequence + 1] - mCuSeqlens[sequence]
