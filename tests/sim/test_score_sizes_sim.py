"""Scores of any size by the compiled kernels of either architecture, on the software GPU."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import cutlass.cute as cute
import pytest
import torch
from cases import BF16, FP16, FP32, Case
from conftest import ACTIVE_ARCH, HOPPER
from eager import assert_gradients_close, lse_tolerance
from inputs import Inputs, make_output_gradients
from planned import call_of
from quiet_runs import quiet_run
from score_tables import HOPPER_CASES, PLAIN, TABLES, make_tabled
from simulated_backward import launch
from simulated_forward import launch_on_simulator, run_on_simulator, run_sim
from split_cases import TABLED_CASES, SplitCase, take_chunks
from torch import Tensor
from trained_mods import TrainedInputs, assert_aux_gradients_close

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

ARCH = ACTIVE_ARCH
hopper_only = pytest.mark.skipif(ARCH != HOPPER, reason="of a kernel that is for Hopper only")
SOME = ("causal-fp32", "ascending", "descending", "extremes", "offsets", "hidden")
BLACKWELL_CASES = (
    Case("tables-sink-softcap-fp16", 1, 300, 300, 1, 1, head_dim=64, softcap=5.0, sink=FP32,
         dtype=FP16),
    Case("tables-gqa2-packed", 1, 60, 300, 2, 1, pack_gqa=True, window_left=280),
    HOPPER_CASES[-1],
)  # fmt: skip
CASES = HOPPER_CASES if ARCH == HOPPER else BLACKWELL_CASES
# twice the largest number is infinite
WITH_FACTOR = ["causal-fp32", "descending", "offsets", "hidden", "steps"]
IN_PIECES = ["causal-1e30", "ascending", "extremes", "steps", "hidden"]
if ARCH == HOPPER:
    WITH_FACTOR, IN_PIECES = [*WITH_FACTOR, "ascending"], list(TABLES)


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    take_chunks(monkeypatch)


@pytest.mark.parametrize("name", TABLES)
def test_forward(simulator: ModuleType, name: str) -> None:
    given = make_tabled(PLAIN, name)
    run_sim(simulator, given.inputs, seeds=(None,))


@pytest.mark.parametrize("case", CASES)
def test_forward_of_other_kernels(simulator: ModuleType, case: Case) -> None:
    for name in SOME:
        run_sim(simulator, make_tabled(case, name).inputs, seeds=(1,))


@pytest.mark.parametrize("name", WITH_FACTOR)
def test_forward_with_a_last_factor(simulator: ModuleType, name: str) -> None:
    """Which the softmax multiplies by; the lowest numbers become -inf and are hidden."""
    given = make_tabled(PLAIN, name, has_factor=True)
    run_sim(simulator, given.inputs, seeds=(None,))


@hopper_only
def test_smaller_tiles_of_keys(simulator: ModuleType) -> None:
    """Many blocks, and without registers for the scores beside the probabilities."""
    for config in ({"tile_n": 48}, {"tile_m": 256, "tile_n": 64}):
        for name in ("descending", "extremes-descending", "hidden"):
            inputs = make_tabled(PLAIN, name).inputs
            run_sim(simulator, inputs, seeds=(None,), config=config)


@pytest.mark.parametrize("split", TABLED_CASES)
def test_forward_in_pieces(simulator: ModuleType, split: SplitCase) -> None:
    """Rows that a low number hides everywhere, too: their splits weigh as many keys as they saw."""
    for name in IN_PIECES:
        inputs = make_tabled(split.case, name).inputs
        run_sim(simulator, inputs, (1,), sms=split.sms, num_splits=split.num_splits)
        assert len(simulator.RESULTS) == 2, "one kernel computes splits, one combines them"


def forward_with_low(simulator: ModuleType, inputs: Inputs, seed: int | None) -> tuple[Tensor, ...]:
    """out, lse and lse_low, of which the last two are LSE together."""
    lse_low = torch.empty(inputs.reference[1].shape, dtype=FP32)
    with quiet_run(simulator, seed):
        out, lse = launch_on_simulator(inputs, lse_low=lse_low)
    error = (lse.double() + lse_low.double() - inputs.reference[1]).abs()
    assert error[inputs.reference[1].isfinite()].max() < lse_tolerance(inputs)
    return out, lse, lse_low


@pytest.mark.parametrize("name", ["causal-bf16", "offsets", "hidden"])
def test_what_rounding_takes_from_lse(simulator: ModuleType, name: str) -> None:
    _, lse, lse_low = forward_with_low(simulator, make_tabled(PLAIN, name).inputs, None)
    assert (lse_low[lse.isinf()] == 0).all()


def check_both_ways(simulator: ModuleType, given: TrainedInputs, seed: int | None = None) -> None:
    """A forward that writes lse_low, and the backward of what it wrote."""
    inputs = given.inputs
    dout, dlse = make_output_gradients(inputs)
    out, lse, lse_low = forward_with_low(simulator, inputs, seed)
    keywords = inputs.bwd_keywords
    sink = keywords["learnable_sink"]
    dsink = None if sink is None else torch.empty_like(sink)
    daux = given.new_daux()
    more = {"lse_low": lse_low, "dlse": dlse, "dsink": dsink, "daux": daux}
    if not given.wants_aux:
        more.pop("daux")
    with quiet_run(simulator, seed):
        dq, dk, dv = launch((inputs.q, inputs.k, inputs.v, out, dout, lse), keywords | more)
    gradients = {"dq": dq, "dk": dk, "dv": dv, "dsink": dsink}
    assert_gradients_close(gradients, inputs, dout, dlse)
    if given.wants_aux:
        trained = [x for x in daux if x is not None]
        # an element is the gradient of one score
        assert_aux_gradients_close(trained, given, dout, dlse, rtol=4e-3)


@hopper_only
@pytest.mark.parametrize("name", TABLES)
def test_gradients(simulator: ModuleType, name: str) -> None:
    check_both_ways(simulator, make_tabled(PLAIN, name)._replace(wants_aux=()))


@hopper_only
@pytest.mark.parametrize("name", ["causal-1e30", "descending", "steps", "extremes", "hidden"])
def test_gradients_of_the_table(simulator: ModuleType, name: str) -> None:
    check_both_ways(simulator, make_tabled(PLAIN, name), seed=1)


@hopper_only
@pytest.mark.parametrize(
    "case",
    [*(HOPPER_CASES[i] for i in (0, 1, 5)), Case("tables-d256", 1, 150, 300, 2, 1, head_dim=256)],
)
def test_gradients_of_other_kernels(simulator: ModuleType, case: Case) -> None:
    for name in ("causal-fp32", "steps", "extremes", "offsets"):
        check_both_ways(simulator, make_tabled(case, name)._replace(wants_aux=()), seed=1)


@hopper_only
@pytest.mark.parametrize("name", ["causal-fp32", "descending", "steps", "offsets", "hidden"])
def test_both_ways_with_a_last_factor(simulator: ModuleType, name: str) -> None:
    check_both_ways(simulator, make_tabled(PLAIN, name, has_factor=True)._replace(wants_aux=()))


@cute.jit
def _as_it_is(score: Any, b_idx: Any, h_idx: Any, q_idx: Any, k_idx: Any, aux: Any) -> Any:
    return score


# of plain products, as exponents of two (docs/forward_sm90.md)
LARGEST = {BF16: 29, FP16: 27} if ARCH == HOPPER else {BF16: 28, FP16: 22}


@pytest.mark.parametrize(
    ("dtype", "exponents", "score_mod"),
    [*((x, (20, most), None) for x, most in LARGEST.items()), (BF16, (29, 31, 37), _as_it_is)],
    ids=["bf16", "fp16", "mod"],
)
def test_large_products(
    simulator: ModuleType, dtype: torch.dtype, exponents: tuple[int, ...], score_mod: Any
) -> None:
    """Equal scores, rounded alike: without a score_mod there is a limit, with any there is none."""
    case = Case("products", 1, 64, 300, 1, 1, head_dim=64, dtype=dtype)
    call = call_of(case, score_mod=score_mod)
    tensors = call.tensors
    expected = tensors.v.float().mean(1)
    for exponent in exponents:
        size = (2.0**exponent * math.log(2) / 64**0.5) ** 0.5
        for factor in (1.0, 1.013, 1.21, 1.37):
            tensors.q.fill_(size * factor)
            tensors.k.fill_(size)
            with quiet_run(simulator, None):
                out, _ = run_on_simulator(call)
            assert (out[:, 0].float() - expected).abs().max() < 2e-3
