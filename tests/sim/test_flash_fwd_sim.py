"""The compiled forward of either architecture, executed instruction by instruction."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import mask_cases
import pytest
import torch
from cases import BF16, FP16, FP32, FP64, MASK_CASES, Case
from conftest import ACTIVE_ARCH
from eager import assert_close_to_oracle
from inputs import make_inputs
from quiet_runs import quiet_run
from simulated_forward import DELAY_SEEDS, launch_on_simulator, run_sim
from unseen_memory import EMPTY_CASES, INF, NAN, UNUSED_CASES, with_empty, with_unused

ARCH = ACTIVE_ARCH
pytestmark = pytest.mark.usefixtures("poisoned_allocations")


class Table(NamedTuple):
    """Of an architecture. seeds, or one_seed of cases alike. visit_cases: hidden blocks, too."""

    seeds: tuple[int | None, ...]
    one_seed: int | None
    cases: tuple[Case, ...]
    mask_cases: tuple[Case, ...]
    visit_cases: tuple[Case, ...]
    cap_fields: tuple[dict[str, Any], ...]
    empty_cases: tuple[Case, ...]


# A work tile of Hopper has 128 or 192 query rows, of Blackwell 256, and the software GPU has two
# SMs. So a case of more than two work tiles gives a persistent CTA several.
CASES = (
    Case("dense-127x129", 1, 127, 129),
    Case("dense-1x1", 1, 1, 1, 1, 1),
    Case("causal-255x255", 2, 255, 255, causal=True),
    Case("causal-63x257", 1, 63, 257, 3, 3, causal=True),
    Case("causal-257x100-empty-rows", 1, 257, 100, causal=True),
    Case("window-20-5-129x300", 1, 129, 300, window_left=20, window_right=5),
    Case("window-20-10-257x65-empty-rows", 1, 257, 65, window_left=20, window_right=10),
    Case("window-behind-3-to-150-129x300", 1, 129, 300, window_left=-3, window_right=150),
    Case("window-behind-128-129x256", 1, 129, 256, window_left=-128),
    Case("gqa4-65x255", 1, 65, 255, 4, 1, causal=True, pack_gqa=False),
    Case("gqa4-packed-65x255", 1, 65, 255, 4, 1, causal=True, pack_gqa=True),
    Case("varlen-causal", lengths_q=(63, 0, 129, 1), lengths_k=(63, 0, 129, 1), causal=True),
    Case("varlen-window-behind-128", lengths_q=(129, 64), lengths_k=(256, 128), window_left=-128),
    Case("seqused", 2, 129, 129, seqused_q=(100, 0), seqused_k=(129, 65), causal=True),
    Case("softcap-129x129", 1, 129, 129, softcap=15.0),
    Case("unreadable-negative-127x129", 1, 127, 129, strided="unreadable", softmax_scale=-2.0),
    Case("scale-0-257x100-empty-rows", 1, 257, 100, causal=True, softmax_scale=0.0),
    Case("sink-fp64-65x129", 1, 65, 129, sink=FP64),
    Case("sink-257x65-empty-rows", 1, 257, 65, causal=True, sink=FP32),
    Case("sink-bf16-gqa4-packed", 1, 65, 129, 4, 1, sink=BF16, pack_gqa=True),
    Case("fp16-d64-causal", 1, 255, 255, head_dim=64, dtype=FP16, causal=True),
)
HOPPER_CASES = (
    Case("dense-255x255-fused_qkv", 1, 255, 255, strided="fused_qkv"),
    Case("window-70-open-65x255", 1, 65, 255, window_left=70),
    Case("window-open-9-129x129", 1, 129, 129, window_right=9),
    Case("window-70-before-9-200x129-empty-rows", 1, 200, 129, window_left=70, window_right=-9),
    Case("window-before-140-causal-255x255", 1, 255, 255, causal=True, window_right=-140),
    Case("window-of-nothing-129x129", 1, 129, 129, window_left=-5, window_right=3),
    Case("gqa4-packed-window-100x129", 1, 100, 129, 8, 2, window_left=30, pack_gqa=True),
    Case("gqa3-packed-45x129", 1, 45, 129, 6, 2, causal=True, pack_gqa=True),
    Case("varlen-cross", lengths_q=(130, 1, 65), lengths_k=(0, 255, 17)),
    Case("scale-tiny-65x129", 1, 65, 129, softmax_scale=-1e-39),
    Case("softcap-scale-negative-129x129", 1, 129, 129, softcap=15.0, softmax_scale=-0.5),
    Case("d72-dv40", 1, 127, 129, head_dim=72, head_dim_v=40),
)
BLACKWELL_CASES = (
    Case("dense-300x300-fused_qkv", 1, 300, 300, strided="fused_qkv"),
    Case("dense-1000x100-short-walks", 1, 1000, 100, 2, 1),
    Case("causal-520x400", 1, 520, 400, 2, 1, causal=True),
    Case("window-70-before-9-300x129-empty-rows", 1, 300, 129, window_left=70, window_right=-9),
    Case("window-before-140-causal-300x300", 1, 300, 300, causal=True, window_right=-140),
    Case("varlen-cross", lengths_q=(300, 1, 65), lengths_k=(0, 255, 17)),
    Case("d96-causal", 1, 300, 200, head_dim=96, causal=True),
    Case("d192-128-causal", 1, 300, 400, head_dim=192, head_dim_v=128, causal=True),
    # columns of tiles that heads do not fill
    Case("d8-window", 1, 129, 200, head_dim=8, window_left=40, window_right=20),
    Case("d40-causal-gqa2-packed", 1, 100, 200, 2, 1, head_dim=40, causal=True, pack_gqa=True),
    Case("fp16-d72-dv40-varlen", lengths_q=(130, 3), lengths_k=(140, 20), head_dim=72,
         head_dim_v=40, dtype=FP16),
    Case("d64-dv128-softcap", 1, 150, 129, head_dim=64, head_dim_v=128, softcap=15.0),
    Case("d136-dv104-causal", 1, 257, 300, 1, 1, head_dim=136, head_dim_v=104, causal=True),
)  # fmt: skip
# whose features other cases have, too: a kernel of Blackwell takes seconds to compile
LEFT_OUT = (
    *("columns-random2-causal", "columns-random4-causal-sink"),
    *("columns-stepped2-gqa4-packed-causal", "columns-blinding4-window", "columns-varlen-stepped1"),
    *("mask-causal-offset", "mask-checks", "mask-prefix-causal-window"),
    "score-scale-columns-mask-blocks",
)
TABLE = {
    "sm_90a": Table(
        DELAY_SEEDS,
        None,
        CASES + HOPPER_CASES,
        MASK_CASES,
        (
            # blocks of a walk in another order would round differently: those of a plain end of the
            # keys, and of walks in which whole blocks come first
            Case("end", 1, 200, 300, 1, 1),
            Case("band", 1, 400, 700, 1, 1, causal=True, head_dim=64),
            Case("columns", 1, 200, 300, 1, 1, column="stepped2"),
            Case(
                "lists-mask", 1, 200, 300, 1, 1, causal=True, mask_mod="documents", blocks=(64, 64)
            ),
        ),
        ({"heads_q": 1, "head_dim": 64}, {"heads_q": 1}),
        EMPTY_CASES[:6],
    ),
    "sm_100a": Table(
        DELAY_SEEDS[:2],
        1,
        CASES + BLACKWELL_CASES,
        tuple(case for case in MASK_CASES if case.id not in LEFT_OUT),
        (Case("columns", 1, 300, 300, 1, 1, column="stepped2"),),
        ({"heads_q": 1}, {"heads_q": 4}),
        EMPTY_CASES[:2],
    ),
}[ARCH]


@pytest.mark.parametrize("case", TABLE.cases)
def test_against_oracle(simulator: ModuleType, case: Case) -> None:
    run_sim(simulator, make_inputs(case), TABLE.seeds)


@pytest.mark.parametrize(
    "position", range(len(TABLE.mask_cases)), ids=lambda i: TABLE.mask_cases[i].id
)
def test_masks_against_oracle(simulator: ModuleType, position: int) -> None:
    inputs = make_inputs(TABLE.mask_cases[position].packed_if_supported())
    run_sim(simulator, inputs, TABLE.seeds if position % 3 == 0 else (TABLE.one_seed,))


@pytest.mark.parametrize("case", TABLE.visit_cases)
def test_skipping_changes_no_bit(simulator: ModuleType, case: Case) -> None:
    inputs = make_inputs(case)
    with quiet_run(simulator, None):
        skipping = launch_on_simulator(inputs)
        visiting = launch_on_simulator(inputs, config={"skip_blocks": False})
    assert torch.equal(skipping[0].view(torch.int16), visiting[0].view(torch.int16))
    assert torch.equal(skipping[1].view(torch.int32), visiting[1].view(torch.int32))
    assert_close_to_oracle(*visiting, inputs)


@pytest.mark.parametrize("fields", TABLE.cap_fields, ids=str)
def test_factors_of_a_score_mod_join_those_of_the_softmax(
    simulator: ModuleType, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first and the last rows: O, LSE and the sink's share are as if they had not."""
    monkeypatch.setitem(mask_cases.SCORE_MODS, "cap", mask_cases.CAP)
    case = Case("cap", 1, 255, 300, heads_kv=1, causal=True, sink=FP32, score_mod="cap", **fields)
    run_sim(simulator, make_inputs(case.packed_if_supported()), TABLE.seeds)


@pytest.mark.parametrize("position", range(len(UNUSED_CASES)), ids=lambda i: UNUSED_CASES[i].id)
def test_rows_that_are_not_in_use(simulator: ModuleType, position: int) -> None:
    value = (NAN, INF)[position % 2]
    run_sim(simulator, with_unused(make_inputs(UNUSED_CASES[position]), value), seeds=(1,))


@pytest.mark.parametrize("case", TABLE.empty_cases)
def test_rows_of_queries_that_see_nothing(simulator: ModuleType, case: Case) -> None:
    """Whose own rows of q may hold anything, too."""
    run_sim(simulator, with_empty(make_inputs(case), NAN).inputs, seeds=(1,))
