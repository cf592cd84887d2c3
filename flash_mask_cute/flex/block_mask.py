"""The lists of a torch `BlockMask` in the form of this package."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flash_mask_cute.block_sparsity import (
    EMPTY,
    FULL,
    BlockSparseTensorsTorch,
    dense_states,
    from_block_mask,
)
from flash_mask_cute.flex.simplify import Band


class _Kept(NamedTuple):
    """What was made of a block mask, for a state of its tensors. says_no_more: by band and numbers
    of queries and keys."""

    state: tuple[Any, ...]
    lists: BlockSparseTensorsTorch
    says_no_more: dict[tuple[Band, tuple[int, int]], bool]


_kept: weakref.WeakKeyDictionary[BlockMask, _Kept] = weakref.WeakKeyDictionary()


def lists_of(block_mask: BlockMask) -> BlockSparseTensorsTorch:
    """int32 lists whose entries rise up to the count, as kernels walk them; torch's may be in any
    order. Made once for an object and the contents of its tensors, without waiting for a device."""
    return _kept_of(block_mask).lists


def says_no_more(block_mask: BlockMask, band: Band, seqlens: tuple[int, int]) -> bool:
    """Whether the lists hide nothing that a band lets a query see, and call no block full that it
    cuts, so that they may be left out. seqlens: queries and keys.

    Found once for an object, the contents of its tensors and a band, waiting for the device; False
    where a CUDA graph is captured and it is not known yet.
    """
    kept = _kept_of(block_mask)
    band_and_lengths = band, seqlens
    if band_and_lengths not in kept.says_no_more:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        kept.says_no_more[band_and_lengths] = _agree(kept.lists, band, seqlens)
    return kept.says_no_more[band_and_lengths]


def _agree(lists: BlockSparseTensorsTorch, band: Band, seqlens: tuple[int, int]) -> bool:
    states = dense_states(lists)
    firsts, lasts = [], []
    for axis, (block, extent) in enumerate(zip(lists.block_size or (), seqlens, strict=True)):
        first = torch.arange(states.shape[axis - 2], device=states.device) * block
        firsts.append(first)
        lasts.append((first + block).clamp(max=extent) - 1)
    # kv_idx - q_idx in a block
    least = firsts[1] - lasts[0][:, None]
    most = lasts[1] - firsts[0][:, None]
    is_full = torch.ones_like(least, dtype=torch.bool)
    is_absent = torch.zeros_like(is_full)
    if band.right is not None:
        is_full, is_absent = is_full & (most <= band.right), is_absent | (least > band.right)
    if band.left is not None:
        is_full, is_absent = is_full & (least >= -band.left), is_absent | (most < -band.left)
    wrong = ((states == EMPTY) & ~is_absent) | ((states == FULL) & ~is_full)
    return not bool(wrong.any())


def _kept_of(block_mask: BlockMask) -> _Kept:
    given = from_block_mask(block_mask)
    state = tuple(_state(x) for x in given[:4]), given.block_size, given.seqlens
    kept = _kept.get(block_mask)
    if kept is None or kept.state != state:
        kept = _kept[block_mask] = _Kept(state, _sorted_lists(given), {})
    return kept


def _state(tensor: Tensor | None) -> Any:
    """What tells whether a tensor is another one, or was written to."""
    if tensor is None:
        return None
    version = None if tensor.is_inference() else tensor._version
    return id(tensor), version, tensor.shape


def _sorted_lists(lists: BlockSparseTensorsTorch) -> BlockSparseTensorsTorch:
    with torch.inference_mode(False), torch.no_grad():
        partial = _sorted(lists.mask_block_cnt, lists.mask_block_idx)
        full = _sorted(lists.full_block_cnt, lists.full_block_idx)
    return BlockSparseTensorsTorch(*partial, *full, lists.block_size, lists.seqlens)


def _sorted(count: Tensor | None, indices: Tensor | None) -> tuple[Any, Any]:
    if count is None or indices is None:
        return None, None
    blocks = indices.shape[-1]
    column = torch.arange(blocks, device=indices.device)
    is_used = column < count[..., None]
    ordered = torch.where(is_used, indices, blocks).sort(dim=-1).values
    return count.to(torch.int32), torch.where(is_used, ordered, 0).to(torch.int32)
