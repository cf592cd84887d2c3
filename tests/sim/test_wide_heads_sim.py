"""Heads above 256 columns, of whose values two CTAs have half each, on the software GPU."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest
from cases import BF16, FP16, FP32, Case
from inputs import make_inputs
from paged_inputs import paged
from simulated_forward import run_sim
from slow_roles import ISLANDS, SEED, add_islands, with_each_role_slow

from flash_mask_cute.call import splits
from flash_mask_cute.limits import ctas_of_tile

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("poisoned_allocations")]

SMS = 4  # two pairs of CTAs, and each has several work tiles
# one of each kind of mask and of lengths
CASES = (
    Case("full", 1, 129, 255, head_dim=512),
    Case("causal-264", 1, 200, 300, 2, 1, head_dim=264, causal=True),
    Case("causal-320-fp16", 1, 129, 300, head_dim=320, causal=True, dtype=FP16),
    Case("empty-rows-384", 1, 255, 63, head_dim=384, causal=True),
    Case("window-sink", 1, 129, 300, 4, 1, 512, window_left=70, window_right=9, sink=FP32),
    Case("softcap-504", 1, 129, 129, head_dim=504, softcap=20.0),
    Case(
        "varlen", lengths_q=(129, 1, 0, 70), lengths_k=(200, 63, 50, 0), head_dim=512, causal=True
    ),
    Case("seqused", 3, 65, 200, head_dim=272, causal=True, seqused_k=(200, 65, 0)),
    Case("seqused-q", 2, 129, 129, head_dim=512, seqused_q=(129, 3), seqused_k=(129, 7)),
    Case("documents", 2, 200, 200, head_dim=512, causal=True, column="documents1"),
    Case("columns-4", 1, 129, 200, head_dim=512, column="stepped4"),
    Case("mask-mod", 1, 129, 200, 4, 2, 512, mask_mod="eviction", blocks=(128, 128)),
    Case("mask-bits", 1, 200, 300, 4, 2, head_dim=512, mask_mod="checks"),
    Case("score-mod", 1, 129, 200, head_dim=512, causal=True, score_mod="alibi"),
    Case("packed-heads", 2, 9, 200, 16, 2, 512, causal=True, sink=BF16, pack_gqa=True),
    Case("padded-group-296", 1, 20, 130, 6, 2, head_dim=296, causal=True, pack_gqa=True),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_oracle(simulator: ModuleType, case: Case) -> None:
    assert ctas_of_tile(case.head_dim_v) == 2
    run_sim(simulator, make_inputs(case), (1,), sms=SMS)


DECODE = Case("decode", 3, 1, 600, 16, 2, 512, causal=True, seqused_k=(600, 0, 131), sink=FP32)
FEW = Case("few", 2, 3, 300, 8, 2, 320, causal=True, seqused_k=(300, 65))
MANY = Case("many", 1, 150, 600, head_dim=264, causal=True)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("page_size", [None, 16, 64, 12])
@pytest.mark.parametrize("case", [DECODE, FEW], ids=lambda case: case.id)
def test_decoding(
    simulator: ModuleType, case: Case, page_size: int | None, num_splits: int
) -> None:
    inputs = make_inputs(case)
    if page_size is not None:
        inputs = paged(inputs, page_size, "NHD")
    run_sim(simulator, inputs, (1,), sms=10, num_splits=num_splits)


@pytest.mark.parametrize("more", [{"num_splits": 3}, {"seqlen_k_per_split": 512}, {}], ids=str)
def test_splits_of_many_queries(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(splits, "_LEAST_BLOCKS_OF_MANY", 4)
    run_sim(simulator, make_inputs(MANY), (1,), sms=12, **more)


@pytest.mark.parametrize("head_dim", [512, 320])
def test_each_role_slow(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    add_islands(monkeypatch)
    lengths = {"lengths_q": (300, 40, 129), "lengths_k": (600, 20, 200)}
    inputs = make_inputs(Case("slow", **ISLANDS, **lengths, head_dim=head_dim))
    run = partial(run_sim, simulator, inputs, (SEED,), sms=SMS)
    with_each_role_slow(simulator, monkeypatch, ["sm90.flash_fwd.kernel"], run)
