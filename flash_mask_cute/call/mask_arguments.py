"""The mask arguments of a kernel, made of those of a call each time it runs."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from flash_mask_cute.block_sparsity import (
    BlockSparseTensorsTorch,
    LogicalBits,
    block_bits,
    from_block_mask,
    retile_lists,
)
from flash_mask_cute.call.arguments import Masks
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.masks import column_mask_of
from flash_mask_cute.core.packed_heads import padded_group
from flash_mask_cute.mask_prep.block_lists import order_lists
from flash_mask_cute.mask_prep.selected_bits import QueryTiles, selected_bits, union_lists
from flash_mask_cute.masks.selected_blocks import SelectedBlocks


class KernelArguments(NamedTuple):
    """The kernel arguments for a call's masks, by their names in the launch. lists: four tensors,
    the last two may be None. columns: indices and bounds. block_size: of the lists. bits: (visible,
    full, block_q, block_k) in place of lists; of a selection full is None, and the bits of tiles
    follow."""

    lists: tuple[Any, ...] | None = None
    aux_tensors: tuple[Tensor, ...] | None = None
    columns: tuple[Tensor, Tensor] | None = None
    block_size: tuple[int, int] | None = None
    bits: tuple[Any, ...] | None = None


class MaskArguments:
    """Makes the mask arguments of a planned kernel from those of a call. Nothing is computed for a
    `ColumnMask` or for lists that were seen before. Layers do not share selections, so the bits of
    a selection are made in each call."""

    def __init__(self, plan: ExecutionPlan) -> None:
        problem = plan.problem
        self._causal_form = problem.intervals is not None and problem.intervals[1]
        self._seqlens = plan.shapes.seqlen_q, plan.shapes.seqlen_k
        self._block_size = plan.masks.block_size
        self._tile = plan.walk_tile
        self._query_tiles = QueryTiles(self._tile[0], padded_group(problem.packed_heads))
        self._reads_lists = plan.reads_lists
        self._by_query_lists = problem.query_lists
        self._reads_entries = problem.selection_dtype is not None
        self._gathers = problem.gathers > 0

    def __call__(
        self, masks: Masks, cu_seqlens_k: Tensor | None, cu_seqlens_q: Tensor | None
    ) -> KernelArguments:
        _, _, aux_tensors, given_lists, given_columns = masks
        lists = columns = block_size = None
        bits: tuple[Any, ...] | None = None
        if given_columns is not None:
            mask = column_mask_of(given_columns, self._causal_form)
            columns = mask.startend_row_indices, mask.bounds(self._tile[1], cu_seqlens_k)
        if isinstance(given_lists, SelectedBlocks):
            # a backward makes query lists itself
            if not self._by_query_lists:
                bits = self._selection_bits(given_lists, cu_seqlens_q)
        elif given_lists is not None:
            sized = from_block_mask(given_lists)._replace(block_size=self._block_size)
            if self._reads_lists:
                retiled = retile_lists(sized, *self._tile, *self._seqlens)
                lists, block_size = retiled.lists[:4], retiled.lists.block_size
                bits = None if retiled.bits is None else tuple(retiled.bits)
            else:
                on_gpu = sized.mask_block_idx.is_cuda
                bits = tuple(block_bits(sized, bits_by_kernel if on_gpu else None))
        aux = tuple(aux_tensors) if aux_tensors else None
        return KernelArguments(lists, aux, columns, block_size, bits)

    def _selection_bits(
        self, selected: SelectedBlocks, cu_seqlens_q: Tensor | None
    ) -> tuple[Any, ...]:
        num_blocks = selected.num_blocks(self._seqlens[1])
        by_entry, size, tiles = selected.by_entry, selected.block_size, self._query_tiles
        queries = min(-(-tiles.tile_m // tiles.pack), self._seqlens[0])
        k = by_entry.shape[3]
        most_tiles = queries * k * max(size // self._tile[1], 1)
        if self._reads_entries:
            if self._gathers:
                most_tiles = -(-k * size // self._tile[1])
            return by_entry, None, 1, size, None, None, most_tiles
        made = selected_bits(by_entry, num_blocks, tiles, cu_seqlens_q)
        if self._gathers:
            length = tiles.list_length(k, num_blocks, self._seqlens[0])
            most_tiles = -(-length * size // self._tile[1])
            lists = union_lists(made.of_any, length)
            return made.rows, None, 1, size, None, None, most_tiles, *lists
        return made.rows, None, 1, size, made.of_any, made.of_every, most_tiles


def bits_by_kernel(lists: BlockSparseTensorsTorch) -> LogicalBits:
    """The bits of lists on a GPU, by one launch."""
    assert lists.block_size is not None
    return LogicalBits(*order_lists(*lists[:4]).bits, *lists.block_size)
