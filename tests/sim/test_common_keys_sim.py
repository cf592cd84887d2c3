"""Several sequences of queries with the keys of one batch entry in common, on the software GPU of
either architecture.

A few calls by default; FLASH_MASK_SIM_SEED=N draws more.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from types import ModuleType

import pytest
import simulated_backward
import torch
from common_keys import CommonKeys
from conftest import ACTIVE_ARCH
from placed_attention import PlacedCall
from planned import forward_call
from quiet_runs import quiet_run
from simulated_forward import run_on_simulator

ARCH = ACTIVE_ARCH
SEED = os.environ.get("FLASH_MASK_SIM_SEED", "0")
EARLIEST = -130

pytestmark = pytest.mark.sim


def calls(seed: int, count: int, has_used_keys: bool = False) -> Iterator[PlacedCall]:
    if SEED != "0":
        seed, count = random.Random(f"common keys {SEED}").randrange(1 << 30), 3 * count
    draw = CommonKeys(seed, torch.bfloat16, 64, 200, EARLIEST)
    draw.has_used_keys = has_used_keys
    yield from draw.calls(count)


@pytest.mark.parametrize("has_used_keys", [False, True])
def test_forward(simulator: ModuleType, has_used_keys: bool) -> None:
    for delay, call in enumerate(calls(1, 3, has_used_keys)):
        with quiet_run(simulator, delay):
            out, lse = run_on_simulator(forward_call(call.q, call.k, call.v, **call.keywords))
        assert lse is not None
        call.assert_output(out, lse)


@pytest.mark.parametrize("deterministic", [False, True])
def test_backward(simulator: ModuleType, deterministic: bool) -> None:
    for delay, call in enumerate(calls(2 + deterministic, 4)):
        out, lse = call.attend(call.q.double(), call.k.double(), call.v.double())
        dout = torch.randn_like(out).bfloat16()
        operands = call.q, call.k, call.v, out.bfloat16(), dout, lse.float()
        more = {"deterministic": deterministic}
        with quiet_run(simulator, delay):
            found = simulated_backward.launch(operands, call.keywords | more)
        call.assert_gradients(found, dout)
