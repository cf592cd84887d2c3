"""Where the sequences of a launch start and how long they are, as kernels get to know it."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_mask_cute.core.tile_scheduler import WorkTile
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.seqlen_info import SeqlenInfoQK


class Lengths(NamedTuple):
    """Where sequences start and how long they are; any of the tensors may be absent."""

    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    seqlen_q: Int32
    seqlen_k: Int32


@cute.jit
def describe(tile: WorkTile, lengths: Lengths, blocks_are_keys: cutlass.Constexpr) -> Work:
    """The ring entry of a work tile of queries, or of keys."""
    batch_idx = cutlass.select_(tile.is_valid, tile.batch_idx, Int32(0))
    slot = SeqlenInfoQK.create(
        batch_idx, lengths.seqlen_q, lengths.seqlen_k, lengths.cu_seqlens_q, lengths.cu_seqlens_k
    )
    used = SeqlenInfoQK.create(
        batch_idx,
        lengths.seqlen_q,
        lengths.seqlen_k,
        lengths.cu_seqlens_q,
        lengths.cu_seqlens_k,
        lengths.seqused_q,
        lengths.seqused_k,
    )
    return Work(
        tile.block,
        tile.head_idx,
        batch_idx,
        Int32(used.offset_q),
        Int32(slot.seqlen_k if const_expr(blocks_are_keys) else slot.seqlen_q),
        Int32(used.seqlen_q),
        Int32(used.offset_k),
        Int32(used.seqlen_k),
    )
