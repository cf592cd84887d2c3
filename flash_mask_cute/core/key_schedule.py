"""Work tiles over the keys of a launch, computed from its tensors on the host."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.tile_order import alternating_heads
from flash_mask_cute.core.tile_scheduler import ScheduleParams

# where the sum of dQ has an order, work tiles of a head are to begin so many row blocks apart, if
# walks are as long as the sequence, and if masks may make them shorter
BLOCKS_APART, BLOCKS_APART_SHORT = 3, 8
# batch entries whose work tiles are handed out together, if they read the same table
ENTRIES_TOGETHER = 8


class KeySchedule(NamedTuple):
    """Work tiles, query heads of each, and groups of CTAs to launch."""

    params: ScheduleParams
    group: Int32
    grid: Int32

    def by_entries(self) -> "KeySchedule":
        """The schedule that alternates between a head's batch entries (`entries_first`)."""
        params = self.params
        together = cutlass.min(params.num_batch, Int32(ENTRIES_TOGETHER))
        together = cutlass.max(params.heads_per_group, together)
        return self._replace(params=params._replace(heads_per_group=together))

    def of_items(self, num_items: Int32, num_groups: int) -> "KeySchedule":
        """The schedule where items are work tiles (`core/query_lists.py`), at most num_items of
        each head. Heads take the place of sequences, which differ in their number of tiles."""
        heads, one = self.params.num_heads, Int32(1)
        grid = cutlass.min(Int32(num_groups), num_items * heads)
        return self._replace(params=ScheduleParams(num_items, one, heads, one), grid=grid)

    @staticmethod
    def create(
        lengths: Lengths,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        tiles: tuple[int, int],
        num_groups: int,
        is_short: bool | None,
        group_splits: Int32 | int = 1,
        is_unequal: bool = False,
    ) -> "KeySchedule":
        """The schedule of mQ (batch, row, head, d) or (row, head, d), mK alike.

        tiles: query rows of a block, and keys of a work tile. num_groups: the most CTAs, or groups
        of CTAs with a work tile each. is_short: for ordered sums, whether masks may make walks
        shorter than sequences; None: sums are not ordered. group_splits: work tiles with the same
        keys, which count as heads. is_unequal: the first keys of a head have the longest walks.
        """
        tile_m, cluster_tile_n = tiles
        varlen_q = const_expr(lengths.cu_seqlens_q is not None)
        varlen_k = const_expr(lengths.cu_seqlens_k is not None)
        heads_q = mQ.shape[1] if varlen_q else mQ.shape[2]
        num_heads = (mK.shape[1] if varlen_k else mK.shape[2]) * group_splits
        group = heads_q // num_heads
        num_batch = mK.shape[0]
        if const_expr(varlen_k):
            num_batch = lengths.cu_seqlens_k.shape[0] - 1
        num_blocks = cute.ceil_div(lengths.seqlen_k, cluster_tile_n)
        heads_per_group = Int32(1)
        if const_expr(is_short is not None):
            rows = lengths.seqlen_q // num_batch if varlen_q else lengths.seqlen_q
            row_blocks = cutlass.max(rows // tile_m * group, 1)
            apart = BLOCKS_APART_SHORT if is_short or varlen_q else BLOCKS_APART
            heads_per_group = cute.ceil_div(apart * num_groups, row_blocks)
        elif const_expr(is_unequal and not varlen_k):
            heads_per_group = alternating_heads(
                cutlass.max(num_blocks, 1), num_heads * num_batch, num_groups, cutlass.select_
            )
        params = ScheduleParams(num_blocks, num_heads, num_batch, heads_per_group)
        grid = Int32(num_groups)
        if const_expr(not varlen_k):
            grid = cutlass.min(grid, num_blocks * num_heads * num_batch)
        return KeySchedule(params, group, grid)
