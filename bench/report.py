"""python -m bench.report [ROWS]: what a file of rows says.

Without an option the table of every run. --write makes bench/results/TABLES.md of all that follows.
--table paper prints the FlashMask paper's Tables 4 to 9, ours and peers side by side, --table
shapes those of everyday shapes (`bench.tables`). --bars compares the figures with what they must
reach.
The latest run that can decide a bar decides it, together with the other runs of its commit that
can: by the median of their ratios, as equal code in two processes may differ by 7 %. Where a run
has timed a shape under two names, their mean counts.

forward   ours / flash-attn-4 in the same case, at sustained load
masks     ours / flash-attn-4 native causal of the same head dimension and length, for the twelve
          masks of the FlashMask paper. With r the best peer's level (bench/targets.json): 1.08 r at
          d=128 and 1.15 r at d=64, or 95 % of our own full attention where that is lower; over
          the masks with r < 0.9 the geometric mean of the ratio to r is 1.20.
callables ours / flash-attn-4 with the same mask_mod and block lists, or the same score_mod
metadata  microseconds, launches and bytes at 131072 tokens
linearity R^2 and intercept of latency against block sparsity
backward  dense and masks as above, with 1.06 r for both head dimensions and 1.15 for the mean; the
          time of a deterministic backward over that of the default; ours / flash-attn-4 with the
          same mask_mod and block lists; the wall time of a training step of 4096 tokens over its
          device time, 1.05 at most. Without a bar, where there are rows: the host time of a
          forward and its backward, ours / flash-attn-4; the bytes that a backward needs
shapes    everyday shapes, both directions: ours / flash-attn-4 in the same case, or / cuDNN where
          flash-attn-4 took part in the run and refused: 1.00, but 0.97 in the backward of ungrouped
          heads at d=128 and in the forward at d=256; the geometric mean of all shapes, 1.15 forward
          and 1.08 backward, which has no figure before all are measured. Milliseconds of ours at
          one shape over those at the next larger of the head dimensions 64, 96, 128, 192, 256: 1.00
          at most
cudnn     masks beside cudnn.flex_attention: ours / cuDNN in the same case, 1.10 forward and 1.05
          backward, and geometric means by size. Where either takes less than half a millisecond a
          call, by bursts of ten calls. Preparing a mask, ours / cuDNN's plan, has no bar
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import fmean, median

from bench import DETERMINISTIC, ROOT, Json, breakdown, format_table, name_of, peer_of, tells_code
from bench.cases import STEP_DIMS
from bench.cudnn_cases import SIZES as CUDNN_SIZES
from bench.cudnn_cases import WIDTHS as CUDNN_WIDTHS
from bench.cudnn_cases import compared_names, other_names, table_names
from bench.everyday import SHAPES, WIDTH_MASKS, WIDTHS, Shape, bound
from bench.linearity import summary, sweeps
from bench.masks import MASKS
from bench.paper import DIMS, LENGTHS
from bench.rows import RESULTS, read_rows
from bench.tables import (
    DIRECTIONS,
    PEER_LABELS,
    ShapeFigures,
    markdown,
    paper_tables,
    shape_table,
)

TARGETS = ROOT / "bench" / "targets.json"
TABLES_PAGE = ROOT / "bench" / "results" / "TABLES.md"
OF_FULL, LOW_R = 0.95, 0.9
FORWARD = {
    **{f"d128-{mask}-{n}": 1.00 for mask in ("full", "causal") for n in ("8k", "32k")},
    **{f"d64-{mask}-{n}": 1.03 for mask in ("full", "causal") for n in ("8k", "32k")},
    **{f"d256-{mask}-8k": 0.97 for mask in ("full", "causal")},
    **{f"d{d}-window-8k": 1.12 for d in DIMS},
    **{f"d{d}-window-32k": 1.05 for d in DIMS},
    **{f"d128-varlen-kv{heads}": 1.02 for heads in (32, 8)},
    **{f"d128-causal-{n}": 1.00 for n in ("512", "1k", "2k")},
}
HOST_SHARE = 0.25
STEP_SHARE, STEP_SIZES = 1.05, ("512", "1k", "2k", "4k")
LISTED = ("document", "random_eviction")
CALLABLES = {
    f"mod-d{d}-{n}-{name}": bar
    for d in DIMS
    for n in ("8k", "32k", "128k")
    for name, bar in (
        *((mask, ("fa4_mask_mod", 1.25)) for mask in LISTED),
        *((mod, ("fa4", 1.10)) for mod in ("alibi", "t5_bias", "softcap")),
    )
}
BACKWARD = {
    f"bwd-d{d}-{mask}-{n}": bar
    for d, bar, lengths in (
        (128, 1.00, ("8k", "32k")),
        (64, 1.03, ("8k", "32k")),
        (256, 1.30, ("8k",)),
    )
    for mask in ("full", "causal")
    for n in lengths
}
BACKWARD_CALLABLES = {
    f"bwd-mod-d128-{n}-{mask}": bar
    for n in ("8k", "32k")
    for mask, bar in (("document", 1.25), ("random_eviction", 1.8))
}
DETERMINISTIC_SHARE = {f"bwd-det-d128-8k-{mask}": 1.20 for mask in ("causal", "document")}
TABLES = {"paper": paper_tables, "shapes": shape_table}
PREP_LIMITS = {"us": 150.0, "launches": 4.0, "bytes": 8e6}
R_SQUARED, INTERCEPT = 0.99, 0.05
SHAPE_BAR, SHAPE_BAR_OF_FEW = 1.00, 0.97
SHAPE_MEANS = {"fwd": 1.15, "bwd": 1.08}
CUDNN_BARS = {"fwd": 1.10, "bwd": 1.05}
COLD_LIMITS = {"import": 3.0, "first_call": 4.0, "first_call_cached": 1.0}

PAGE_SAYS = """# Tables

