"""Minimum and maximum interval edges of each block of keys, by a kernel or by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import Compiled
from flash_mask_cute.runtime.compiler import cached_kernel, compile_object, options_for
from flash_mask_cute.runtime.target import Target


def num_key_blocks(seqlen_k: int, tile_n: int, cu_seqlens_k: Tensor | None) -> int:
    """Number of blocks of bounds; for a packed batch, the largest possible number."""
    if cu_seqlens_k is None:
        return (seqlen_k + tile_n - 1) // tile_n
    return seqlen_k // tile_n + cu_seqlens_k.shape[0] - 1


def fill_bounds(indices: Tensor, bounds: Tensor, tile_n: int, cu_seqlens_k: Tensor | None) -> None:
    """Fill `bounds`, which is not empty; on a GPU by one launch on the current stream.

    indices: int32 (batch, heads, seqlen_k, n), any strides. bounds: int32 (batch, heads, 2 * n,
    num_blocks), contents as `ColumnMask.bounds`. cu_seqlens_k: of a packed batch. Raises
    NotImplementedError: there is no kernel for the device."""
    if not indices.is_cuda:
        bounds.copy_(bounds_by_torch(indices, tile_n, cu_seqlens_k, bounds.shape[3]))
        return
    compiled = compile_column_bounds(
        indices.shape[3], cu_seqlens_k is not None, Target.from_device(indices.device).arch
    )
    with torch.cuda.device_of(indices):
        compiled.function(indices, bounds, tile_n, cu_seqlens_k)


@cached_kernel("column_bounds")
def compile_column_bounds(num_vectors: int, is_packed: bool, arch: str) -> Compiled:
    """The kernel, whose `function` takes by position what `fill_bounds` has; None for cu_seqlens_k
    unless is_packed."""
    import cutlass.cute as cute

    from flash_mask_cute.mask_prep.column_bounds_kernel import KeyBlockBounds

    batch, heads, any_strides = cute.sym_int(), cute.sym_int(), [None] * 4
    arguments = [
        fake_tensors.tensor("int32", (batch, heads, None, num_vectors), any_strides),
        fake_tensors.tensor("int32", (batch, heads, 2 * num_vectors, None), any_strides),
        fake_tensors.int32(),
        fake_tensors.strided(1) if is_packed else None,
        fake_tensors.stream(),
    ]
    return compile_object(KeyBlockBounds(num_vectors), arguments, options_for(arch))


def bounds_by_torch(
    indices: Tensor, tile_n: int, cu_seqlens_k: Tensor | None, num_blocks: int
) -> Tensor:
    """`ColumnMask.bounds` by torch: each block lists its keys, the last one repeated."""
    seqlen_k = indices.shape[2]
    block = torch.arange(num_blocks, device=indices.device)
    lane = torch.arange(tile_n, device=indices.device)
    if cu_seqlens_k is None:
        keys = block[:, None] * tile_n + lane
    else:
        starts = cu_seqlens_k.long()
        num_sequences = len(starts) - 1
        first = starts[:-1] // tile_n + torch.arange(num_sequences, device=indices.device)
        owner = (torch.searchsorted(first, block, right=True) - 1).clamp_(min=0)
        keys = (starts[owner] + (block - first[owner]) * tile_n)[:, None] + lane
        keys = torch.minimum(keys, starts[owner + 1, None] - 1).clamp_(min=0)
    low, high = torch.aminmax(indices[:, :, keys.clamp_(max=seqlen_k - 1)], dim=3)
    return torch.stack((low, high), dim=-1).flatten(-2).transpose(2, 3)
