"""Block lists of any order as kernels read them, by one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import Compiled
from flash_mask_cute.runtime.compiler import cached_kernel, compile_object, options_for
from flash_mask_cute.runtime.plain_tensors import outside_inference_mode
from flash_mask_cute.runtime.target import Target

WORD = 32


class OrderedTensors(NamedTuple):
    """The lists (counts and entries of partial and of full blocks, as `BlockSparseTensorsTorch` has
    them, the latter maybe None) and the bits (visible, full) of the blocks, as `LogicalBits`."""

    lists: tuple[Tensor, Tensor, Tensor | None, Tensor | None]
    bits: tuple[Tensor, Tensor]

    @staticmethod
    def empty_like(mask_idx: Tensor, has_full: bool) -> OrderedTensors:
        """Outputs for entries of the shape of mask_idx, (batch, heads, q_blocks, k_blocks)."""
        shape = mask_idx.shape
        words = *shape[:3], -(-shape[3] // WORD)
        cnt = mask_idx.new_empty(shape[:3], dtype=torch.int32)
        idx = mask_idx.new_empty(shape, dtype=torch.int32)
        full = (torch.empty_like(cnt), torch.empty_like(idx)) if has_full else (None, None)
        visible = mask_idx.new_empty(words, dtype=torch.int32)
        return OrderedTensors((cnt, idx, *full), (visible, torch.empty_like(visible)))


# what is made of the result may be kept with it
@outside_inference_mode
def order_lists(
    mask_cnt: Tensor, mask_idx: Tensor, full_cnt: Tensor | None, full_idx: Tensor | None
) -> OrderedTensors:
    """The lists with ascending entries and zeros after them, and their bits.

    It takes int32 tensors on a GPU, of the shapes of `BlockSparseTensorsTorch`. Entries may have
    any order. One launch on the current stream reads them as they are when it runs, and a replayed
    CUDA graph reads them again. Raises NotImplementedError: there is no kernel for the device."""
    given = mask_cnt, mask_idx, full_cnt, full_idx
    made = OrderedTensors.empty_like(mask_idx, full_idx is not None)
    if mask_idx.numel() == 0:
        for cnt in made.lists[::2]:
            if cnt is not None:
                cnt.zero_()
        return made
    compiled = compile_ordered_lists(full_idx is not None, Target.from_device(mask_idx.device).arch)
    with torch.cuda.device_of(mask_idx):
        compiled.function(given, made.lists, *made.bits)
    return made


@cached_kernel("ordered_lists")
def compile_ordered_lists(has_full: bool, arch: str) -> Compiled:
    """The kernel. `function` takes, by position: the lists that are given and those to be made,
    four tensors each (the last two None unless has_full), the visible and the full bits."""
    from flash_mask_cute.mask_prep.block_lists_kernel import BlockLists, OrderedLists

    def lists() -> BlockLists:
        mask, full = ((fake_tensors.strided(3), fake_tensors.strided(4)) for _ in range(2))
        return BlockLists(*mask, *(full if has_full else (None, None)))

    arguments = [lists(), lists(), *(fake_tensors.strided(4) for _ in range(2))]
    return compile_object(OrderedLists(), [*arguments, fake_tensors.stream()], options_for(arch))
