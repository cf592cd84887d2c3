"""The table of the paper: its cases, what is compiled ahead, what is measured again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
from bench import ahead, cases, masks, measure, pace, paper, peers, run, tables, timing
from bench.cases import CASES, BenchCase, make_tensors
from bench.rows import append_row, read_rows

NOWHERE = measure.Options(
    (), ("ours", "fa4"), 5, 0, 0.15, 0.0, 9.0, 9.0, 3, "", "abc", "", table="paper"
)


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: SimpleNamespace())


def small(mask: str, n: int = 256, **changes: object) -> BenchCase:
    window = n // 16 if mask.endswith("sliding_window") else None
    fields: dict[str, object] = {"d": 64, "d_v": 64, "heads": 4, "heads_kv": 2, "tokens": 2 * n}
    if mask not in cases.NATIVE:
        third = n // 3
        fields |= {"form": "columns", "draw": masks.Draw(((third,), (n - third,)), ((3, 40),))}
    return BenchCase("small", mask, n=n, window=window, **(fields | changes))  # type: ignore[arg-type]


def test_every_cell_of_the_table_is_a_case() -> None:
    names = paper.table_names()
    assert len(names) == len(set(names)) == 12 * 3 * 2 * 2 and set(names) <= set(CASES)
    cells = {(c.mask, c.n, c.d, c.kind) for c in (CASES[name] for name in names)}
    assert len(cells) == 144
    # whole groups first: lengths grow, a backward follows its forward, references lead their group
    lengths = [CASES[name].n for name in names]
    assert lengths == sorted(lengths)
    assert [f"bwd-{name}" for name in names[::2]] == list(names[1::2])
    assert [CASES[name].mask for name in names[:4]] == ["full", "full", "causal", "causal"]
    assert {CASES[name].d for name in names[:24]} == {128}


def test_references_of_the_table_are_measured_once(all_installed: None) -> None:
    asked = replace(NOWHERE, peers=("flex", "fa4", "ours"))
    found = {name: run.supporting(CASES[name], asked) for name in paper.table_names()}
    with_fa4 = [name for name, told in found.items() if "fa4" in told]
    assert len(with_fa4) == 12 and {CASES[name].mask for name in with_fa4} == {"causal"}
    with_flex = [CASES[name] for name, told in found.items() if "flex" in told]
    assert len(with_flex) == 48 and {(c.d, c.n) for c in with_flex} == {(128, 8192), (128, 32768)}
    assert all(told[0] == "ours" for told in found.values())
    everywhere = replace(asked, table="")
    assert everywhere.peers_of(CASES["mask-d128-8k-full"]) == ("ours", "flex", "fa4")


def row(name: str, peer: str, commit: str = "abc") -> bench.Json:
    head = {"run": "r", "date": "today", "gpu": "a GPU", "commit": commit, "versions": {}}
    return head | bench.row_of(CASES[name], peer, "loop", 2.0, ())


def test_a_second_run_measures_what_is_left_and_its_references(all_installed: None) -> None:
    group = [f"{way}mask-d64-8k-{m}" for m in masks.MASKS for way in ("", "bwd-")]
    done, left = group[:10], group[10:]
    rows = [row(name, "ours") for name in done]
    rows += [row(name, "fa4") for name in done if name.endswith("-causal")]
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
    rows[0] = {key: value for key, value in rows[0].items() if key != "fwd"}
    assert run.unmeasured(group, rows, options) == (group[0], *left)
    finished = run.resume(replace(options, names=tuple(done[1:])), rows)
    assert finished.names == ()


def test_a_line_is_of_a_run_with_both_directions_if_the_commit_has_one() -> None:
    name, way_back = "mask-d64-8k-full", "bwd-mask-d64-8k-full"

    def of_run(run: str, commit: str, *names: str) -> list[bench.Json]:
        return [row(n, "ours", commit) | {"run": run} for n in names]

    def runs(*rows: bench.Json) -> list[str]:
        figures = tables.Figures(rows)
        return [figures.of(n)["ours"]["run"] for n in (name, way_back)]

    old, both = of_run("old", "abb", name, way_back), of_run("both", "abc", name, way_back)
    assert runs(*old, *both, *of_run("late", "abc", name)) == ["both", "both"]
    # a later commit is worth more than a total
    assert runs(*old, *both, *of_run("new", "abd", name)) == ["new", "both"]
    assert tables.Figures(of_run("new", "abd", name)).of(way_back) == {}


def test_a_line_is_of_a_run_with_its_reference_if_there_is_one() -> None:
    name, causal = "mask-d64-8k-document", "mask-d64-8k-causal"
    alone = row(name, "ours", "abd") | {"run": "alone"}
    beside = [row(name, "ours") | {"run": "beside"}, row(causal, "fa4") | {"run": "beside"}]
    assert tables.Figures([*beside, alone]).of(name)["ours"]["run"] == "beside"
    assert tables.Figures([beside[0], alone]).of(name)["ours"]["run"] == "alone"


def test_the_command_of_the_table() -> None:
    args = run.parse(["--table", "paper", "--ahead", "0"])
    assert args.names == paper.table_names() and args.peers == ("ours", "fa4")
    assert (args.resume, args.singles, args.burst, args.ahead) == (True, 0, 0.15, 0)
    part = run.parse(["--table", "paper", "*-d64-32k-*", "--no-resume", "--repeats", "0"])
    assert len(part.names) == 24 and not part.resume and part.repeats == 0
    plain = run.parse([])
    assert (plain.names, plain.resume, plain.ahead) == (tuple(CASES), False, 0)
    with pytest.raises(SystemExit):
        run.parse(["--table", "paper", "host-128"])


def test_inputs_are_made_once_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def on_cpu(case: BenchCase, device: str, seed: int) -> cases.CaseTensors:
        made.append(case.mask)
        return make_tensors(case, "cpu", seed)

    monkeypatch.setattr(measure, "make_tensors", on_cpu)
    inputs = measure.Inputs()
    first = inputs.of(small("full"), 1)
    assert inputs.of(small("document", kind="backward"), 1) is first
    for other in (small("causal", heads_kv=4), small("causal", 128), small("causal", d_v=32)):
        assert inputs.of(other, 1).q is not first.q
    again = inputs.of(small("full"), 1)
    assert again is not first and torch.equal(again.q, first.q)
    assert not torch.equal(inputs.of(small("full"), 2).q, first.q)
    assert made == ["full", "causal", "causal", "causal", "full", "full"]


def test_forward_and_backward_share_a_mask_object() -> None:
    mask = small("document").mask_of(256)
    device = torch.device("cpu")
    assert peers.column_mask(mask, device) is peers.column_mask(mask, device)


def test_one_job_for_each_kernel(all_installed: None) -> None:
    names = paper.table_names()
    work = ahead.jobs(names, NOWHERE.peers_of)
    # flags: full, causal and the window, by length; intervals: 1, 2 and 2 vectors, and 4, and of
    # these one and one with documents
    assert len(work) == 2 * 2 * (3 * 3 + 6) and {peer for peer, _ in work} == {"ours"}
    kinds = [CASES[name].kind for _, name in work]
    assert kinds == sorted(kinds, reverse=True)
    keys = {ahead.kernel_of("ours", CASES[name]) for name in names}
    assert keys == {ahead.kernel_of(*(peer, CASES[name])) for peer, name in work}
    with_flex = ahead.jobs(names, replace(NOWHERE, peers=("ours", "fa4", "flex")).peers_of)
    assert len(with_flex) == len(work) + 48
    hands = ahead.deal(with_flex, 14)
    assert sorted(sum(hands, [])) == sorted(with_flex)
    assert [len({peer for peer, _ in hand}) for hand in hands] == [1] * (14 + 8)
    assert ahead.deal(work[:3], 14) == [[job] for job in work[:3]]


@pytest.mark.parametrize("mask", ["causal", "sliding_window", "document"])
@pytest.mark.parametrize("kind", ["attention", "backward"])
def test_a_job_calls_what_the_bench_calls(
    mask: str, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[BenchCase] = []
    prepare = peers.CutePeer.prepare

    def noted(peer: peers.CutePeer, case: BenchCase, tensors: cases.CaseTensors) -> peers.Call:
        called.append(case)
        return prepare(peer, case, tensors)

    monkeypatch.setattr(peers.CutePeer, "prepare", noted)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        ahead, "make_tensors", lambda case, device, seed: make_tensors(case, "cpu", 0)
    )
    monkeypatch.setitem(ahead.CASES, "small", small(mask, kind=kind))
    ahead.compile_jobs(json.dumps([("ours", "no such case"), ("ours", "small")]))
    assert "no such case not compiled ahead: KeyError" in capsys.readouterr().out
    (case,) = called
    assert (case.batch, case.heads, case.heads_kv, case.mask, case.kind) == (1, 2, 1, mask, kind)
    assert ahead.kernel_of("ours", case) == ahead.kernel_of("ours", small(mask, kind=kind))


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


def test_loop_calls_are_those_that_timing_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Event:
        at = 0.0

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(timing, "_events", lambda: (Event(), Event()))
    for call_s, rounds, burst_s, least in (
        (1.25, 5, 0.15, 1),
        (0.125, 4, 1.0, 3),
        (0.5, 5, 0.5, 3),
    ):
        calls = []

        def call(call_s: float = call_s, calls: list[int] = calls) -> None:
            clock[0] += call_s
            calls.append(1)

        timing.time_loop({"ours": call}, rounds, burst_s, least)
        assert len(calls) == pace.loop_calls(call_s, rounds, burst_s, least)


def test_pace() -> None:
    expected = pace.Pace({"a": 2.0, "b": 4.0, "c": 10.0})
    assert expected.left() == 16.0
    assert expected.needs("a") == pace.START_S + 2.0 * pace.MARGIN
    assert expected.bar().endswith("-] 0/3")
    expected.done("a", 40.0)  # with the start
    assert expected.needs("b") > 4.0 * pace.MARGIN
    expected.done("b", 8.0)
    assert expected.left() == 20.0
    assert expected.needs("c") == 20.0 * pace.MARGIN
    assert expected.bar() == f"[{'#' * 11}{'-' * 19}] 2/3"
    quick = pace.Pace({"a": 2.0, "b": 4.0})
    quick.done("a", 1.0)
    assert quick.left() == 2.0 and quick.needs("b") == 4.0 * pace.MARGIN


def test_forecast_of_the_table(all_installed: None) -> None:
    options = replace(NOWHERE, names=paper.table_names())
    expected = run.pace_of(options).expected
    assert 200 < sum(expected.values()) < 500 and max(expected.values()) < 25
    assert expected["bwd-mask-d128-128k-full"] > 2 * expected["mask-d128-128k-full"]
    assert expected["mask-d128-8k-causal"] > 1.5 * expected["mask-d128-8k-full"]  # two peers
    flex = replace(options, peers=("ours", "flex"), names=("mask-d128-8k-full",))
    assert run.pace_of(flex).left() > expected["mask-d128-8k-full"] + pace.PEER_S["flex"]
    assert run.pace_of(replace(options, names=("host-128",))).left() == pace.OTHER_KIND_S


def flex_by_hand(q, k, v, block_mask=None, return_aux=None, **options):  # type: ignore[no-untyped-def]
    """What `flex_attention` computes, in torch."""
    n, group = q.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    scores = q.float() @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    at = torch.arange(n)
    seen = torch.ones(n, n, dtype=torch.bool)
    if block_mask is not None:
        seen = block_mask.mask_mod(0, 0, at[:, None], at[None])
    scores = scores.masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).to(q.dtype)


@pytest.mark.parametrize("mask", ["full", "causal", "document"])
def test_backward_of_flex_attention(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(flex_attention, "flex_attention", flex_by_hand)
    case = small(mask, 200, kind="backward")
    tensors = make_tensors(case, "cpu", 2)
    with pytest.raises(ValueError, match="saved"):
        peers.PEERS["flex"].prepare(case, tensors)
    tensors = peers.save_forward(case, tensors, 2)
    call = peers.PEERS["flex"].prepare(case, tensors)
    judge = measure.gradient_judge(case, tensors, 4)
    for _ in range(2):  # the second call reads the same forward again
        assert judge(peers.PEERS["flex"], call, 2.0).ok
    wrong = peers.PEERS["flex"].prepare(
        replace(case, mask="causal" if mask == "full" else "full", form="native", draw=None),
        tensors,
    )
    assert not judge(peers.PEERS["flex"], wrong, 8.0).ok


@pytest.mark.parametrize("mask", ["causal", "document"])
def test_backward_of_sdpa_by_a_dense_mask(mask: str) -> None:
    case = small(mask, 200, kind="backward")
    tensors = peers.save_forward(case, make_tensors(case, "cpu", 2), 2)
    call = peers.PEERS["sdpa_dense"].prepare(case, tensors)
    judge = measure.gradient_judge(case, tensors, 4)
    for _ in range(2):
        assert judge(peers.PEERS["sdpa_dense"], call, 2.0).ok


@pytest.mark.parametrize("kind", ["attention", "backward"])
def test_flex_attention_is_asked_for_its_backend(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention import flex_attention

    told: list[object] = []

    def asked(*operands, kernel_options=None, return_aux=None, **options):  # type: ignore[no-untyped-def]
        told.append(kernel_options)
        return flex_by_hand(*operands, **options)

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(flex_attention, "flex_attention", asked)
    case = small("document", 200, kind=kind)
    tensors = peers.save_forward(case, make_tensors(case, "cpu", 2), 2)
    for name in ("flex", "flex_flash"):
        peers.PEERS[name].prepare(case, tensors)()
    assert told == [None, {"BACKEND": "FLASH"}]
    assert peers.PEERS["flex_flash"].supports(replace(case, kind="prep"))


def test_a_worker_goes_on_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def on_cpu(case: BenchCase, device: str, seed: int) -> cases.CaseTensors:
        return make_tensors(case, "cpu", seed)

    def time_loop(calls: dict[str, peers.Call], *_: object) -> timing.Samples:
        return {name: [2.0, 3.0, 4.0] for name in calls}

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(measure, "make_tensors", on_cpu)
    monkeypatch.setattr(timing, "time_loop", time_loop)
    names = ("first", "wrong", "bwd-first", "late")
    mask = small("document")
    wrong = small("document", heads_kv=4)
    for name, case in zip(names, (mask, wrong, replace(mask, kind="backward"), mask), strict=True):
        monkeypatch.setitem(CASES, name, replace(case, name=name))
    prepare = peers.CutePeer.prepare

    def fails(peer: peers.CutePeer, case: BenchCase, tensors: cases.CaseTensors) -> peers.Call:
        if case.name == "wrong":
            raise RuntimeError("no luck")
        return prepare(peer, case, tensors)

    monkeypatch.setattr(peers.CutePeer, "prepare", fails)
    out, report = tmp_path / "rows", tmp_path / "report"
    options = replace(
        NOWHERE, names=names, peers=("ours",), out=str(out), report=str(report), case_s=100.0
    )
    needs = pace.Pace.needs
    monkeypatch.setattr(
        pace.Pace, "needs", lambda self, name: 1e9 if name == "late" else needs(self, name)
    )
    told = json.dumps(asdict(replace(options, deadline=time.time() + 1e6)))
    assert run.work(told) == 0
    rows = read_rows(out)
    assert [bench.name_of(r) for r in rows] == ["first", "bwd-first"]
    assert [r.get("fwd_ms", r.get("bwd_ms")) for r in rows] == [3.0, 3.0]
    assert {(r["gpu"], r["commit"], r["run"]) for r in rows} == {("a GPU", "abc", "")}
    outcomes = dict(json.loads(line) for line in report.read_text().splitlines())
    assert outcomes == {
        "first": run.DONE,
        "wrong": "RuntimeError: no luck",
        "bwd-first": run.DONE,
        "late": run.SKIPPED,
    }
    said = capsys.readouterr().out
    assert "] 3/4 bwd-first: done (" in said and "s left)" in said


def test_the_command_compiles_ahead_and_goes_on_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    compiled: list[int] = []
    launched: list[tuple[str, ...]] = []

    def compile_ahead(hands: list[list[ahead.Job]], limit_s: float) -> None:
        compiled.append(len({job for hand in hands for job in hand}))

    def worker(options: measure.Options, names: tuple[str, ...], attempt: int) -> run.Report:
        """Measures six cases, then is out of time."""
        launched.append(names)
        for name in names[:6]:
            for peer in options.peers_of(CASES[name]):
                append_row(options.out, row(name, peer) | {"run": options.run})
        return dict.fromkeys(names[:6], run.DONE) | dict.fromkeys(names[6:], run.SKIPPED)

    monkeypatch.setattr(run, "compile_ahead", compile_ahead)
    monkeypatch.setattr(run, "launch_worker", worker)
    monkeypatch.setattr(run, "why_no_gpu", lambda command: None)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: SimpleNamespace())
    command = ["--table", "paper", "*d64-32k-*", "--out", str(out), "--commit", "abc"]
    for _ in range(2):
        assert run.main([*command, "--ahead", "4"]) == 0
    group = [f"{way}mask-d64-32k-{m}" for m in masks.MASKS for way in ("", "bwd-")]
    assert launched == [tuple(group), (*group[:4], *group[6:])]
    # the second time around kernels of six cases less, but those of the references again
    assert compiled[0] == 2 * (3 + 6) and compiled[1] == compiled[0] - 2
    said = capsys.readouterr().out
    assert "0 of 24 cases are measured, 0 of them again" in said
    assert "6 of 24 cases are measured, 4 of them again" in said
    assert "22 cases, about " in said and "mask-d64-32k-document: not run: out of time" in said
