"""A call on CPU tensors, in the form that the CPU path takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch
from flash_mask_cute.call.arguments import Tensors
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.masks.q_start import NO_START, QStart
from flash_mask_cute.masks.selected_blocks import SelectedBlocks


class CpuMasks(NamedTuple):
    """The masks of a call, and what changes its scores.

    score_mod, mask_mod: CuTe callables. aux_tensors: the tensors that they index
    (`mods/on_cpu.py`). score_mod gets scaled and soft-capped scores. column_mask:
    startend_row_indices (batch | 1, 1 | heads_kv | heads_q, seqlen_k, n), with cu_seqlens_k (1,
    ..., total_k, n). block_lists: with block_size; blocks count from the start of a sequence.
    selected: a choice, whose rows are queries of the call. All masks apply together.
    """

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    aux_tensors: Sequence[Tensor] | None = None
    column_mask: ColumnMask | None = None
    block_lists: BlockSparseTensorsTorch | None = None
    selected: SelectedBlocks | None = None


class CpuTiles(NamedTuple):
    """The tiles that the walk visits.

    tile_m, tile_n: rows and keys of a tile. pack_gqa: number of query heads of a KV head that share
    a tile; row r of such heads is query r // pack_gqa of head r % pack_gqa. skip_blocks False
    visits every tile of a sequence and applies every mask to it, to the same result bit for bit.
    split: "rows": each work tile is computed in num_splits splits, which are combined. "stream_k":
    all key blocks are divided into num_splits equal stream-K chunks. None: one pass.
    """

    tile_m: int
    tile_n: int
    pack_gqa: int = 1
    skip_blocks: bool = True
    split: str | None = None
    num_splits: int = 1


class CpuCall(NamedTuple):
    """A call of either direction that the caller has validated.

    tensors: q, k, v (batch, seqlen, heads, d), or (total, heads, d) with the cu_seqlens of that
    side; any floating dtype. k and v of one batch entry are those of all sequences. The others as
    in a call. window_*: tokens, None for an open side, causal already in window_right (that of
    column_mask is added by the walk). seqlen_*: the length of a dense side. score_mod_bwd,
    aux_sums: of a backward (`flash_attn_bwd_cpu`).
    """

    tensors: Tensors
    masks: CpuMasks
    tiles: CpuTiles
    seqlen_q: int
    seqlen_k: int
    softmax_scale: float
    softcap: float = 0.0
    window_left: int | None = None
    window_right: int | None = None
    q_start: QStart = NO_START
    score_mod_bwd: Callable[..., Any] | None = None
    aux_sums: Mapping[int, Tensor] | None = None
