"""The tangent kernel, executed in the software GPU, against torch's forward mode in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import FP16, FP32, Case
from conftest import ACTIVE_ARCH, SMS
from eager import Pair, assert_as_good_as_eager, eager_tangents, reference_tangents
from inputs import Inputs, make_inputs, make_tangents
from planned import call_of
from quiet_runs import quiet_run
from random_cases import small_case
from simulated_forward import DELAY_SEEDS
from slow_roles import SEED, add_islands, with_each_role_slow
from torch import Tensor
from unseen_memory import UNUSED_CASES, with_unused

from flash_mask_cute import interface
from flash_mask_cute.call.facts import Backend
from flash_mask_cute.call.tangent import PreparedTangent, plan_tangent
from flash_mask_cute.cpu.tangent import Tangents
from flash_mask_cute.runtime.target import Target

KERNEL = "sm90.flash_fwd.kernel"
GQA: dict[str, Any] = {"heads_q": 2, "heads_kv": 1}
CASES = (
    Case("full-gqa2", 1, 130, 200, **GQA),
    Case("full-d64", 2, 100, 300, head_dim=64),
    Case("causal", 1, 300, 300, 1, 1, causal=True),
    Case("causal-d64-fp16", 1, 300, 200, 1, 1, head_dim=64, dtype=FP16, causal=True),
    Case("window-sink-d40", 1, 200, 250, head_dim=40, window_left=70, window_right=5, sink=FP32),
    Case("scale-negative", 1, 130, 170, head_dim=64, softmax_scale=-0.3, strided="unreadable"),
    Case("packed", lengths_q=(130, 0, 70), lengths_k=(150, 30, 190), causal=True, **GQA),
    Case("packed-used", lengths_q=(150, 80), lengths_k=(160, 190), seqused_q=(30, 80),
         seqused_k=(160, 0), head_dim=64, **GQA),
    Case("columns1-causal", 1, 300, 300, 2, 1, causal=True, column="random1"),
    Case("columns2-q", 1, 200, 240, 2, 1, column="random2", column_heads="q", head_dim=64),
    Case("columns4-d96", 1, 200, 240, 1, 1, column="random4", head_dim=96),
    Case("mask_mod-documents", 1, 250, 250, 2, 1, mask_mod="documents", head_dim=64),
    Case("mask_mod-blind", 1, 150, 200, 1, 1, mask_mod="blinding"),
    Case("lists", 1, 400, 400, 1, 1, blocks=(128, 128)),
    Case("lists-mask_mod", 1, 300, 300, 1, 1, mask_mod="checks", blocks=(48, 80), head_dim=64),
)  # fmt: skip


class Problem:
    """A call with its tangents, and what is right."""

    def __init__(self, inputs: Inputs, clean: Inputs | None = None) -> None:
        self.inputs, self.tangents = inputs, make_tangents(inputs)
        out, lse = interface.forward(call_of(inputs))
        assert lse is not None
        self.primal = out, lse
        of = clean or inputs
        self.exact = reference_tangents(of, self.tangents)
        self.eager = eager_tangents(of, self.tangents)

    def run(self, simulator: ModuleType, seed: int | None = SEED, **more: Any) -> Pair:
        call = call_of(self.inputs, **more)
        prepared = PreparedTangent(plan_tangent(call, Target(ACTIVE_ARCH, num_sms=SMS)))
        with quiet_run(simulator, seed):
            given = Tangents(*self.tangents, *self.primal)
            return Pair(*prepared(call.tensors, call.masks, given))

    def check(self, simulator: ModuleType, seed: int | None = SEED) -> None:
        found = self.run(simulator, seed)
        assert_as_good_as_eager(found, self.exact, self.eager, self.inputs.case.id)


@pytest.mark.parametrize("case", CASES)
def test_tangents(simulator: ModuleType, case: Case) -> None:
    problem = Problem(make_inputs(case))
    for seed in DELAY_SEEDS:
        problem.check(simulator, seed)


@pytest.mark.parametrize("case", [UNUSED_CASES[1], UNUSED_CASES[6]])
def test_unused_memory_reaches_no_tangent(simulator: ModuleType, case: Case) -> None:
    clean = make_inputs(replace(case, head_dim=64, head_dim_v=64))
    problem = Problem(with_unused(clean, float("nan")), clean)
    for name, t in zip("qkv", problem.tangents, strict=True):
        t[~clean.rows_in_use("q" if name == "q" else "k")] = float("nan")
    problem.check(simulator)


@pytest.mark.parametrize("mask", ["full", "causal", "window", "columns"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_common_shift_of_scores_costs_no_precision(
    simulator: ModuleType, mask: str, head_dim: int
) -> None:
    """Whichever block is the first one in which a row sees a key: `jvp` of a common shift is no
    error. Each row is compared with eager, which subtracts nothing, at the same inputs without the
    shift."""
    masks: dict[str, dict[str, Any]] = {
        "full": {},
        "causal": {"causal": True},
        "window": {"window_left": 40, "window_right": 0},
        "columns": {"causal": True, "column": "random1"},
    }
    case = Case(f"shift-{mask}", 1, 260, 260, 1, 1, head_dim=head_dim, **masks[mask])
    inputs = make_inputs(case)
    inputs.k[..., 0] = 1.0
    problem = Problem(inputs)
    plain = problem.run(simulator)
    problem.tangents[0][..., 0] += 30.0 * head_dim**0.5
    shifted = problem.run(simulator)
    exact = reference_tangents(inputs, problem.tangents)
    errors = [
        (found.out.double() - want.out).abs().amax((-2, -1)).flatten()
        for found, want in ((plain, problem.exact), (shifted, exact))
    ]
    # by row: a row with few keys has small errors of its own
    assert (errors[1] < 2.0 * errors[0].max() + 1e-3).all(), errors[1].argmax()


@pytest.mark.parametrize("start", [9, torch.tensor([40, 3], dtype=torch.int32)])
def test_q_start(simulator: ModuleType, start: int | Tensor) -> None:
    inputs = make_inputs(Case("q_start", 2, 130, 260, 1, 1, head_dim=64, causal=True))
    tangents = make_tangents(inputs)
    more: dict[str, Any] = {"q_start": start}
    out, lse = interface.forward(call_of(inputs, **more))
    problem = Problem(inputs)
    problem.primal = out, lse
    found = problem.run(simulator, **more)
    wide = [x.double() for x in (inputs.q, inputs.k, inputs.v)]
    double = replace(inputs, q=wide[0], k=wide[1], v=wide[2])
    call = call_of(double, **more)
    given = Tangents(*(t.double() for t in tangents), *interface.forward(call))
    exact = PreparedTangent(plan_tangent(call))(call.tensors, call.masks, given)
    for one, other in zip(found, exact, strict=True):
        assert (one.double() - other).abs().max() < 0.02 * other.abs().max()


@pytest.mark.parametrize(
    "fields",
    [
        {"heads_q": 1, "heads_kv": 1, "causal": True, "column": "islands"},
        {"heads_q": 2, "heads_kv": 1, "head_dim": 64, "mask_mod": "documents"},
        {"heads_q": 1, "heads_kv": 1, "head_dim": 64},
    ],
    ids=["islands", "mask_mod", "full"],
)
def test_slow_roles(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """Each role, and each of the two warps that load and make bits by itself."""
    add_islands(monkeypatch)
    problem = Problem(make_inputs(Case("slow", 1, 260, 600, **fields)))
    run = partial(problem.check, simulator)
    with_each_role_slow(simulator, monkeypatch, [KERNEL], run)
    for warp in (2, 3):
        monkeypatch.setitem(simulator.OPTIONS, "slow", frozenset({warp}))
        run()


def _drawn() -> list[Case]:
    found: list[Case] = []
    seed = 0
    while len(found) < 60:
        case = small_case(random.Random(seed), ((64, 64), (128, 128), (40, 40)), 200)
        if not (case.score_mod or case.softcap):
            found.append(replace(case, pack_gqa=None))
        seed += 1
    return found


@pytest.mark.parametrize("number", range(60))
def test_drawn_calls(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """In order, with delays, and with two sets of warps slow, which change from draw to draw."""
    case = _drawn()[number]
    problem = Problem(make_inputs(case))
    planned = plan_tangent(call_of(problem.inputs), Target(ACTIVE_ARCH, num_sms=SMS))
    run: Callable[[], object] = partial(problem.check, simulator)
    if planned.backend is Backend.KERNEL:
        with_each_role_slow(simulator, monkeypatch, [KERNEL], run, turn=number)
