"""Arguments of good calls of the public forward, in every layout, for the checks of arguments."""

from __future__ import annotations

from typing import Any

import torch
from cases import int32
from planned import forward_call
from torch.nn.attention.flex_attention import BlockMask

from flash_mask_cute.call.check.validate import check_inputs
from flash_mask_cute.call.problem import FwdShapes

BATCH, SEQLEN_Q, SEQLEN_K, HEADS_Q, HEADS_KV, DIM, DIM_V = 2, 24, 40, 6, 2, 64, 32
LENGTHS_Q, LENGTHS_K = (0, 9, 24), (5, 45, 60)


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def dense() -> dict[str, Any]:
    return {
        "q": zeros(BATCH, SEQLEN_Q, HEADS_Q, DIM),
        "k": zeros(BATCH, SEQLEN_K, HEADS_KV, DIM),
        "v": zeros(BATCH, SEQLEN_K, HEADS_KV, DIM_V),
    }


def packed_q() -> dict[str, Any]:
    return dense() | {"q": zeros(24, HEADS_Q, DIM), "cu_seqlens_q": int32(0, 9, 24)}


def packed_k() -> dict[str, Any]:
    return dense() | {
        "k": zeros(60, HEADS_KV, DIM),
        "v": zeros(60, HEADS_KV, DIM_V),
        "cu_seqlens_k": int32(0, 45, 60),
    }


def packed() -> dict[str, Any]:
    return packed_q() | {name: packed_k()[name] for name in ("k", "v", "cu_seqlens_k")}


def column_zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def reaches_a_tensor() -> Any:
    limit = torch.tensor(3)
    return lambda b, h, q, k, aux: k <= limit


def block_mask() -> BlockMask:
    counts, indices = column_zeros(1, 1, 1), column_zeros(1, 1, 1, 1)
    return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128, seq_lengths=(24, 60))


LAYOUTS = {"dense": dense, "packed_q": packed_q, "packed_k": packed_k, "packed": packed}


def check(arguments: dict[str, Any]) -> FwdShapes:
    arguments = dict(arguments)
    q, k, v = (arguments.pop(name) for name in "qkv")
    return check_inputs(forward_call(q, k, v, **arguments))
