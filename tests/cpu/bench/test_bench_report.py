"""Rows: their file, the bars that they are held to, and the pages that show them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from small_cases import row

import bench
from bench import DETERMINISTIC, flops, plot, report, sweep, tables
from bench.cases import CASES
from bench.everyday import SHAPES
from bench.rows import HEAD, RESULTS, append_row, read_rows, row_line

ROWS = [
    row("old", "mask-d128-8k-causal", "ours", 600),
    row("old", "mask-d128-8k-causal", "fa4", 500),
    row("old", "mask-d128-8k-causal", "cudnn", 400),
    row("old", "mask-d128-8k-document", "ours", 450),
    row("new", "mask-d128-8k-causal", "ours", 660),
    row("new", "mask-d128-8k-causal", "ours", 10, "single"),
    row("new", "mask-d128-8k-causal", "fa4", 600),
    row("new", "mask-d128-8k-document", "flex", 300),
    row("new", "bwd-mask-d128-8k-causal", "ours", 550),
    row("new", "bwd-mask-d128-8k-document", "ours", 520),
    row("new", "bwd-mask-d128-8k-document", "flex", 260),
    row("new", "d128-causal-8k", "ours", 1),
]


# -- the file -------------------------------------------------------------------------------------


def test_a_file_gives_the_rows_back(tmp_path: Path) -> None:
    """Two runs append in turns, a head changes back, and a row of its own wins over the head."""
    path = tmp_path / "rows.jsonl"
    given = [each for pair in zip(ROWS[:4], ROWS[4:8], strict=True) for each in pair]
    given += [ROWS[0] | {"commit": "another"}, ROWS[0], ROWS[0]]
    for each in given:
        append_row(path, each)
    assert read_rows(path) == given
    lines = path.read_text().splitlines()
    heads = [line for line in lines if '"kind"' not in line]
    assert len(heads) == 4 and len(lines) == len(given) + len(heads)
    own = ROWS[1] | {"commit": "its own"}
    with open(path, "a") as file:
        file.write(row_line(own))
    assert read_rows(path) == [*given, own] and {*HEAD} <= own.keys()


# -- tables ---------------------------------------------------------------------------------------


def cells(text: str) -> dict[tuple[str, ...], list[str]]:
    """Lines of a table by their first two cells."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {(line[0].strip(), line[1].strip()): [x.strip() for x in line[2:]] for line in lines}


def test_a_total_is_of_one_run() -> None:
    found = cells(tables.paper_tables(ROWS))
    forward = flops.attention_flops(CASES["mask-d128-8k-causal"]) / 1e12
    ms = [forward / 660 * 1e3, 2.5 * forward / 550 * 1e3]
    line = found["causal", "flash_mask_cute"]
    assert line[:3] == [f"{ms[0]:.2f}", f"{ms[1]:.2f}", f"{sum(ms):.2f}"]
    assert line[6:] == ["660.0", "550.0", f"{3.5 * forward / sum(ms) * 1e3:.1f}", "0.49", "a a"]
    # a peer that the run of ours does not have comes from another run, and says so
    assert found["causal", "cuDNN"][6:] == ["400.0", "-", "-", "0.49", "b -"]
    assert found["document", "flash_mask_cute"][6:] == ["450.0", "520.0", "-", "0.74", "b a"]
    # ours of the old run is held against that run's causal figure
    ratios = cells(tables.headline(ROWS))
    assert {*ratios} >= {("causal", "660 (1.10)"), ("document", "450 (0.90)"), ("full", "-")}


def test_means_of_the_headline() -> None:
    """Geometric, over the masks that have a figure: forward 660 and 450, ratios 1.10 and 0.90."""
    found = cells(tables.headline_means(ROWS))
    (means,) = (key for key in found if key[0] == "twelve masks")
    shown = [x for line in cells(tables.headline(ROWS)) for x in line[1:] if x != "-"]
    rates = [float(x.split()[0]) for x in shown if x.endswith(")")]
    ratios = [float(x.split("(")[1][:-1]) for x in shown if x.endswith(")")]
    assert len(rates) == 2
    rate, ratio = (math.exp(sum(map(math.log, x)) / 2) for x in (rates, ratios))
    assert means[1] == f"{rate:.0f} ({ratio:.2f})"


# -- bars -----------------------------------------------------------------------------------------

SHAPE, SMALL_GRID = "shape-llama3-8b-b2-n8192", "shape-gpt2-b8-n1024"


