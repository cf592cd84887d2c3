"""Reads by differences that tables answer, in compiled kernels: the same bits as without tables."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from cases import FP16, FP32, Case
from conftest import ACTIVE_ARCH, SMS
from eager import assert_close_to_oracle
from inputs import Inputs, make_output_gradients
from planned import call_of, planned
from quiet_runs import quiet_run
from simulated_backward import launch_on_simulator
from trained_mods import TrainedRecipe, assert_aux_gradients_close, make_trained

from flash_mask_cute.call import tables as difference_tables
from flash_mask_cute.call.prepare import prepared_fwd
from flash_mask_cute.runtime.target import Target

# as the software GPU is, so that these tests run on either
ARCH = ACTIVE_ARCH

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

SUMMED = ("axial", "grid", "grid_and_slopes", "swin")
IS_ORDERED = ACTIVE_ARCH == "sm_90a"
# Each with a mod and the number of its tables: clipped distances of any length, sequences without
# keys, two axes of a grid, two reads of a tensor, heads of a group in one tile. Sums along
# diagonals in narrow and wide heads, with dQ in turn, and beside gradients of a walk.
CASES = (
    (Case("t5-causal", 1, 200, 330, 2, 2, causal=True), "t5", 1),
    (Case("t5-fp16-gqa2", 2, 130, 200, 4, 2, head_dim=64, dtype=FP16), "t5", 1),
    (
        Case(
            "t5-varlen", heads_q=2, heads_kv=2, head_dim=64,
            lengths_q=(150, 0, 33, 1), lengths_k=(97, 60, 0, 129),
        ),
        "t5",
        1,
    ),
    (Case("buckets", 1, 140, 150, 2, 2, head_dim=64, window_left=100), "buckets", 2),
    (Case("grid-gqa2", 1, 144, 170, 2, 1, head_dim=64), "grid", 2),
    (
        Case(
            "grid-varlen", heads_q=2, heads_kv=2, head_dim=64,
            lengths_q=(0, 70, 9, 65), lengths_k=(40, 200, 0, 65), causal=True,
        ),
        "grid",
        2,
    ),
    (
        Case("grid-d32-fp16", 1, 140, 150, 2, 1, head_dim=32, dtype=FP16, window_left=60),
        "grid",
        2,
    ),
    (Case("grid-softcap", 1, 100, 129, 1, 1, head_dim=64, causal=True, softcap=12.0), "grid", 2),
    (Case("grid-d192", 1, 70, 140, 1, 1, head_dim=192, head_dim_v=64), "grid", 2),
    # two of its three reads take no function of the difference: they are not worth a table
    (Case("axial-d80", 1, 100, 150, 1, 1, head_dim=80, causal=True), "axial", 1),
    (
        Case(
            "grid-and-slopes-varlen", heads_q=2, heads_kv=1, head_dim=64,
            lengths_q=(0, 70, 9, 65), lengths_k=(40, 200, 0, 65), causal=True,
        ),
        "grid_and_slopes",
        2,
    ),
    (Case("swin-d80", 1, 64, 128, 1, 1, head_dim=80), "swin", 0),
    (Case("swin", 2, 144, 144, 2, 2, head_dim=32), "swin", 0),
    (Case("swin-gqa2-d64", 1, 100, 140, 2, 1, head_dim=64, causal=True), "swin", 0),
)  # fmt: skip
GRID = CASES[5]
cases = pytest.mark.parametrize(("case", "name", "count"), CASES)
# Neighbours share no kernel, and one takes up to a minute.
ALONE = pytest.mark.shares(36)


def tables_always(monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:
    monkeypatch.setattr(difference_tables, "LEAST_SCORES", 0 if is_on else 2**60)
    monkeypatch.setattr(difference_tables, "SCORES_OF_ELEMENT", 0)


def forward(inputs: Inputs, count: int) -> Any:
    call = call_of(inputs)
    plan = planned(call, Target(ACTIVE_ARCH, num_sms=SMS))
    assert len(plan.problem.tables) == count
    return prepared_fwd(plan)(call.tensors, call.masks)


@ALONE
@cases
def test_forward(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, case: Case, name: str, count: int
) -> None:
    inputs = make_trained(case, name).inputs
    tables_always(monkeypatch, False)
    with quiet_run(simulator, 1):
        expected = forward(inputs, 0)
    tables_always(monkeypatch, True)
    with quiet_run(simulator, 1, launches=1 + (count > 0)):
        found = forward(inputs, count)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
    assert_close_to_oracle(*found, inputs)


@ALONE
@cases
@pytest.mark.parametrize("is_learned", [False, True])
def test_backward(
    simulator: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    name: str,
    count: int,
    is_learned: bool,
) -> None:
    """Gradients of the tables, too, unless they are summed by difference."""
    given = make_trained(case, name)
    dout, _ = make_output_gradients(given.inputs)
    launches = 3 + bool(case.lengths_q)
    results = []
    for is_on, seed in ((False, 1), (True, 1), (True, None)):
        tables_always(monkeypatch, is_on)
        more: dict[str, Any] = {"deterministic": IS_ORDERED}
        daux = [torch.full_like(x, float("nan")) for x in given.trained]
        if is_learned:
            more["daux"] = [None] * (len(given.aux_tensors) - len(daux)) + daux
        with quiet_run(simulator, seed, launches + (is_on and count > 0)):
            found = launch_on_simulator(given.inputs, dout, **more)
        if is_learned:
            assert_aux_gradients_close(daux, given, dout)
            found |= {f"daux{i}": x for i, x in enumerate(daux)}
        results.append(found)
    without, first, second = results
    for key, found in first.items():
        assert (found is None) == (without[key] is None)
        is_exact = not key.startswith("daux") or (IS_ORDERED and name not in SUMMED)
        if found is not None and is_exact:
            assert torch.equal(found, without[key]), key
        if found is not None and IS_ORDERED:
            assert torch.equal(found, second[key]), key


def _of_bucket(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    import cutlass

    return score + aux[-1][aux[-2][cutlass.min(abs(q[0] - k[0]), 20)], h[0]]


def test_a_table_of_buckets(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read by what another read finds, in kernels that read elements in different ways."""
    recipe = TrainedRecipe(
        _of_bucket,
        lambda score, b, h, q, k, buckets, table: (
            score + table[buckets[(q - k).abs().clamp(max=20)].long(), h]
        ),
        lambda x: [((21,), torch.int32), ((9, x.heads_q), FP32)],
    )
    given = make_trained(Case("buckets", 1, 70, 200, 4, 2, head_dim=64, causal=True), recipe)
    given.trained[0].copy_(torch.arange(21, dtype=torch.int32) * 5 % 9)
    dout, _ = make_output_gradients(given.inputs)
    results = []
    for is_on in (False, True):
        tables_always(monkeypatch, is_on)
        with quiet_run(simulator, 1, launches=1 + is_on):
            out, lse = forward(given.inputs, 2 * is_on)
        with quiet_run(simulator, 1, launches=3 + is_on):
            grads = launch_on_simulator(given.inputs, dout, deterministic=IS_ORDERED)
        results.append({"out": out, "lse": lse} | grads)
    assert_close_to_oracle(out, lse, given.inputs)
    without, found = results
    for key, x in found.items():
        assert (x is None and without[key] is None) or torch.equal(x, without[key]), key


