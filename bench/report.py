"""python -m bench.report [ROWS]: what a file of rows says.

Without an option the table of every run, and its sweeps. --write makes bench/results/TABLES.md.
--bars compares the figures with what they must reach; docs/benchmarking.md says what each bar
means, and which runs decide it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, median
from typing import Any

from bench import DETERMINISTIC, ROOT, Json, cudnn_cases, format_table, peer_of
from bench.cases import STEP_DIMS
from bench.everyday import SHAPES, WIDTH_MASKS, WIDTHS, Shape, bound
from bench.masks import MASKS
from bench.paper import DIMS, LENGTHS
from bench.rows import RESULTS, read_rows
from bench.sweep import summary, sweeps
from bench.tables import DIRECTIONS, PEER_LABELS, Runs, markdown, paper_tables, shape_table

TARGETS = ROOT / "bench" / "targets.json"
TABLES_PAGE = ROOT / "bench" / "results" / "TABLES.md"
OF_FULL, LOW_R = 0.95, 0.9
FORWARD = {
    **{f"d128-{mask}-{n}": 1.00 for mask in ("full", "causal") for n in ("8k", "32k")},
    **{f"d64-{mask}-{n}": 1.03 for mask in ("full", "causal") for n in ("8k", "32k")},
    **{f"d256-{mask}-8k": 0.97 for mask in ("full", "causal")},
    **{f"d{d}-window-{n}": bar for n, bar in (("8k", 1.12), ("32k", 1.05)) for d in DIMS},
    **{f"d128-varlen-kv{heads}": 1.02 for heads in (32, 8)},
    **{f"d128-causal-{n}": 1.00 for n in ("512", "1k", "2k")},
}
HOST_SHARE = 0.25
STEP_SHARE, STEP_SIZES = 1.05, ("512", "1k", "2k", "4k")
OF_MODS = dict.fromkeys(("document", "random_eviction"), ("fa4_mask_mod", 1.25))
OF_MODS |= dict.fromkeys(("alibi", "t5_bias", "softcap"), ("fa4", 1.10))
CALLABLES = {
    f"mod-d{d}-{n}-{name}": bar
    for d in DIMS
    for n in ("8k", "32k", "128k")
    for name, bar in OF_MODS.items()
}
SIZES = ("8k", "32k")
BACKWARD = {
    f"bwd-d{d}-{mask}-{n}": bar
    for d, bar, lengths in ((128, 1.00, SIZES), (64, 1.03, SIZES), (256, 1.30, SIZES[:1]))
    for mask in ("full", "causal")
    for n in lengths
}
BACKWARD_CALLABLES = {
    f"bwd-mod-d128-{n}-{mask}": bar
    for n in SIZES
    for mask, bar in (("document", 1.25), ("random_eviction", 1.8))
}
DETERMINISTIC_SHARE = {f"bwd-det-d128-8k-{mask}": 1.20 for mask in ("causal", "document")}
PREP_LIMITS = {"us": 150.0, "launches": 4.0, "bytes": 8e6}
R_SQUARED, INTERCEPT = 0.99, 0.05
SHAPE_BAR, SHAPE_BAR_OF_FEW = 1.00, 0.97
SHAPE_MEANS = {"fwd": 1.15, "bwd": 1.08}
CUDNN_BARS = {"fwd": 1.10, "bwd": 1.05}
CUDNN_FORWARD = "masks: ours / cudnn.flex_attention"
CUDNN_BACKWARD = "backward of masks: ours / cudnn.flex_attention"
COLD_LIMITS = {"import": 3.0, "first_call": 4.0, "first_call_cached": 1.0}

PAGE_SAYS = """# Tables

Written by `python -m bench.report --write` from the rows beside it.
[Results](../../docs/results.md) defines the terms. The legend of each table names its runs, with
commit and GPU."""
BARS_SAY = "`python -m bench.report --bars` prints each bar."
SHAPES_SAY = """\
Shapes that people run, TFLOP/s in both directions. Ratios are to flash-attn-4, or to cuDNN
where flash-attn-4 refuses."""
CUDNN_SAYS = """\
Ours / cudnn.flex_attention. A star: below the bar, which is 1.10 forward and 1.05 backward."""
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


def _remark(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _mean(figures: Iterable[float | None]) -> float | None:
    """The geometric one of those that are known."""
    known = [x for x in figures if x is not None]
    return geometric_mean(known) if known else None


def _of_runs(measured: Iterable[str]) -> str:
    found = list(measured)
    if len(found) < 2:
        return f"run {found[0]}" if found else ""
    return f"median of {len(found)} runs, {found[0]} the last"


def _ratio(
    runs: Runs, name: str, peer: str, bar: float | None, key: str = "fwd", most: bool = False
) -> Bar:
    """Ours over a peer's figure in the same case."""
    found = runs.measured(key, ((name,), "ours"), ((name,), peer))
    figure = median(ours / other for ours, other in found.values()) if found else None
    return Bar(name, figure, bar, most, _of_runs(found))


