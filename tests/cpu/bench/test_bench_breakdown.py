"""bench.breakdown: the fit, and what it says of rows whose parts are known."""

from __future__ import annotations

import numpy as np
import pytest
from small_cases import row

import bench
from bench import breakdown, flops
from bench.cases import CASES
from bench.masks import MASKS
from bench.paper import table_name

COSTS = (1e-4, 2e-5, 3e-4)


def made_up(way: str, d: int) -> list[bench.Json]:
    """A run whose times are exactly those of the costs."""
    names = [
        table_name(d, size, mask, is_backward=way == "bwd")
        for size in breakdown.SIZES
        for mask in MASKS
    ]
    times = [float(np.dot(breakdown.counts(CASES[name]), COSTS)) for name in names]
    return [
        row("made up", name, "ours", flops.attention_flops(CASES[name]) / milliseconds / 1e9)
        for name, milliseconds in zip(names, times, strict=True)
    ]


@pytest.mark.parametrize(("way", "d"), [("fwd", 64), ("bwd", 128)])
def test_known_costs_are_found(way: str, d: int) -> None:
    rows = made_up(way, d)
    # a later run without enough masks is passed over
    later = [each | {"run": "later"} for each in rows[:3]]
    found = breakdown.Breakdown.create([*rows, *later], d, way)
    assert found.run == "made up" and found.costs
    for costs in found.costs.values():
        # rows hold five digits of the milliseconds
        assert costs == pytest.approx(COSTS, rel=2e-2)
    for parts in found.parts.values():
        assert parts.rest == pytest.approx(0, abs=1e-3) and sum(parts) == pytest.approx(1)
    evicted = table_name(d, "32k", "random_eviction", is_backward=way == "bwd")
    assert found.parts[evicted].cut > 0.1


def test_no_cost_is_negative() -> None:
    counted = np.array([[1.0, 0.0], [2.0, 1.0], [3.0, 2.0]])
    # a second column that takes time away
    assert breakdown.fit(counted, counted @ [1.0, -0.2]).tolist()[1] == 0
    assert breakdown.fit(counted, counted @ [1.0, 0.5]) == pytest.approx([1.0, 0.5])


def test_counts_are_those_of_a_dense_mask() -> None:
    case = CASES["mask-d64-8k-share_question"]
    tile_m, tile_n = breakdown.tile_shape(case)
    seen = np.zeros(2, dtype=int)
    keys = np.arange(case.n)
    for first in range(0, case.n, tile_m):
        rows = np.arange(first, min(first + tile_m, case.n))
        tiles = (
            case.mask_of(case.n).sees(rows[:, None], keys[None, :]).reshape(len(rows), -1, tile_n)
        )
        some, every = tiles.any(axis=(0, 2)), tiles.all(axis=(0, 2))
        seen += [some.sum(), (some & ~every).sum()]
    times = case.batch * case.heads
    assert breakdown.counts(case) == (*(seen * times), -(-case.n // tile_m) * times)
