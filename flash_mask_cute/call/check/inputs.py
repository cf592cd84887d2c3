"""The tensors that a call reads, which its outputs must not overlap."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from flash_mask_cute.block_sparsity import from_block_mask
from flash_mask_cute.call.arguments import AttentionCall, Direction, Gradients, Masks
from flash_mask_cute.masks.selected_blocks import SelectedBlocks

# the others are read by a forward
_NOT_OF_FORWARD = frozenset({"out", "lse", "lse_low", "max_scores", *Gradients._fields})
_OF_BACKWARD = "q", "k", "v", "out", "dout"


def inputs_of(call: AttentionCall) -> dict[str, Tensor | None]:
    """By name, for messages. Of a backward those of the size of q, k and v."""
    given = call.tensors.by_name()
    if call.direction is Direction.BACKWARD:
        return {name: given[name] for name in _OF_BACKWARD}
    found = {name: x for name, x in given.items() if name not in _NOT_OF_FORWARD}
    if call.masks is not None:
        found |= dict(tensors_of_masks(call.masks))
    return found


def tensors_of_masks(masks: Masks) -> Iterator[tuple[str, Tensor]]:
    """The tensors that masks hold, by name."""
    for position, tensor in enumerate(masks.aux_tensors or ()):
        yield f"aux_tensors[{position}]", tensor
    columns = masks.startend_row_indices
    if columns is not None:
        name = "startend_row_indices"
        yield name, columns if isinstance(columns, Tensor) else columns.startend_row_indices
    lists = masks.block_sparse_tensors_torch
    if isinstance(lists, SelectedBlocks):
        yield "indices of block_sparse_tensors", lists.indices
    elif lists is not None:
        for name, given in from_block_mask(lists)._asdict().items():
            if isinstance(given, Tensor):
                yield name, given
