"""Hostile calls on a Hopper GPU, of ten kinds that share their kernels: right, or refused."""

from __future__ import annotations

import pytest
import torch
from drawn_share import Draws
from hostile_runs import GPU, assert_none_is_wrong
from random_hostile import GPU_FRAMES, draw_call

DRAWN = Draws.of("HOSTILE", 300, 0, "CALLS")


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("kind", range(len(GPU_FRAMES)))
def test_hostile_calls(kind: int) -> None:
    numbers = range(kind, DRAWN.most, len(GPU_FRAMES))
    calls = (draw_call(DRAWN.seed, number, GPU_FRAMES[kind], "cuda") for number in numbers)
    assert_none_is_wrong(calls, GPU)
    torch.cuda.synchronize()
