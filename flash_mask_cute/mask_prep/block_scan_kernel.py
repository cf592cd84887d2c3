"""Block lists of a `mask_mod`: the blocks of the score matrix with visible or hidden scores.

A warp examines one block, the warps of a CTA examine neighbouring blocks. They exchange their
states in shared memory, and each warp then knows the place of its block in the list. So lists are
ascending without a sort, and nothing is counted beforehand. The same rules run on the host, block
by block, for CPU tensors.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr, range_constexpr

from flash_mask_cute.core.tile_state import (
    EMPTY,
    FULL,
    PARTIAL,
    has_hidden,
    has_visible,
    state_of_warp,
)
from flash_mask_cute.mods.aux_reads import CheckedAux
from flash_mask_cute.mods.calling import call_mask_mod

NUM_WARPS = 8
WARP = 32


class BlockLists(NamedTuple):
    """The outputs: counts (batch, heads, q_blocks), indices (batch, heads, q_blocks, k_blocks),
    int32; the lists of full blocks may be absent."""

    mask_cnt: cute.Tensor
    mask_idx: cute.Tensor
    full_cnt: cute.Tensor | None
    full_idx: cute.Tensor | None


class BlockGrid(NamedTuple):
    """Extents in tokens: of a block, and of the sequences. The last blocks may reach past the
    end."""

    block_q: Int32
    block_k: Int32
    seqlen_q: Int32
    seqlen_k: Int32


class Place(NamedTuple):
    """The indices of a list."""

    batch_idx: Int32
    head_idx: Int32
    m_block: Int32


class BlockScan:
    """Fills block lists; to be passed to `cute.compile`, itself or its `on_host`.

    :param mask_mod: the user's callable, see `mods.calling`
    :param has_full: full blocks get separate lists, else they count as partial
    :param samples: examine only the corners and the centre of a block
    """

    def __init__(self, mask_mod: Callable[..., Any], has_full: bool, samples: bool):
        self.mask_mod = mask_mod
        self.has_full = has_full
        self.samples = samples

    @cute.jit
    def __call__(self, lists: BlockLists, grid: BlockGrid, aux_tensors, stream):
        """Launch on `stream`: one CTA for each list."""
        batch, heads, q_blocks = lists.mask_cnt.shape
        self.kernel(lists, grid, aux_tensors).launch(
            grid=(q_blocks, heads, batch), block=(NUM_WARPS * WARP, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, lists: BlockLists, grid: BlockGrid, aux_tensors):
        m_block, head_idx, batch_idx = cute.arch.block_idx()
        place = Place(batch_idx, head_idx, m_block)
        thread_idx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        sStates = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(NUM_WARPS))
        mask_idx = self._entries(lists.mask_idx, place)
        full_idx = self._entries(lists.full_idx, place)
        num_blocks = mask_idx.shape[0]
        mask_cnt = Int32(0)
        full_cnt = Int32(0)
        for first in range(0, num_blocks, NUM_WARPS):
            n_block = first + warp_idx
            state = Int32(0)
            if n_block < num_blocks:
                mine = self._look_at_block(grid, place, n_block, lane, WARP, aux_tensors)
                state = state_of_warp(has_visible(mine), has_hidden(mine))
            if lane == 0:
                sStates[warp_idx] = state
            cute.arch.sync_threads()
            mask_end = mask_cnt
            full_end = full_cnt
            for i in range_constexpr(NUM_WARPS):
                is_partial, is_full = self._classify(sStates[i])
                mask_end += Int32(is_partial)
                full_end += Int32(is_full)
                if i < warp_idx:
                    mask_cnt += Int32(is_partial)
                    full_cnt += Int32(is_full)
            if lane == 0:
                is_partial, is_full = self._classify(state)
                self._put(mask_idx, mask_cnt, n_block, is_partial)
                if const_expr(self.has_full):
                    self._put(full_idx, full_cnt, n_block, is_full)
            mask_cnt = mask_end
            full_cnt = full_end
            # the states of this round have been read
            cute.arch.sync_threads()
        self._finish(lists.mask_cnt, mask_idx, place, mask_cnt, thread_idx, NUM_WARPS * WARP)
        if const_expr(self.has_full):
            self._finish(lists.full_cnt, full_idx, place, full_cnt, thread_idx, NUM_WARPS * WARP)

    @cute.jit
    def on_host(self, lists: BlockLists, grid: BlockGrid, aux_tensors, record):
        """The same on CPU tensors, without a kernel.

        :param record: of the first index outside an aux tensor, see `mods.aux_reads`, or None
        """
        batch, heads, q_blocks = lists.mask_cnt.shape
        checked = CheckedAux.create(aux_tensors, record)
        for batch_idx in range(batch):
            for head_idx in range(heads):
                for m_block in range(q_blocks):
                    self._list_on_host(lists, grid, Place(batch_idx, head_idx, m_block), checked)

    @cute.jit
    def _list_on_host(self, lists: BlockLists, grid: BlockGrid, place: Place, aux_tensors):
        mask_idx = self._entries(lists.mask_idx, place)
        full_idx = self._entries(lists.full_idx, place)
        mask_cnt = Int32(0)
        full_cnt = Int32(0)
        for n_block in range(mask_idx.shape[0]):
            state = self._look_at_block(grid, place, n_block, 0, 1, aux_tensors)
            is_partial, is_full = self._classify(state)
            self._put(mask_idx, mask_cnt, n_block, is_partial)
            mask_cnt += Int32(is_partial)
            if const_expr(self.has_full):
                self._put(full_idx, full_cnt, n_block, is_full)
                full_cnt += Int32(is_full)
        self._finish(lists.mask_cnt, mask_idx, place, mask_cnt, 0, 1)
        if const_expr(self.has_full):
            self._finish(lists.full_cnt, full_idx, place, full_cnt, 0, 1)

    @staticmethod
    def _entries(idx: cute.Tensor | None, place: Place) -> cute.Tensor | None:
        return None if idx is None else idx[place.batch_idx, place.head_idx, place.m_block, None]

    def _classify(self, state: Int32) -> tuple[Boolean, Boolean]:
        """(is partial, is full); without lists of full blocks, all that is visible is partial."""
        if const_expr(self.has_full):
            return state == PARTIAL, state == FULL
        return has_visible(state), Boolean(False)

    @cute.jit
    def _put(self, entries: cute.Tensor, at: Int32, n_block: Int32, is_listed: Boolean):
        if is_listed:
            entries[at] = n_block

    @cute.jit
    def _finish(
        self,
        cnt: cute.Tensor,
        entries: cute.Tensor,
        place: Place,
        count: Int32,
        thread_idx: Int32,
        threads: cutlass.Constexpr[int],
    ):
        for i in range(count + thread_idx, entries.shape[0], threads):
            entries[i] = Int32(0)
        if thread_idx == 0:
            cnt[place.batch_idx, place.head_idx, place.m_block] = count

    @cute.jit
    def _look_at_block(
        self,
        grid: BlockGrid,
        place: Place,
        n_block: Int32,
        lane: Int32,
        lanes: cutlass.Constexpr[int],
        aux_tensors,
    ) -> Int32:
        """The state that this one of `lanes` threads finds in its columns of a block, inside the
        sequences.

        It stops as soon as the block's state is known.
        """
        q_begin = place.m_block * grid.block_q
        k_begin = n_block * grid.block_k
        q_end = cutlass.min(q_begin + grid.block_q, grid.seqlen_q)
        k_end = cutlass.min(k_begin + grid.block_k, grid.seqlen_k)
        state = Int32(0)
        if const_expr(self.samples):
            for q_idx, k_idx in (
                (q_begin, k_begin),
                (q_begin, k_end - 1),
                (q_end - 1, k_begin),
                (q_end - 1, k_end - 1),
                ((q_begin + q_end - 1) // 2, (k_begin + k_end - 1) // 2),
            ):
                state |= self._look(place, q_idx, k_idx, aux_tensors)
        else:
            enough = PARTIAL if const_expr(self.has_full) else FULL
            q_idx = q_begin
            while q_idx < q_end and (state & enough) != enough:
                for k_idx in cutlass.range(k_begin + lane, k_end, lanes, unroll=4):
                    state |= self._look(place, q_idx, k_idx, aux_tensors)
                q_idx += 1
        return state

    def _look(self, place: Place, q_idx: Int32, k_idx: Int32, aux_tensors) -> Int32:
        visible = call_mask_mod(
            self.mask_mod, place.batch_idx, place.head_idx, q_idx, k_idx, aux_tensors
        )
        return cutlass.select_(visible, Int32(FULL), Int32(EMPTY))
