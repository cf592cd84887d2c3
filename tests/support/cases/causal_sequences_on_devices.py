"""Batches with some causal sequences, on every device."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from causal_sequences import draw_mixed
from devices import Device

SEED = os.environ.get("FLASH_MASK_SIM_SEED", "0")
# Seeds of draws: packed queries over pages of 3 keys with a mask_mod; dense queries over pages of
# 16; packed queries and a sink.
DRAWN = (4, 1, 6)


@pytest.mark.parametrize(
    ("drawn", "more"),
    [
        (DRAWN, {}),
        (DRAWN[2:], {"num_splits": 1}),
        (DRAWN[:1], {"num_splits": 3}),
        (DRAWN[1:2], {"config": {"skip_blocks": False}}),
    ],
    ids=["default", "one-pass", "splits", "no-skips"],
)
def test_random_calls(device: Device, drawn: Sequence[int], more: dict[str, Any]) -> None:
    """Each call runs twice, with the tensor turned round: what was causal is not."""
    seeds = device.pick(range(6), drawn if more else range(8), drawn)
    if SEED != "0" and device.kind == "simulated":
        rng = random.Random(f"causal {SEED}")
        seeds = tuple(rng.randrange(1 << 30) for _ in range(4))
    for delay, seed in enumerate(seeds):
        call = draw_mixed(random.Random(seed), torch.bfloat16, 64, device.pick(200, 600, 200))
        for given in (call, call.turned()):
            keywords = given.host_keywords() | more
            out, lse = device.forward(given.q, given.k, given.v, **keywords, delay=delay)
            given.assert_close(out, lse)
