"""Sums of dQ in a fixed order, by pairs of CTAs of Blackwell's backward, on the software GPU."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import simulated_backward
from cases import BF16, FP16, Case
from gradient_oracle import assert_gradients_close, make_output_gradients
from inputs import make_inputs
from quiet_runs import quiet_run
from simulated_backward import assert_same_bits, launch_on_simulator

ARCH = "sm_100a"

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("poisoned_allocations")]

PAIR = {"cta_pair": True}
# Of several key blocks of pairs, of which each has 256 keys, or at 256 columns 128; with masks of
# every kind, lengths, and what else changes who adds to a row block.
CASES = (
    Case("causal-gqa2", 1, 200, 600, 4, 2, causal=True),
    Case("window-sink", 1, 300, 700, 2, 2, window_left=300, window_right=-30, sink=BF16),
    Case("varlen", lengths_q=(130, 0, 200), lengths_k=(300, 70, 530), causal=True),
    Case("lists-mask_mod", 1, 260, 700, 2, 2, blocks=(48, 80), mask_mod="checks"),
    Case("columns", 1, 200, 600, 2, 1, column="random2", dtype=FP16),
    Case("seqused", 2, 150, 600, 1, 1, seqused_q=(150, 20), seqused_k=(0, 550)),
)
DIMS = ((128, 128), (192, 128), (256, 256), (104, 104), (168, 72), (224, 256))
# seeds of delays; SMs, and how many pairs run at a time, and more if all of these wait
ORDERS = ((1, 6, 3, 16), (2, 4, 2, 0), (3, 6, 1, 0), (4, 2, 1, 16), (5, 8, 2, 0))


def case_of(number: int, dims: tuple[int, int]) -> Case:
    case = CASES[number]
    name = f"d{dims[0]}-dv{dims[1]}-{case.id}"
    return replace(case, id=name, head_dim=dims[0], head_dim_v=dims[1])


def check_equal_bits(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, case: Case, orders=ORDERS
) -> None:
    """The order of sums does not depend on which pair is ahead, nor on how many there are; and no
    pair waits for one that has not begun."""
    inputs = make_inputs(case)
    dout, dlse = make_output_gradients(inputs)
    runs = []
    for seed, sms, resident, spare in orders:
        monkeypatch.setattr(simulated_backward, "SMS", sms)
        monkeypatch.setitem(simulator.OPTIONS, "resident", resident)
        monkeypatch.setitem(simulator.OPTIONS, "spare", spare)
        with quiet_run(simulator, seed):
            ordered = {"deterministic": True, "config": PAIR}
            runs.append(launch_on_simulator(inputs, dout, dlse, **ordered))
        launches = [x["cluster"] for result in simulator.RESULTS for x in result["launches"]]
        assert launches.count((2, 1, 1)) == 1
        assert_same_bits(runs[0], runs[-1])
    assert_gradients_close(runs[0], inputs, dout, dlse)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: CASES[i].id)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_bits_are_equal(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], number: int
) -> None:
    check_equal_bits(simulator, monkeypatch, case_of(number, dims))
