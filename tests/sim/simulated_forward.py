"""A forward call executed on the software GPU, by the public call's own way to a kernel."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from conftest import ACTIVE_ARCH, SMS
from eager import assert_close_to_oracle
from inputs import Inputs
from planned import call_of, planned
from quiet_runs import quiet_run
from torch import Tensor

from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.call.mask_bits import Limits
from flash_mask_cute.call.prepare import prepared_fwd
from flash_mask_cute.runtime.target import Target

# None: asynchronous work completes at once. A seed: at random later points, with warps shuffled.
DELAY_SEEDS = (None, 1, 2)


def launch_on_simulator(
    inputs: Inputs, sms: int = SMS, limits: Limits | None = None, **more: Any
) -> tuple[Tensor, Tensor]:
    """Run the kernel for tensors on the CPU. sms: what the host takes the GPU to have."""
    out, lse = run_on_simulator(call_of(inputs, **more), sms, limits)
    assert lse is not None
    return out, lse


def run_on_simulator(
    call: AttentionCall, sms: int = SMS, limits: Limits | None = None
) -> tuple[Tensor, Tensor | None]:
    """`interface.forward` of tensors on the CPU."""
    prepared = prepared_fwd(planned(call, Target(ACTIVE_ARCH, num_sms=sms), limits))
    return prepared(call.tensors, call.masks)


def run_sim(
    simulator: ModuleType, inputs: Inputs, seeds: tuple[int | None, ...] = DELAY_SEEDS, **more: Any
) -> float:
    """Run with each seed against the oracle, without warnings; the largest share of the bound."""
    share = 0.0
    for seed in seeds:
        with quiet_run(simulator, seed):
            out, lse = launch_on_simulator(inputs, **more)
        share = max(share, assert_close_to_oracle(out, lse, inputs))
    return share