def made_up(run: str, name: str, variant: str = "loop", **ms: float) -> list[bench.Json]:
    head = {"run": run, "commit": "abc", "gpu": "a GPU", "versions": {"torch": "2"}}
    return [head | bench.row_of(CASES[name], p, variant, of, ()) for p, of in ms.items()]


def bars(*rows: bench.Json, targets: tuple[bench.Json, ...] = ()) -> dict[str, report.Bar]:
    return {bar.name: bar for group in report.bars(rows, targets).values() for bar in group}


TARGETS: tuple[bench.Json, ...] = (
    {"d": 128, "n": 8192, "mask": "document", "fwd_rel": 0.8, "bwd_rel": 0.9},
    {"d": 128, "n": 8192, "mask": "share_question", "fwd_rel": 0.6, "bwd_rel": 0.75},
    {"d": 128, "n": 8192, "mask": "prefix_lm_causal", "fwd_rel": 1.0, "bwd_rel": 1.0},
    {"d": 64, "n": 8192, "mask": "document", "fwd_rel": 0.8},
)


def test_bars_of_masks_and_callables() -> None:
    rates = {
        "mask-d128-8k-causal": {"fa4": 600},
        "d128-full-8k": {"ours": 650},
        "mask-d128-8k-document": {"ours": 600},
        "mask-d128-8k-share_question": {"ours": 380},
        "mask-d128-8k-prefix_lm_causal": {"ours": 620},
        "mod-d64-8k-alibi": {"ours": 550, "fa4": 500},
        "d64-full-8k": {"ours": 500, "fa4": 500},
        "bwd-d128-causal-8k": {"fa4": 560},
        "bwd-mask-d128-8k-full": {"ours": 600},
        "bwd-mask-d128-8k-document": {"ours": 540},
        "bwd-mask-d128-8k-share_question": {"ours": 460},
        "bwd-mask-d128-8k-prefix_lm_causal": {"ours": 575},
        "bwd-mod-d128-8k-random_eviction": {"ours": 500, "fa4_mask_mod": 400},
        "bwd-det-d128-8k-causal": {"ours": 550, DETERMINISTIC: 500},
        "bwd-det-d128-8k-document": {"ours": 500, DETERMINISTIC: 400},
    }
    rows = [row("a", name, p, rate) for name, of in rates.items() for p, rate in of.items()]
    # the causal figure of another run does not count; without a level there is no bar
    rows += [row("b", "mask-d64-8k-document", "ours", 500)]
    rows += [row("c", "bwd-mask-d64-8k-document", "ours", 400)]
    rows += [row("c", "bwd-d64-causal-8k", "fa4", 500)]
    found = bars(*rows, targets=TARGETS)
    means = {"": (600 / 600 / 0.8 * 380 / 600 / 0.6) ** 0.5, "bwd-": 460 / 560 / 0.75}
    for name, figure, bar, verdict in (
        ("mask-d128-8k-document", 1.0, 0.864, "met"),
        ("mask-d128-8k-share_question", 0.633, 0.648, "short"),
        # 95 % of our own full attention is less than 1.08 r
        ("mask-d128-8k-prefix_lm_causal", 1.033, 0.95 * 650 / 600, "met"),
        ("mask-d64-8k-document", None, 0.92, "not measured"),
        ("mask mean d128", means[""], 1.2, "short"),
        ("mod-d64-8k-alibi", 1.1, 1.1, "met"),
        ("d64-full-8k", 1.0, 1.03, "short"),
        ("bwd-mask-d128-8k-document", 540 / 560, 0.954, "met"),
        ("bwd-mask-d128-8k-share_question", 460 / 560, 0.795, "met"),
        ("bwd-mask-d128-8k-prefix_lm_causal", 575 / 560, 0.95 * 600 / 560, "met"),
        ("bwd-mask-d64-8k-document", 0.8, None, "no bar"),
        ("bwd-mask mean all", means["bwd-"], 1.15, "short"),
        ("bwd-mod-d128-8k-random_eviction", 1.25, 1.8, "short"),
        ("bwd-det-d128-8k-causal", 1.1, 1.2, "met"),
        ("bwd-det-d128-8k-document", 1.25, 1.2, "short"),
    ):
        expected = [x if x is None else pytest.approx(x, abs=2e-3) for x in (figure, bar)]
        assert [found[name].figure, found[name].bar] == expected, name
        assert found[name].verdict() == verdict, name
    named = {*report.FORWARD, *report.CALLABLES, *report.BACKWARD, *report.BACKWARD_CALLABLES}
    assert named | {*report.DETERMINISTIC_SHARE} <= {*CASES} & found.keys()


