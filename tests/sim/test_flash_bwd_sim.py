"""The compiled backward of either architecture, its kernels one after the other."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from cases import BF16, FP16, FP32, FP64, MASK_CASES, Case
from conftest import ACTIVE_ARCH, HOPPER
from eager import assert_gradients_close
from inputs import make_inputs, make_output_gradients
from quiet_runs import quiet_run
from simulated_backward import (
    DELAY_SEEDS,
    assert_same_bits,
    launch_on_simulator,
    run_hostile,
    run_sim,
)
from unseen_memory import (
    EMPTY_CASES,
    INF,
    NAN,
    UNUSED_CASES,
    WIDE_UNUSED_CASES,
    with_empty,
    with_unused_gradients,
)

ARCH = ACTIVE_ARCH
IS_HOPPER = ARCH == HOPPER
# the widest heads of the kernel
MAX_DIM = 256

pytestmark = pytest.mark.usefixtures("poisoned_allocations")


def narrow(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    return tuple(case for case in cases if max(case.head_dim, case.head_dim_v) <= MAX_DIM)


# The software GPU has two SMs, so a case of more than two work tiles (key blocks x KV heads x
# batch) gives a persistent CTA several.
ALL_CASES = (
    Case("dense-127x129", 1, 127, 129),
    Case("dense-1x1", 1, 1, 1, 1, 1),
    Case("dense-129x129-fused_qkv", 1, 129, 129, strided="fused_qkv"),
    Case("causal-129x300", 2, 129, 300, causal=True),
    Case("causal-257x100-empty-rows", 1, 257, 100, causal=True),
    Case("window-20-5-129x300-unseen-keys", 1, 129, 300, window_left=20, window_right=5),
    Case("window-open-9-129x129", 1, 129, 129, window_right=9),
    Case("window-70-before-9-200x129-empty-rows", 1, 200, 129, window_left=70, window_right=-9),
    Case("window-behind-3-to-150-129x300", 1, 129, 300, window_left=-3, window_right=150),
    Case("window-before-140-causal-255x255", 1, 255, 255, causal=True, window_right=-140),
    Case("window-of-nothing-129x129", 1, 129, 129, window_left=-5, window_right=3),
    Case("gqa4-65x255", 1, 65, 255, 4, 1, causal=True),
    Case("varlen-causal", lengths_q=(63, 0, 129, 1), lengths_k=(63, 9, 129, 0), causal=True),
    Case("varlen-q-dense-k-seqused", seqlen_k=129, lengths_q=(130, 1), seqused_q=(90, 0)),
    Case("dense-q-varlen-k", seqlen_q=129, lengths_k=(0, 200)),
    Case("seqused", 2, 129, 129, seqused_q=(100, 0), seqused_k=(129, 65), causal=True),
    Case("softcap-129x129", 1, 129, 129, softcap=15.0),
    Case("unreadable-negative-127x129", 1, 127, 129, strided="unreadable", softmax_scale=-0.3),
    Case("scale-0-sink-fp64-257x100", 1, 257, 100, causal=True, softmax_scale=0.0, sink=FP64),
    Case("softcap-scale-negative-129x129", 1, 129, 129, softcap=15.0, softmax_scale=-0.5),
    Case("sink-257x65-empty-rows", 1, 257, 65, causal=True, sink=FP32),
    Case("sink-bf16-gqa2-varlen", 0, 0, 0, 4, 2, lengths_q=(65, 99), lengths_k=(0, 70), sink=BF16),
    Case("fp16-d64-causal", 1, 255, 255, head_dim=64, dtype=FP16, causal=True),
    Case("d72-dv40", 1, 127, 129, head_dim=72, head_dim_v=40),
    Case("d256-causal-softcap", 1, 70, 130, head_dim=256, causal=True, softcap=15.0),
    Case("d192-dv128-gqa2-softcap", 1, 70, 130, 2, 1, head_dim=192, head_dim_v=128, softcap=15.0),
    Case("d40-dv200-varlen", head_dim=40, head_dim_v=200, lengths_q=(65, 0), lengths_k=(70, 9)),
    Case("d136-fp16-window", 1, 129, 129, head_dim=136, dtype=FP16, window_left=20),
    Case("d96-70x200", 1, 70, 200, 1, 1, head_dim=96),
    Case("d192-dv128-pair-causal", 1, 70, 200, 1, 1, head_dim=192, head_dim_v=128, causal=True),
    Case("d160-softcap", 1, 70, 130, 1, 1, head_dim=160, softcap=15.0),
    Case("d104-dv112", 1, 70, 130, 1, 1, head_dim=104, head_dim_v=112),
    Case("d80-gqa2-causal-300x300", 1, 300, 300, 2, 1, head_dim=80, causal=True),
    Case("d96-window-300x400", 1, 300, 400, 1, 1, head_dim=96, window_left=70, window_right=9),
    Case("d72-varlen", lengths_q=(63, 0, 129, 1), lengths_k=(163, 9, 129, 0), heads_q=1, heads_kv=1,
         head_dim=72, causal=True),
    Case("d96-softcap-200x130", 1, 200, 130, 1, 1, head_dim=96, softcap=15.0),
    Case("d88-dv160-70x200", 1, 70, 200, 1, 1, head_dim=88, head_dim_v=160),
)  # fmt: skip
BLACKWELL_CASES = (
    Case("dense-d64-300x300", 1, 300, 300, 2, 2, head_dim=64),
    Case("dense-d96-fp16-200x260", 1, 200, 260, 1, 1, head_dim=96, dtype=FP16),
    Case("causal-d96-gqa2-257x300", 1, 257, 300, 2, 1, head_dim=96, causal=True),
    Case("causal-d64-gqa2-257x300", 1, 257, 300, 4, 2, head_dim=64, causal=True),
    Case("d128-dv64-129x130", 1, 129, 130, head_dim=128, head_dim_v=64),
)
CASES = (() if IS_HOPPER else BLACKWELL_CASES) + narrow(ALL_CASES)


@pytest.mark.parametrize("position", range(len(CASES)), ids=lambda i: CASES[i].id)
def test_against_oracle(simulator: ModuleType, position: int) -> None:
    """With a gradient by lse, and for each second case without one as well."""
    run_sim(simulator, make_inputs(CASES[position]), DELAY_SEEDS if position % 2 else (1,))


# Each has a neighbour in the table with the same kind of mask; a GPU runs them all.
LEFT_OUT = (
    *("columns-documents1", "columns-stepped1-q", "columns-random2-causal", "columns-random2"),
    *("columns-varlen-documents2", "mask-checks", "mask-causal-offset"),
    "score-head-bias-gqa2-packed",
)
# of four heads, with a mask_mod that does not look at them
MAKES_MASK_BITS = ("everything-varlen",)
SIM_MASK_CASES = tuple(case for case in MASK_CASES if case.id not in LEFT_OUT)


@pytest.mark.parametrize("position", range(len(SIM_MASK_CASES)), ids=lambda i: SIM_MASK_CASES[i].id)
def test_masks_against_oracle(simulator: ModuleType, position: int) -> None:
    case = replace(SIM_MASK_CASES[position], pack_gqa=None)
    launches = 4 if IS_HOPPER and case.id in MAKES_MASK_BITS else 3
    run_sim(simulator, make_inputs(case), ((1,), (None,))[position % 2], launches)


# of several work tiles for the same queries
TOGETHER = (
    [replace(ALL_CASES[i], seqlen_k=300) for i in (0, 7)]
    if IS_HOPPER
    else [BLACKWELL_CASES[0], BLACKWELL_CASES[2]]
)


@pytest.mark.parametrize("case", TOGETHER)
def test_work_tiles_that_come_to_a_row_block_together(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """Both CTAs run at a time: the second adds to what the first stores."""
    monkeypatch.setitem(simulator.OPTIONS, "resident", 2)
    run_sim(simulator, make_inputs(case), seeds=(1, 2, 3) if IS_HOPPER else (1, 2))


HOPPER_CONFIGS = (
    {"stages_q": 1, "stages_kv": 2},
    {"stages_do": 1, "tile_m": 64},
    {"stages_kv": 2},
    {"clears_dq": True},
)
CONFIGS = HOPPER_CONFIGS if IS_HOPPER else ({"clears_dq": True}, {"stages_do": 1})


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configurations_that_no_row_has(simulator: ModuleType, config: dict[str, Any]) -> None:
    keys = 600 if IS_HOPPER else 300
    case = Case("config", 1, 200, keys, 2, 1, head_dim=64, causal=True, column="stepped1")
    run_sim(simulator, make_inputs(case), seeds=(1,), config=config)


# each with what it has on Blackwell
NARROW = {"head_dim": 64, "head_dim_v": 64}
ORDERED_CASES = (
    (Case("causal", 1, 200, 500, 4, 2, causal=True), NARROW),
    (Case("window-before-30", 1, 200, 500, 1, 1, window_left=150, window_right=-30), {}),
    (Case("lists", 1, 150, 400, 1, 1, blocks=(48, 80)), NARROW),
    (
        replace(next(c for c in MASK_CASES if c.id == "columns-random2"), pack_gqa=None),
        {"head_dim": 96},
    ),
)


@pytest.mark.parametrize(("case", "fields"), ORDERED_CASES, ids=lambda x: getattr(x, "id", ""))
def test_deterministic(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, case: Case, fields: dict[str, int]
) -> None:
    """Whichever CTA is ahead; no CTA waits for one that has not begun."""
    if not IS_HOPPER:
        case = replace(case, **fields)
    inputs = make_inputs(case)
    dout, _ = make_output_gradients(inputs)
    runs = []
    for seed, (resident, spare) in enumerate(((2, 16), (1, 0)), 1):
        monkeypatch.setitem(simulator.OPTIONS, "resident", resident)
        monkeypatch.setitem(simulator.OPTIONS, "spare", spare)
        with quiet_run(simulator, seed):
            runs.append(launch_on_simulator(inputs, dout, deterministic=True))
    assert_same_bits(*runs)
    assert_gradients_close(runs[0], inputs, dout)


def test_skipping_changes_no_bit(simulator: ModuleType) -> None:
    case = Case("skip", 1, 200, 300, 1, 1, causal=True, column="stepped2", blocks=(64, 64))
    inputs = make_inputs(case if IS_HOPPER else replace(case, head_dim=64, head_dim_v=64))
    dout, dlse = make_output_gradients(inputs)
    with quiet_run(simulator, None):
        skipping, visiting = (
            launch_on_simulator(inputs, dout, dlse, deterministic=True, config=config)
            for config in (None, {"skip_blocks": False})
        )
    assert_same_bits(skipping, visiting)
    assert_gradients_close(visiting, inputs, dout, dlse)


UNUSED = narrow((*UNUSED_CASES, *WIDE_UNUSED_CASES))
EMPTY = narrow(EMPTY_CASES)


@pytest.mark.parametrize("position", range(len(UNUSED)), ids=lambda i: UNUSED[i].id)
def test_rows_that_are_not_in_use(simulator: ModuleType, position: int) -> None:
    inputs, value = make_inputs(replace(UNUSED[position], pack_gqa=None)), (NAN, INF)[position % 2]
    run_hostile(simulator, with_unused_gradients(inputs, value), deterministic=position % 3 == 1)


@pytest.mark.parametrize("position", range(len(EMPTY)), ids=lambda i: EMPTY[i].id)
def test_rows_of_queries_that_see_nothing(simulator: ModuleType, position: int) -> None:
    inputs, value = make_inputs(EMPTY[position]), (NAN, INF)[position % 2]
    run_hostile(simulator, with_empty(inputs, value), deterministic=position % 3 == 1)


@pytest.mark.parametrize("is_expanded", [False, True])
def test_given_outputs(simulator: ModuleType, is_expanded: bool) -> None:
    """Slices of one tensor, of which nothing else is written; dout may be one number for all."""
    inputs = make_inputs(Case("given", 1, 129, 129, 2, 2, causal=True))
    dout, dlse = make_output_gradients(inputs)
    if is_expanded:
        dout, dlse = dout[:, :1, :1, :1].expand_as(dout), dlse[:, :1, :1].expand_as(dlse)
    guarded = inputs.q.new_full((1, 131, 8, 128), float("nan"))
    fused = guarded[:, 1:-1, 1:-1]
    given = dict(zip(("dq", "dk", "dv"), fused.split((2, 2, 2), dim=2), strict=True))
    with quiet_run(simulator, None):
        gradients = launch_on_simulator(inputs, dout, dlse, **given)
    assert all(gradients[name] is x for name, x in given.items())
    assert_gradients_close(gradients, inputs, dout, dlse)
    assert guarded.isnan().sum() == guarded.numel() - fused.numel()


def _scale_bwd(grad: Any, score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return grad * 1.1


def test_a_derivative_of_the_users(simulator: ModuleType) -> None:
    """Of a score_mod that multiplies by as much."""
    inputs = make_inputs(Case("told", 1, 129, 200, 2, 1, causal=True, score_mod="scale"))
    run_sim(simulator, inputs, seeds=(1,), score_mod_bwd=_scale_bwd)
