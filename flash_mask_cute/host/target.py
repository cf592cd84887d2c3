"""The device that a kernel is compiled for."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

H200_SMS = 132


@dataclass(frozen=True)
class Target:
    """arch: what the compiler is told, such as "sm_90a"; num_sms: how many CTAs run at once."""

    arch: str
    num_sms: int

    @staticmethod
    def default() -> Target:
        """An H100 or H200 (SXM), for compiling where there is no GPU."""
        return Target("sm_90a", H200_SMS)

    @staticmethod
    def of(device: torch.device) -> Target:
        """The target of a CUDA device.

        Raises:
            NotImplementedError: there is no kernel for the device's compute capability.
        """
        index = torch.cuda.current_device() if device.index is None else device.index
        return _of_index(index)


@functools.cache
def _of_index(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if properties.major != 9:
        raise NotImplementedError(
            f"q is on {properties.name} (cuda:{index}) with compute capability "
            f"{properties.major}.{properties.minor}; kernels exist for 9.x (Hopper) only"
        )
    return Target("sm_90a", properties.multi_processor_count)
