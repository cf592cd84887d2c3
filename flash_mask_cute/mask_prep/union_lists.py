"""The blocks that the queries of a tile chose together, as lists."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.mask_prep.selected_bits import WORD, QueryTiles
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.compiler import CACHE, by_names, compile_object, options_for
from flash_mask_cute.runtime.target import Target

KERNEL_NAME = "union_lists"
# A list is as long as whole tiles of keys need it, of blocks of 4 keys.
LENGTH_STEP = 32


class UnionLists(NamedTuple):
    """The blocks that any query of a tile chose.

    numbers: int32 (batch | 1, heads, tiles, length), ascending. Those behind the end of a list, up
    to the next multiple of LENGTH_STEP, are the last one's, or 0, inverted. counts: int32 (batch |
    1, heads, tiles), how many each tile has.
    """

    numbers: Tensor
    counts: Tensor


def list_length(k: int, num_blocks: int, tiles: QueryTiles, seqlen_q: int) -> int:
    """Room for the blocks of a tile, whose queries chose k each. seqlen_q: of any sequence."""
    queries = min(-(-tiles.tile_m // tiles.pack), seqlen_q)
    most = max(min(queries * k, num_blocks), 1)
    return -(-most // LENGTH_STEP) * LENGTH_STEP


def union_lists(of_any: Tensor, length: int) -> UnionLists:
    """The lists of the bits of tiles (`SelectionBits.of_any`), by one launch on the current stream.
    length: `list_length`."""
    lists = UnionLists(
        of_any.new_empty((*of_any.shape[:3], length)), of_any.new_empty(of_any.shape[:3])
    )
    if not of_any.is_cuda:
        _fill_by_torch(of_any, lists)
    elif of_any.numel():
        arch = Target.from_device(of_any.device).arch
        compile_union_lists(arch).function(of_any, *lists)
    return lists


def _fill_by_torch(of_any: Tensor, lists: UnionLists) -> None:
    """Make the lists on the CPU."""
    bits = torch.arange(WORD, dtype=torch.int32, device=of_any.device)
    is_chosen = ((of_any[..., None] >> bits) & 1).flatten(-2).bool()
    number = torch.arange(is_chosen.shape[-1], dtype=torch.int32, device=of_any.device)
    last = torch.where(is_chosen, number, 0).amax(-1, keepdim=True)
    length = lists.numbers.shape[-1]
    # one more place for those that are not chosen
    place = torch.where(is_chosen, is_chosen.cumsum(-1) - 1, length)
    numbers = (last ^ -1).repeat(1, 1, 1, length + 1)
    lists.numbers.copy_(numbers.scatter_(-1, place, number.expand_as(place))[..., :-1])
    lists.counts.copy_(is_chosen.sum(-1))


def compile_union_lists(arch: str, cache: CompileCache = CACHE) -> Compiled:
    """The compiled kernel, from the cache or built now. `function` takes the bits, and both tensors
    of `UnionLists`."""
    return by_names(KERNEL_NAME, {}, _build, arch, cache)


def _build(arch: str) -> Compiled:
    from flash_mask_cute.mask_prep.union_lists_kernel import UnionListsKernel

    arguments = [*(fake_tensors.strided(rank) for rank in (4, 4, 3)), fake_tensors.stream()]
    return compile_object(UnionListsKernel(), arguments, options_for(arch))
