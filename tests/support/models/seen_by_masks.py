"""What a mask of the mask half sees, what transformers' own sees, and what making one costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
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


class Waits(TorchDispatchMode):
    """Counts what waits for a device, and all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.count += 1
        if any(x in name for x in ("_local_scalar_dense", "nonzero", "masked_select", "unique")):
            self.waits.append(name)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Waits:
        # no mode sees it
        read = Tensor.tolist
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(Tensor, "tolist", lambda x: self.waits.append("tolist") or read(x))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.patch.undo()
        super().__exit__(*error)
