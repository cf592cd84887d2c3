"""python -m bench.linearity ROWS [--out FIGURE]: latency against block sparsity.

Fits, for each sweep of each run, milliseconds = intercept + slope * (1 - sparsity), and prints R^2
and the intercept (the time where nothing is visible) as a fraction of the time of full attention.
--out draws the points and lines of the latest run of each mask (svg or png; needs matplotlib).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench import Json, name_of
from bench.figure import save, subplots
from bench.rows import read_rows

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Sweep:
    """The points of a run: sparsity and milliseconds of each draw, and the dense time."""

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
        """Of the dense time."""
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


def draw(found: Sequence[Sweep], path: str) -> None:
    """Points and fitted lines, a panel for each mask. ImportError without matplotlib."""
    latest = {sweep.mask: sweep for sweep in found}
    size = (4.2 * len(latest), 3.6)
    figure, panels = subplots(1, len(latest), figsize=size, sharey=True)
    for panel, (mask, sweep) in zip(panels[0], latest.items(), strict=True):
        intercept, slope = sweep.line()
        ends = np.array([0.0, 1.0])
        panel.plot(ends, intercept + slope * (1 - ends), color="0.6", linewidth=1)
        panel.scatter(sweep.sparsity, sweep.ms, s=12)
        panel.scatter([0], [sweep.dense_ms], s=24, marker="x", color="black")
        panel.set_title(f"{mask}, R$^2$ = {sweep.r_squared():.4f}", fontsize=10)
        panel.set_xlabel("block sparsity")
        panel.set_xlim(-0.03, 1.03)
        panel.set_ylim(bottom=0)
    panels[0][0].set_ylabel("forward, ms (x: full attention)")
    figure.tight_layout()
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.linearity", description="Fit the sweeps.")
    parser.add_argument("rows", help="JSONL file of bench.run")
    parser.add_argument("--out", help="figure, svg or png")
    args = parser.parse_args(argv)
    rows = read_rows(args.rows)
    if not (lines := summary(rows)):
        parser.error(f"{args.rows} holds no sweep")
    sys.stdout.write("\n".join(lines) + "\n")
    if args.out:
        draw(sweeps(rows), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
