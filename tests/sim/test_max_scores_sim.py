"""The largest score of each row by the compiled forwards of either architecture."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import FP32, Case
from conftest import ACTIVE_ARCH
from eager import assert_close_to_oracle
from inputs import Inputs, make_inputs
from oracle import largest_scores
from score_tables import make_tabled
from simulated_forward import launch_on_simulator

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

ARCH = ACTIVE_ARCH
D: Any = {"head_dim": 64}
CASES = (
    Case("causal-d128-two-tiles", 1, 257, 129, 1, 1, causal=True),
    Case("gqa4-packed-window", 1, 40, 129, 4, 1, window_left=30, pack_gqa=True, **D),
    Case("varlen-softcap", lengths_q=(63, 0, 70), lengths_k=(63, 9, 70), causal=True, softcap=3.0,
         heads_q=1, heads_kv=1, **D),
    Case("seqused-sink", 2, 70, 129, 1, 1, seqused_q=(50, 0), seqused_k=(129, 65), sink=FP32, **D),
    Case("columns-mask-mod", 1, 129, 129, 1, 1, column="stepped2", mask_mod="checks", **D),
)  # fmt: skip
# two CTAs have half of the keys of a row each
DIMS = (64, 264) if ARCH == "sm_90a" else (64,)


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("case", CASES)
def test_largest_scores(simulator: ModuleType, case: Case, head_dim: int) -> None:
    """Also where a second tile is larger by less than 2**8, which renews no maximum in use."""
    inputs = make_inputs(
        case if head_dim == 64 else replace(case, head_dim=head_dim, head_dim_v=head_dim)
    )
    if case.lengths_k is None:
        inputs.k[:, 100:] *= 1.25
    _check(inputs)


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("name", ["offsets", "hidden", "ascending"])
def test_of_scores_of_any_size(simulator: ModuleType, name: str, head_dim: int) -> None:
    _check(make_tabled(Case("tables", 1, 130, 300, 1, 1, head_dim=head_dim), name).inputs)


def _check(inputs: Inputs) -> None:
    expected = largest_scores(inputs.q, inputs.k, inputs.v, inputs.dense, **inputs.plain_keywords)
    max_scores = torch.full(expected.shape, -torch.inf)
    out, lse = launch_on_simulator(inputs, max_scores=max_scores)
    assert_close_to_oracle(out, lse, inputs)
    torch.testing.assert_close(max_scores.double(), expected, rtol=1e-5, atol=1e-5)
