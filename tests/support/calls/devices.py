"""Where a case runs that is written once: the fixture `device` of tests/cpu, tests/gpu, tests/sim.

A case calls the device as the host does, and holds what comes back to its oracle. Modules
`*_on_devices.py` have the cases; each folder of tests imports those that it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from cases import Case
from eager import assert_close_to_oracle
from guarded_outputs import GuardedOutputs
from inputs import Inputs, make_inputs
from torch import Tensor

from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

T = TypeVar("T")


@dataclass(frozen=True)
class Device:
    """The CPU path, or a GPU. Results lie where operands are moved to."""

    kind: Literal["cpu", "gpu", "simulated"]
    where: str = "cpu"

    def pick(self, cpu: T, gpu: T, simulated: T) -> T:
        """Of sizes and numbers of draws, those of this device."""
        return {"cpu": cpu, "gpu": gpu, "simulated": simulated}[self.kind]

    def inputs(self, case: Case, seed: int = 0) -> Inputs:
        return make_inputs(case, self.where, seed)

    def moved(self, given: Any) -> Any:
        """Tensors, also in mappings, lists and tuples, where this device reads them."""
        if isinstance(given, Tensor):
            return given.to(self.where)
        if isinstance(given, dict):
            return {name: self.moved(x) for name, x in given.items()}
        if isinstance(given, list):
            return [self.moved(x) for x in given]
        if isinstance(given, tuple) and any(isinstance(x, Tensor) for x in given):
            return type(given)(*map(self.moved, given))
        return given

    def forward(
        self, *qkv: Tensor, delay: int | None = None, sms: int | None = None, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        """delay, sms: of the software GPU: the seed by which asynchronous work is late, and how
        many SMs the host takes it to have."""
        out, lse = _flash_attn_fwd(*map(self.moved, qkv), **self.moved(keywords))
        assert lse is not None
        return out, lse

    def backward(
        self, *operands: Tensor, delay: int | None = None, **keywords: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """operands: q, k, v, out, dout, lse."""
        return _flash_attn_bwd(*map(self.moved, operands), **self.moved(keywords))

    def in_kernel_memory(self, tensor: Tensor) -> Any:
        """A tensor of this device, as `from_dlpack` takes it."""
        return tensor

    def needs_hopper(self) -> None:
        """Skip what the kernels of this device's architecture do not compute, or not apart."""


def check_forward(
    device: Device, inputs: Inputs, delays: tuple[int | None, ...] = (None, 1), **more: Any
) -> None:
    """Runs are close to the oracle and equal in every bit; the caller's outputs are guarded."""
    qkv, keywords = (inputs.q, inputs.k, inputs.v), inputs.keywords | more
    out, lse = device.forward(*qkv, **keywords, delay=delays[0])
    assert_close_to_oracle(out, lse, inputs)
    for delay in delays[1:]:
        again, _ = device.forward(*qkv, **keywords, delay=delay)
        assert torch.equal(again, out), inputs.case.id
    if device.kind != "simulated":
        check_given_outputs(partial(device.forward, *qkv, **keywords), inputs, out, lse)


def check_given_outputs(
    forward: Callable[..., Any], inputs: Inputs, out: Tensor, lse: Tensor
) -> None:
    """Those of the caller are equal in every bit, and guarded."""
    given = GuardedOutputs(inputs)
    forward(out=given.out, lse=given.lse)
    given.assert_guards_intact()
    rows = inputs.rows_in_use("q")
    assert torch.equal(given.out[rows], out[rows]), inputs.case.id
    assert torch.equal(given.lse.mT[rows], lse.mT[rows]), inputs.case.id
