"""Block lists of any order as kernels read them: with ascending entries, and as bits.

A warp marks the states of a list's blocks where the new entries will be, and turns 32 states at a
time into entries and into a word of bits. A vote gives each lane the place of its block, so nothing
is sorted.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_mask_cute.core.tile_state import EMPTY, FULL, PARTIAL, has_visible
from flash_mask_cute.core.warp_scan import WARP


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

    def row_of(self, tensor: cute.Tensor | None) -> cute.Tensor | None:
        """The last mode of a tensor of all lists, which may be absent."""
        return None if tensor is None else tensor[self.batch_idx, self.head_idx, self.m_block, None]


class OrderedLists:
    """Fills lists and bits; to be passed to `cute.compile`."""

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
        states = place.row_of(made.mask_idx)
        for n_block in range(lane, states.shape[0], WARP):
            states[n_block] = Int32(EMPTY)
        cute.arch.sync_threads()
        self._mark(given.mask_cnt, given.mask_idx, place, states, Int32(PARTIAL))
        if const_expr(given.full_idx is not None):
            cute.arch.sync_threads()
            self._mark(given.full_cnt, given.full_idx, place, states, Int32(FULL))
        cute.arch.sync_threads()
        write_lists(made, place, (place.row_of(mVisible), place.row_of(mFull)))

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
        entries, num_blocks = place.row_of(idx), states.shape[0]
        count = cutlass.min(cnt[place.batch_idx, place.head_idx, place.m_block], num_blocks)
        for i in range(cute.arch.lane_idx(), count, WARP):
            n_block = entries[i]
            if n_block >= 0 and n_block < num_blocks:
                states[n_block] = state


@cute.jit
def write_lists(lists: BlockLists, place: ListCoord, words: tuple | None) -> None:
    """Turn the states of blocks in mask_idx into a list, and into bits. Run by a warp, 32 blocks at
    a time. An entry overwrites a state that was read before.

    :param words: rows of words of the bits of visible and of full blocks
    """
    lane = cute.arch.lane_idx()
    mask_idx, full_idx = place.row_of(lists.mask_idx), place.row_of(lists.full_idx)
    num_blocks = mask_idx.shape[0]
    mask_cnt, full_cnt = Int32(0), Int32(0)
    for first in range(0, num_blocks, WARP):
        state = Int32(EMPTY)
        if first + lane < num_blocks:
            state = mask_idx[first + lane]
        visible = cute.arch.vote_ballot_sync(has_visible(state))
        full = cute.arch.vote_ballot_sync(state == FULL)
        # without lists of full blocks, all that is visible is partial
        partial = visible if const_expr(full_idx is None) else visible & ~full
        mask_cnt = _append(mask_idx, mask_cnt, first, partial)
        if const_expr(full_idx is not None):
            full_cnt = _append(full_idx, full_cnt, first, full)
        if const_expr(words is not None):
            word = first // WARP
            if lane == 0:
                words[0][word], words[1][word] = visible, full
    finish_list(lists.mask_cnt, mask_idx, place, mask_cnt, lane, WARP)
    if const_expr(full_idx is not None):
        finish_list(lists.full_cnt, full_idx, place, full_cnt, lane, WARP)


@cute.jit
def _append(entries: cute.Tensor, count: Int32, first: Int32, listed: Int32) -> Int32:
    """Append the blocks from `first` on whose bits are set, to a list of `count` entries. Returns
    the new count."""
    lane = cute.arch.lane_idx()
    if (listed >> lane) & 1 != 0:
        before = listed & ((1 << lane) - 1)
        entries[count + cute.arch.popc(before)] = first + lane
    return count + cute.arch.popc(listed)


@cute.jit
def finish_list(
    cnt: cute.Tensor,
    entries: cute.Tensor,
    place: ListCoord,
    count: Int32,
    thread_idx: Int32,
    threads: cutlass.Constexpr[int],
):
    """Store the count of a list, and zeros after its entries."""
    for i in range(count + thread_idx, entries.shape[0], threads):
        entries[i] = Int32(0)
    if thread_idx == 0:
        cnt[place.batch_idx, place.head_idx, place.m_block] = count
