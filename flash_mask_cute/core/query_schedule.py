"""Work tiles over the queries of a launch, computed from its tensors on the host."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.tile_scheduler import ScheduleParams


class QuerySchedule(NamedTuple):
    """Work tiles, heads for each KV head (packed heads count once), and CTAs to launch. num_splits:
    splits of each work tile, which count as heads; None: work tiles have no splits."""

    params: ScheduleParams
    heads_per_kv: Int32
    grid: Int32
    num_splits: Int32 | None = None

    @staticmethod
    def create(
        lengths: Lengths,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        traits: Any,
        num_groups: int,
        group_bytes: int | None,
        blocks: tuple[Int32, Int32] | None = None,
        num_splits: Int32 | None = None,
    ) -> "QuerySchedule":
        """The schedule of mQ (batch, row, head, d) or (row, head, d), mK alike.

        traits: of the kernel: head_dim, head_dim_v, cluster_tile_m, packed_heads and group_size.
        num_groups: the most CTAs, or pairs of them, to launch. group_bytes: for dense calls, the
        size of keys and values whose heads form a group, and which stay in the L2 cache together;
        None: the heads of one KV head form a group. Groups are about equal. blocks: only these
        blocks of each dense sequence, the first one and their number.
        """
        varlen_q = const_expr(lengths.cu_seqlens_q is not None)
        heads_q = mQ.shape[1] if varlen_q else mQ.shape[2]
        heads_kv = mK.shape[1] if const_expr(lengths.cu_seqlens_k is not None) else mK.shape[2]
        num_heads = heads_q // traits.group_size
        num_batch = mQ.shape[0]
        if varlen_q:
            num_batch = lengths.cu_seqlens_q.shape[0] - 1
        rows, first_block = lengths.seqlen_q * traits.packed_heads, None
        num_blocks = cute.ceil_div(rows, traits.cluster_tile_m)
        if const_expr(blocks is not None):
            first_block, num_blocks = blocks
        # heads that share keys stay together
        heads_per_kv = num_heads // heads_kv
        heads_per_group = Int32(1) if varlen_q else heads_per_kv
        if not varlen_q and group_bytes is not None:
            kv_bytes = Int64(cutlass.max(lengths.seqlen_k, 1)) * (
                (traits.head_dim + traits.head_dim_v) * 2
            )
            most = heads_kv * num_batch
            fitting = Int32(cutlass.max(cutlass.min(group_bytes // kv_bytes, most), 1))
            # the long walks of a small last group would begin late (cute.ceil_div takes no static
            # number with a dynamic one)
            groups = cutlass.max((most + fitting - 1) // fitting, 1)
            heads_per_group = (most + groups - 1) // groups * heads_per_kv
        num_rows = num_heads if num_splits is None else num_heads * num_splits
        grid = Int32(num_groups)
        if not varlen_q:
            grid = cutlass.min(grid, num_blocks * num_rows * num_batch)
        params = ScheduleParams(num_blocks, num_rows, num_batch, heads_per_group, first_block)
        return QuerySchedule(params, heads_per_kv, grid, num_splits)

    @property
    def num_heads(self) -> Int32:
        heads = self.params.num_heads
        return heads if self.num_splits is None else heads // self.num_splits