Written by `python -m bench.report --write` from the rows beside it.
[Results](../../docs/results.md) defines the terms. The legend of each table names its runs, with
commit and GPU."""
BARS_SAY = "`python -m bench.report --bars` prints each bar."
SHAPES_SAY = """\
Shapes that people run, TFLOP/s in both directions. Ratios are to flash-attn-4, or to cuDNN
where flash-attn-4 refuses."""
PARTS_SAY = """\
Percent of the rate of our own full attention in the same run. In brackets the other percent of
the mask's time, by a fit over all masks of a run (`python -m bench.breakdown`): visited tiles
beyond those that operations are counted by, partial tiles, ends of work tiles, and what the fit
leaves. A dash: not timed in that run, or with tiles of another shape."""
FIGURES_SAY = """\
Milliseconds, operations and rates of ours and of peers. Totals stand where both directions are
of one run."""


@dataclass(frozen=True)
class Direction:
    """key: of a row's figure; prefix: of case names; factor, mean: what masks must reach, by head
    dimension and on average, relative to the best peer's level."""

    key: str
    prefix: str
    factor: dict[int, float]
    mean: float


FWD = Direction("fwd", "", {128: 1.08, 64: 1.15}, 1.20)
BWD = Direction("bwd", "bwd-", {128: 1.06, 64: 1.06}, 1.15)


@dataclass(frozen=True)
class Bar:
    """A figure and what it must be: at least `bar`, or at most where `most`. None: not known."""

    name: str
    figure: float | None
    bar: float | None
    most: bool = False
    remark: str = ""

    def verdict(self) -> str:
        if self.figure is None or self.bar is None:
            return "not measured" if self.figure is None else "no bar"
        met = self.figure <= self.bar if self.most else self.figure >= self.bar
        return "met" if met else "short"

    def line(self) -> str:
        figure = "-" if self.figure is None else f"{self.figure:.4g}"
        bar = "-" if self.bar is None else f"{'<=' if self.most else '>='} {self.bar:.4g}"
        return f"{self.name:40} {figure:>9}  {bar:>9}  {self.verdict():12} {self.remark}".rstrip()


