"""What a mask of the mask half sees, and what transformers' own dense mask sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from flash_mask_cute.integrations.transformers import AttentionMask
from flash_mask_cute.integrations.transformers.attention import layer_attention


def seen(mask: AttentionMask) -> Tensor:
    """What attention with a mask sees: (batch, queries, keys), by values that tell keys apart."""
    batch, _, num_rows, num_keys = mask.shape
    dim = -(-max(num_keys, 8) // 8) * 8
    q, k = torch.zeros(batch, 1, num_rows, 8), torch.zeros(batch, 1, num_keys, 8)
    v = torch.eye(num_keys, dim).expand(batch, 1, -1, -1)
    out, _ = layer_attention(torch.nn.Module(), q, k, v, mask)
    return out[:, :, 0, :num_keys] > 0


def dense(call: dict[str, Any]) -> Tensor:
    """What transformers sees with the arguments of `make_mask`, (batch, queries, keys)."""
    found = masking_utils.sdpa_mask(**call, allow_is_causal_skip=False)
    assert isinstance(found, Tensor)
    return found.expand(-1, 1, -1, -1)[:, 0]
