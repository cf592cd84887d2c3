"""Pairs of CTAs in Blackwell's backward, on the software GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from cases import BF16, FP16, MASK_CASES, Case
from inputs import make_inputs
from random_cases import small_case
from simulated_backward import run_hostile, run_sim
from unseen_memory import EMPTY_CASES, INF, NAN, UNUSED_CASES, with_empty, with_unused_gradients

from flash_mask_cute.call import prepare
from flash_mask_cute.call.build_backward import compile_bwd
from flash_mask_cute.runtime.cache import CompileCache
from flash_mask_cute.sm100.flash_bwd_pairs import Arrivals, PeerGrads
from flash_mask_cute.sm100.flash_bwd_traits import BwdTraits, Role

ARCH = "sm_100a"

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

PAIR = {"cta_pair": True, "clears_dq": True}
WIDE = {"head_dim": 128, "head_dim_v": 128}
CASES = (
    Case("full-129x300", 1, 129, 300, 1, 1),
    Case("causal-gqa2-257x300", 1, 257, 300, 2, 1, causal=True),
    # the second CTA has no keys, or no keys in use
    Case("fp16-70x100", 1, 70, 100, 2, 2, dtype=FP16),
    Case("seqused", 2, 129, 300, seqused_q=(100, 0), seqused_k=(300, 65), causal=True),
    Case("varlen-causal", lengths_q=(63, 0, 129, 1), lengths_k=(63, 9, 260, 0), causal=True),
    Case("window-behind-3-to-150-129x300", 1, 129, 300, window_left=-3, window_right=150),
    Case("d104-sink-empty-rows", 1, 257, 100, head_dim=104, causal=True, sink=BF16),
)


@pytest.mark.parametrize("position", range(len(CASES)), ids=lambda i: CASES[i].id)
def test_against_oracle(simulator: ModuleType, position: int) -> None:
    run_sim(simulator, make_inputs(CASES[position]), (position + 1,), config=PAIR)


# Tiles of 192 and 128 columns: results over each other, and dS over dO and Q. Tiles of 256 columns:
# 64 keys a CTA, and P and dS in shared memory.
WIDE_CASES = tuple(
    replace(case, id=f"d{d}-dv{d_v}-{case.id}", head_dim=d, head_dim_v=d_v)
    for dims in (((192, 128), (136, 72), (168, 104)), ((256, 256), (200, 208), (256, 232)))
    for case, (d, d_v) in zip(
        CASES, (dims[0], dims[0], dims[1], dims[0], dims[0], dims[0], dims[2]), strict=True
    )
)


@pytest.mark.parametrize("position", range(len(WIDE_CASES)), ids=lambda i: WIDE_CASES[i].id)
def test_wide_heads_against_oracle(simulator: ModuleType, position: int) -> None:
    case = WIDE_CASES[position]
    run_sim(simulator, make_inputs(case), (None, position + 1, position + 8), config=PAIR)


PLAIN_MASKS = tuple(
    replace(case, pack_gqa=None, **WIDE)
    for case in MASK_CASES
    if case.score_mod is None and not case.softcap
)


@pytest.mark.parametrize("position", range(len(PLAIN_MASKS)), ids=lambda i: PLAIN_MASKS[i].id)
def test_masks_against_oracle(simulator: ModuleType, position: int) -> None:
    run_sim(simulator, make_inputs(PLAIN_MASKS[position]), (1,), config=PAIR)


@pytest.mark.parametrize("position", range(0, len(PLAIN_MASKS), 2), ids=lambda i: PLAIN_MASKS[i].id)
def test_masks_of_wide_heads(simulator: ModuleType, position: int) -> None:
    dims = (192, 256)[position // 2 % 2], (128, 256)[position // 2 % 2]
    case = replace(PLAIN_MASKS[position], head_dim=dims[0], head_dim_v=dims[1])
    run_sim(simulator, make_inputs(case), (1,), config=PAIR)


FUZZED = (192, 128), (256, 256), (136, 72), (200, 256), (160, 128), (256, 200), (176, 8), (224, 224)


@pytest.mark.parametrize("number", range(24))
def test_fuzzed_wide_heads(simulator: ModuleType, number: int) -> None:
    case = replace(small_case(random.Random(3000 + number), ((192, 128),), 300), pack_gqa=None)
    d, d_v = FUZZED[number % len(FUZZED)]
    # slices of one tensor have one head dimension
    is_fused = case.strided == "fused_qkv" and d != d_v
    strided = "transposed" if is_fused else case.strided
    case = replace(case, score_mod=None, softcap=0.0, head_dim=d, head_dim_v=d_v, strided=strided)
    run_sim(simulator, make_inputs(case, seed=number), (number,), config=PAIR)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)], ids=str)
def test_work_tiles_of_pairs_together(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int]
) -> None:
    """Several work tiles of each pair, with both CTAs at a time."""
    monkeypatch.setitem(simulator.OPTIONS, "resident", 2)
    case = Case("tiles", 2, 200, 520, 2, 1, causal=True, head_dim=dims[0], head_dim_v=dims[1])
    run_sim(simulator, make_inputs(case), seeds=(1, 2), config=PAIR)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)], ids=str)
def test_pairs_of_the_table(simulator: ModuleType, dims: tuple[int, int]) -> None:
    case = Case("table", 1, 130, 520, 1, 1, head_dim=dims[0], head_dim_v=dims[1])
    run_sim(simulator, make_inputs(case))
    launches = [x for result in simulator.RESULTS for x in result["launches"]]
    assert [x["cluster"] for x in launches].count((2, 1, 1)) == 1


ONE_HALF = range(Role.COMPUTE, Role.COMPUTE + (Role.REDUCE - Role.COMPUTE) // 2)


@pytest.mark.parametrize(
    ("what", "dims"),
    [
        ("ds", (128, 128)),
        ("ds", (192, 128)),
        ("ds", (256, 256)),
        ("scores", (256, 256)),
        ("parts_over_scores", (192, 128)),
        ("values", (192, 128)),
    ],
    ids=str,
)
def test_products_await(
    simulator: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    what: str,
    dims: tuple[int, int],
) -> None:
    """dS of both CTAs; P and dS; S of the next block dQ's columns; dS the memory of dO dV."""
    inputs = make_inputs(Case("awaited", 1, 300, 300, 1, 1, head_dim=dims[0], head_dim_v=dims[1]))
    compile_anew = partial(compile_bwd, cache=CompileCache(tmp_path))
    monkeypatch.setattr(prepare, "compile_bwd", compile_anew)
    slow = range(Role.COMPUTE, Role.REDUCE)
    if what == "parts_over_scores":
        monkeypatch.setattr(BwdTraits, what, 0)
        slow = range(Role.REDUCE, Role.LOAD)
    elif what == "values":
        monkeypatch.setattr(PeerGrads, "_await_values", lambda self, number: None)
        slow = ONE_HALF
    else:
        monkeypatch.setattr(Arrivals, what, lambda self, number: None)
        if dims == (192, 128):
            slow = ONE_HALF
    monkeypatch.setitem(simulator.OPTIONS, "slow", frozenset(slow))
    with pytest.raises(AssertionError):
        run_sim(simulator, inputs, (1,), config=PAIR)


