"""The lists of a torch `BlockMask` in the form of this package."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch, from_block_mask


class _Kept(NamedTuple):
    state: tuple[Any, ...]
    lists: BlockSparseTensorsTorch


_kept: weakref.WeakKeyDictionary[BlockMask, _Kept] = weakref.WeakKeyDictionary()


def lists_of(block_mask: BlockMask) -> BlockSparseTensorsTorch:
    """int32 lists whose entries rise up to the count, as kernels walk them; torch's may be in any
    order. Made once for an object and the contents of its tensors, without waiting for a device."""
    given = from_block_mask(block_mask)
    state = tuple(_state(x) for x in given[:4]), given.block_size, given.seqlens
    kept = _kept.get(block_mask)
    if kept is None or kept.state != state:
        kept = _kept[block_mask] = _Kept(state, _sorted_lists(given))
    return kept.lists


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
