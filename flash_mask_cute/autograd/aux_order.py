"""Whether gradients of aux tensors have a fixed order of sums, for a call that is to have one."""

from __future__ import annotations

import torch

from flash_mask_cute.call.batch_sums import why_unordered_on
from flash_mask_cute.runtime.constant_result import assume_constant_result


def why_unordered(device: torch.device) -> str | None:
    """Why gradients of aux tensors have no fixed order of sums on a device, or None."""
    return _why_on(device.type, device.index)


@assume_constant_result
def _why_on(device: str, index: int | None) -> str | None:
    return why_unordered_on(torch.device(device if index is None else f"{device}:{index}"))