# marks of rows that are cleared in the memory of both CTAs
EMPTY = tuple(
    replace(case, **WIDE) for case in EMPTY_CASES if case.score_mod is None and not case.softcap
)
UNUSED = tuple(
    replace(case, pack_gqa=None, **WIDE)
    for case in UNUSED_CASES
    if case.score_mod is None and not case.softcap
)


@pytest.mark.parametrize("position", range(len(EMPTY)), ids=lambda i: EMPTY[i].id)
def test_rows_of_queries_that_see_nothing(simulator: ModuleType, position: int) -> None:
    inputs, value = make_inputs(EMPTY[position]), (NAN, INF)[position % 2]
    run_hostile(simulator, with_empty(inputs, value), config=PAIR)


@pytest.mark.parametrize("dims", [(192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("position", range(len(EMPTY)), ids=lambda i: EMPTY[i].id)
def test_rows_of_wide_heads_that_see_nothing(
    simulator: ModuleType, position: int, dims: tuple[int, int]
) -> None:
    case, value = EMPTY[position], (NAN, INF)[position % 2]
    inputs = make_inputs(replace(case, head_dim=dims[0], head_dim_v=dims[1]))
    run_hostile(simulator, with_empty(inputs, value), config=PAIR)


@pytest.mark.parametrize("position", range(len(UNUSED)), ids=lambda i: UNUSED[i].id)
def test_rows_that_are_not_in_use(simulator: ModuleType, position: int) -> None:
    inputs, value = make_inputs(UNUSED[position]), (NAN, INF)[position % 2]
    run_hostile(simulator, with_unused_gradients(inputs, value), config=PAIR)
