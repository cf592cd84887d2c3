"""Sweeps over sparsities, how linear they are, and the bars that rows are held to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_cases import rate_row

import bench
from bench import flops, linearity, report, sweep
from bench.cases import CASES
from bench.rows import append_row


def test_sweeps_cover_the_sparsities() -> None:
    for mask, least in (("causal_document", 0.5), ("share_question", 0.5), ("document", 0.0)):
        base = replace(CASES[f"sweep-32k-{mask}"], n=4096, draw=None)
        drawn = sweep.draw_cases(base)
        found = [flops.sparsity(case) for case in drawn]
        assert len(drawn) >= 40 and len(set(drawn)) == len(drawn)
        assert min(found) < least + 0.1 and max(found) > 0.8
        assert [case.name for case in drawn[:2]] == [f"sweep-32k-{mask}#0", f"sweep-32k-{mask}#1"]
        assert flops.sparsity(sweep.dense_case(base)) == 0.0


def synthetic_sweep(noise: float) -> list[bench.Json]:
    """Rows of 2 + 98 (1 - sparsity) ms, each off by `noise` one way or the other."""
    base = replace(CASES["sweep-32k-document"], n=4096, draw=None)
    rows = [bench.row_of(sweep.dense_case(base), "ours", "sweep", 100.0, ())]
    for i, case in enumerate(sweep.draw_cases(base)):
        ms = 2.0 + 98.0 * (1 - flops.sparsity(case)) + noise * (-1) ** i
        rows.append(bench.row_of(case, "ours", "sweep", ms, ()))
    return [{"run": "a"} | row for row in rows]


def test_linearity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = linearity.sweeps(synthetic_sweep(0.0))
    assert found.r_squared() == pytest.approx(1.0, abs=1e-5)
    assert found.intercept_share() == pytest.approx(0.02, abs=1e-3)
    (noisy,) = linearity.sweeps(synthetic_sweep(10.0))
    assert noisy.r_squared() == pytest.approx(1 - 100 / noisy.ms.var(), abs=0.02)
    path = tmp_path / "rows.jsonl"
    known = {"date": "today", "gpu": "a GPU", "commit": "abc", "versions": {}}
    for row in synthetic_sweep(0.0):
        append_row(path, known | row)
    assert linearity.main([str(path)]) == 0
    assert "R^2 1.0000, intercept 2.0% of the dense 100.00 ms" in capsys.readouterr().out
    assert not bench.format_table(synthetic_sweep(0.0))


def test_linearity_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    linearity.draw(linearity.sweeps(synthetic_sweep(1.0)), str(tmp_path / "fig.svg"))
    assert (tmp_path / "fig.svg").read_text().count("<svg") == 1


def test_bars() -> None:
    targets = [
        {"d": 128, "n": 8192, "mask": "document", "fwd_rel": 0.8},
        {"d": 128, "n": 8192, "mask": "share_question", "fwd_rel": 0.6},
        {"d": 128, "n": 8192, "mask": "prefix_lm_causal", "fwd_rel": 1.0},
        {"d": 64, "n": 8192, "mask": "document", "fwd_rel": 0.8},
    ]
    rows = [
        rate_row("a", "mask-d128-8k-causal", "fa4", 600),
        rate_row("a", "d128-full-8k", "ours", 650),
        rate_row("a", "mask-d128-8k-document", "ours", 600),
        rate_row("a", "mask-d128-8k-share_question", "ours", 380),
        rate_row("a", "mask-d128-8k-prefix_lm_causal", "ours", 620),
        rate_row("b", "mask-d64-8k-document", "ours", 500),
        rate_row("c", "mod-d64-8k-alibi", "ours", 550),
        rate_row("c", "mod-d64-8k-alibi", "fa4", 500),
        rate_row("c", "d64-full-8k", "ours", 500),
        rate_row("c", "d64-full-8k", "fa4", 500),
        {"run": "d"} | bench.row_of(CASES["meta-128k-document"], "ours", "wall", 99.0, ()),
        {"run": "d"} | bench.row_of(CASES["meta-128k-document"], "flex", "wall", None, ("failed",)),
        *synthetic_sweep(0.0),
    ]
    rows[-1 - len(synthetic_sweep(0.0)) - 1] |= {"bytes": 3_000_000, "launches": 5}
    found = {bar.name: bar for bars in report.bars(rows, targets).values() for bar in bars}

    def of(name: str) -> tuple[float | None, float | None, str]:
        return found[name].figure, found[name].bar, found[name].verdict()

    approx = pytest.approx
    assert of("mask-d128-8k-document") == (approx(1.0, abs=1e-3), approx(0.864), "met")
    assert of("mask-d128-8k-share_question") == (approx(0.633, abs=1e-3), approx(0.648), "short")
    # 95 % of our own full attention is less than 1.08 r
    near_full = approx(0.95 * 650 / 600, abs=1e-3)
    assert of("mask-d128-8k-prefix_lm_causal") == (approx(1.033, abs=1e-3), near_full, "met")
    # the causal figure of another run does not count
    assert of("mask-d64-8k-document") == (None, approx(0.92), "not measured")
    mean = (1 / 0.8 * 380 / 600 / 0.6) ** 0.5
    assert of("mask mean d128") == (approx(mean, abs=1e-3), 1.2, "short")
    assert of("mask mean d64")[2] == "not measured"
    assert of("mod-d64-8k-alibi") == (approx(1.1, abs=1e-3), 1.1, "met")
    assert of("d64-full-8k") == (approx(1.0, abs=1e-3), 1.03, "short")
    assert of("d128-full-8k")[2] == "not measured"
    verdicts = [of(f"meta-128k-document {key}")[2] for key in ("us", "launches", "bytes")]
    assert verdicts == ["met", "short", "met"]
    assert of("sweep document R^2")[2] == of("sweep document intercept / dense")[2] == "met"
    assert all(bar.line().startswith(bar.name) for bar in found.values())
    assert found.keys() >= report.FORWARD.keys() | report.CALLABLES.keys()
    assert set(report.CALLABLES) | set(report.FORWARD) <= set(CASES)


def test_report_reads_the_committed_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--bars"]) == 0
    bars = capsys.readouterr().out
    for prefix in ("  mask-d", "  bwd-mask-d"):
        assert sum(line.startswith(prefix) for line in bars.splitlines()) == 72
    assert report.main(["--run", "no such run"]) == 0
    assert capsys.readouterr().out == "\n"
