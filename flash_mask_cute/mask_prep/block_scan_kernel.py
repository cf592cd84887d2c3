"""Block lists of a `mask_mod`: the blocks of the score matrix with visible or hidden scores.

Two kernels. In the first one, each warp examines one block of the matrix, and writes its state
where its entry of a list may be later. In the second one, a warp turns the states of a list into
entries (`write_lists`). The same rules run on the host, block by block, for CPU tensors.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core.tile_state import (
    EMPTY,
    FULL,
    PARTIAL,
    has_hidden,
    has_visible,
    state_of_warp,
)
from flash_mask_cute.core.warp_scan import WARP
from flash_mask_cute.mask_prep.block_lists_kernel import (
    BlockLists,
    ListCoord,
    finish_list,
    write_lists,
)
from flash_mask_cute.mods.aux_reads import CheckedAux
from flash_mask_cute.mods.calling import ScorePlace, call_mask_mod

NUM_WARPS = 8
# rows and columns of a thread between two tests whether the state of a block is known
ROWS_AT_ONCE, COLS_AT_ONCE = 2, 8
# Lanes of a warp that look at the same rows. With more columns of a thread, what is computed from a
# row alone is shared by more scores.
COL_LANES = 16


class BlockGrid(NamedTuple):
    """Tokens of a block and of the sequences; the last blocks may reach past the end."""

    block_q: Int32
    block_k: Int32
    seqlen_q: Int32
    seqlen_k: Int32


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
        """Launch both kernels on `stream`."""
        batch, heads, q_blocks, k_blocks = lists.mask_idx.shape
        # in one dimension: the others have at most 65535
        num_lists = batch * heads * q_blocks
        examiners = num_lists * cute.ceil_div(k_blocks, NUM_WARPS)
        self.examine_blocks(lists, grid, aux_tensors).launch(
            grid=(examiners, 1, 1), block=(NUM_WARPS * WARP, 1, 1), stream=stream
        )
        self.make_lists(lists).launch(grid=(num_lists, 1, 1), block=(WARP, 1, 1), stream=stream)

    @cute.kernel
    def examine_blocks(self, lists: BlockLists, grid: BlockGrid, aux_tensors):
        """Write the state of each block as its entry of mask_idx. A warp for each block."""
        number, _, _ = cute.arch.block_idx()
        ctas_of_list = cute.ceil_div(lists.mask_idx.shape[3], NUM_WARPS)
        place = ListCoord.of_list(number // ctas_of_list, lists.mask_idx)
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        n_block = number % ctas_of_list * NUM_WARPS + warp_idx
        states = place.row_of(lists.mask_idx)
        if n_block < states.shape[0]:
            lane = cute.arch.lane_idx()
            state = self._look_at_block(grid, place, n_block, lane, WARP, aux_tensors)
            state = state_of_warp(has_visible(state), has_hidden(state))
            if lane == 0:
                states[n_block] = state

    @cute.kernel
    def make_lists(self, lists: BlockLists):
        """Turn the states in mask_idx into lists. A warp for each place of a list."""
        number, _, _ = cute.arch.block_idx()
        write_lists(lists, ListCoord.of_list(number, lists.mask_idx), None)

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
                    self._list_on_host(
                        lists, grid, ListCoord(batch_idx, head_idx, m_block), checked
                    )

    @cute.jit
    def _list_on_host(self, lists: BlockLists, grid: BlockGrid, place: ListCoord, aux_tensors):
        mask_idx = place.row_of(lists.mask_idx)
        full_idx = place.row_of(lists.full_idx)
        mask_cnt = Int32(0)
        full_cnt = Int32(0)
        for n_block in range(mask_idx.shape[0]):
            state = self._look_at_block(grid, place, n_block, 0, 1, aux_tensors)
            # without lists of full blocks, all that is visible is partial
            is_partial = state == PARTIAL if const_expr(self.has_full) else has_visible(state)
            self._put(mask_idx, mask_cnt, n_block, is_partial)
            mask_cnt += Int32(is_partial)
            if const_expr(self.has_full):
                self._put(full_idx, full_cnt, n_block, state == FULL)
                full_cnt += Int32(state == FULL)
        finish_list(lists.mask_cnt, mask_idx, place, mask_cnt, 0, 1)
        if const_expr(self.has_full):
            finish_list(lists.full_cnt, full_idx, place, full_cnt, 0, 1)

    @cute.jit
    def _put(self, entries: cute.Tensor, at: Int32, n_block: Int32, is_listed: Boolean):
        if is_listed:
            entries[at] = n_block

    @cute.jit
    def _look_at_block(
        self,
        grid: BlockGrid,
        place: ListCoord,
        n_block: Int32,
        lane: Int32,
        lanes: cutlass.Constexpr[int],
        aux_tensors,
    ) -> Int32:
        """The state of a block in this one of `lanes` threads' columns; stops once it is known."""
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
            on_gpu = const_expr(lanes == WARP)
            num_rows, num_cols = (ROWS_AT_ONCE, COLS_AT_ONCE) if on_gpu else (1, 1)
            lanes_of_row = COL_LANES if on_gpu else 1
            k_idx = k_begin + lane % lanes_of_row
            while k_idx < k_end and (state & enough) != enough:
                q_idx = q_begin + lane // lanes_of_row * num_rows
                while q_idx < q_end and (state & enough) != enough:
                    # Unrolled, what the mask_mod computes from a query alone is shared by columns,
                    # and what it computes from a key alone by all rows. Behind the ends, the last
                    # row and column are examined again. In loops, the mask_mod is traced once.
                    for row in cutlass.range(num_rows, unroll_full=True):
                        for col in cutlass.range(num_cols, unroll_full=True):
                            q = cutlass.min(q_idx + row, q_end - 1)
                            k = cutlass.min(k_idx + col * lanes_of_row, k_end - 1)
                            state |= self._look(place, q, k, aux_tensors)
                    q_idx += num_rows * (lanes // lanes_of_row)
                k_idx += num_cols * lanes_of_row
        return state

    def _look(self, place: ListCoord, q_idx: Int32, k_idx: Int32, aux_tensors) -> Int32:
        of_score = ScorePlace(place.batch_idx, place.head_idx, q_idx, k_idx)
        visible = call_mask_mod(self.mask_mod, of_score, aux_tensors)
        return cutlass.select_(visible, Int32(FULL), Int32(EMPTY))
