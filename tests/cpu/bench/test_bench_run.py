"""Runs: who is timed when, what is measured again, what goes on after a failure."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_cases import masked, row, without_a_gpu

import bench
from bench import DETERMINISTIC, cases, masks, measure, peers, run, timing
from bench.cases import CASES, BenchCase
from bench.rows import read_rows

NOWHERE = measure.Options(
    (), ("ours", "fa4"), 5, 0, 0.15, 0.0, 9.0, 9.0, 3, "", "abc", "", table="paper"
)


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: SimpleNamespace())


# -- time -----------------------------------------------------------------------------------------


# -- one case -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["ours", DETERMINISTIC])
def test_a_wrong_backward_makes_no_row(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    case = masked("document", 200, kind="backward", deterministic=True)
    without_a_gpu(monkeypatch)
    options = replace(NOWHERE, peers=("ours", DETERMINISTIC, "cudnn"), table="")
    calls, _ = measure.admit(case, options, measure.Inputs())
    assert list(calls) == ["ours", DETERMINISTIC]
    prepare = peers.CutePeer.prepare

    def damaged(peer: peers.CutePeer, case: BenchCase, tensors: cases.CaseTensors) -> peers.Call:
        call = prepare(peer, case, tensors)
        if peer.name != wrong or case.kind != "backward":
            return call
        return lambda: [x * (1 + 0.1 * torch.rand(())) for x in call()]

    monkeypatch.setattr(peers.CutePeer, "prepare", damaged)
    with pytest.raises(measure.Refused, match=f"{wrong}: ") as refused:
        measure.admit(case, options, measure.Inputs())
    assert ("two calls differ" in str(refused.value)) == (wrong == DETERMINISTIC)


# -- a run ----------------------------------------------------------------------------------------


def test_a_second_run_measures_what_is_left_and_its_references(all_installed: None) -> None:
    group = [f"{way}mask-d64-8k-{m}" for m in masks.MASKS for way in ("", "bwd-")]
    done, left = group[:10], group[10:]
    rows = [row("r", name, "ours", 1) for name in done]
    rows += [row("r", name, "fa4", 1) for name in done if name.endswith("-causal")]
    options = replace(NOWHERE, names=tuple(group))
    assert run.unmeasured(group, rows, options) == tuple(left)
    assert run.resume(options, rows).names == (*group[:4], *left)
    # a reference without its peer is not done; nor is anything of another commit, or of no commit
    half = [r for r in rows if r["peer"] != "fa4"]
    assert set(run.unmeasured(group, half, options)) == {*group[2:4], *left}
    for commit in ("abd", "abc+", "unknown"):
        others = [r | {"commit": commit} for r in rows]
        assert run.unmeasured(group, others, options) == tuple(group)
        if commit != "abd":
            assert run.unmeasured(group, others, replace(options, commit=commit)) == tuple(group)
    finished = run.resume(replace(options, names=tuple(done[1:])), rows)
    assert finished.names == ()
    widths = ["width-full-d96", "bwd-width-full-d96"]
    assert run.references(["width-full-d72"], widths) == ("width-full-d96",)


def test_a_worker_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_a_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(timing, "time_loop", lambda calls, *_: dict.fromkeys(calls, [2.0, 3.0]))
    mask = masked("document", 256)
    given = {"first": mask, "wrong": replace(mask, heads_kv=4), "late": mask}
    given["bwd-first"] = replace(mask, kind="backward")
    for name, case in given.items():
        monkeypatch.setitem(CASES, name, replace(case, name=name))
    prepare, needs = peers.CutePeer.prepare, run.Pace.needs

    def fails(peer: peers.CutePeer, case: BenchCase, tensors: cases.CaseTensors) -> peers.Call:
        if case.name == "wrong":
            raise RuntimeError("no luck")
        return prepare(peer, case, tensors)

    def in_time(self: run.Pace, name: str) -> float:
        return 1e9 if name == "late" else needs(self, name)

    monkeypatch.setattr(peers.CutePeer, "prepare", fails)
    monkeypatch.setattr(run.Pace, "needs", in_time)
    out, report = tmp_path / "rows", tmp_path / "report"
    names = ("first", "wrong", "bwd-first", "late")
    options = replace(NOWHERE, names=names, peers=("ours",), out=str(out), report=str(report))
    told = asdict(replace(options, case_s=100.0, deadline=time.time() + 1e6))
    assert run.work(json.dumps(told)) == 0
    rows = read_rows(out)
    assert [bench.name_of(r) for r in rows] == ["first", "bwd-first"]
    assert [r.get("fwd_ms", r.get("bwd_ms")) for r in rows] == [2.5, 2.5]
    assert {(r["gpu"], r["commit"], r["run"]) for r in rows} == {("a GPU", "abc", "")}
    outcomes = dict(json.loads(line) for line in report.read_text().splitlines())
    ends = (run.DONE, "RuntimeError: no luck", run.DONE, run.SKIPPED)
    assert outcomes == dict(zip(names, ends, strict=True))
