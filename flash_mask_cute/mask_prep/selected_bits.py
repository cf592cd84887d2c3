"""The choice of each query as bits of key blocks, by a kernel or by torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.compiler import CACHE, compile_object, options_for
from flash_mask_cute.runtime.dtypes import dtype_name
from flash_mask_cute.runtime.target import Target

KERNEL_NAME = "selected_bits"
WORD = 32


def bits_shape(by_entry_shape: torch.Size, num_blocks: int) -> tuple[int, int, int, int]:
    """The shape of the bits of a choice (batch | 1, heads, rows, k): a word has 32 blocks."""
    batch, heads, rows, _ = by_entry_shape
    return batch, heads, rows, -(-num_blocks // WORD)


def bits_bytes(by_entry_shape: torch.Size, num_blocks: int) -> int:
    """The memory that the bits of a choice take."""
    return 4 * math.prod(bits_shape(by_entry_shape, num_blocks))


def selected_bits(by_entry: Tensor, num_blocks: int) -> Tensor:
    """int32 (batch | 1, heads, rows, words): bit n % 32 of word n // 32 says that a row chose block
    n.

    by_entry: int32 or int64 (batch | 1, heads, rows, k), any strides. num_blocks: of the longest
    sequence; larger and negative numbers are in no bit. On a GPU one launch on the current stream,
    which must be a stream of that GPU, reads the entries when it runs; a replayed CUDA graph reads
    them again.

    Raises:
        NotImplementedError: there is no kernel for the device.
    """
    bits = by_entry.new_empty(bits_shape(by_entry.shape, num_blocks), dtype=torch.int32)
    if bits.numel() == 0:
        return bits
    if not by_entry.is_cuda:
        return _by_torch(by_entry, bits)
    arch = Target.from_device(by_entry.device).arch
    compile_selected_bits(dtype_name(by_entry.dtype), arch).function(by_entry, bits)
    return bits


def compile_selected_bits(dtype: str, arch: str, cache: CompileCache = CACHE) -> Compiled:
    """The compiled kernel, from the cache or built now. dtype: of the entries.

    `function` takes, by position: the entries and the bits. Extents and strides are run-time
    values.
    """
    return cache.get(
        KERNEL_NAME,
        lambda: {"dtype": dtype},
        lambda: _build(dtype, arch),
        arch=arch,
        options=options_for(arch),
        token=dtype,
    )


def _build(dtype: str, arch: str) -> Compiled:
    from flash_mask_cute.mask_prep.selected_bits_kernel import SelectedBits

    arguments = [fake_tensors.strided(4, dtype), fake_tensors.strided(4), fake_tensors.stream()]
    return compile_object(SelectedBits(), arguments, options_for(arch))


def _by_torch(by_entry: Tensor, bits: Tensor) -> Tensor:
    """Fill the bits on the CPU."""
    bits.zero_()
    one = torch.ones((), dtype=torch.int32, device=bits.device)
    for entries in by_entry.unbind(-1):
        word = entries // WORD
        exists = (entries >= 0) & (word < bits.shape[-1])
        place = torch.where(exists, word, 0).long()[..., None]
        bit = torch.where(exists, one << (entries % WORD).int(), 0)[..., None]
        bits.scatter_(-1, place, bits.gather(-1, place) | bit)
    return bits