class Figures:
    """Rows by run, case and peer; of equal ones the last counts."""

    def __init__(self, rows: Sequence[Json]) -> None:
        self.by_run: dict[str, dict[tuple[str, str], Json]] = {}
        for row in rows:
            if row["variant"] in ("loop", "warm", "step", "wall", "peak"):
                self.by_run.setdefault(row["run"], {})[name_of(row), peer_of(row)] = row

    def latest(self, *wanted: tuple[str, str]) -> list[Json] | None:
        """Rows of the latest run that has all of them; each wanted is (case name, peer)."""
        for known in reversed(self.by_run.values()):
            if all(each in known for each in wanted):
                return [known[each] for each in wanted]
        return None

    def measured(self, key: str, *wanted: tuple[tuple[str, ...], str]) -> dict[str, list[float]]:
        """Figures of all runs that have all of them, of the last commit that has any such run; by
        run, the latest first. Each wanted is (names of one shape, peer)."""
        found: dict[str, list[float]] = {}
        commit = None
        for run, known in reversed(self.by_run.items()):
            rows = [
                [known[name, peer] for name in names if (name, peer) in known]
                for names, peer in wanted
            ]
            if not all(rows):
                continue
            if found and rows[0][0]["commit"] != commit:
                continue
            commit = rows[0][0]["commit"]
            found[run] = [fmean(row[key] for row in of_shape) for of_shape in rows]
            if not tells_code(commit):
                break
        return found


def _runs(measured: Iterable[str]) -> str:
    runs = list(measured)
    if len(runs) < 2:
        return f"run {runs[0]}" if runs else ""
    return f"median of {len(runs)} runs, {runs[0]} the last"


def _ratio(
    figures: Figures, name: str, peer: str, bar: float | None, key: str = "fwd", most: bool = False
) -> Bar:
    """Ours over a peer's figure in the same case."""
    found = figures.measured(key, ((name,), "ours"), ((name,), peer))
    figure = median(ours / other for ours, other in found.values()) if found else None
    return Bar(name, figure, bar, most, _runs(found))


def forward_bars(figures: Figures) -> Iterator[Bar]:
    for name, bar in FORWARD.items():
        yield _ratio(figures, name, "fa4", bar)
    yield _ratio(figures, "host-128", "fa4", HOST_SHARE, "us", most=True)


def cold_bars(rows: Sequence[Json]) -> Iterator[Bar]:
    """Seconds in fresh processes, and beside them how long torch took to import: hosts differ."""
    ours = [row for row in rows if row["kind"] == "cold" and peer_of(row) == "ours"]
    latest = {row["variant"]: row for row in ours if row["run"] == ours[-1]["run"]}
    for variant, limit in COLD_LIMITS.items():
        row = latest.get(variant)
        remark = f"torch {latest['torch']['us'] / 1e6:.1f} s, run {row['run']}" if row else ""
        yield Bar(f"cold-128 {variant}", row["us"] / 1e6 if row else None, limit, True, remark)


def backward_bars(figures: Figures) -> Iterator[Bar]:
    for name, bar in BACKWARD.items():
        yield _ratio(figures, name, "fa4", bar, "bwd")
    for name, bar in BACKWARD_CALLABLES.items():
        yield _ratio(figures, name, "fa4_mask_mod", bar, "bwd")
    for name, bar in DETERMINISTIC_SHARE.items():
        share = _ratio(figures, name, DETERMINISTIC, bar, "bwd", most=True)
        yield replace(share, remark=", ".join(filter(None, ("time / default", share.remark))))
    train = _ratio(figures, "host-128-train", "fa4", None, "us", most=True)
    if train.figure is not None:
        yield replace(train, remark=f"host time, {train.remark}")
    yield from step_bars(figures)
    yield from memory_bars(figures)


