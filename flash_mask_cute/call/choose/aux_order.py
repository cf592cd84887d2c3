"""Whether gradients of aux tensors are summed in a fixed order."""

from __future__ import annotations

import torch

from flash_mask_cute.call.choose.arch import arch_spec
from flash_mask_cute.runtime.target import Target


def why_unordered(target: Target) -> str | None:
    """Why gradients of aux tensors have no fixed order of sums, in words; None if they have one."""
    if arch_spec(target).backward.orders_aux:
        return None
    return f"gradients of aux tensors are summed in no fixed order on {arch_spec(target).name}"


def why_unordered_on(device: torch.device) -> str | None:
    """`why_unordered` on a device, before a call is planned."""
    return why_unordered(Target.from_device(device) if device.type == "cuda" else Target.default())
