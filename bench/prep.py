"""Preparing the metadata of a mask: everything that a kernel needs beyond the user's own tensors.

For ours, from intervals on the device to the bounds of key blocks and to documents, nothing cached;
for FlexAttention, torch's compiled `create_block_mask`; for `cudnn.flex_attention`, the plan of
both directions. The intervals, and the tables that FlexAttention's mask_mod reads, are there
before: they count among the bytes, not in the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.cases import BenchCase, make_tensors
from bench.mods import mask_tables, torch_mask_mod
from bench.peers import DOCUMENT_MASKS, column_tensor, cudnn_plan_call, endpoint_tensor

# The finest key blocks that a kernel asks for; coarser ones are less work. Packed documents have
# those of the kernels at the dimensions timed.
BLOCK_KEYS = 64


@dataclass(frozen=True)
class Preparation:
    """call: prepares and returns the metadata; size: their bytes."""

    call: Callable[[], Any]
    size: Callable[[Any], int]


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if hasattr(t, "element_size"))


def prepare_ours(case: BenchCase, device: str) -> Preparation:
    from flash_mask_cute.mask_prep.documents import BOUNDS_TILE, DocumentTensors
    from flash_mask_cute.masks.column_mask import ColumnMask

    mask = case.mask_of(case.n)
    indices = column_tensor(mask, torch.device(device))

    def by_documents() -> tuple[Tensor, ...]:
        starts, packed = ColumnMask(indices, mask.causal, documents=True).split(1)
        return starts, packed.bounds(BOUNDS_TILE, starts)

    def by_keys() -> tuple[Tensor, ...]:
        return (ColumnMask(indices, mask.causal).bounds(BLOCK_KEYS),)

    if mask.name in DOCUMENT_MASKS:
        return Preparation(
            by_documents, lambda _: _bytes((indices, *DocumentTensors.empty_like(indices, 1)))
        )
    return Preparation(by_keys, lambda made: _bytes((indices, *made)))


def prepare_flex(case: BenchCase, device: str) -> Preparation:
    from torch.nn.attention.flex_attention import create_block_mask

    # Beyond a limit of recompilations torch would run uncompiled.
    torch._dynamo.reset()
    mask = case.mask_of(case.n)
    tables = mask_tables(mask, torch.device(device))
    create = torch.compile(create_block_mask, dynamic=False)
    call = partial(create, torch_mask_mod(mask, tables), None, None, case.n, case.n, device)
    return Preparation(
        call, lambda made: _bytes(tables.values()) + _bytes(made.as_tuple(flatten=True))
    )


def prepare_cudnn_flex(case: BenchCase, device: str) -> Preparation:
    tensors = make_tensors(case, device, seed=0)
    told = endpoint_tensor(case, tensors.q.device)

    def size(plan: Any) -> int:
        # tensors that several parts of the plan share count once for each part
        parts = (part for part in plan.debug_snapshot().values() if isinstance(part, dict))
        return _bytes((told, *(tensor for part in parts for tensor in part.values())))

    return Preparation(cudnn_plan_call(case, tensors, build_backward=True), size)


PREPARERS: dict[str, Callable[[BenchCase, str], Preparation]] = {
    "ours": prepare_ours,
    "flex": prepare_flex,
    "cudnn_flex": prepare_cudnn_flex,
}