def step_bars(figures: Figures) -> Iterator[Bar]:
    """Wall time of a training step of ours over its device time, beside that of flash-attn-4."""
    for name in (f"host-step-d{d}-{n}" for d in STEP_DIMS for n in STEP_SIZES):
        ours = (name, "ours")
        rows = figures.latest(ours, (name, "fa4")) or figures.latest(ours)
        if not rows:
            yield Bar(name, None, STEP_SHARE, most=True)
            continue
        figure, *beside = (row["us"] / row["device_us"] for row in rows)
        peer = [f"flash-attn-4 {other:.3f}" for other in beside]
        remark = (f"wall / device, device {rows[0]['device_us']:.0f} us", *peer)
        yield Bar(name, figure, STEP_SHARE, True, ", ".join((*remark, f"run {rows[0]['run']}")))


def memory_bars(figures: Figures) -> Iterator[Bar]:
    """Bytes beyond inputs and gradients for each element of q, and beside them flash-attn-4's."""
    names = dict.fromkeys(name for known in figures.by_run.values() for name, _ in known)
    for name in (name for name in names if name.startswith("memory-bwd-")):
        ours = (name, "ours")
        if rows := figures.latest(ours, (name, "fa4")) or figures.latest(ours):
            figure, *beside = (r["bytes"] / (r["tokens"] * r["heads"] * r["d"]) for r in rows)
            peer = [f"flash-attn-4 {other:.4g}" for other in beside]
            remark = ", ".join(("bytes / element of q", *peer, f"run {rows[0]['run']}"))
            yield Bar(name, figure, None, most=True, remark=remark)


def _names(way: Direction, d: int, size: str, mask: str) -> tuple[str, ...]:
    """The cases of the bench that are this mask: the short names are the same shapes."""
    names = (f"mask-d{d}-{size}-{mask}", f"d{d}-{mask.replace('sliding_', '')}-{size}")
    return tuple(f"{way.prefix}{name}" for name in names)


def mask_bars(figures: Figures, targets: Sequence[Json], way: Direction = FWD) -> Iterator[Bar]:
    levels = {(row["d"], row["n"], row["mask"]): row.get(f"{way.key}_rel") for row in targets}
    gains: dict[int, list[float]] = {d: [] for d in DIMS}
    for d in DIMS:
        for size, n in LENGTHS.items():
            for mask in MASKS:
                level = levels.get((d, n, mask))
                bar, gain = _mask_bar(figures, way, d, size, mask, level)
                yield bar
                if gain is not None and level is not None and level < LOW_R:
                    gains[d].append(gain)
    for name, found in (("d128", gains[128]), ("d64", gains[64]), ("all", sum(gains.values(), []))):
        mean = exp(sum(map(log, found)) / len(found)) if found else None
        remark = f"geometric mean of ours / (causal r) over {len(found)} masks with r < {LOW_R}"
        yield Bar(f"{way.prefix}mask mean {name}", mean, way.mean, remark=remark)


def _mask_bar(
    figures: Figures, way: Direction, d: int, size: str, mask: str, level: float | None
) -> tuple[Bar, float | None]:
    """The bar of one mask, and ours / (causal r)."""
    names = {name: _names(way, d, size, name) for name in (mask, "causal", "full")}
    name = names[mask][0]
    needed = ((names[mask], "ours"), (names["causal"], "fa4"))
    beside_full = figures.measured(way.key, *needed, (names["full"], "ours"))
    found = beside_full or figures.measured(way.key, *needed)
    bar = None if level is None else way.factor[d] * level
    if not found:
        return Bar(name, None, bar), None
    ratio = median(ours / causal for ours, causal, *_ in found.values())
    remarks = [f"{median(ours for ours, *_ in found.values()):.0f} TFLOP/s"]
    remarks.append("" if level is None else f"r {level}")
    if beside_full:
        of_full = median(ours / full for ours, _, full in beside_full.values())
        remarks.append(f"{of_full:.0%} of full")
        if bar is not None:
            full_ratio = median(full / causal for _, causal, full in beside_full.values())
            bar = min(bar, OF_FULL * full_ratio)
    remark = ", ".join((*filter(None, remarks), _runs(found)))
    gain = None if level is None else ratio / level
    return Bar(name, ratio, bar, remark=remark), gain