def test_bars_of_shapes() -> None:
    rows = made_up("a", SHAPE, ours=1.0, fa4=1.2, cudnn=0.9)
    assert bars(*rows)[SHAPE].figure == pytest.approx(1.2)
    # without flash-attn-4 in the run nothing tells that it refused
    only = made_up("a", SHAPE, ours=1.0, cudnn=0.9)
    assert bars(*only)[SHAPE].verdict() == "not measured"
    refused = bars(*only, *made_up("a", "shape-flux-b1-n4608", ours=1.0, fa4=1.0))
    bar, mean = refused[SHAPE], refused["shape mean"]
    assert (bar.figure, bar.verdict()) == (pytest.approx(0.9), "short")
    assert "against cuDNN" in bar.remark
    assert mean.figure is None and "2 of 41" in mean.remark
    every = [each for s in SHAPES for each in made_up("a", s.case_name(), ours=1.0, fa4=1.16)]
    assert bars(*every)["shape mean"].verdict() == "met"
    # few are held to less
    by_name = {shape.name: shape for shape in SHAPES}
    few = [by_name[x] for x in ("flux b1 n4608", "gemma3-4b b1 n8192", "llama3-8b b2 n8192")]
    assert [report.shape_bar(shape, "bwd") for shape in few] == [0.97, 1, 1]
    assert [report.shape_bar(shape, "fwd") for shape in few] == [1, 0.97, 1]


def test_runs_of_one_commit_decide_together() -> None:
    name, long = "d128-causal-8k", "mask-d128-8k-causal"

    def of(run: str, rate: float, commit: str = "new", name: str = name) -> list[bench.Json]:
        pairs = (("ours", rate), ("fa4", 100))
        return [row(run, name, peer, x, commit=commit) for peer, x in pairs]

    runs = [of("0", 90), of("1", 120), of("2", 130)]
    bar = bars(*of("old", 500, "old"), *runs[0], *runs[1], *runs[2])[name]
    assert bar.figure == pytest.approx(1.2) and bar.remark == "median of 3 runs, 2 the last"
    # a commit with changes on top of it may be any code
    bar = bars(*of("0", 90, "new+"), *of("1", 120, "new+"))[name]
    assert bar.figure == pytest.approx(1.2) and bar.remark == "run 1"
    # the last commit that has all that a bar needs
    assert bars(*runs[0], *runs[1], row("3", name, "ours", 10))[name].figure == pytest.approx(1.05)
    # names of one shape count together
    assert bars(*of("0", 130), *of("0", 100, name=long))[long].figure == pytest.approx(1.15)


def synthetic_sweep(noise: float) -> list[bench.Json]:
    """Rows of 2 + 98 (1 - sparsity) ms, each off by `noise` one way or the other."""
    base = replace(CASES["sweep-32k-document"], n=4096, draw=None)
    rows = [bench.row_of(sweep.dense_case(base), "ours", "sweep", 100.0, ())]
    for i, case in enumerate(sweep.draw_cases(base)):
        ms = 2.0 + 98.0 * (1 - flops.sparsity(case)) + noise * (-1) ** i
        rows.append(bench.row_of(case, "ours", "sweep", ms, ()))
    return [{"run": "a"} | each for each in rows]


def test_linearity() -> None:
    (found,) = sweep.sweeps(synthetic_sweep(0.0))
    assert found.r_squared() == pytest.approx(1.0, abs=1e-5)
    assert found.intercept_share() == pytest.approx(0.02, abs=1e-3)
    (noisy,) = sweep.sweeps(synthetic_sweep(10.0))
    assert noisy.r_squared() == pytest.approx(1 - 100 / noisy.ms.var(), abs=0.02)
    held = bars(*synthetic_sweep(0.0))
    assert held["sweep document R^2"].verdict() == "met"
    assert held["sweep document intercept / dense"].verdict() == "met"


# -- pages ----------------------------------------------------------------------------------------

COMMITTED = read_rows(RESULTS)


@pytest.mark.parametrize("page", plot.PAGES)
def test_pages_say_what_the_rows_say(page: str) -> None:
    text = (bench.ROOT / page).read_text()
    assert plot.fill(page, text, COMMITTED) == text != plot.fill(page, text, [])
    with pytest.raises(ValueError, match="no markers for"):
        plot.fill(page, text.replace("<!-- end of", "<!-- gone"), COMMITTED)


def test_tables_say_what_the_rows_say() -> None:
    assert report.TABLES_PAGE.read_text() == report.tables_page(COMMITTED)
