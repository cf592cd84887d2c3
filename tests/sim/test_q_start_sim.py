"""Queries that begin at a position, on the software GPU of either architecture.

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
from conftest import ACTIVE_ARCH
from placed_attention import Draw, PlacedCall
from planned import forward_call
from quiet_runs import quiet_run
from simulated_forward import run_on_simulator

ARCH = ACTIVE_ARCH
SEED = os.environ.get("FLASH_MASK_SIM_SEED", "0")
# Seed of `Draw` and number of calls with intervals and lists: "end" with a score_mod; a tensor; and
# queries before position 0 with a mask_mod.
DRAWN = (0, 8), (1, 11), (5, 3)
# The same of draws whose positions begin at EARLIEST: a number with a mask_mod and lists; a number
# with intervals, causal and a score_mod; a tensor with lists.
BEFORE = (0, 4), (5, 12), (4, 1)
EARLIEST = -130

pytestmark = pytest.mark.sim


def calls(drawn: tuple[tuple[int, int], ...], earliest: int = 0) -> Iterator[PlacedCall]:
    if SEED != "0":
        rng = random.Random(f"q_start {SEED}")
        drawn = tuple((rng.randrange(1 << 30), number) for number in range(12))
    for seed, number in drawn:
        *_, call = Draw(seed, torch.bfloat16, 64, 200, earliest).calls(number + 1)
        yield call


def run_forward(call: PlacedCall) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = run_on_simulator(forward_call(call.q, call.k, call.v, **call.keywords))
    assert lse is not None
    return out, lse


@pytest.mark.parametrize(("drawn", "earliest"), [(DRAWN, 0), (BEFORE, EARLIEST)])
def test_forward(simulator: ModuleType, drawn: tuple[tuple[int, int], ...], earliest: int) -> None:
    for delay, call in enumerate(calls(drawn, earliest)):
        with quiet_run(simulator, delay):
            out, lse = run_forward(call)
        call.assert_output(out, lse)


@pytest.mark.parametrize(("drawn", "earliest"), [(DRAWN[1:], 0), (BEFORE[:2], EARLIEST)])
def test_backward(simulator: ModuleType, drawn: tuple[tuple[int, int], ...], earliest: int) -> None:
    for delay, call in enumerate(calls(drawn, earliest)):
        out, lse = call.attend(call.q.double(), call.k.double(), call.v.double())
        dout = torch.randn_like(out).bfloat16()
        operands = call.q, call.k, call.v, out.bfloat16(), dout, lse.float()
        with quiet_run(simulator, delay):
            found = simulated_backward.launch(operands, call.keywords)
        call.assert_gradients(found, dout)
