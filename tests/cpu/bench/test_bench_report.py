"""Rows: their file, and as tables."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

import bench
from bench import flops, report, tables
from bench.cases import CASES
from bench.rows import HEAD, append_row, read_rows


def row(run: str, name: str, peer: str, rate: float, variant: str = "loop") -> bench.Json:
    """A row whose figure is `rate` TFLOP/s."""
    case = CASES[name]
    milliseconds = flops.attention_flops(case) / rate / 1e9
    known = {"run": run, "date": "today", "gpu": "a GPU", "commit": f"of {run}"}
    known |= {"versions": {"torch": "2"}}
    return known | bench.row_of(case, peer, variant, milliseconds, ())


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


def test_a_file_gives_the_rows_back(tmp_path: Path) -> None:
    """Runs that append in turns, and one whose head changes and changes back."""
    path = tmp_path / "rows.jsonl"
    given = [entry for pair in zip(ROWS[:4], ROWS[4:8], strict=True) for entry in pair]
    given += [ROWS[0] | {"commit": "another"}, ROWS[0], ROWS[0]]
    for entry in given:
        append_row(path, entry)
    assert read_rows(path) == given
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    heads = [line for line in lines if "kind" not in line]
    assert [(head["run"], head["commit"]) for head in heads] == [
        ("old", "of old"),
        ("new", "of new"),
        ("old", "another"),
        ("old", "of old"),
    ]
    assert all({*head} == {*HEAD} for head in heads) and len(lines) == len(given) + len(heads)
    assert all({*line} & {*HEAD} == {"run"} for line in lines if "kind" in line)
    compact = (json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    assert path.read_text() == "".join(compact)


def test_a_row_with_a_head_of_its_own_needs_no_other(tmp_path: Path) -> None:
    """Rows were once written so; what stands in a row wins over the head."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in ROWS))
    assert read_rows(path) == ROWS
    append_row(path, ROWS[0])
    own = ROWS[1] | {"commit": "its own"}
    with open(path, "a") as file:
        file.write(json.dumps(own))
    assert read_rows(path) == [*ROWS, ROWS[0], own]


def test_an_archive_is_read_before_its_file(tmp_path: Path) -> None:
    """Two runs archived one after the other, each a stream of its own, and a third in the file."""
    path, archive = tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.xz"
    for row in ROWS[:2]:
        append_row(path, row)
        with open(archive, "ab") as file:
            file.write(lzma.compress(path.read_bytes()))
        path.unlink()
    assert read_rows(path) == ROWS[:2]
    append_row(path, ROWS[2])
    assert read_rows(path) == ROWS[:3]
    with pytest.raises(FileNotFoundError):
        read_rows(tmp_path / "other.jsonl")


def test_a_row_before_its_head_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_row(path, ROWS[0])
    append_row(path, ROWS[4])
    *others, head, late = path.read_text().splitlines()
    path.write_text("\n".join((*others, late, head)))
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 3: .* run 'new' .* date, gpu, commit"):
        read_rows(path)
    with pytest.raises(KeyError, match="gpu"):
        append_row(path, {"run": "new", "date": "today", "kind": "attention"})


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_tables_of_the_paper() -> None:
    text = tables.paper_tables(ROWS)
    assert text.count("###") == 1 and text.startswith("### d=128, 8K tokens\n")
    header, rule, *lines = cells(text)
    assert header == list(tables.COLUMNS) and set("".join(rule)) == {"-", ":"}
    forward = flops.attention_flops(CASES["mask-d128-8k-causal"]) / 1e12
    ms = [forward / 660 * 1e3, 2.5 * forward / 550 * 1e3]
    assert lines[0] == [
        *("causal", "flash_mask_cute"),
        *(f"{ms[0]:.2f}", f"{ms[1]:.2f}", f"{sum(ms):.2f}"),
        *(f"{forward:.2f}", f"{2.5 * forward:.2f}", f"{3.5 * forward:.2f}"),
        *("660.0", "550.0", f"{3.5 * forward / sum(ms) * 1e3:.1f}", "0.49", "a a"),
    ]
    by_method = {(line[0], line[1]): line for line in lines}
    assert list(by_method) == [
        ("causal", "flash_mask_cute"),
        ("causal", "flash-attn-4"),
        ("causal", "cuDNN"),
        ("document", "flash_mask_cute"),
        ("document", "FlexAttention"),
    ]
    # a peer that the run of ours does not have comes from another run, and says so
    assert by_method["causal", "cuDNN"][8:] == ["400.0", "-", "-", "0.49", "b -"]
    # a total of two runs is none
    assert by_method["document", "flash_mask_cute"][8:] == ["450.0", "520.0", "-", "0.74", "b a"]
    assert by_method["document", "FlexAttention"][12] == "a a"
    assert "- a: run new, commit of new, a GPU, torch 2\n- b: run old" in text
    assert tables.paper_tables([]) == ""


def test_headline_is_relative_to_causal_attention_of_the_same_run() -> None:
    header, _, *lines = cells(tables.headline(ROWS))
    assert header[:2] == ["mask", "forward 8K"] and len(lines) == 12
    found = {line[0]: line for line in lines}
    assert found["causal"] == ["causal", "660 (1.10)", "-", "-", "550", "-", "-"]
    # ours of the old run is held against that run's causal figure
    assert found["document"][1] == "450 (0.90)"
    assert found["full"][1:] == ["-"] * 6
    assert cells(tables.headline(ROWS, 64))[2][1:] == ["-"] * 6


