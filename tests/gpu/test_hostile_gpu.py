"""Hostile calls on a Hopper GPU, of ten kinds that share their kernels: right, or refused."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from drawn_share import Draws
from hostile_runs import GPU, run_call
from random_hostile import GPU_FRAMES, draw_call

DRAWN = Draws.of("HOSTILE", 300, 0, "CALLS")

pytestmark = pytest.mark.gpu


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("kind", range(len(GPU_FRAMES)))
def test_hostile_calls(kind: int) -> None:
    numbers = range(kind, DRAWN.most, len(GPU_FRAMES))
    frame = GPU_FRAMES[kind]
    outcomes = [run_call(draw_call(DRAWN.seed, number, frame, "cuda"), GPU) for number in numbers]
    torch.cuda.synchronize()
    wrong = [outcome.text for outcome in outcomes if outcome.kind == "wrong"]
    assert not wrong, f"{len(wrong)} of {len(outcomes)}:\n" + "\n".join(wrong[:8])
    kinds = Counter(outcome.kind for outcome in outcomes)
    if len(outcomes) >= 20:
        assert kinds["right"] >= len(outcomes) // 2, [x.text for x in outcomes if x.kind != "right"]
