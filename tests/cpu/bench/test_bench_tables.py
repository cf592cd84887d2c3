"""The benches that are tables of cases: their gates refuse wrong results, their kept rows are
readable, and what they say of a problem is what its definition says."""

from __future__ import annotations

import contextlib
import importlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from small_cases import row as made_row

from bench import (
    ROOT,
    Json,
    block_sparse,
    decode,
    flex,
    parallel,
    run,
    runner,
    selected,
    statistics,
)
from bench.flex_mods import NAMED
from bench.rows import append_row
from flash_mask_cute import attention_statistics, flash_attn_func

NAMES = ["flex", "selected", "block_sparse", "parallel", "decode", "statistics", "run", "trees"]
NAMES += ["tangent"]
TABLES = {name: importlib.import_module(f"bench.{name}").TABLE for name in NAMES}


def dry_run(table: runner.Table) -> runner.Run:
    peers = ",".join(table.peers)
    return runner.Run(table, Namespace(dry=True, seconds=1e6, peers=peers, rounds=1, burst=0.1))


# -- the runner -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    name: str


def made_table(rows: Callable[[Made], Iterator[Json]]) -> runner.Table:
    return runner.Table(
        "bench.made", "Made up.", lambda: [Made("one"), Made("two")], lambda case, run: rows(case),
        lambda cases: cases, ratios=(runner.Ratio("b / a", ("b_ms", "c_ms"), "a_ms"),),
    )  # fmt: skip


def test_a_wrong_result_makes_the_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    """And the next case goes on."""

    def rows(case: Made) -> Iterator[Json]:
        if case.name == "one":
            raise ValueError("out is off")
        yield {"case": case.name, "a_ms": 2.0, "b_ms": 4.0, "c_ms": 3.0}

    assert runner.main(made_table(rows), ["--dry"]) == 1
    wrong, right = capsys.readouterr().out.splitlines()
    assert "failed: ValueError: out is off" in wrong and right.endswith("b / a 1.500")
    assert runner.main(made_table(rows), ["--dry", "two"]) == 0
    for row in ({"kind": "wrong"}, {"ok": False}):
        assert runner.main(made_table(lambda case, row=row: iter([row])), ["--dry"]) == 1  # type: ignore


@pytest.mark.parametrize("name", NAMES)
def test_cases_have_one_name_each_and_a_run_needs_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [case.name for case in TABLES[name].cases()]
    assert len(names) == len({*names}) > 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runner.main(TABLES[name], names[:1]) == runner.NO_GPU
    with pytest.raises(SystemExit):
        runner.main(TABLES[name], ["no-such-case"])
    assert f"no case matches 'no-such-case'; they are {names[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["flex", "selected", "block_sparse", "parallel", "decode"])