def _behind_a_query(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    import cutlass

    rows = cutlass.max(cutlass.min(q[0] // 20 - k[0] // 20, 7), -5) + 5
    return score + (aux[-2][q[0] // 20, h[0]] + aux[-1][rows, h[0]])


def test_behind_a_read_by_query(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the mod reads before does not change the sign of a difference."""
    recipe = TrainedRecipe(
        _behind_a_query,
        lambda score, b, h, q, k, gain, table: (
            score + gain[q // 20, h] + table[(q // 20 - k // 20).clamp(-5, 7) + 5, h]
        ),
        lambda x: [((x.seqlen_q // 20 + 1, x.heads_q), FP32), ((13, x.heads_q), FP32)],
    )
    given = make_trained(Case("behind", 1, 200, 200, 2, 2, head_dim=64), recipe)
    dout, _ = make_output_gradients(given.inputs)
    tables_always(monkeypatch, True)
    with quiet_run(simulator, 1, launches=2):
        found = forward(given.inputs, 1)
    assert_close_to_oracle(*found, given.inputs)
    daux = [torch.full_like(x, float("nan")) for x in given.trained]
    with quiet_run(simulator, 1, launches=4):
        launch_on_simulator(given.inputs, dout, daux=daux)
    assert_aux_gradients_close(daux, given, dout)