def _beside(runs: Runs, name: str, peer: str, figure: Callable[[Json], float]) -> tuple[Bar, Json]:
    """A figure of ours without a bar, and beside it that of a peer, if a run has both; the row."""
    ours = (name, "ours")
    rows = runs.latest(ours, (name, peer)) or runs.latest(ours)
    if not rows:
        return Bar(name, None, None, most=True), {}
    own, *other = map(figure, rows)
    told = "".join(f"{PEER_LABELS[peer]} {x:.4g}" for x in other)
    return Bar(name, own, None, most=True, remark=_remark(told, f"run {rows[0]['run']}")), rows[0]


def forward_bars(runs: Runs) -> Iterator[Bar]:
    yield from (_ratio(runs, name, "fa4", bar) for name, bar in FORWARD.items())
    yield _ratio(runs, "host-128", "fa4", HOST_SHARE, "us", most=True)


def cold_bars(rows: Sequence[Json]) -> Iterator[Bar]:
    """Seconds in fresh processes, and beside them how long torch took to import: hosts differ."""
    ours = [row for row in rows if row["kind"] == "cold" and peer_of(row) == "ours"]
    latest = {row["variant"]: row for row in ours if row["run"] == ours[-1]["run"]}
    for variant, limit in COLD_LIMITS.items():
        row = latest.get(variant)
        remark = f"torch {latest['torch']['us'] / 1e6:.1f} s, run {row['run']}" if row else ""
        yield Bar(f"cold-128 {variant}", row["us"] / 1e6 if row else None, limit, True, remark)


def backward_bars(runs: Runs) -> Iterator[Bar]:
    yield from (_ratio(runs, name, "fa4", bar, "bwd") for name, bar in BACKWARD.items())
    for name, bar in BACKWARD_CALLABLES.items():
        yield _ratio(runs, name, "fa4_mask_mod", bar, "bwd")
    for name, bar in DETERMINISTIC_SHARE.items():
        share = _ratio(runs, name, DETERMINISTIC, bar, "bwd", most=True)
        yield replace(share, remark=_remark("time / default", share.remark))
    train = _ratio(runs, "host-128-train", "fa4", None, "us", most=True)
    if train.figure is not None:
        yield replace(train, remark=f"host time, {train.remark}")
    for name in (f"host-step-d{d}-{n}" for d in STEP_DIMS for n in STEP_SIZES):
        step, row = _beside(runs, name, "fa4", lambda x: x["us"] / x["device_us"])
        of = f"wall / device, device {row['device_us']:.0f} us" if row else ""
        yield replace(step, bar=STEP_SHARE, remark=_remark(of, step.remark))

    def of_element(row: Json) -> float:
        return float(row["bytes"] / (row["tokens"] * row["heads"] * row["d"]))

    for name in (name for name in runs.names() if name.startswith("memory-bwd-")):
        bytes_, row = _beside(runs, name, "fa4", of_element)
        if row:
            yield replace(bytes_, remark=_remark("bytes / element of q", bytes_.remark))


def mask_bars(runs: Runs, targets: Sequence[Json], way: Direction = FWD) -> Iterator[Bar]:
    levels = {(row["d"], row["n"], row["mask"]): row.get(f"{way.key}_rel") for row in targets}
    gains: dict[int, list[float]] = {d: [] for d in DIMS}
    for d, size, mask in ((d, size, mask) for d in DIMS for size in LENGTHS for mask in MASKS):
        level = levels.get((d, LENGTHS[size], mask))
        bar = _mask_bar(runs, way, d, size, mask, level)
        yield bar
        if bar.figure is not None and level is not None and level < LOW_R:
            gains[d].append(bar.figure / level)
    for name, found in (("d128", gains[128]), ("d64", gains[64]), ("all", gains[128] + gains[64])):
        remark = f"geometric mean of ours / (causal r) over {len(found)} masks with r < {LOW_R}"
        yield Bar(f"{way.prefix}mask mean {name}", _mean(found), way.mean, remark=remark)


