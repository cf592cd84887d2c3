"""Hostile calls on a Hopper GPU, of ten kinds that share their kernels: right, or refused."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
from hostile_oracle import GPU
from hostile_runs import run_call
from random_hostile import GPU_FRAMES, draw_call

pytestmark = pytest.mark.gpu

CALLS = int(os.environ.get("FLASH_MASK_HOSTILE_CALLS", "300"))
SEED = int(os.environ.get("FLASH_MASK_HOSTILE_SEED", "0"))


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("kind", range(len(GPU_FRAMES)))
def test_hostile_calls(kind: int) -> None:
    numbers = range(kind, CALLS, len(GPU_FRAMES))
    frame = GPU_FRAMES[kind]
    outcomes = [run_call(draw_call(SEED, number, frame, "cuda"), GPU) for number in numbers]
    torch.cuda.synchronize()
    wrong = [outcome.text for outcome in outcomes if outcome.kind == "wrong"]
    assert not wrong, f"{len(wrong)} of {len(outcomes)}:\n" + "\n".join(wrong[:8])
    kinds = Counter(outcome.kind for outcome in outcomes)
    if len(outcomes) >= 20:
        assert kinds["right"] >= len(outcomes) // 2, [x.text for x in outcomes if x.kind != "right"]
