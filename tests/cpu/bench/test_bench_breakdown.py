"""bench.breakdown: the fit, and what it says of rows whose parts are known."""

from __future__ import annotations

import numpy as np
import pytest
from test_bench_report import row

import bench
from bench import breakdown, flops
from bench.cases import CASES
from bench.masks import MASKS
from bench.paper import table_name

COSTS = (1e-4, 2e-5, 3e-4)


def made_up(way: str, d: int, costs: tuple[float, ...] = COSTS) -> list[bench.Json]:
    """A run whose times are exactly those of the costs."""
    rows = []
    for size in breakdown.SIZES:
        for mask in MASKS:
            name = table_name(d, size, mask, is_backward=way == "bwd")
            case = CASES[name]
            milliseconds = float(np.dot(breakdown.counts(case), costs))
            rate = flops.attention_flops(case) / milliseconds / 1e9
            rows.append(row("made up", name, "ours", rate))
    return rows


@pytest.mark.parametrize(("way", "d"), [("fwd", 128), ("fwd", 64), ("bwd", 128)])
def test_known_costs_are_found(way: str, d: int) -> None:
    found = breakdown.Breakdown.create(made_up(way, d), d, way)
    assert found.run == "made up" and found.costs
    for costs in found.costs.values():
        # rows hold five digits of the milliseconds
        assert costs == pytest.approx(COSTS, rel=2e-2)
    for parts in found.parts.values():
        assert parts.rest == pytest.approx(0, abs=1e-3)
        assert parts.ideal + parts.tiles + parts.cut + parts.ends + parts.rest == pytest.approx(1)
    full = found.parts.get(table_name(d, "32k", "full", is_backward=way == "bwd"))
    evicted = found.parts[table_name(d, "32k", "random_eviction", is_backward=way == "bwd")]
    assert evicted.cut > 0.1 and (full is None or full.cut < 0.01)


def test_no_cost_is_negative() -> None:
    counted = np.array([[1.0, 0.0], [2.0, 1.0], [3.0, 2.0]])
    # a second column that takes time away
    assert breakdown.fit(counted, counted @ [1.0, -0.2]).tolist()[1] == 0
    assert breakdown.fit(counted, counted @ [1.0, 0.5]) == pytest.approx([1.0, 0.5])


def test_counts_are_those_of_a_dense_mask() -> None:
    name = "mask-d64-8k-share_question"
    case = CASES[name]
    tile_m, tile_n = breakdown.tile_shape(case)
    assert (tile_m, tile_n) == (192, 128)
    mask = case.mask_of(case.n)
    keys = np.arange(case.n)
    visited = cut = 0
    for first in range(0, case.n, tile_m):
        rows = np.arange(first, min(first + tile_m, case.n))
        seen = mask.sees(rows[:, None], keys[None, :]).reshape(len(rows), -1, tile_n)
        some, every = seen.any(axis=(0, 2)), seen.all(axis=(0, 2))
        visited += int(some.sum())
        cut += int((some & ~every).sum())
    times = case.batch * case.heads
    assert breakdown.counts(case) == (visited * times, cut * times, -(-case.n // tile_m) * times)


def test_runs_without_enough_masks_are_passed_over() -> None:
    rows = made_up("fwd", 128)
    later = [entry | {"run": "later"} for entry in rows[:3]]
    assert breakdown.Breakdown.create([*rows, *later], 128, "fwd").run == "made up"
    assert breakdown.Breakdown.create(later, 128, "fwd").parts == {}
    text = breakdown.table([*rows, *later], "fwd")
    assert "run made up" in text and text.count("| share question ") == 1
    assert "No run has enough masks." in breakdown.table([], "bwd")