def callable_bars(figures: Figures) -> Iterator[Bar]:
    for name, (peer, bar) in CALLABLES.items():
        yield _ratio(figures, name, peer, bar)


def prep_bars(figures: Figures) -> Iterator[Bar]:
    names = {name for known in figures.by_run.values() for name, _ in known}
    for name in sorted(name for name in names if name.startswith("meta-")):
        rows = figures.latest((name, "ours"))
        beside = figures.latest((name, "ours"), (name, "flex"))
        for key, limit in PREP_LIMITS.items():
            flex = beside[1].get(key) if beside else None
            remark = f"FlexAttention {flex:.4g}" if flex is not None else ""
            figure = rows[0][key] if rows else None
            yield Bar(f"{name} {key}", figure, limit, most=True, remark=remark)


def linearity_bars(rows: Sequence[Json]) -> Iterator[Bar]:
    for sweep in {sweep.mask: sweep for sweep in sweeps(rows)}.values():
        remark = f"{len(sweep.ms)} draws, run {sweep.run}"
        yield Bar(f"sweep {sweep.mask} R^2", sweep.r_squared(), R_SQUARED, remark=remark)
        share = sweep.intercept_share()
        yield Bar(f"sweep {sweep.mask} intercept / dense", share, INTERCEPT, most=True)


def shape_bar(shape: Shape, direction: str) -> float:
    """What ours / flash-attn-4 must be."""
    if direction == "fwd":
        few = shape.head_dim == 256
    else:
        few = shape.head_dim == shape.head_dim_v == 128 and shape.heads == shape.heads_kv
    return SHAPE_BAR_OF_FEW if few else SHAPE_BAR


def shape_bars(rows: Sequence[Json], direction: str) -> Iterator[Bar]:
    figures, found = ShapeFigures(rows), list[float]()
    for shape in SHAPES:
        name = shape.case_name(is_backward=direction == "bwd")
        bar = shape_bar(shape, direction)
        comparisons = figures.comparisons(name, direction)
        if not comparisons:
            yield Bar(name, None, bar)
            continue
        found.append(median(each.ratio(direction) for each in comparisons))
        latest = comparisons[0]
        peer = PEER_LABELS[latest.rival["peer"]]
        against = f"against {peer}" if latest.rival["peer"] != "fa4" else ""
        mode = "bursts of ten calls" if latest.ours["variant"] == "short" else ""
        runs = _runs(each.ours["run"] for each in comparisons)
        yield Bar(name, found[-1], bar, remark=", ".join(filter(None, (against, mode, runs))))
    mean = exp(sum(map(log, found)) / len(found)) if found else None
    remark = f"geometric mean of {len(found)} of {len(SHAPES)} shapes"
    if mean is not None and len(found) < len(SHAPES):
        mean, remark = None, f"{remark}: {mean:.3f}"
    prefix = "bwd-" if direction == "bwd" else ""
    yield Bar(f"{prefix}shape mean", mean, SHAPE_MEANS[direction], remark=remark)


def width_bars(figures: Figures) -> Iterator[Bar]:
    """Milliseconds of ours over those at the next larger common head dimension."""
    for direction in DIRECTIONS:
        for mask in WIDTH_MASKS:
            for width in WIDTHS:
                larger = bound(width)
                if larger is None:
                    continue
                names = [
                    each.case_name(mask, is_backward=direction == "bwd") for each in (width, larger)
                ]
                wanted = [((name,), "ours") for name in names]
                found = figures.measured(f"{direction}_ms", *wanted)
                figure = median(ms / most for ms, most in found.values()) if found else None
                remark = ", ".join((f"time / {larger.label}", *filter(None, [_runs(found)])))
                yield Bar(names[0], figure, 1.0, most=True, remark=remark)