def test_what_stands_in_one_picture_is_of_one_run() -> None:
    figures = tables.Figures(ROWS)
    assert list(figures.together("mask-d128-8k-causal")) == ["ours", "fa4"]
    assert list(figures.of("mask-d128-8k-causal")) == ["ours", "fa4", "cudnn"]
    assert figures.of("mask-d64-8k-causal") == {}


def test_letters_go_on_after_z() -> None:
    letters = tables.Letters()
    names = [letters.of(row(str(i), "mask-d128-8k-causal", "ours", 1)) for i in range(28)]
    assert names[:2] + names[25:] == ["a", "b", "z", "aa", "ab"]
    assert letters.legend()[26].startswith("aa: run 26,")


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--table", "paper"]) == 0
    assert capsys.readouterr().out.count("| full ") >= 6
    with pytest.raises(SystemExit):
        report.main(["--table", "paper", "--bars"])


def ratios(*rows: bench.Json) -> dict[str, report.Bar]:
    figures = report.Figures(rows)
    targets = [{"d": 128, "n": 8192, "mask": "causal", "fwd_rel": 1.0}]
    found = [*report.forward_bars(figures), *report.mask_bars(figures, targets)]
    return {bar.name: bar for bar in found}


def of_commit(commit: str, run: str, name: str, *rates: float) -> list[bench.Json]:
    """Ours and flash-attn-4's."""
    pairs = zip(("ours", "fa4"), rates, strict=True)
    return [row(run, name, peer, rate) | {"commit": commit} for peer, rate in pairs]


def test_runs_of_one_commit_decide_together() -> None:
    name = "d128-full-8k"
    runs = [of_commit("new", str(i), name, ours, 100) for i, ours in enumerate((90, 120, 130))]
    old = of_commit("old", "old", name, 500, 100)
    bar = ratios(*old, *runs[0], *runs[1], *runs[2])[name]
    assert bar.figure == pytest.approx(1.2) and bar.remark == "median of 3 runs, 2 the last"
    # a commit with changes on top of it may be any code
    changed = [of_commit("new+", str(i), name, ours, 100) for i, ours in enumerate((90, 120, 130))]
    bar = ratios(*changed[0], *changed[1], *changed[2])[name]
    assert bar.figure == pytest.approx(1.3) and bar.remark == "run 2"
    # the last commit that has all that a bar needs
    bar = ratios(*runs[0], *runs[1], row("3", name, "ours", 10))[name]
    assert bar.figure == pytest.approx(1.05) and bar.remark == "median of 2 runs, 1 the last"
    assert ratios()[name].verdict() == "not measured"


def test_names_of_one_shape_count_together() -> None:
    short, long = "d128-causal-8k", "mask-d128-8k-causal"
    rows = [*of_commit("c", "r", short, 130, 100), *of_commit("c", "r", long, 100, 100)]
    assert ratios(*rows)[long].figure == pytest.approx(1.15)
    assert ratios(*rows[2:])[long].figure == pytest.approx(1.0)
    # 95 % of full attention is less than 1.08 times the best peer
    full = row("r", "mask-d128-8k-full", "ours", 100) | {"commit": "c"}
    bar = ratios(*rows, full)[long]
    assert bar.bar == pytest.approx(0.95) and "115% of full" in bar.remark


def test_figures_without_a_bar_stand_where_there_are_rows() -> None:
    def of_kind(name: str, peer: str, variant: str, figure: bench.Json) -> bench.Json:
        made = bench.row_of(CASES[name], peer, variant, None, ())
        return {"run": "r", "commit": "c"} | made | figure

    document, causal = "memory-bwd-8k-causal_document", "memory-bwd-128k-causal"
    rows = [
        of_kind("host-128-train", "ours", "warm", {"us": 60.0}),
        of_kind("host-128-train", "fa4", "warm", {"us": 240.0}),
        of_kind(document, "ours", "peak", {"bytes": 4 * 8192 * 4096}),
        of_kind(causal, "ours", "peak", {"bytes": 3 * 131072 * 4096}),
        of_kind(causal, "fa4", "peak", {"bytes": 5 * 131072 * 4096}),
    ]
    found = {bar.name: bar for bar in report.backward_bars(report.Figures(rows))}
    expected = {"host-128-train": 0.25, document: 4.0, causal: 3.0}
    assert {name: found[name].figure for name in expected} == expected
    assert {found[name].verdict() for name in expected} == {"no bar"}
    assert found[document].remark == "bytes / element of q, run r"
    assert found[causal].remark == "bytes / element of q, flash-attn-4 5, run r"
    assert found["host-128-train"].remark == "host time, run r"
    assert not {*expected} & {bar.name for bar in report.backward_bars(report.Figures([]))}


def test_bars_of_a_cold_start_are_of_the_latest_run() -> None:
    seconds = {"torch": 2.0, "import": 2.9, "first_call": 4.1, "first_call_cached": 0.5}

    def of_run(run: str, peer: str, factor: float) -> list[bench.Json]:
        return [
            {"run": run, "kind": "cold", "peer": peer, "deterministic": False, "variant": variant}
            | {"us": 1e6 * value * factor}
            for variant, value in seconds.items()
        ]

    rows = [*of_run("a", "ours", 0.1), *of_run("b", "ours", 1.0), *of_run("b", "fa4", 9.0)]
    found = list(report.cold_bars(rows))
    assert [bar.figure for bar in found] == pytest.approx([2.9, 4.1, 0.5])
    assert [bar.verdict() for bar in found] == ["met", "short", "met"]
    assert all("run b" in bar.remark for bar in found)
    assert {bar.verdict() for bar in report.cold_bars([])} == {"not measured"}
