"""A forward call executed on the software GPU, by the public call's own way to a kernel."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from inputs import Inputs
from planned import call_of, planned
from tolerances import assert_close_to_oracle
from torch import Tensor

from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.call.choose.mask_bits import Limits
from flash_mask_cute.call.prepare import prepared_fwd
from flash_mask_cute.runtime.target import Target

# few, so that small problems give every persistent CTA several work tiles
SMS = 2
# None: asynchronous work completes at once. A seed: at random later points, with warps shuffled.
DELAY_SEEDS = (None, 1, 2)


def launch_on_simulator(
    inputs: Inputs, arch: str, sms: int = SMS, limits: Limits | None = None, **more: Any
) -> tuple[Tensor, Tensor]:
    """Run the kernel for tensors on the CPU. sms: what the host takes the GPU to have."""
    out, lse = run_on_simulator(call_of(inputs, **more), arch, sms, limits)
    assert lse is not None
    return out, lse


def run_on_simulator(
    call: AttentionCall, arch: str, sms: int = SMS, limits: Limits | None = None
) -> tuple[Tensor, Tensor | None]:
    """`interface.forward` of tensors on the CPU."""
    prepared = prepared_fwd(planned(call, Target(arch, num_sms=sms), limits))
    return prepared(call.tensors, call.masks)


def run_sim(
    simulator: ModuleType,
    inputs: Inputs,
    arch: str,
    seeds: tuple[int | None, ...] = DELAY_SEEDS,
    **more: Any,
) -> None:
    """Run with each seed, hold the result to the oracle, and refuse warnings."""
    for seed in seeds:
        simulator.OPTIONS.pop("delay", None)
        if seed is not None:
            simulator.OPTIONS["delay"] = seed
        simulator.RESULTS.clear()
        out, lse = launch_on_simulator(inputs, arch, **more)
        assert simulator.RESULTS, "no kernel ran on the software GPU"
        for result in simulator.RESULTS:
            assert not result["warnings"], f"delay {seed}: {result}"
        assert_close_to_oracle(out, lse, inputs)
