"""Documents of a mask (tokens that see only each other) as sequences of a packed batch, whose tiles
begin where documents begin."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_mask_cute.mask_prep.column_bounds import bounds_by_torch, num_key_blocks
from flash_mask_cute.rules.intervals import Intervals
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import Compiled
from flash_mask_cute.runtime.compiler import cached_kernel, compile_object, options_for
from flash_mask_cute.runtime.target import Target

# at most one document may start in so many tokens; later starts are merged into it
DOCUMENT_STRIDE = 512
# keys of the blocks that show a slot the bounds of others, as of tiles of most attention kernels
BOUNDS_TILE = 128


def max_documents(seqlen: int) -> int:
    """Number of sequences that a batch entry is packed as. Many of them may be empty."""
    return -(-seqlen // DOCUMENT_STRIDE)


class DocumentTensors(NamedTuple):
    """The documents of column intervals (batch | 1, 1, seqlen, n), all int32.

    column_bounds: (batch | 1, 1, 2 n, blocks), of the intervals, for blocks of BOUNDS_TILE keys.
    begins: (batch | 1, slots), for each slot of DOCUMENT_STRIDE tokens its first row at which a
    document begins, or -1. cu_seqlens: (batch * slots + 1,), the starts of documents in the packed
    batch; a slot without a start makes an empty sequence. rows: (1, 1, batch * seqlen, n), the
    intervals of the packed batch, counted inside documents. bounds: (1, 1, 2 n, blocks), of rows
    and cu_seqlens, for blocks of BOUNDS_TILE keys. Both bounds are as `ColumnMask.bounds` has them.
    """

    column_bounds: Tensor
    begins: Tensor
    cu_seqlens: Tensor
    rows: Tensor
    bounds: Tensor

    @staticmethod
    def empty_like(indices: Tensor, batch: int) -> DocumentTensors:
        of_mask, _, seqlen, num_vectors = indices.shape
        slots, rows = max_documents(seqlen), batch * seqlen

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=indices.device)

        cu_seqlens = empty(batch * slots + 1)
        return DocumentTensors(
            empty(of_mask, 1, 2 * num_vectors, num_key_blocks(seqlen, BOUNDS_TILE, None)),
            empty(of_mask, slots),
            cu_seqlens,
            empty(1, 1, rows, num_vectors),
            empty(1, 1, 2 * num_vectors, num_key_blocks(rows, BOUNDS_TILE, cu_seqlens)),
        )

    def fill(self, indices: Tensor, causal: bool) -> None:
        """Find the documents of non-empty indices. On a GPU it makes four launches on the current
        stream. Raises NotImplementedError: there is no kernel for the GPU."""
        if indices.is_cuda:
            arch = Target.from_device(indices.device).arch
            compiled = compile_split(indices.shape[3], causal, arch)
            with torch.cuda.device_of(indices):
                compiled.function(indices, *self)
        else:
            found = _split_by_torch(indices, causal, self)
            for tensor, values in zip(self, found, strict=True):
                tensor.copy_(values)


@cached_kernel("document_split")
def compile_split(num_vectors: int, causal: bool, arch: str) -> Compiled:
    """The kernels. `function` takes, by position: indices, and the tensors of a
    `DocumentTensors`."""
    from flash_mask_cute.mask_prep.documents_kernel import DocumentSplit

    kernels = DocumentSplit(num_vectors, causal, DOCUMENT_STRIDE, BOUNDS_TILE)
    tensors = [fake_tensors.strided(rank) for rank in (4, 4, 2, 1, 4, 4)]
    return compile_object(kernels, [*tensors, fake_tensors.stream()], options_for(arch))


def _split_by_torch(given: Tensor, causal: bool, like: DocumentTensors) -> DocumentTensors:
    """The same result as `mask_prep/documents_kernel.py`, with the same blocks and slots."""
    bounds = bounds_by_torch(given, BOUNDS_TILE, None, like.column_bounds.shape[3])
    indices = given[:, 0]
    of_mask, seqlen, num_vectors = indices.shape
    intervals = Intervals(num_vectors, causal)
    slots, device = max_documents(seqlen), indices.device
    values = [x.long() for x in indices.unbind(2)]
    first, last = (filled(x, values[0]) for x in intervals.seen_span(values, values, seqlen))
    smallest, largest = (list(bounds[:, 0, i::2].long().unbind(1)) for i in (0, 1))
    block_first, block_last = (
        filled(x, smallest[0]) for x in intervals.seen_span(largest, smallest, seqlen)
    )
    # what blocks before and after each slot say
    blocks_of_slot = DOCUMENT_STRIDE // BOUNDS_TILE
    number = torch.arange(slots, device=device) * blocks_of_slot
    before = F.pad(block_last.cummax(1).values, (1, 0), value=-1)[:, number]
    behind = F.pad(block_first.flip(1).cummin(1).values.flip(1), (0, 1), value=seqlen)
    behind = behind[:, (number + blocks_of_slot).clamp(max=behind.shape[1] - 1)]

    def by_slot(x: Tensor, value: int) -> Tensor:
        return F.pad(x, (0, slots * DOCUMENT_STRIDE - seqlen), value=value).view(
            of_mask, slots, DOCUMENT_STRIDE
        )

    up_to = F.pad(by_slot(last, -1), (1, 0), value=-1)[..., :DOCUMENT_STRIDE].cummax(2).values
    onwards = by_slot(first, seqlen).flip(2).cummin(2).values.flip(2)
    rows = torch.arange(slots * DOCUMENT_STRIDE, device=device).view(slots, DOCUMENT_STRIDE)
    splits = (torch.maximum(up_to, before[..., None]) < rows) & (rows < seqlen)
    if not causal:
        splits &= torch.minimum(onwards, behind[..., None]) >= rows
    begins = torch.where(splits, rows, slots * DOCUMENT_STRIDE).amin(2)
    begins = begins.masked_fill(begins == slots * DOCUMENT_STRIDE, -1)

    batch = (len(like.cu_seqlens) - 1) // slots
    starts = begins.cummax(1).values
    positions = torch.arange(seqlen, device=device)
    own = begins[:, positions // DOCUMENT_STRIDE]
    previous = F.pad(starts, (1, 0))[:, positions // DOCUMENT_STRIDE]
    first_row = torch.where((own >= 0) & (positions >= own), own, previous)[..., None]
    relative = torch.maximum(indices.long(), first_row) - first_row
    offsets = torch.arange(batch, device=device)[:, None] * seqlen
    cu_seqlens = F.pad((starts + offsets).flatten(), (0, 1), value=batch * seqlen)
    packed = relative.expand(batch, -1, -1).reshape(1, 1, batch * seqlen, num_vectors)
    packed_bounds = bounds_by_torch(packed, BOUNDS_TILE, cu_seqlens, like.bounds.shape[3])
    return DocumentTensors(bounds, begins, cu_seqlens, packed, packed_bounds)


def filled(value: Tensor | int, like: Tensor) -> Tensor:
    """A tensor of a number; a tensor as it is."""
    return value if isinstance(value, Tensor) else torch.full_like(like, value)
