"""The backward of heads above 256 columns, by roles, on the software GPU."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
from cases import FP32, Case
from inputs import make_inputs, make_output_gradients
from quiet_runs import quiet_run
from simulated_backward import assert_same_bits, launch_on_simulator, run_hostile, run_sim
from unseen_memory import NAN, with_empty, with_unused_gradients
from wide_cases import TRAINED_WIDE_CASES

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

# the statistics of queries, and both launches by roles
LAUNCHES = 2
# each role is slow in it: several work tiles of a CTA, partial and full blocks, groups, a tail
SLOW = Case("slow", heads_q=2, heads_kv=1, head_dim=320, causal=True, window_left=150,
            lengths_q=(200, 0, 70), lengths_k=(300, 20, 70))  # fmt: skip
SLOW_HEAD = replace(SLOW, heads_q=1)


@pytest.mark.parametrize("case", (*TRAINED_WIDE_CASES, SLOW))
def test_against_oracle(simulator: ModuleType, case: Case) -> None:
    run_sim(simulator, make_inputs(case), (1,), LAUNCHES)


@pytest.mark.parametrize("deterministic", [False, True])
def test_equal_bits(simulator: ModuleType, deterministic: bool) -> None:
    """However long anything takes, since nobody adds to what another wrote."""
    inputs, found = make_inputs(SLOW), []
    dout, dlse = make_output_gradients(inputs)
    for seed in (None, 1, 2):
        with quiet_run(simulator, seed, LAUNCHES + 1):
            more = {"deterministic": deterministic}
            found.append(launch_on_simulator(inputs, dout, dlse, **more))
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])


@pytest.mark.parametrize(
    "case",
    [
        Case("causal", 1, 130, 70, 2, 1, 512, causal=True),
        Case("sink", 1, 129, 70, 2, 1, 320, window_left=9, window_right=3, sink=FP32),
        Case("packed", lengths_q=(70, 65), lengths_k=(9, 70), head_dim=264, causal=True),
    ],
)
def test_queries_that_see_nothing_may_be_nan(simulator: ModuleType, case: Case) -> None:
    run_hostile(simulator, with_empty(make_inputs(case), NAN))


def test_unused_rows_may_be_nan(simulator: ModuleType) -> None:
    fields = {"seqused_q": (66, 9), "seqused_k": (130, 0)}
    case = Case("unused", 2, 70, 150, 2, 1, head_dim=512, **fields)
    run_hostile(simulator, with_unused_gradients(make_inputs(case), NAN))
