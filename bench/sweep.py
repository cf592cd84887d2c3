"""Sweeps: one mask at many sparsities, and how linear latency is in the visible share of the tiles.

As in appendix A.4.1 of the paper: arXiv 2410.01359 draws documents again and again and fills
buckets of sparsity, 0.05 wide, from 0.5 (causal masks) or 0 to 1. Here a bucket is full with fewer
draws, and `ENOUGH` of them end the drawing, or `TRIES`, whether or not each bucket was met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bench import Json, name_of
from bench.cases import BenchCase
from bench.flops import sparsity
from bench.masks import Draw, draw_documents

Floats = npt.NDArray[np.float64]
BUCKET = 0.05
TRIES, ENOUGH = 400, 44
# Draws a bucket, and how many documents.
PER_BUCKET = {"causal_document": 6, "share_question": 5, "document": 3}
COUNTS = {"causal_document": (2, 20), "share_question": (1, 5), "document": (2, 10)}


def dense_case(case: BenchCase) -> BenchCase:
    """Full attention on the tensors of a sweep."""
    changes = {"mask": "full", "draw": None, "form": "native", "kind": "attention"}
    return replace(case, name=f"{case.name}#dense", **changes)  # type: ignore[arg-type]


def draw_cases(case: BenchCase) -> list[BenchCase]:
    """The cases of a sweep, named `sweep-...#0` and on, each with documents of its own."""
    filled: dict[int, int] = {}
    drawn: list[BenchCase] = []
    for seed in range(TRIES):
        if len(drawn) == ENOUGH:
            break
        documents = draw_documents(case.n, COUNTS[case.mask], seed, spread=1.0)
        name = f"{case.name}#{len(drawn)}"
        candidate = replace(case, name=name, kind="attention", draw=Draw(documents))
        bucket = int(sparsity(candidate) / BUCKET)
        if filled.get(bucket, 0) < PER_BUCKET[case.mask]:
            filled[bucket] = filled.get(bucket, 0) + 1
            drawn.append(candidate)
    return drawn


@dataclass(frozen=True, eq=False)
class Sweep:
    """Points of a run, and the dense time; milliseconds = intercept + slope * (1 - sparsity)."""

    run: str
    mask: str
    sparsity: Floats
    ms: Floats
    dense_ms: float

    def line(self) -> tuple[float, float]:
        """Intercept and slope in milliseconds, over the visible share of the tiles."""
        slope, intercept = np.polyfit(1 - self.sparsity, self.ms, 1)
        return float(intercept), float(slope)

    def r_squared(self) -> float:
        intercept, slope = self.line()
        rest = self.ms - intercept - slope * (1 - self.sparsity)
        return float(1 - rest.var() / self.ms.var())

    def intercept_share(self) -> float:
        """The time where nothing is visible, of the dense time."""
        return self.line()[0] / self.dense_ms


def sweeps(rows: Sequence[Json]) -> list[Sweep]:
    """The sweeps in `rows`, in their order; without a dense time or three draws there is none."""
    draws: dict[tuple[str, str], list[Json]] = {}
    dense: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["variant"] == "sweep":
            name, _, which = name_of(row).partition("#")
            key = (row["run"], name)
            draws.setdefault(key, [])
            if which == "dense":
                dense[key] = row["fwd_ms"]
            else:
                draws[key].append(row)
    return [
        Sweep(
            run,
            points[0]["mask"],
            np.array([row["sparsity"] for row in points]),
            np.array([row["fwd_ms"] for row in points]),
            dense[run, name],
        )
        for (run, name), points in draws.items()
        if len(points) >= 3 and (run, name) in dense
    ]


def summary(rows: Sequence[Json]) -> list[str]:
    """One line for each sweep."""
    return [
        f"{sweep.mask:16} {len(sweep.ms)} draws, sparsity {sweep.sparsity.min():.2f} to "
        f"{sweep.sparsity.max():.2f}: R^2 {sweep.r_squared():.4f}, intercept "
        f"{sweep.intercept_share():.1%} of the dense {sweep.dense_ms:.2f} ms (run {sweep.run})"
        for sweep in sweeps(rows)
    ]