def _mask_bar(runs: Runs, way: Direction, d: int, size: str, mask: str, level: float | None) -> Bar:
    """The bar of one mask: ours over causal flash-attn-4."""

    def names(mask: str) -> tuple[str, ...]:
        # the short names are the same shapes
        found = f"mask-d{d}-{size}-{mask}", f"d{d}-{mask.replace('sliding_', '')}-{size}"
        return tuple(f"{way.prefix}{name}" for name in found)

    needed = ((names(mask), "ours"), (names("causal"), "fa4"))
    beside_full = runs.measured(way.key, *needed, (names("full"), "ours"))
    found = beside_full or runs.measured(way.key, *needed)
    bar = None if level is None else way.factor[d] * level
    if not found:
        return Bar(names(mask)[0], None, bar)
    ratio = median(ours / causal for ours, causal, *_ in found.values())
    told = [f"{median(ours for ours, *_ in found.values()):.0f} TFLOP/s"]
    told.append("" if level is None else f"r {level}")
    if beside_full:
        told.append(f"{median(ours / full for ours, _, full in beside_full.values()):.0%} of full")
        if bar is not None:
            full_ratio = median(full / causal for _, causal, full in beside_full.values())
            bar = min(bar, OF_FULL * full_ratio)
    return Bar(names(mask)[0], ratio, bar, remark=_remark(*told, _of_runs(found)))


def prep_bars(runs: Runs) -> Iterator[Bar]:
    for name in sorted(name for name in runs.names() if name.startswith("meta-")):
        rows = runs.latest((name, "ours"))
        beside = runs.latest((name, "ours"), (name, "flex"))
        for key, limit in PREP_LIMITS.items():
            flex = beside[1].get(key) if beside else None
            remark = f"FlexAttention {flex:.4g}" if flex is not None else ""
            yield Bar(f"{name} {key}", rows[0][key] if rows else None, limit, True, remark)


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


def _compared(
    runs: Runs, name: str, direction: str, bar: float, rivals: Sequence[str] = ("fa4", "cudnn")
) -> Bar:
    """How many times as fast ours is as the peer that it is held against."""
    found = runs.comparisons(name, direction, rivals)
    if not found:
        return Bar(name, None, bar)
    peer = found[0].rival["peer"]
    remark = _remark(
        f"against {PEER_LABELS[peer]}" if peer != rivals[0] else "",
        "bursts of ten calls" if found[0].ours["variant"] == "short" else "",
        _of_runs(each.ours["run"] for each in found),
    )
    return Bar(name, median(each.ratio(direction) for each in found), bar, remark=remark)


def shape_bars(runs: Runs, direction: str) -> Iterator[Bar]:
    is_backward = direction == "bwd"
    found = [
        _compared(runs, x.case_name(is_backward=is_backward), direction, shape_bar(x, direction))
        for x in SHAPES
    ]
    yield from found
    mean, measured = _mean(x.figure for x in found), sum(x.figure is not None for x in found)
    remark = f"geometric mean of {measured} of {len(SHAPES)} shapes"
    if mean is not None and measured < len(SHAPES):
        mean, remark = None, f"{remark}: {mean:.3f}"
    name = f"{'bwd-' if is_backward else ''}shape mean"
    yield Bar(name, mean, SHAPE_MEANS[direction], remark=remark)


def width_bars(runs: Runs) -> Iterator[Bar]:
    """Milliseconds of ours over those at the next larger common head dimension."""
    pairs = [(width, larger) for width in WIDTHS if (larger := bound(width)) is not None]
    for direction, mask in ((way, mask) for way in DIRECTIONS for mask in WIDTH_MASKS):
        for pair in pairs:
            names = [x.case_name(mask, is_backward=direction == "bwd") for x in pair]
            found = runs.measured(f"{direction}_ms", *(((name,), "ours") for name in names))
            figure = median(ms / most for ms, most in found.values()) if found else None
            remark = _remark(f"time / {pair[1].label}", _of_runs(found))
            yield Bar(names[0], figure, 1.0, most=True, remark=remark)


CUDNN_GRID = [(width, size) for width in cudnn_cases.WIDTHS for size in cudnn_cases.SIZES]


def cudnn_bars(runs: Runs, direction: str) -> Iterator[Bar]:
    """Ours / cudnn.flex_attention: each case, and the masks of one size together."""
    is_backward, bar = direction == "bwd", CUDNN_BARS[direction]

    def of_cases(names: Sequence[str]) -> list[Bar]:
        return [_compared(runs, name, direction, bar, ("cudnn_flex",)) for name in names]

    for width, size in CUDNN_GRID:
        found = of_cases(cudnn_cases.compared_names(width, size, is_backward=is_backward))
        yield from found
        known = sum(each.figure is not None for each in found)
        remark = f"geometric mean of {known} of {len(found)} masks"
        name = f"{'bwd-' if is_backward else ''}cudnn mean {width.label} {size}"
        yield Bar(name, _mean(each.figure for each in found), bar, remark=remark)
    yield from of_cases(cudnn_cases.other_names(is_backward=is_backward))


