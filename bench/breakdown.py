"""Where a mask's time goes, by a fit over the masks of a run (`bench.report --table parts`).

The time of a call is taken as

    milliseconds = a * visited tiles + b * cut tiles + c * work tiles

with tiles of the shape that the call uses. Visited ones hold a visible pair, cut ones a hidden one
as well. A work tile is what a CTA finishes before it goes on: rows of queries in the forward, of
keys in the backward, where c also has the kernels before and after the main one. a, b and c, none
below 0, are fitted by relative errors to all masks of a head dimension and direction with that tile
shape, in the latest run with at least as many cases as there are masks. What the fit leaves is told
as well: it is what no such count explains, noise included. Shapes are those that the package
chooses now, so a run of before a change of its tables may be read wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bench import Json, name_of, peer_of
from bench.cases import CASES, BenchCase
from bench.flops import touched
from bench.masks import MASKS
from bench.paper import DIMS, table_name
from bench.tables import NOTHING, markdown

SIZES = ("8k", "32k")
# fewer cases of a tile shape than that are not fitted
LEAST_CASES = 6
Floats = npt.NDArray[np.float64]


class Parts(NamedTuple):
    """A mask's time in shares of itself, which add up to 1.

    ideal: what its operations take at the rate of our own full attention. tiles: visited tiles
    beyond that, those with little to see and those of a slower shape. cut, ends: cut tiles and work
    tiles. rest: what the fit leaves.
    """

    ideal: float
    tiles: float
    cut: float
    ends: float
    rest: float


def tile_shape(case: BenchCase) -> tuple[int, int]:
    """Queries and keys of a tile of ours."""
    from flash_mask_cute.call.choose.config import WalkFacts, select_bwd_config, select_fwd_config
    from flash_mask_cute.call.problem import AttentionProblem, FwdShapes

    problem = AttentionProblem(
        case.dtype,
        case.d,
        case.d_v,
        is_causal=case.causal,
        has_window_left=case.window is not None,
        intervals=None if case.form == "native" else (1, case.causal),
    )
    if case.kind == "backward":
        choice = select_bwd_config(case.d, case.d_v, problem.tuning_class, seqlen_k=case.n)
        return choice.tiles.tile_m, choice.tile_n
    shapes = FwdShapes(case.batch, *(case.n,) * 4, case.heads, case.heads_kv, case.d, case.d_v)
    window = case.window if case.form == "native" else None
    tiles = select_fwd_config(problem, shapes, walk=WalkFacts(window)).tiles
    return tiles.tile_m, tiles.tile_n


def counts(case: BenchCase) -> tuple[int, int, int]:
    """Visited tiles, cut tiles and work tiles of a call."""
    tile, mask = tile_shape(case), case.mask_of(case.n)
    visited = touched(*mask.visible_rows(), *tile)
    cut = visited & touched(*mask.hidden_rows(), *tile)
    work_tiles = visited.shape[int(case.kind == "backward")]
    times = case.batch * case.heads
    return int(visited.sum()) * times, int(cut.sum()) * times, work_tiles * times


def fit(counted: Floats, milliseconds: Floats) -> Floats:
    """Costs of at least 0 by least squares of relative errors."""
    scaled = counted / milliseconds[:, None]
    best, least = np.zeros(counted.shape[1]), float("inf")
    # a solution is that of the columns whose cost is not 0
    for size in range(1, counted.shape[1] + 1):
        for chosen in map(list, combinations(range(counted.shape[1]), size)):
            found = np.linalg.lstsq(scaled[:, chosen], np.ones(len(scaled)), rcond=None)[0]
            error = float(np.square(scaled[:, chosen] @ found - 1).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(counted.shape[1]), error
                best[chosen] = found
    return best


class Breakdown(NamedTuple):
    """Of a run: the costs of a visited, a cut and a work tile in milliseconds, by tile shape, and
    the parts of each case of such a shape whose full attention was timed. Empty without a run."""

    run: str
    costs: dict[tuple[int, int], Sequence[float]]
    parts: dict[str, Parts]

    @classmethod
    def create(cls, rows: Sequence[Json], d: int, way: str) -> Breakdown:
        back = way == "bwd"
        wanted = {table_name(d, size, mask, is_backward=back) for size in SIZES for mask in MASKS}
        runs: dict[str, dict[str, Json]] = {}
        for row in rows:
            if row["variant"] == "loop" and peer_of(row) == "ours" and name_of(row) in wanted:
                runs.setdefault(row["run"], {})[name_of(row)] = row
        for run, found in reversed(runs.items()):
            if len(found) >= len(MASKS):
                return cls._of_run(run, found, way)
        return cls("", {}, {})

    @classmethod
    def _of_run(cls, run: str, found: dict[str, Json], way: str) -> Breakdown:
        shapes: dict[tuple[int, int], list[str]] = {}
        for name in found:
            shapes.setdefault(tile_shape(CASES[name]), []).append(name)
        costs, parts = {}, {}
        for shape, names in shapes.items():
            if len(names) < LEAST_CASES:
                continue
            counted = np.array([counts(CASES[name]) for name in names], dtype=float)
            milliseconds = np.array([found[name][f"{way}_ms"] for name in names])
            fitted = fit(counted, milliseconds)
            costs[shape] = fitted.tolist()
            shares = counted * fitted / milliseconds[:, None]
            for name, (visited, cut, ends) in zip(names, shares.tolist(), strict=True):
                full = name.replace(CASES[name].mask, "full")
                if full in found:
                    ideal = found[name][way] / found[full][way]
                    rest = 1 - visited - cut - ends
                    parts[name] = Parts(ideal, visited - ideal, cut, ends, rest)
        return cls(run, costs, parts)

    def told(self) -> str:
        costs = (
            f"{m} x {n} tiles, a partial one {1 + cut / visited:.2f} and a work tile "
            f"{end / visited:.2f} of a whole one"
            for (m, n), (visited, cut, end) in self.costs.items()
        )
        return f"run {self.run}: {'; '.join(costs)}"


def table(rows: Sequence[Json], way: str) -> str:
    """Markdown: percent of our own full attention, and of the time, by mask, d and length."""
    found = {d: Breakdown.create(rows, d, way) for d in DIMS}

    def cell(mask: str, d: int, size: str) -> str:
        parts = found[d].parts.get(table_name(d, size, mask, is_backward=way == "bwd"))
        if parts is None:
            return NOTHING
        ideal, *others = parts
        return f"{100 * ideal:.0f} ({' '.join(f'{100 * x:+.0f}' for x in others)})"

    columns = [(d, size) for d in DIMS for size in SIZES]
    lines = [[mask.replace("_", " "), *(cell(mask, *at) for at in columns)] for mask in MASKS]
    header = ("mask", *(f"d={d}, {size[:-1]}K" for d, size in columns))
    notes = "\n".join(f"- d={d}, {each.told()}" for d, each in found.items() if each.costs)
    return f"{markdown(header, lines, 1)}\n\n{notes or 'No run has enough masks.'}"
