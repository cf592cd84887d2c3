"""A backward call executed on the software GPU, by the public call's own way to its kernels."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from conftest import ACTIVE_ARCH, SMS
from eager import assert_gradients_close
from inputs import Inputs, make_output_gradients
from planned import backward_call
from quiet_runs import quiet_run
from torch import Tensor
from unseen_memory import Hostile

from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.call.prepare import prepare_bwd
from flash_mask_cute.runtime.target import Target

# None: asynchronous work completes at once. A seed: at random later points, with warps shuffled.
DELAY_SEEDS = (None, 1)


def launch_on_simulator(
    inputs: Inputs, dout: Tensor, dlse: Tensor | None = None, **more: Any
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
    dq, dk, dv = launch((q, k, v, out, dout, lse), keywords | more)
    return {"dq": dq, "dk": dk, "dv": dv, "dsink": dsink}


def launch(operands: tuple[Tensor, ...], keywords: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    return run_on_simulator(backward_call(*operands, **keywords))


def run_on_simulator(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """`interface.backward` of tensors on the CPU."""
    return prepare_bwd(call, Target(ACTIVE_ARCH, num_sms=SMS))(call.tensors, call.masks)


def run_sim(
    simulator: ModuleType,
    inputs: Inputs,
    seeds: tuple[int | None, ...] = DELAY_SEEDS,
    launches: int = 3,
    **more: Any,
) -> float:
    """launches: of a call whose gradients have no tails to be cleared. Returns the largest error as
    a share of what is allowed."""
    dout, dlse = make_output_gradients(inputs)
    if inputs.case.lengths_q or inputs.case.lengths_k:
        launches += 1
    share = 0.0
    for seed in seeds:
        given_dlse = None if seed is None else dlse
        with quiet_run(simulator, seed, launches):
            gradients = launch_on_simulator(inputs, dout, given_dlse, **more)
        share = max(share, assert_gradients_close(gradients, inputs, dout, given_dlse))
    return share


def run_hostile(simulator: ModuleType, hostile: Hostile, seed: int | None = 1, **more: Any) -> None:
    with quiet_run(simulator, seed):
        gradients = launch_on_simulator(hostile.inputs, hostile.dout, hostile.dlse, **more)
    hostile.assert_close(gradients)


def assert_same_bits(some: dict[str, Tensor | None], others: dict[str, Tensor | None]) -> None:
    for name in ("dq", "dk", "dv"):
        a, b = some[name], others[name]
        assert a is not None and b is not None
        assert torch.equal(a.view(torch.int16), b.view(torch.int16)), name
