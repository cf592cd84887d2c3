"""The device that a kernel is compiled for."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

H200_SMS = 132
B200_SMS = 148
# what the compiler is told, by compute capability, and how many SMs the usual device has
ARCHS = {
    (9, 0): ("sm_90a", H200_SMS),
    (10, 0): ("sm_100a", B200_SMS),
    (10, 3): ("sm_103a", B200_SMS),
}


@dataclass(frozen=True)
class Target:
    """arch: the compiler's architecture name, such as "sm_90a"; num_sms: CTAs that run at once."""

    arch: str
    num_sms: int

    @staticmethod
    def named(arch: str) -> Target:
        """The usual device of an arch, for compiling without such a device. Raises TypeError,
        ValueError: there is no such arch."""
        known = dict(ARCHS.values())
        if not isinstance(arch, str) or arch not in known:
            kind = ValueError if isinstance(arch, str) else TypeError
            raise kind(f"target must be one of {', '.join(known)}, got {arch!r}")
        return Target(arch, known[arch])

    @staticmethod
    def default() -> Target:
        """An H100 or H200 (SXM), for compiling without a GPU."""
        return Target("sm_90a", H200_SMS)

    @staticmethod
    def from_device(device: torch.device) -> Target:
        """The target of a CUDA device. Raises NotImplementedError: there is no kernel for the
        device's compute capability."""
        index = torch.cuda.current_device() if device.index is None else device.index
        return _of_index(index)


@functools.cache
def _of_index(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    capability = properties.major, properties.minor
    if capability not in ARCHS:
        raise NotImplementedError(
            f"q is on {properties.name} (cuda:{index}) with compute capability "
            f"{properties.major}.{properties.minor}; kernels exist for 9.0 (Hopper), 10.0 and 10.3 "
            "(Blackwell) only"
        )
    arch, _ = ARCHS[capability]
    return Target(arch, properties.multi_processor_count)
