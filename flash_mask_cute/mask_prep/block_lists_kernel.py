"""Block lists of any order as kernels read them: with ascending entries, and as bits.

A warp takes a list. It marks the states of the blocks in memory, where the new entries will be, and
turns 32 states at a time into entries and into a word of bits. A vote gives each lane the place of
its block, so nothing is sorted.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core.warp_scan import WARP

# of a block while its list is made
ABSENT, PARTIAL, FULL = 0, 1, 2


class BlockLists(NamedTuple):
    """Counts (batch, heads, q_blocks) and entries (batch, heads, q_blocks, k_blocks), int32; those
    of full blocks may be absent. A scan of a mask_mod makes them, too (`block_scan_kernel.py`)."""

    mask_cnt: cute.Tensor
    mask_idx: cute.Tensor
    full_cnt: cute.Tensor | None
    full_idx: cute.Tensor | None


class ListCoord(NamedTuple):
    """The indices of a list."""

    batch_idx: Int32
    head_idx: Int32
    m_block: Int32

    @staticmethod
    def of_list(number: Int32, entries: cute.Tensor) -> "ListCoord":
        """Of one of all lists, whose entries (batch, heads, q_blocks, k_blocks) are."""
        _, heads, q_blocks, _ = entries.shape
        head = number // q_blocks
        return ListCoord(head // heads, head % heads, number - head * q_blocks)


class OrderedLists:
    """Fills lists and bits; to be passed to `cute.compile`.

    :param has_full: there are lists of full blocks
    """

    def __init__(self, has_full: bool):
        self.has_full = has_full

    @cute.jit
    def __call__(
        self,
        given: BlockLists,
        made: BlockLists,
        mVisible: cute.Tensor,
        mFull: cute.Tensor,
        stream,
    ):
        """Launch on `stream`.

        :param given: lists of any order, any strides; entries outside of the matrix are left out
        :param made: the same with ascending entries, and zeros after them
        :param mVisible: int32 (batch, heads, q_blocks, words), bits of the blocks in any list
        :param mFull: the same, of full blocks
        """
        batch, heads, q_blocks, _ = made.mask_idx.shape
        self.kernel(given, made, mVisible, mFull).launch(
            # in one dimension: the others have at most 65535
            grid=(batch * heads * q_blocks, 1, 1),
            block=(WARP, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, given: BlockLists, made: BlockLists, mVisible: cute.Tensor, mFull: cute.Tensor
    ):
        number, _, _ = cute.arch.block_idx()
        place, lane = ListCoord.of_list(number, made.mask_idx), cute.arch.lane_idx()
        states = self._row(made.mask_idx, place)
        num_blocks = states.shape[0]
        for n_block in range(lane, num_blocks, WARP):
            states[n_block] = Int32(ABSENT)
        cute.arch.sync_threads()
        self._mark(given.mask_cnt, given.mask_idx, place, states, Int32(PARTIAL))
        if const_expr(self.has_full):
            cute.arch.sync_threads()
            self._mark(given.full_cnt, given.full_idx, place, states, Int32(FULL))
        cute.arch.sync_threads()
        self._make(made, place, states, mVisible, mFull)

    @staticmethod
    def _row(tensor: cute.Tensor | None, place: ListCoord) -> cute.Tensor | None:
        if tensor is None:
            return None
        return tensor[place.batch_idx, place.head_idx, place.m_block, None]

    @cute.jit
    def _mark(
        self,
        cnt: cute.Tensor,
        idx: cute.Tensor,
        place: ListCoord,
        states: cute.Tensor,
        state: Int32,
    ):
        """Write the state of each block of a list."""
        entries, num_blocks = self._row(idx, place), states.shape[0]
        count = cutlass.min(cnt[place.batch_idx, place.head_idx, place.m_block], num_blocks)
        for i in range(cute.arch.lane_idx(), count, WARP):
            n_block = entries[i]
            if n_block >= 0 and n_block < num_blocks:
                states[n_block] = state

    @cute.jit
    def _make(
        self,
        made: BlockLists,
        place: ListCoord,
        states: cute.Tensor,
        mVisible: cute.Tensor,
        mFull: cute.Tensor,
    ):
        """Turn states into lists and words; an entry overwrites a state that was read before."""
        lane, num_blocks = cute.arch.lane_idx(), states.shape[0]
        full_idx = self._row(made.full_idx, place)
        visible, full_words = self._row(mVisible, place), self._row(mFull, place)
        mask_cnt = Int32(0)
        full_cnt = Int32(0)
        for first in range(0, num_blocks, WARP):
            n_block = first + lane
            state = Int32(ABSENT)
            if n_block < num_blocks:
                state = states[n_block]
            partial = cute.arch.vote_ballot_sync(state == PARTIAL)
            full = cute.arch.vote_ballot_sync(state == FULL)
            self._put(states, mask_cnt, n_block, partial, state == PARTIAL)
            mask_cnt += cute.arch.popc(partial)
            if const_expr(self.has_full):
                self._put(full_idx, full_cnt, n_block, full, state == FULL)
                full_cnt += cute.arch.popc(full)
            if lane == 0:
                visible[first // WARP] = partial | full
                full_words[first // WARP] = full
        self._finish(made.mask_cnt, states, place, mask_cnt)
        if const_expr(self.has_full):
            self._finish(made.full_cnt, full_idx, place, full_cnt)

    @cute.jit
    def _put(
        self, entries: cute.Tensor, count: Int32, n_block: Int32, listed: Int32, is_listed: Boolean
    ):
        """Append the blocks of the lanes in `listed` to a list of `count` entries."""
        if is_listed:
            before = listed & ((1 << cute.arch.lane_idx()) - 1)
            entries[count + cute.arch.popc(before)] = n_block

    @cute.jit
    def _finish(self, cnt: cute.Tensor, entries: cute.Tensor, place: ListCoord, count: Int32):
        lane = cute.arch.lane_idx()
        for i in range(count + lane, entries.shape[0], WARP):
            entries[i] = Int32(0)
        if lane == 0:
            cnt[place.batch_idx, place.head_idx, place.m_block] = count
