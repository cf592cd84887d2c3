"""A backward call executed on the software GPU, by the public call's own way to its kernels."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from case_log import note
from gradient_oracle import assert_gradients_close, make_output_gradients
from inputs import Inputs
from planned import backward_call
from torch import Tensor
from unseen_memory import Hostile

from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.call.prepare import prepare_bwd
from flash_mask_cute.runtime.target import Target

HOPPER = "sm_90a"
# None: asynchronous work completes at once. A seed: at random later points, with warps shuffled.
DELAY_SEEDS = (None, 1)
# few, so that small problems give every persistent CTA several work tiles
SMS = 2


def launch_on_simulator(
    inputs: Inputs, dout: Tensor, dlse: Tensor | None = None, arch: str = HOPPER, **more: Any
) -> dict[str, Tensor | None]:
    """The public call's own way to its kernels, for tensors on the CPU, with the oracle's out and
    lse, NaN in rows that are not in use. more: keywords of the backward.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    out, lse = inputs.reference[0].to(q.dtype), inputs.reference[1].float()
    unused = ~inputs.rows_in_use("q")
    out[unused] = float("nan")
    lse.mT[unused] = float("nan")
    keywords = inputs.bwd_keywords
    keywords["dlse"] = dlse
    dsink = None
    if inputs.case.sink is not None:
        dsink = keywords["dsink"] = torch.empty_like(keywords["learnable_sink"])
    dq, dk, dv = launch((q, k, v, out, dout, lse), keywords | more, arch)
    return {"dq": dq, "dk": dk, "dv": dv, "dsink": dsink}


def launch(
    operands: tuple[Tensor, ...], keywords: dict[str, Any], arch: str = HOPPER
) -> tuple[Tensor, Tensor, Tensor]:
    return run_on_simulator(backward_call(*operands, **keywords), arch)


def run_on_simulator(call: AttentionCall, arch: str = HOPPER) -> tuple[Tensor, Tensor, Tensor]:
    """`interface.backward` of tensors on the CPU."""
    return prepare_bwd(call, Target(arch, num_sms=SMS))(call.tensors, call.masks)


def run_sim(
    simulator: ModuleType,
    inputs: Inputs,
    seeds: tuple[int | None, ...] = DELAY_SEEDS,
    launches: int = 3,
    arch: str = HOPPER,
    **more: Any,
) -> None:
    """launches: of a call whose gradients have no tails to be cleared."""
    dout, dlse = make_output_gradients(inputs)
    if inputs.case.lengths_q or inputs.case.lengths_k:
        launches += 1
    for seed in seeds:
        simulator.OPTIONS.pop("delay", None)
        if seed is not None:
            simulator.OPTIONS["delay"] = seed
        simulator.RESULTS.clear()
        given_dlse = None if seed is None else dlse
        gradients = launch_on_simulator(inputs, dout, given_dlse, arch, **more)
        assert len(simulator.RESULTS) == launches
        for result in simulator.RESULTS:
            assert not result["warnings"], f"delay {seed}: {result}"
        note(inputs.case, seed, assert_gradients_close(gradients, inputs, dout, given_dlse), **more)


def run_hostile(
    simulator: ModuleType, hostile: Hostile, seed: int | None = 1, arch: str = HOPPER, **more: Any
) -> None:
    simulator.OPTIONS.pop("delay", None)
    if seed is not None:
        simulator.OPTIONS["delay"] = seed
    simulator.RESULTS.clear()
    gradients = launch_on_simulator(hostile.inputs, hostile.dout, hostile.dlse, arch, **more)
    for result in simulator.RESULTS:
        assert not result["warnings"], f"delay {seed}: {result}"
    note(hostile.inputs.case, seed, hostile.assert_close(gradients), hostile=True, **more)


def assert_same_bits(some: dict[str, Tensor | None], others: dict[str, Tensor | None]) -> None:
    for name in ("dq", "dk", "dv"):
        a, b = some[name], others[name]
        assert a is not None and b is not None
        assert torch.equal(a.view(torch.int16), b.view(torch.int16)), name
