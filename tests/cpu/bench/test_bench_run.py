"""Runs: who is timed when, what is measured again, what goes on after a failure."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_cases import masked, row, small, without_a_gpu

import bench
from bench import DETERMINISTIC, ahead, cases, masks, measure, paper, peers, run, timing
from bench.cases import CASES, BenchCase
from bench.rows import read_rows

NOWHERE = measure.Options(
    (), ("ours", "fa4"), 5, 0, 0.15, 0.0, 9.0, 9.0, 3, "", "abc", "", table="paper"
)


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: SimpleNamespace())


# -- time -----------------------------------------------------------------------------------------


def test_rotation_gives_each_peer_each_place() -> None:
    orders = list(timing.rotations(["a", "b", "c"], 4))
    assert orders == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b"), ("a", "b", "c")]
    assert timing.spread([3.0, 1.0, 2.0]) == 1.0
    assert timing.parse_smi("1665, 688.10\n") == "SM 1665 MHz, 688 W"
    assert timing.parse_smi("1665, [N/A]") == ""


@pytest.mark.parametrize(
    ("call_s", "rounds", "burst_s", "least", "counted"),
    [
        (0.7, 2, 0.1, 3, 5 + 2 * 5),
        (0.7, 2, 0.1, 1, 2 + 2 * 2),
        # three rounds at most where a call is longer than a burst
        (1.25, 9, 0.15, 1, 2 + 3 * 2),
        (0.125, 4, 1.0, 3, 5 + 4 * (8 + 2)),
    ],
)
def test_a_burst_has_a_few_calls_at_least_and_the_forecast_knows(
    monkeypatch: pytest.MonkeyPatch,
    call_s: float,
    rounds: int,
    burst_s: float,
    least: int,
    counted: int,
) -> None:
    clock, calls = without_a_gpu(monkeypatch), []

    def call() -> None:
        clock.now += 1e3 * call_s
        calls.append(call_s)

    found = timing.time_loop({"ours": call}, rounds, burst_s, least)["ours"]
    assert {*found} == {1e3 * call_s} and len(found) == (3 if rounds == 9 else rounds)
    assert len(calls) == counted == run.loop_calls(call_s, rounds, burst_s, least)


def test_a_short_burst_has_ten_calls_behind_a_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("sync"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: said.append("spin"), raising=False)
    monkeypatch.setattr(timing, "burst", lambda call, count, untimed: [count, untimed, call()][0])
    found = timing.time_short({"ours": lambda: said.append("call")}, 2, idle_s=0.0)
    assert found == {"ours": [10, 10]}
    assert said == ["sync", *["call"] * 10, "sync", *["sync", "spin", "call"] * 2]


def test_steps_are_timed_in_turns_and_the_first_round_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    clock: Iterator[int] = iter(range(0, 10**9, 6000))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("sync"))
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: next(clock))
    calls = {"step": lambda: said.append("step"), "replay": lambda: said.append("replay")}
    found = timing.time_steps(calls, rounds=2, count=3)
    assert found == {"step": [2.0, 2.0], "replay": [2.0, 2.0]}
    each = {name: ["sync", name, name, name, "sync"] for name in calls}
    turns = ("step", "replay", "replay", "step", "step", "replay")
    assert said == [word for name in turns for word in each[name]]


def test_pace() -> None:
    expected = run.Pace({"a": 2.0, "b": 4.0, "c": 10.0})
    assert expected.left() == 16.0
    assert expected.needs("a") == run.START_S + 2.0 * run.MARGIN
    expected.done("a", 40.0)  # with the start
    assert expected.needs("b") > 4.0 * run.MARGIN
    expected.done("b", 8.0)
    assert expected.left() == 20.0
    assert expected.needs("c") == 20.0 * run.MARGIN


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


def test_a_row_of_steps_has_the_wall_and_the_device_time(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_gpu(monkeypatch)
    monkeypatch.setattr(timing, "captured", lambda call: call)
    monkeypatch.setattr(timing, "STEP_ROUNDS", 2)
    monkeypatch.setattr(timing, "STEPS", 1)
    case = small("causal", 130, kind="host_step")
    (made,) = measure.measure(case, replace(NOWHERE, table=""), measure.Inputs())
    assert made["us"] > 0 and made["device_us"] > 0 and made["variant"] == "step"
    assert "of the allowed error: dQ" in made["note"]


@pytest.mark.parametrize(
    ("name", "returned", "judged"),
    [
        ("memory-8k-causal_document", 96 * 2 * (128 * 2 + 4), "O"),
        ("memory-bwd-8k-causal_document", 3 * 96 * 2 * 128 * 2, "dQ"),
    ],
)
def test_memory_is_what_a_call_needs_beyond_inputs_and_outputs(
    monkeypatch: pytest.MonkeyPatch, name: str, returned: int, judged: str
) -> None:
    draw = cases.Draw(((40,), (56,)))
    case = replace(CASES[name], n=96, tokens=96, heads=2, heads_kv=2, draw=draw)
    without_a_gpu(monkeypatch)
    peak = [0]
    for function, result in {
        "reset_peak_memory_stats": lambda: peak.__setitem__(0, 0),
        "memory_allocated": lambda: 1000,
        "max_memory_allocated": lambda: peak[0],
    }.items():
        monkeypatch.setattr(torch.cuda, function, result)
    prepare = peers.CutePeer.prepare

    def noted(peer: peers.CutePeer, each: BenchCase, tensors: cases.CaseTensors) -> peers.Call:
        # the forward of a backward is no part of it
        most = 1000 + 777 + returned if each.kind == case.kind else 10**9
        if each.is_backward:
            peak[0] = 10**9
        call = prepare(peer, each, tensors)

        def timed() -> object:
            peak[0] = max(peak[0], most)
            return call()

        return timed

    monkeypatch.setattr(peers.CutePeer, "prepare", noted)
    options = replace(NOWHERE, peers=("cudnn", "ours"), table="")
    (made,) = measure.measure(case, options, measure.Inputs())
    assert (made["peer"], made["variant"], made["bytes"]) == ("ours", "peak", 777)
    assert not {"fwd", "us"} & made.keys() and f"of the allowed error: {judged} " in made["note"]


def test_inputs_are_made_once_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_gpu(monkeypatch)
    inputs = measure.Inputs()
    first = inputs.of(small("full"), 1)
    assert inputs.of(masked("document", 300, tokens=300, kind="backward"), 1) is first
    for other in (small("causal", heads_kv=4), small("causal", 128), small("causal", d_v=32)):
        assert inputs.of(other, 1).q is not first.q
    assert torch.equal(inputs.of(small("full"), 1).q, first.q)
    assert not torch.equal(inputs.of(small("full"), 2).q, first.q)


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


def test_one_job_for_each_kernel(all_installed: None) -> None:
    names = paper.table_names()
    work = ahead.jobs(names, NOWHERE.peers_of)
    # flags: full, causal and the window, by length; intervals: 1, 2 and 2 vectors, and 4, and of
    # these one and one with documents
    assert len(work) == 2 * 2 * (3 * 3 + 6) and {peer for peer, _ in work} == {"ours"}
    assert {ahead.kernel_of("ours", CASES[name]) for name in names} == {
        ahead.kernel_of(peer, CASES[name]) for peer, name in work
    }
    with_flex = ahead.jobs(names, replace(NOWHERE, peers=("ours", "fa4", "flex")).peers_of)
    assert len(with_flex) == len(work) + 48
    hands = ahead.deal(with_flex, 14)
    assert sorted(sum(hands, [])) == sorted(with_flex)
    assert [len({peer for peer, _ in hand}) for hand in hands] == [1] * (14 + 8)


@pytest.mark.parametrize("kind", ["attention", "backward"])
def test_a_job_calls_what_the_bench_calls(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_a_gpu(monkeypatch)
    monkeypatch.setattr(ahead, "make_tensors", measure.make_tensors)
    called: list[BenchCase] = []
    prepare = peers.CutePeer.prepare

    def noted(peer: peers.CutePeer, case: BenchCase, tensors: cases.CaseTensors) -> peers.Call:
        called.append(case)
        return prepare(peer, case, tensors)

    monkeypatch.setattr(peers.CutePeer, "prepare", noted)
    given = masked("document", 256, kind=kind)
    monkeypatch.setitem(ahead.CASES, "small", given)
    ahead.compile_jobs(json.dumps([("ours", "no such case"), ("ours", "small")]))
    assert "no such case not compiled ahead: KeyError" in capsys.readouterr().out
    (case,) = called
    assert (case.batch, case.heads, case.heads_kv, case.kind) == (1, 2, 1, kind)
    assert ahead.kernel_of("ours", case) == ahead.kernel_of("ours", given)


def test_a_late_process_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def sleeper(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        seconds = json.loads(command[-1])[0][1]
        launched.append(start([sys.executable, "-c", f"import time; time.sleep({seconds})"]))
        return launched[-1]

    monkeypatch.setattr(ahead.subprocess, "Popen", sleeper)
    begin = time.monotonic()
    ahead.compile_ahead([[("ours", "0")], [("ours", "60")]], limit_s=2.0)
    assert time.monotonic() - begin < 30
    assert launched[0].returncode == 0 and launched[1].returncode not in (0, None)


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


def test_a_dead_worker_loses_its_case_only() -> None:
    """A new one measures what its cases are compared with."""
    launched = []
    full, causal, one, two = (f"mask-d64-8k-{m}" for m in ("full", "causal", "document", "hstu"))

    def launch(names: tuple[str, ...], attempt: int) -> dict[str, str]:
        launched.append((names, attempt))
        return dict.fromkeys(names, run.DONE) if attempt else {full: run.DONE, one: "died"}

    outcomes = run.supervise([full, one, causal, two], launch)
    assert launched == [((full, one, causal, two), 0), ((full, causal, two), 1)]
    assert outcomes == dict.fromkeys((full, causal, two), run.DONE) | {one: "died"}
    nothing = run.supervise("ab", lambda names, attempt: {})
    assert set(nothing.values()) == {"the worker could not start"}


def test_the_commands_of_the_tables() -> None:
    args = run.parse(["--table", "paper", "--ahead", "0"])
    assert args.names == paper.table_names() and args.peers == ("ours", "fa4")
    assert (args.resume, args.singles, args.burst, args.ahead) == (True, 0, 0.15, 0)
    assert run.parse(["--table", "shapes"]).shorts == 9
    assert run.parse(["--table", "cudnn"]).peers == ("ours", "cudnn_flex")
    assert (run.parse([]).names, run.parse([]).resume) == (tuple(CASES), False)
    for wrong in (["--peers", "ours,fa5"], ["d512*"], ["--table", "paper", "host-128"]):
        with pytest.raises(SystemExit) as stopped:
            run.parse(wrong)
        assert stopped.value.code == 2


def test_listing_imports_neither_torch_nor_cutlass() -> None:
    program = (
        "import sys; from bench.run import main; assert main(['--list']) == 0; "
        "assert not {'torch', 'cutlass'} & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=bench.ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(CASES)
