"""Documents of a mask: tokens that only see each other, as sequences of a packed batch.

Tiles of a packed batch begin where documents begin. Under the mask of a whole sequence they begin
anywhere, and one that two documents share visits the keys of both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_mask_cute.masks.intervals import Intervals

# at most one document begins in as many tokens; others stay part of the one before
SLOT = 512
# keys of the blocks by whose bounds a slot knows the others
BOUNDS_TILE = 128


class Split(NamedTuple):
    """The documents of column intervals (batch | 1, 1, seqlen, n), all int32.

    begins: (batch | 1, slots), the first row of each slot of SLOT tokens with which a document
    begins, or -1. cu_seqlens: (batch * slots + 1,), where documents begin in the packed batch; a
    slot in which none begins makes an empty sequence. rows: (1, 1, batch * seqlen, n), the
    intervals of the packed batch, counted inside documents.
    """

    begins: Tensor
    cu_seqlens: Tensor
    rows: Tensor

    @staticmethod
    def empty_like(indices: Tensor, batch: int) -> Split:
        of_mask, _, seqlen, num_vectors = indices.shape
        slots = -(-seqlen // SLOT)
        shapes = (of_mask, slots), (batch * slots + 1,), (1, 1, batch * seqlen, num_vectors)
        return Split(*(torch.empty(x, dtype=torch.int32, device=indices.device) for x in shapes))

    def fill(self, indices: Tensor, causal: bool, bounds: Tensor) -> None:
        """Find the documents of indices; bounds: theirs, for blocks of BOUNDS_TILE keys. Neither is
        empty. On a GPU, two launches on the current stream.

        Raises:
            NotImplementedError: there is no kernel for the GPU.
        """
        if indices.is_cuda:
            from flash_mask_cute.host.compile_documents import launch_split

            launch_split(indices, causal, bounds, *self)
        else:
            found = _split_by_torch(indices, causal, bounds, self.cu_seqlens.shape[0] - 1)
            for tensor, values in zip(self, found, strict=True):
                tensor.copy_(values)


def _split_by_torch(indices: Tensor, causal: bool, bounds: Tensor, num_sequences: int) -> Split:
    """As `kernels/document_split.py` finds them, with blocks and slots where it has them."""
    indices = indices[:, 0]
    of_mask, seqlen, num_vectors = indices.shape
    intervals = Intervals(num_vectors, causal)
    slots, device = -(-seqlen // SLOT), indices.device
    values = [x.long() for x in indices.unbind(2)]
    first, last = (_full(x, values[0]) for x in intervals.seen_span(values, values, seqlen))
    smallest, largest = (list(bounds[:, 0, i::2].long().unbind(1)) for i in (0, 1))
    block_first, block_last = (
        _full(x, smallest[0]) for x in intervals.seen_span(largest, smallest, seqlen)
    )
    # what blocks before and behind each slot say
    blocks_of_slot = SLOT // BOUNDS_TILE
    number = torch.arange(slots, device=device) * blocks_of_slot
    before = F.pad(block_last.cummax(1).values, (1, 0), value=-1)[:, number]
    behind = F.pad(block_first.flip(1).cummin(1).values.flip(1), (0, 1), value=seqlen)
    behind = behind[:, (number + blocks_of_slot).clamp(max=behind.shape[1] - 1)]

    def by_slot(x: Tensor, value: int) -> Tensor:
        return F.pad(x, (0, slots * SLOT - seqlen), value=value).view(of_mask, slots, SLOT)

    up_to = F.pad(by_slot(last, -1), (1, 0), value=-1)[..., :SLOT].cummax(2).values
    onwards = by_slot(first, seqlen).flip(2).cummin(2).values.flip(2)
    rows = torch.arange(slots * SLOT, device=device).view(slots, SLOT)
    splits = (torch.maximum(up_to, before[..., None]) < rows) & (rows < seqlen)
    if not causal:
        splits &= torch.minimum(onwards, behind[..., None]) >= rows
    begins = torch.where(splits, rows, slots * SLOT).amin(2)
    begins = begins.masked_fill(begins == slots * SLOT, -1)

    batch = num_sequences // slots
    starts = begins.cummax(1).values
    positions = torch.arange(seqlen, device=device)
    own = begins[:, positions // SLOT]
    previous = F.pad(starts, (1, 0))[:, positions // SLOT]
    first_row = torch.where((own >= 0) & (positions >= own), own, previous)[..., None]
    relative = torch.maximum(indices.long(), first_row) - first_row
    offsets = torch.arange(batch, device=device)[:, None] * seqlen
    cu_seqlens = F.pad((starts + offsets).flatten(), (0, 1), value=batch * seqlen)
    packed = relative.expand(batch, -1, -1).reshape(1, 1, batch * seqlen, num_vectors)
    return Split(begins, cu_seqlens, packed)


def _full(value: Tensor | int, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full_like(like, value)