def cudnn_bars(rows: Sequence[Json], direction: str) -> Iterator[Bar]:
    """Ours / cudnn.flex_attention: each case, and the masks of one size together."""
    is_backward, bar = direction == "bwd", CUDNN_BARS[direction]
    figures = ShapeFigures(rows, table_names(), ("cudnn_flex",))
    prefix = "bwd-" if is_backward else ""

    def of_case(name: str) -> Bar:
        comparisons = figures.comparisons(name, direction)
        if not comparisons:
            return Bar(name, None, bar)
        mode = "bursts of ten calls" if comparisons[0].ours["variant"] == "short" else ""
        runs = _runs(each.ours["run"] for each in comparisons)
        figure = median(each.ratio(direction) for each in comparisons)
        return Bar(name, figure, bar, remark=", ".join(filter(None, (mode, runs))))

    for width in CUDNN_WIDTHS:
        for size in CUDNN_SIZES:
            found = list(map(of_case, compared_names(width, size, is_backward=is_backward)))
            yield from found
            ratios = [each.figure for each in found if each.figure is not None]
            mean = exp(sum(map(log, ratios)) / len(ratios)) if ratios else None
            remark = f"geometric mean of {len(ratios)} of {len(found)} masks"
            yield Bar(f"{prefix}cudnn mean {width.label} {size}", mean, bar, remark=remark)
    yield from map(of_case, other_names(is_backward=is_backward))


def cudnn_table(rows: Sequence[Json]) -> str:
    """Markdown: the masks of each size beside cudnn.flex_attention, both directions."""
    lines = []
    for direction, bar in CUDNN_BARS.items():
        is_backward = direction == "bwd"
        way = "backward" if is_backward else "forward"
        of_name = {each.name: each.figure for each in cudnn_bars(rows, direction)}
        for width in CUDNN_WIDTHS:
            for size in CUDNN_SIZES:
                names = compared_names(width, size, is_backward=is_backward)
                ratios = [x for name in names if (x := of_name[name]) is not None]
                if not ratios:
                    continue
                mean = exp(sum(map(log, ratios)) / len(ratios))
                figures = [f"{x:.3g}" for x in (mean, min(ratios), max(ratios))]
                short = sum(x < bar for x in ratios)
                where = f"{way}, {width.label}, {size}"
                lines.append([where, *figures, f"{bar:.2f}", f"{short} of {len(ratios)}"])
    heads = ("masks", "mean", "least", "most", "bar", "below their bar")
    return markdown(heads, lines, 1) if lines else "No row."


def cudnn_plan_bars(figures: Figures) -> Iterator[Bar]:
    """Microseconds of preparing a mask over those of cuDNN's plan."""
    for name in (name for name in table_names() if name.startswith("cudnn-plan-")):
        plan = _ratio(figures, name, "cudnn_flex", None, "us", most=True)
        if rows := figures.latest((name, "ours"), (name, "cudnn_flex")):
            remark = f"us: {rows[0]['us']:.0f} / {rows[1]['us']:.0f}, {plan.remark}"
            yield replace(plan, remark=remark)


