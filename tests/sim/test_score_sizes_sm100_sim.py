"""Scores of any size by the compiled forward of Blackwell, on the software GPU."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from cases import FP16, FP32, Case
from score_tables import TABLES, make_tabled
from simulated_forward import launch_on_simulator, run_sim
from split_cases import TABLED_CASES, SplitCase
from tolerances import lse_tolerance

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("poisoned_allocations")]

ARCH = "sm_100a"
PLAIN = Case("tables", 1, 300, 300, 1, 1, head_dim=64)
CASES = (
    Case("tables-sink-softcap-fp16", 1, 300, 300, 1, 1, head_dim=64, softcap=5.0, sink=FP32,
         dtype=FP16),
    Case("tables-gqa2-packed", 1, 60, 300, 2, 1, pack_gqa=True, window_left=280),
    Case("tables-varlen", 0, 0, 0, 1, 1, head_dim=64, lengths_q=(70, 0, 140),
         lengths_k=(70, 9, 280), causal=True),
)  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_forward(simulator: ModuleType, name: str) -> None:
    run_sim(simulator, make_tabled(PLAIN, name).inputs, ARCH, seeds=(None,))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_forward_of_other_kernels(simulator: ModuleType, case: Case) -> None:
    for name in ("causal-fp32", "ascending", "descending", "extremes", "offsets", "hidden"):
        run_sim(simulator, make_tabled(case, name).inputs, ARCH, seeds=(1,))


@pytest.mark.parametrize("name", ["causal-fp32", "descending", "offsets", "steps", "hidden"])
def test_forward_with_a_last_factor(simulator: ModuleType, name: str) -> None:
    given = make_tabled(PLAIN, name, has_factor=True)
    run_sim(simulator, given.inputs, ARCH, seeds=(None,))


@pytest.mark.parametrize("split", TABLED_CASES, ids=lambda split: split.id)
def test_forward_in_pieces(simulator: ModuleType, split: SplitCase) -> None:
    for name in ("causal-1e30", "ascending", "extremes", "steps", "hidden"):
        inputs = make_tabled(split.case, name).inputs
        run_sim(simulator, inputs, ARCH, (1,), sms=split.sms, num_splits=split.num_splits)
        assert len(simulator.RESULTS) == 2, "one kernel computes splits, one combines them"


@pytest.mark.parametrize("name", ["causal-bf16", "offsets", "hidden"])
def test_what_rounding_takes_from_lse(simulator: ModuleType, name: str) -> None:
    inputs = make_tabled(PLAIN, name).inputs
    lse_low = torch.empty(1, 1, 300)
    _, lse = launch_on_simulator(inputs, ARCH, lse_low=lse_low)
    error = (lse.double() + lse_low.double() - inputs.reference[1]).abs()
    assert error[inputs.reference[1].isfinite()].max() < lse_tolerance(inputs)
    assert (lse_low[lse.isinf()] == 0).all()
