"""Drawn calls of Blackwell's kernels; in every order where FLASH_MASK_SIM_ROWS names a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import simulated_backward
from conftest import SMS
from drawn_blackwell import DRAWS, Draw
from drawn_cases import ROWS, Row
from eager import assert_gradients_close
from inputs import Inputs, make_inputs, make_output_gradients
from paged_inputs import paged
from quiet_runs import quiet_run
from simulated_backward import assert_same_bits, launch_on_simulator
from simulated_backward import run_sim as run_backward
from simulated_forward import run_sim as run_forward
from slow_roles import cache_oracles, slow_sets, with_each_role_slow

ARCH = "sm_100a"

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

NUM_WARPS = 20
# seeds of delays, and how many CTAs or pairs run at a time
ORDERS = tuple(product(range(1, 6), range(1, SMS + 1)))
Run = Callable[[tuple[int | None, ...]], float]


# Of a table that has run in every order (bench/results/blackwell_cases.txt).
@pytest.mark.shares(60)
@pytest.mark.parametrize("draw", DRAWS)
def test_draw(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, draw: Draw) -> None:
    inputs = make_inputs(draw.case, seed=draw.number)
    if draw.page_size is not None:
        inputs = paged(inputs, draw.page_size)
    rows = os.environ.get(ROWS)
    if draw.more.get("deterministic"):
        # CTAs wait for each other
        monkeypatch.setitem(simulator.OPTIONS, "resident", SMS)
    run = run_backward if draw.is_backward else run_forward
    run_draw: Run = partial(run, simulator, inputs, **draw.more)
    if draw.is_ordered:
        orders = ORDERS if rows else ORDERS[:: len(ORDERS) - 1]
        monkeypatch.setattr(simulated_backward, "SMS", SMS * (1 + draw.is_pair))
        share = _of_equal_bits(simulator, monkeypatch, inputs, orders, draw.more)
        told = f"{len(orders)} equal: seeds 1-5, 1-{SMS} at a time"
    elif rows:
        told, share = _in_every_order(simulator, monkeypatch, draw, run_draw)
    else:
        sets = sorted(slow_sets(draw.kernel, NUM_WARPS), key=sorted)
        monkeypatch.setitem(simulator.OPTIONS, "slow", sets[draw.number % len(sets)])
        run_draw((draw.number + 1,))
    if draw.is_pair:
        clusters = [x["cluster"] for result in simulator.RESULTS for x in result["launches"]]
        assert (2, 1, 1) in clusters
    if rows:
        with open(rows, "a") as file:
            file.write(Row(draw.id, "", told, f"{share:.2f}", draw.told).line)


def _in_every_order(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, draw: Draw, run: Run
) -> tuple[str, float]:
    """In order, with delays of two seeds, each role slow: what ran, and the largest share."""
    seed, other = draw.number + 1, draw.number + 2
    shares = [run((None,))]
    if draw.is_backward:
        cache_oracles(monkeypatch)
    shares.append(run((other,)))
    slow = with_each_role_slow(
        simulator, monkeypatch, [draw.kernel], lambda: shares.append(run((seed,)))
    )
    return f"{len(shares)} runs: -, {seed}, {other}, {slow} slow", max(shares)


def _of_equal_bits(
    simulator: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    inputs: Inputs,
    orders: tuple[tuple[int, int], ...],
    more: dict[str, Any],
) -> float:
    """The order of sums does not depend on which CTA, or pair of them, is ahead."""
    dout, dlse = make_output_gradients(inputs)
    runs = []
    for seed, resident in orders:
        monkeypatch.setitem(simulator.OPTIONS, "resident", resident)
        with quiet_run(simulator, seed):
            runs.append(launch_on_simulator(inputs, dout, dlse, **more))
        assert_same_bits(runs[0], runs[-1])
    return assert_gradients_close(runs[0], inputs, dout, dlse)