def bars(rows: Sequence[Json], targets: Sequence[Json] | None = None) -> dict[str, list[Bar]]:
    """All bars by heading, also those that no row decides. targets: of TARGETS by default."""
    figures = Figures(rows)
    if targets is None:
        targets = json.loads(TARGETS.read_text())["rows"]
    return {
        "forward: ours / flash-attn-4": list(forward_bars(figures)),
        "cold start, seconds": list(cold_bars(rows)),
        "masks: ours / flash-attn-4 native causal": list(mask_bars(figures, targets)),
        "callables: ours / flash-attn-4": list(callable_bars(figures)),
        "metadata at 131072 tokens": list(prep_bars(figures)),
        "linearity": list(linearity_bars(rows)),
        "backward: ours / flash-attn-4": list(backward_bars(figures)),
        "backward of masks: ours / flash-attn-4 native causal": list(
            mask_bars(figures, targets, BWD)
        ),
        "everyday shapes: ours / flash-attn-4": list(shape_bars(rows, "fwd")),
        "backward of everyday shapes: ours / flash-attn-4": list(shape_bars(rows, "bwd")),
        "head dimensions: time of ours / that of a larger one": list(width_bars(figures)),
        "masks: ours / cudnn.flex_attention": list(cudnn_bars(rows, "fwd")),
        "backward of masks: ours / cudnn.flex_attention": list(cudnn_bars(rows, "bwd")),
        "preparing masks: time / cudnn.flex_attention": list(cudnn_plan_bars(figures)),
    }


def count_bars(found: dict[str, list[Bar]]) -> str:
    """Markdown: of each group of bars, how many are met, short, not measured and without a bar."""
    kinds = ("met", "short", "not measured", "no bar")
    lines = []
    for title, group in found.items():
        verdicts = [bar.verdict() for bar in group]
        lines.append([title, *(str(verdicts.count(kind)) for kind in kinds)])
    return markdown(("bars", *kinds), lines, 1)


def missed_bars(found: dict[str, list[Bar]]) -> str:
    """Markdown: the bars that are short."""
    short = [(title, bar) for title, group in found.items() for bar in group]
    lines = [
        [title, bar.name, f"{bar.figure:.4g}", f"{'<=' if bar.most else '>='} {bar.bar:.4g}"]
        for title, bar in short
        if bar.verdict() == "short"
    ]
    return markdown(("bars", "case", "figure", "must be"), lines, 2) if lines else "None."


def tables_page(rows: Sequence[Json]) -> str:
    """The whole text of TABLES_PAGE."""
    found = bars(rows)
    linear = "\n".join(f"- {line}" for line in summary(rows)) or "No sweep is among the rows."
    parts = {
        "Bars": f"{BARS_SAY}\n\n{count_bars(found)}",
        "Bars that are short": missed_bars(found),
        "Everyday shapes": f"{SHAPES_SAY}\n\n{shape_table(rows)}",
        "Forward: what a mask does not reach": f"{PARTS_SAY}\n\n{breakdown.table(rows, 'fwd')}",
        "Backward: what a mask does not reach": breakdown.table(rows, "bwd"),
        "Latency against sparsity": linear,
        "All figures": f"{FIGURES_SAY}\n\n{paper_tables(rows)}",
    }
    text = "\n\n".join(f"## {title}\n\n{part}" for title, part in parts.items())
    return f"{PAGE_SAYS}\n\n{text}\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.report", description="Read bench rows.")
    parser.add_argument("rows", nargs="?", default=str(RESULTS), help="default: %(default)s")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--bars", action="store_true", help="each bar, the figure, met or short")
    shown.add_argument("--write", action="store_true", help="write bench/results/TABLES.md")
    shown.add_argument("--table", choices=tuple(TABLES), help="the paper's tables, or shapes")
    parser.add_argument("--run", default="", help="only runs whose id starts so")
    parser.add_argument("--targets", default=str(TARGETS), help="levels of the peers")
    args = parser.parse_args(argv)
    rows = read_rows(args.rows)
    rows = [row for row in rows if row["run"].startswith(args.run)]
    if args.write:
        TABLES_PAGE.write_text(tables_page(rows))
        return 0
    text = TABLES[args.table](rows) if args.table else format_table(rows)
    if args.bars:
        targets = json.loads(Path(args.targets).read_text())["rows"]
        groups = bars(rows, targets).items()
        text = "\n".join(
            "\n".join((title, *(f"  {bar.line()}" for bar in found))) for title, found in groups
        )
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