def test_kept_rows_are_read(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "bench" / "results" / f"{name}.jsonl"
    kept, table = runner.rows_in([path]), TABLES[name]
    wrong = any(map(runner.is_wrong, kept))
    assert runner.main(table, ["--report", str(path)]) == wrong
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(kept) + len(list(table.summary(kept)))
    known = {case.name for case in table.cases()}
    assert any(row.get("case") in known for row in kept)


def test_statistics_are_compared_before_they_are_timed() -> None:
    few = statistics.small(list(statistics.CASES))
    (of_rows,) = [case for case in few if case.name == "d64-causal"]
    (of_few,) = [case for case in few if case.few]
    for case in (of_rows, of_few):
        (row,) = statistics.measure(case, dry_run(statistics.TABLE))
        assert row["error"] < 1e-4
    given = statistics.Given.of(of_rows, dry_run(statistics.TABLE))
    _, lse = flash_attn_func(given.q, given.k, given.v, return_lse=True)
    found = attention_statistics(given.q, given.k, lse, statistics.REDUCE)
    with pytest.raises(ValueError, match="ours: key_sums is off by"):
        statistics.check(of_rows, given, lse, found)


def test_nan_is_no_small_error() -> None:
    right, nan = torch.ones(3), torch.tensor([1.0, torch.nan, 1.0])
    assert runner.compare("x", ["out", "dq"], [right, right * 1.01], [right] * 2, 0.02) > 0.009
    for found in (nan, right * 1.03):
        with pytest.raises(ValueError, match=r"x: dq is off by \S+ of the largest number"):
            runner.compare("x", ["out", "dq"], [right, found], [right] * 2, 0.02)
    assert np.isnan(runner.worst([0.0, torch.nan, 0.5])) and runner.worst([0.5, 0.1]) == 0.5


# -- gates ----------------------------------------------------------------------------------------


@pytest.mark.shares(4)
@pytest.mark.parametrize("name", ["prefix_lm", "alibi", "relative_bias", "block_map"])
def test_flex_calls_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention, our own form of the same, and rows in float64; a wrong row is not timed."""
    case = flex.Case(name, 160, 16, batch=2, heads=2)
    problem = flex.Problem(case, "cpu", torch.float32)
    calls, remarks = flex.ready_calls(problem)
    assert list(calls["fwd"]) == list(calls["bwd"]) == ["ours", "own"] and len(remarks) == 1
    right = problem.call_of("own")().detach()
    for factor in (1.02, torch.nan):
        with pytest.raises(ValueError, match="rows of O are off"):
            problem.check_rows(right * factor)
    own = problem.gradients
    monkeypatch.setattr(problem, "gradients", lambda out: damaged(own(out)))
    with pytest.raises(ValueError, match="gradient 0 is off by"):
        flex.ready_calls(problem)


def damaged(call: Callable[[], Any], seen: list[int] = [0]) -> Callable[[], Any]:  # noqa: B006
    """Each second call gives gradients that are 10 % too large."""

    def wrong() -> list[torch.Tensor]:
        seen[0] += 1
        return [x * (1 + 0.1 * (seen[0] % 2)) for x in call()]

    return wrong


MASKED = [x.name for x in NAMED if x.name not in ("alibi", "soft_cap", "t5_bias")]


@pytest.mark.shares(3)
@pytest.mark.parametrize("name", MASKED)
def test_masks_by_hand_are_those_of_the_mods(name: str) -> None:
    """By the mean of the values that a query sees, at a length that the windows do not cover."""
    problem = flex.Problem(flex.Case(name, 1300, 8, heads=1), "cpu", torch.float64)
    if problem.made.own is None:
        pytest.skip("nothing by hand")
    problem.q, problem.k = (torch.zeros_like(x) for x in (problem.q, problem.k))
    with torch.no_grad():
        ours, own = (problem.call_of(peer)() for peer in ("ours", "own"))
    torch.testing.assert_close(own, ours, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["vsa", "frames"])
def test_wrong_lists_of_blocks_are_noticed(kind: str) -> None:
    case = replace(block_sparse.short(block_sparse.Case(kind, 4), 512), d=16)
    problem = block_sparse.Problem(case, "cpu", torch.float32)
    expected = problem.reference()
    for peer in block_sparse.OURS:
        assert problem.check(peer, expected) < 1e-5
    problem.count = problem.count.clamp(max=1)
    with pytest.raises(ValueError, match="ours: out is off by"):
        problem.check("ours", expected)


def test_a_wrong_choice_of_blocks_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = selected.small([selected.CASES[0]])
    monkeypatch.setitem(selected.PEERS, "ours", selected.dense)
    rows = list(selected.measure(case, dry_run(selected.TABLE)))
    kinds = {row["peer"]: row["kind"] for row in rows}
    assert (kinds["ours"], kinds["ours_deterministic"], kinds["dense"]) == (
        *("wrong", "backward", "backward"),
    )
    (cached,) = selected.small([selected.CASES[-1]])
    (row,) = selected.measure(cached, dry_run(selected.TABLE))
    assert row["kind"] == "decode" and row["error"] < selected.ALLOWED


@pytest.mark.shares(3)
def test_a_training_step_of_an_indexer_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = selected.small([case for case in selected.CASES if case.trains])
    step = selected.Step.of(case, "cpu")
    numbers = step.given.chosen.indices[0].long()
    blocks, own = case.n // case.block, torch.arange(case.n)[:, None] // case.block
    has = torch.zeros(*numbers.shape[:2], blocks + 1, dtype=torch.bool)
    has.scatter_(2, numbers.where(numbers >= 0, blocks), True)
    seen = has[..., :blocks]
    assert seen[..., 0].all() and seen.gather(2, own.expand(1, -1, 1)).all()
    assert torch.equal(seen.sum(-1), (own[:, 0] + 1).clamp(max=case.k).expand(1, -1))
    gradients = step.run()
    assert len(gradients) == 5 and all(x.isfinite().all() for x in gradients)
    run = dry_run(selected.TABLE)
    (row,) = selected.measure(case, run)
    assert row["kind"] == "step" and row["teacher_error"] < 1e-5

    def wrong(*args: Any, **keywords: Any) -> Any:
        found = attention_statistics(*args, **keywords)
        return found._replace(block_sums=found.block_sums * 1.1)

    monkeypatch.setattr(selected, "attention_statistics", wrong)
    (row,) = selected.measure(case, run)
    assert row["kind"] == "wrong" and row["teacher_error"] > selected.ALLOWED


def test_decoding_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("append", "mixed", "tree4", "sink"):
        case = next(case for case in decode.SMALL if case.name == name)
        rows = list(decode.measure(case, dry_run(decode.TABLE)))
        found = [row for row in rows if row["kind"] == "decode"]
        assert found and all(row["ok"] for row in found), found
    problem = decode.Problem(decode.SMALL[0], "cpu")

    def wrong(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.full_like(problem.q, torch.nan)

    row = decode.row_of(dry_run(decode.TABLE), problem, decode.Attempt("x", wrong))
    assert row["ok"] is False and runner.is_wrong(row)


def test_ranks_are_compared_with_one_gpu() -> None:
    q, k, v, dout = (torch.randn(1, 20, 2, 16) for _ in range(4))
    calls = parallel.calls_of(lambda *x: flash_attn_func(*x, causal=True), [q, k, v], dout)
    out, dq, dk, dv = expected = calls["both"]()
    assert torch.equal(calls["forward"](), out) and parallel.compare(expected, expected) == 0
    with pytest.raises(ValueError, match="beside one GPU: dk is off by"):
        parallel.compare((out, dq, dk + 1, dv), expected)


# -- what is said of a problem --------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 2])
def test_frames_see_the_frames_before_them(count: int) -> None:
    seen = block_sparse.Case("frames", count, heads=2, blocks=14, frame=3).listed("cpu")
    for q, k in np.ndindex(14, 14):
        before = q // 3 - k // 3
        assert bool(seen[1, q, k]) == (before >= 0 and (count == 0 or before <= count or k < 3))


def test_counts_of_choices_are_those_of_a_dense_mask() -> None:
    case = selected.Case("small", 512, (8, 2), block=32, k=5, r=0.9)
    choice = selected.choose(case, case.n, "cpu")
    seen = torch.zeros(2, 512, 512, dtype=torch.bool)
    for head, token in np.ndindex(2, 512):
        numbers = [x for x in choice[0, head, token].tolist() if x >= 0]
        assert {0, token // 32} <= {*numbers} and len(numbers) == min(5, token // 32 + 1)
        for number in numbers:
            seen[head, token, number * 32 : min(number * 32 + 32, token + 1)] = True
    found = selected.count(case, choice)
    assert found.visible == pytest.approx(seen.sum().item() / 2)
    tiles = seen.view(2, 16, 32, 16, 32).any(4).any(2)  # 128 rows of 4 heads each
    assert found.union == pytest.approx(tiles.sum(-1).float().mean().item())
    assert 0.5 < found.shared < 1


@pytest.mark.parametrize("keeps_failures", [True, False])
def test_a_worker_that_dies_loses_its_case_only(
    keeps_failures: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next worker goes on with the others, as a run of its own, and measures `again` first."""
    out, asked = tmp_path / "rows.jsonl", list[tuple[str, list[str], list[str]]]()

    def rows(case: Made) -> Iterator[Json]:
        if case.name == "dies":
            raise KeyboardInterrupt
        if case.name == "wrong":
            raise ValueError("out is off")
        yield {"case": case.name}

    class Worker:
        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            self.told = runner.json.loads(command[-1])
            asked.append((self.told["run"], self.told["names"], self.told["jobs"]))

        def wait(self, timeout: float = 0) -> None:
            with contextlib.suppress(KeyboardInterrupt):
                runner.work(table, self.told)

    compiled = list[str]()
    names = ("kept", "one", "wrong", "dies", "two")
    table = runner.Table(
        "bench.made", "Made up.", lambda: map(Made, names), lambda case, run: rows(case),
        head=lambda run: {"run": run.name, "commit": "x"}, keeps_failures=keeps_failures,
        isolated=runner.Isolated(
            lambda run, cases: [[case.name] for case in cases],
            lambda run, job: compiled.append(job), lambda run, cases: {"kept"},
            lambda left, done: [x for x in done if x == "one"],
        ),
    )  # fmt: skip
    monkeypatch.setattr(runner.subprocess, "Popen", Worker)
    monkeypatch.setattr(runner, "why_no_gpu", lambda command: None)
    monkeypatch.setattr(runner.threading, "Timer", Mock())
    assert runner.main(table, ["--out", str(out), "--ahead", "2"]) == 1
    assert compiled == [x for x in names if x != "kept"]
    (name, first, _), (second_name, second, _) = asked[-2:]
    assert first == ["one", "wrong", "dies", "two"] and second == ["one", "two"]
    assert second_name == f"{name}.1"
    of_cases = [row["case"] for row in runner.rows_in([out])]
    failed = ["wrong", "dies"] if keeps_failures else []
    assert of_cases == ["one", *failed, "one", "two"]


def test_cases_that_a_commit_has_are_left_out(tmp_path: Path) -> None:
    """But those that the others are compared with: a row of another commit or peer is none."""
    out = tmp_path / "rows.jsonl"
    command = ["--table", "paper", "--out", str(out), "--commit", "abc", "--peers", "ours"]
    given, cases = runner.parse(run.TABLE, [*command, "mask-d64-8k-*"])
    names = [f"mask-d64-8k-{mask}" for mask in ("full", "causal", "document")]
    for name, commit in zip(names, ("abc", "abc", "old"), strict=True):
        append_row(out, made_row("a", name, "ours", 500, commit=commit))
    done = run.done(runner.Run(run.TABLE, given), cases)
    assert done == {*names[:2]} and len(cases) == 12 and given.burst == 0.15
    assert run.references(["mask-d64-8k-document"], [*names[:2], "other"]) == (*names[:2],)
    given.commit = "abc+"
    assert run.done(runner.Run(run.TABLE, given), cases) == set()
