"""Gradients of aux tensors by the compiled backward, on the software GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from cases import Case
from gradient_oracle import make_output_gradients
from simulated_backward import DELAY_SEEDS, run_sim
from trained_mods import (
    FAR_CASES,
    LINE_CASES,
    TRAINED_CASES,
    assert_aux_gradients_close,
    make_trained,
)

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("poisoned_allocations")]


def check(simulator: ModuleType, case: Case, name: str, seeds: Any, **more: Any) -> None:
    """Without a gradient by lse, and with one. more: keywords of the backward."""
    given = make_trained(case, name)
    dout, dlse = make_output_gradients(given.inputs)
    for seed in seeds:
        daux = [
            torch.full_like(x, float("nan")) if i in given.wants_aux else None
            for i, x in enumerate(given.aux_tensors)
        ]
        run_sim(simulator, given.inputs, (seed,), daux=daux, **more)
        trained = [x for x in daux if x is not None]
        assert_aux_gradients_close(trained, given, dout, None if seed is None else dlse)


@pytest.mark.parametrize(
    ("case", "name"), TRAINED_CASES + LINE_CASES + FAR_CASES, ids=lambda x: getattr(x, "id", x)
)
def test_against_oracle(simulator: ModuleType, case: Case, name: str) -> None:
    """Beside dq, dk, dv."""
    check(simulator, case, name, DELAY_SEEDS)


@pytest.mark.parametrize("head_dim", [64, 80])
def test_every_block_of_sequences_without_keys(simulator: ModuleType, head_dim: int) -> None:
    """Work tiles without scores, of several query blocks that nobody leaves out."""
    case = Case("unused", 3, 130, 150, 1, 1, head_dim=head_dim, seqused_q=(130, 0, 70),
                seqused_k=(0, 150, 100))  # fmt: skip
    check(simulator, case, "key_bias", (1,), config={"skip_blocks": False})