def cudnn_ratios(found: dict[str, list[Bar]], direction: str) -> str:
    """Markdown: ours / cudnn.flex_attention of each mask and size. found: all bars."""
    is_backward = direction == "bwd"
    way, title = ("bwd-", "backward") if is_backward else ("", "forward")
    figures = {bar.name: bar for bar in (*found[CUDNN_FORWARD], *found[CUDNN_BACKWARD])}

    def cell(name: str) -> str:
        bar = figures[name]
        short = "*" if bar.verdict() == "short" else ""
        return "-" if bar.figure is None else f"{bar.figure:.3f}{short}"

    def name_of(mask: str, *of: Any) -> str:
        return cudnn_cases.case_name(mask, *of, is_backward=is_backward)

    lines = [[mask, *(cell(name_of(mask, *of)) for of in CUDNN_GRID)] for mask in cudnn_cases.MASKS]
    lines.append(["mean", *(cell(f"{way}cudnn mean {w.label} {size}") for w, size in CUDNN_GRID)])
    head = (title, *(f"{width.label}, {size}" for width, size in CUDNN_GRID))
    names = cudnn_cases.other_names(is_backward=is_backward)
    others = ", ".join(f"{name} {cell(name)}" for name in names)
    return f"{markdown(head, lines, 1)}\n\n{others}"


def cudnn_plan_bars(runs: Runs) -> Iterator[Bar]:
    """Microseconds of preparing a mask over those of cuDNN's plan."""
    for name in (name for name in cudnn_cases.table_names() if name.startswith("cudnn-plan-")):
        plan = _ratio(runs, name, "cudnn_flex", None, "us", most=True)
        if rows := runs.latest((name, "ours"), (name, "cudnn_flex")):
            remark = f"us: {rows[0]['us']:.0f} / {rows[1]['us']:.0f}, {plan.remark}"
            yield replace(plan, remark=remark)


def bars(rows: Sequence[Json], targets: Sequence[Json] | None = None) -> dict[str, list[Bar]]:
    """All bars by heading, also those that no row decides. targets: of TARGETS by default."""
    runs = Runs(rows)
    if targets is None:
        targets = json.loads(TARGETS.read_text())["rows"]
    found: dict[str, Iterable[Bar]] = {
        "forward: ours / flash-attn-4": forward_bars(runs),
        "cold start, seconds": cold_bars(rows),
        "masks: ours / flash-attn-4 native causal": mask_bars(runs, targets),
        "callables: ours / flash-attn-4": (
            _ratio(runs, name, peer, bar) for name, (peer, bar) in CALLABLES.items()
        ),
        "metadata at 131072 tokens": prep_bars(runs),
        "linearity": linearity_bars(rows),
        "backward: ours / flash-attn-4": backward_bars(runs),
        "backward of masks: ours / flash-attn-4 native causal": mask_bars(runs, targets, BWD),
        "everyday shapes: ours / flash-attn-4": shape_bars(runs, "fwd"),
        "backward of everyday shapes: ours / flash-attn-4": shape_bars(runs, "bwd"),
        "head dimensions: time of ours / that of a larger one": width_bars(runs),
        CUDNN_FORWARD: cudnn_bars(runs, "fwd"),
        CUDNN_BACKWARD: cudnn_bars(runs, "bwd"),
        "preparing masks: time / cudnn.flex_attention": cudnn_plan_bars(runs),
    }
    return {title: list(group) for title, group in found.items()}


def count_bars(found: dict[str, list[Bar]]) -> str:
    """Markdown: of each group of bars, how many are met, short, not measured and without a bar."""
    kinds = ("met", "short", "not measured", "no bar")
    verdicts = {title: [bar.verdict() for bar in group] for title, group in found.items()}
    lines = [[title, *(str(of.count(kind)) for kind in kinds)] for title, of in verdicts.items()]
    return markdown(("bars", *kinds), lines, 1)


def missed_bars(found: dict[str, list[Bar]]) -> str:
    """Markdown: the bars that are short, but those of `cudnn_ratios`."""
    lines = [
        [title, bar.name, f"{bar.figure:.4g}", f"{'<=' if bar.most else '>='} {bar.bar:.4g}"]
        for title, group in found.items()
        for bar in group
        if bar.verdict() == "short" and title not in (CUDNN_FORWARD, CUDNN_BACKWARD)
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
        "Masks beside cuDNN": "\n\n".join(
            (CUDNN_SAYS, *(cudnn_ratios(found, direction) for direction in DIRECTIONS))
        ),
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
    args = parser.parse_args(argv)
    rows = read_rows(args.rows)
    if args.write:
        TABLES_PAGE.write_text(tables_page(rows))
        return 0
    lines = [format_table(rows), *summary(rows)]
    if args.bars:
        lines = [
            x for title, of in bars(rows).items() for x in (title, *(f"  {b.line()}" for b in of))
        ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
