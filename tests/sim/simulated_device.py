"""The software GPU as the fixture `device` of cases that run on every device."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import simulated_backward
import simulated_forward
from conftest import ACTIVE_ARCH, HOPPER, SMS
from devices import Device
from planned import backward_call, forward_call
from quiet_runs import quiet_run
from torch import Tensor


@dataclass(frozen=True)
class SimulatedDevice(Device):
    simulator: ModuleType | None = None

    def forward(
        self, *qkv: Tensor, delay: int | None = None, sms: int | None = None, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.simulator is not None
        with quiet_run(self.simulator, delay):
            call = forward_call(*qkv, **keywords)
            out, lse = simulated_forward.run_on_simulator(call, sms or SMS)
        assert lse is not None
        return out, lse

    def backward(
        self, *operands: Tensor, delay: int | None = None, **keywords: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.simulator is not None
        with quiet_run(self.simulator, delay):
            return simulated_backward.run_on_simulator(backward_call(*operands, **keywords))

    def in_kernel_memory(self, tensor: Tensor) -> Any:
        from software_gpu.device_memory import as_cuda

        return as_cuda(tensor)

    def needs_hopper(self) -> None:
        if ACTIVE_ARCH != HOPPER:
            pytest.skip("of kernels that are for Hopper only")
