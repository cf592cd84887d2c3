"""The kernels that split the documents of a mask, on the software GPU."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import pytest
import torch
from quiet_runs import quiet_run
from torch import Tensor

from flash_mask_cute.mask_prep.documents import BOUNDS_TILE, DocumentTensors, compile_split
from flash_mask_cute.masks import builders
from flash_mask_cute.masks.column_mask import ColumnMask

# None: warps take turns; a seed: shuffled.
DELAY_SEEDS = (None, 1)
POISON = 7777


def random_mask(num_vectors: int, causal: bool, batch: int, seqlen: int) -> ColumnMask:
    generator = torch.Generator().manual_seed(num_vectors + seqlen)
    shape = (batch, 1, seqlen, num_vectors)
    return ColumnMask(torch.randint(-9, seqlen + 9, shape, generator=generator).int(), causal)


MASKS = {
    "causal_document": lambda: builders.causal_document([[700, 600, 300], [20, 1000, 580]]),
    "document": lambda: builders.document([511, 1, 512, 700]),
    "share_question": lambda: builders.share_question([[300, 200, 400], [600, 100, 50]]),
    "prefix_lm_document": lambda: builders.prefix_lm_document([900, 700], [300, 10], 1700),
    "full": lambda: builders.full(1030),
    "short": lambda: builders.causal_document([3, 2]),
    "random-1": lambda: random_mask(1, True, 1, 700),
    "random-2": lambda: random_mask(2, False, 2, 1025),
    "random-4": lambda: random_mask(4, True, 1, 513),
}


def blocks_in_use(cu_seqlens: Tensor) -> list[int]:
    """The entries of bounds that some block of a packed batch uses, as `ColumnMask.bounds` says."""
    starts = cu_seqlens.tolist()
    used: list[int] = []
    for number, (start, end) in enumerate(pairwise(starts)):
        first = start // BOUNDS_TILE + number
        used += range(first, first + -(-(end - start) // BOUNDS_TILE))
    return used


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("name", MASKS)
def test_as_torch_finds_them(simulator: ModuleType, name: str, batch: int) -> None:
    mask = MASKS[name]()
    if mask.startend_row_indices.shape[0] > 1:
        batch = mask.startend_row_indices.shape[0]
    indices = mask.startend_row_indices
    expected = DocumentTensors.empty_like(indices, batch)
    expected.fill(indices, mask.causal)
    results = [torch.full_like(x, POISON) for x in expected]
    compiled = compile_split(indices.shape[3], mask.causal, "sm_90a")
    for seed in DELAY_SEEDS:
        with quiet_run(simulator, seed):
            compiled.function(indices, *results)
        *found, bounds = results
        for result, values in zip(found, expected[:-1], strict=True):
            assert torch.equal(result, values)
        used = blocks_in_use(expected.cu_seqlens)
        assert torch.equal(bounds[..., used], expected.bounds[..., used])
