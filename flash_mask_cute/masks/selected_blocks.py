"""A selection of key blocks for each query and head: the third form of `block_sparse_tensors`.

Models such as MiniMax-M3 and NSA let each query choose k blocks of keys. A selection holds the
numbers of these blocks. Query i sees key j only if one of its numbers is j // block_size; all other
masks only hide more. It differs from block lists, which hold one list for all queries of a block,
and a number for each block that there is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.runtime.checks import brief, check_device, check_tensor

_NAME = "block_sparse_tensors"
_SIZES = tuple(4 << i for i in range(11))
_DTYPES = torch.int32, torch.int64


class SelectedBlocks(NamedTuple):
    """The key blocks that each query may see.

    indices: int32 or int64 (batch or 1, heads, seqlen_q, k), or (heads, total_q, k) beside
    cu_seqlens_q; heads is 1, heads_kv or heads_q, and strides are any. Numbers count blocks of
    `block_size` keys, a power of two from 4 to 4096, from the start of the sequence's keys. They
    may have any order, and repeated ones count once. A negative number stands for nothing, and so
    does one past the end of its own sequence. A query without a block sees nothing.

    Row i belongs to query i of the call. q_start does not move it, as it moves rows of other masks.
    There is no gradient of indices.

    Raises:
        TypeError, ValueError, NotImplementedError: by the call that gets it, naming indices or
            block_size of block_sparse_tensors and the value.

    Example:
        >>> import torch
        >>> from flash_mask_cute import SelectedBlocks, flash_attn_func
        >>> q = torch.randn(1, 64, 4, 8)  # (batch, seqlen, heads, head_dim)
        >>> k, v = torch.randn(2, 1, 64, 2, 8)
        >>> own = torch.arange(64) // 16  # each query: the first block, and its own
        >>> selection = torch.stack([torch.zeros_like(own), own], dim=-1).expand(1, 2, 64, 2)
        >>> selected = SelectedBlocks(selection, block_size=16)
        >>> flash_attn_func(q, k, v, causal=True, block_sparse_tensors=selected).shape
        torch.Size([1, 64, 4, 8])
    """

    indices: Tensor
    block_size: int

    @property
    def heads(self) -> int:
        return int(self.indices.shape[-3])

    @property
    def by_entry(self) -> Tensor:
        """The indices as (batch | 1, heads, rows, k), where packed sequences are one entry."""
        return self.indices if self.indices.dim() == 4 else self.indices[None]

    def num_blocks(self, seqlen_k: int) -> int:
        """The blocks of a sequence of this many keys."""
        return -(-seqlen_k // self.block_size)


def check_form(selected: SelectedBlocks, device: torch.device) -> None:
    """Checks that need no extents of the problem. Raises TypeError, ValueError."""
    indices, block_size = selected
    name = f"indices of {_NAME}"
    check_tensor(name, indices)
    if indices.dtype not in _DTYPES:
        raise TypeError(f"{name} must be int32 or int64, got {indices.dtype}")
    check_device(name, indices, device)
    size_name = f"block_size of {_NAME}"
    if isinstance(block_size, bool) or not isinstance(block_size, int):
        raise TypeError(f"{size_name} must be an int, got {brief(block_size)}")
    if block_size not in _SIZES:
        raise ValueError(
            f"{size_name} must be a power of two from {_SIZES[0]} to {_SIZES[-1]}, got {block_size}"
        )


def check_rows(selected: SelectedBlocks, shapes: Any, is_packed: bool) -> None:
    """Check the shape of indices against the extents of a problem (`FwdShapes`). Raises ValueError.

    is_packed: cu_seqlens_q is given. Values are not checked: what does not exist is never read.
    """
    shape, name = tuple(selected.indices.shape), f"indices of {_NAME}"
    heads = sorted({1, shapes.heads_kv, shapes.heads_q})
    of_heads = " or ".join(map(str, heads))
    if is_packed:
        expected = f"({of_heads}; {shapes.total_q}; k), heads and total_q, beside cu_seqlens_q"
        is_right = len(shape) == 3 and shape[1] == shapes.total_q
    else:
        batch = "1" if shapes.batch == 1 else f"{shapes.batch} or 1"
        expected = f"({batch}; {of_heads}; {shapes.seqlen_q}; k), batch, heads and seqlen_q"
        expected += ", without cu_seqlens_q"
        is_right = len(shape) == 4 and shape[0] in (1, shapes.batch) and shape[2] == shapes.seqlen_q
    if not is_right or shape[-3] not in heads:
        raise ValueError(f"{name} must have shape {expected}, got {shape}")


def is_chosen(by_entry: Tensor, first_block: int, end_block: int) -> Tensor:
    """Whether rows of a selection (..., rows, k) have some blocks: bool (..., rows, blocks)."""
    blocks = torch.arange(first_block, end_block, device=by_entry.device)
    return (by_entry[..., None] == blocks).any(-2)
