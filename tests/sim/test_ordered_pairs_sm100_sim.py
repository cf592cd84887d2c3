"""Pairs of CTAs of Blackwell's backward that have turns at the sums of dQ, on the software GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import mask_cases
import pytest
import simulated_backward
import torch
from cases import BF16, FP16, Case
from devices import Device
from eager import assert_gradients_close
from inputs import make_inputs, make_output_gradients
from quiet_runs import quiet_run
from random_cases import small_case
from shared_keys import CommonKeys
from simulated_backward import assert_same_bits, launch_on_simulator, run_hostile, run_sim
from test_flash_bwd_pairs_sm100_sim import EMPTY, FUZZED, UNUSED
from test_shared_keys_sim import run_backward
from unseen_memory import INF, NAN, with_empty, with_unused_gradients

from flash_mask_cute.call import prepare
from flash_mask_cute.call.build_backward import compile_bwd
from flash_mask_cute.core import semaphore
from flash_mask_cute.rules.mask_warps import send_walks
from flash_mask_cute.runtime.cache import CompileCache
from flash_mask_cute.sm100 import flash_bwd
from flash_mask_cute.sm100.flash_bwd_loads import SumsOut

ARCH = "sm_100a"

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

IN_PAIRS: dict[str, Any] = {"config": {"cta_pair": True}}
IN_ORDER = IN_PAIRS | {"deterministic": True}


class Order(NamedTuple):
    """Seed, SMs, pairs that run at a time; spare: pairs that begin where all of these wait."""

    seed: int
    sms: int
    resident: int
    spare: int

    def set(self, simulator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(simulated_backward, "SMS", self.sms)
        monkeypatch.setitem(simulator.OPTIONS, "resident", self.resident)
        monkeypatch.setitem(simulator.OPTIONS, "spare", self.spare)


ORDERS = (Order(1, 6, 3, 16), Order(2, 4, 2, 0), Order(3, 6, 1, 0), Order(4, 2, 1, 0),
          Order(5, 8, 2, 0))  # fmt: skip

# A pair has 256 keys, or at 256 columns 128: row blocks of two to six turns.
MASKED = (
    Case("causal-gqa2", 1, 140, 520, 2, 1, causal=True),
    Case("window-sink", 1, 140, 600, 1, 1, window_left=300, window_right=-30, sink=BF16),
    Case("varlen", lengths_q=(130, 0, 60), lengths_k=(300, 70, 530), causal=True),
    Case("lists-mask_mod", 1, 140, 600, 1, 1, blocks=(48, 80), mask_mod="checks"),
    Case("columns", 1, 140, 520, 1, 1, column="random2", dtype=FP16),
    Case("seqused", 2, 70, 520, 1, 1, seqused_q=(70, 20), seqused_k=(0, 500)),
)
DIMS = {"128": ((128, 128), (104, 128)), "192": ((192, 128), (168, 72)),
        "256": ((256, 256), (224, 200))}  # fmt: skip
by_dims = pytest.mark.parametrize("dims", [x[0] for x in DIMS.values()], ids=list(DIMS))
CASES = tuple(
    replace(case, id=f"{name}-{case.id}", head_dim=dims[i % 2][0], head_dim_v=dims[i % 2][1])
    for name, dims in DIMS.items()
    for i, case in enumerate(MASKED)
)


def check_equal_bits(
    simulator: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    orders: Sequence[Order] = ORDERS,
) -> None:
    inputs = make_inputs(case)
    dout, dlse = make_output_gradients(inputs)
    runs = []
    for order in orders:
        order.set(simulator, monkeypatch)
        with quiet_run(simulator, order.seed):
            runs.append(launch_on_simulator(inputs, dout, dlse, **IN_ORDER))
        clusters = [x["cluster"] for result in simulator.RESULTS for x in result["launches"]]
        assert clusters.count((2, 1, 1)) == 1
        assert_same_bits(runs[0], runs[-1])
    assert_gradients_close(runs[0], inputs, dout, dlse)


@pytest.mark.parametrize("position", range(len(CASES)), ids=lambda i: CASES[i].id)
def test_bits_are_equal(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    """Whichever pair is ahead and however many there are; none waits for one that has not begun."""
    check_equal_bits(simulator, monkeypatch, CASES[position])


@pytest.mark.parametrize("number", range(24))
def test_fuzzed(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Also visiting what is hidden, and where the first CTA at a row block stores."""
    dims = (*FUZZED[:4], (128, 128), (104, 120))[number % 6]
    case = small_case(random.Random(4000 + number), (dims,), 300)
    is_square = case.strided == "fused_qkv" and dims[0] != dims[1]
    strided = "transposed" if is_square else case.strided
    case = replace(case, pack_gqa=None, score_mod=None, softcap=0.0, strided=strided)
    config = IN_PAIRS["config"] | ({"skip_blocks": False} if number % 8 == 5 else {})
    more = {"clears_dq": False} if number % 4 == 3 else {}
    ORDERS[number % len(ORDERS)].set(simulator, monkeypatch)
    run_sim(
        simulator, make_inputs(case, seed=number), (number,),
        config=config | more, deterministic=not more,
    )  # fmt: skip


