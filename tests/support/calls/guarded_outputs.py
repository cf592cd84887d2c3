"""Output buffers that show what a kernel did not write, and what it wrote beside them."""

from __future__ import annotations

import torch
from cases import FP32
from inputs import Inputs
from torch import Tensor


class Guarded:
    """NaN-filled tensors for a caller to pass, each inside a larger NaN-filled buffer."""

    GUARD = 1024  # elements before and after

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}

    def allocate(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        numel = torch.Size(shape).numel() + 2 * self.GUARD
        self._buffers[name] = torch.full((numel,), float("nan"), dtype=dtype, device=device)
        self.tensors[name] = self._buffers[name][self.GUARD : -self.GUARD].view(shape)
        return self.tensors[name]

    def assert_guards_intact(self) -> None:
        for name, buffer in self._buffers.items():
            assert buffer[: self.GUARD].isnan().all(), f"the memory before {name} was written"
            assert buffer[-self.GUARD :].isnan().all(), f"the memory after {name} was written"


class GuardedOutputs(Guarded):
    """`out` and `lse`."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        out_shape = (*inputs.q.shape[:-1], inputs.v.shape[-1])
        lse_shape = (*out_shape[:-3], out_shape[-2], out_shape[-3])
        self.out = self.allocate("out", out_shape, inputs.q.dtype, inputs.q.device)
        self.lse = self.allocate("lse", lse_shape, FP32, inputs.q.device)
