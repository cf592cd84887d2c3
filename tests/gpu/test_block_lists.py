"""Block lists made on a Hopper GPU: equal to those of the CPU path, and of use to the kernel."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch

from flash_mask_cute import create_block_mask
from flash_mask_cute.interface import _flash_attn_fwd
from flash_mask_cute.utils import scalar_to_ssa


@cute.jit
def documents(b_idx: Any, h_idx: Any, q_idx: Any, kv_idx: Any, aux_tensors: Any) -> Any:
    ids = aux_tensors[0]
    seen = scalar_to_ssa(ids[b_idx[0], q_idx[0]], cutlass.Int32)
    return seen == scalar_to_ssa(ids[b_idx[0], kv_idx[0]], cutlass.Int32)


@cute.jit
def causal(b_idx: Any, h_idx: Any, q_idx: Any, kv_idx: Any, aux_tensors: Any) -> Any:
    return kv_idx <= q_idx


@pytest.mark.parametrize("mask_mod", [documents, causal])
@pytest.mark.parametrize("block", [(128, 128), (64, 96), (256, 128)])
def test_lists_of_the_device_equal_those_of_the_cpu(mask_mod: Any, block: tuple[int, int]) -> None:
    ids = torch.arange(700, dtype=torch.int32).div(150, rounding_mode="floor").expand(2, -1)
    made = {
        device: create_block_mask(
            mask_mod,
            2,
            None,
            700,
            700,
            device=device,
            BLOCK_SIZE=block,
            aux_tensors=[ids.int().to(device)],
        )
        for device in ("cpu", "cuda")
    }
    for here, there in zip(made["cpu"][:4], made["cuda"][:4], strict=True):
        assert torch.equal(here, there.cpu())


def test_lists_of_the_device_serve_the_kernel() -> None:
    ids = torch.arange(700, dtype=torch.int32).div(150, rounding_mode="floor").int()[None]
    q, k, v = (torch.randn(1, 700, 2, 128).bfloat16() for _ in range(3))
    results = {}
    for device in ("cpu", "cuda"):
        aux = [ids.to(device)]
        lists = create_block_mask(documents, 1, 1, 700, 700, device=device, aux_tensors=aux)
        results[device], _ = _flash_attn_fwd(
            *(x.to(device) for x in (q, k, v)),
            mask_mod=documents,
            aux_tensors=aux,
            block_sparse_tensors_torch=lists,
        )
    assert (results["cpu"].float() - results["cuda"].cpu().float()).abs().max() < 0.02