@by_dims
def test_sums_that_the_first_one_stores(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int]
) -> None:
    case = Case("first", 1, 300, 520, 2, 1, head_dim=dims[0], head_dim_v=dims[1], causal=True)
    config = IN_PAIRS["config"] | {"clears_dq": False}
    for order in ORDERS[:3]:
        order.set(simulator, monkeypatch)
        run_sim(simulator, make_inputs(case), (order.seed,), config=config)


@pytest.mark.parametrize("position", range(len(EMPTY)), ids=lambda i: EMPTY[i].id)
@by_dims
def test_rows_of_queries_that_see_nothing(
    simulator: ModuleType, position: int, dims: tuple[int, int]
) -> None:
    case = replace(EMPTY[position], head_dim=dims[0], head_dim_v=dims[1])
    hostile = with_empty(make_inputs(case), (NAN, INF)[position % 2])
    run_hostile(simulator, hostile, **IN_ORDER)


@pytest.mark.parametrize("position", range(len(UNUSED)), ids=lambda i: UNUSED[i].id)
def test_rows_that_are_not_in_use(simulator: ModuleType, position: int) -> None:
    """Keys in use of none of a pair's sequences have no turn."""
    hostile = with_unused_gradients(make_inputs(UNUSED[position]), (NAN, INF)[position % 2])
    run_hostile(simulator, hostile, **IN_ORDER)


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("number", range(3))
def test_keys_in_common(
    simulator: ModuleType, device: Device, monkeypatch: pytest.MonkeyPatch, number: int,
    head_dim: int,
) -> None:  # fmt: skip
    """Of several sequences of packed queries, whose turns follow each other."""
    *_, call = CommonKeys(5, BF16, head_dim, 400, -130).calls(number + 1)
    # which pairs do not have
    call.keywords.pop("score_mod", None)
    call.mods.pop("score_mod", None)
    run_backward(device, call, number, **IN_PAIRS)
    found = []
    for order in ORDERS[1:3]:
        order.set(simulator, monkeypatch)
        found.append(run_backward(device, call, order.seed, **IN_ORDER))
    for name, a, b in zip("qkv", *found, strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16)), f"d{name}, {call.name}"


def late_case(monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int]) -> Case:
    """The last queries alone see the first keys, which would add first if they did not wait."""

    def columns(rng: random.Random, seqlen_q: int, seqlen_k: int, n: int) -> list[list[int]]:
        return [[seqlen_q, 260 if key < 512 else 0] for key in range(seqlen_k)]

    monkeypatch.setitem(mask_cases.COLUMNS, "late", mask_cases.ColumnRecipe(columns, 2, True))
    return Case("late", 1, 390, 780, 1, 1, head_dim=dims[0], head_dim_v=dims[1], column="late")


@by_dims
def test_who_would_be_first_waits(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int]
) -> None:
    check_equal_bits(simulator, monkeypatch, late_case(monkeypatch, dims), ORDERS[:3])


def _number_of_cta(self: SumsOut, work: Any) -> Any:
    return work.block + 1


def _in_fixed_turns(scheduler: Any, *more: Any) -> None:
    send_walks(replace(scheduler, counter=None, claims=None, claims_first=False), *more)


# what is left out, and how that is noticed
MUTATIONS: dict[str, tuple[object, str, Callable[..., Any], str]] = {
    "a-turn-that-is-not-awaited": (semaphore, "wait", lambda place, value: None, "dq"),
    "numbers-of-ctas-for-those-of-pairs": (SumsOut, "_own_number", _number_of_cta, "livelock"),
    "work-tiles-that-nobody-claims": (
        flash_bwd, "send_claimed_walks", _in_fixed_turns, "deadlock|livelock",
    ),
}  # fmt: skip


@by_dims
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_order_is_noticed(
    simulator: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    dims: tuple[int, int],
) -> None:
    owner, attribute, broken, message = MUTATIONS[name]
    compile_anew = partial(compile_bwd, cache=CompileCache(tmp_path))
    monkeypatch.setattr(prepare, "compile_bwd", compile_anew)
    monkeypatch.setattr(owner, attribute, broken)
    case = late_case(monkeypatch, dims)
    with pytest.raises((AssertionError, simulator.SimError), match=message):
        check_equal_bits(simulator, monkeypatch, case, ORDERS[:3])
