"""Batches of which some sequences are causal, on the software GPU."""

from __future__ import annotations

import os
import random
from types import ModuleType
from typing import Any

import pytest
import torch
from causal_sequences import draw_mixed
from planned import forward_call
from quiet_runs import quiet_run
from simulated_forward import run_on_simulator

ARCH = "sm_90a"
SEED = os.environ.get("FLASH_MASK_SIM_SEED", "0")
# Seeds of draws: packed queries over pages of 3 keys with a mask_mod; dense queries over pages of
# 16; packed queries and a sink.
DRAWN = (4, 1, 6)

pytestmark = pytest.mark.sim


@pytest.mark.parametrize(
    ("seeds", "more"),
    [(DRAWN, {}), (DRAWN[:1], {"num_splits": 3}), (DRAWN[1:2], {"config": {"skip_blocks": False}})],
)
def test_random_calls(seeds: tuple[int, ...], more: dict[str, Any], simulator: ModuleType) -> None:
    """Each call runs twice, with the tensor turned round: what was causal is not."""
    if SEED != "0":
        rng = random.Random(f"causal {SEED}")
        seeds = tuple(rng.randrange(1 << 30) for _ in range(4))
    for delay, seed in enumerate(seeds):
        call = draw_mixed(random.Random(seed), torch.bfloat16, 64, 200)
        for given in (call, call.turned()):
            made = forward_call(given.q, given.k, given.v, **given.host_keywords(), **more)
            with quiet_run(simulator, delay):
                out, lse = run_on_simulator(made)
            assert lse is not None
            given.assert_close(out, lse)
