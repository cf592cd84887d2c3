"""Commits in turns: who is timed when, what a side's process answers, what is called slower."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from small_cases import masked, without_a_gpu

from bench import ROOT, compare, history
from bench.cases import CASES, BenchCase
from bench.compare import HERE, Failed

BASE, OLD = "base", "old"


class FakeProcess:
    """Takes `ms` a call times a factor that drifts with each burst of any process."""

    def __init__(
        self, label: str, ms: float, log: list[tuple[str, object]], drift: float = 1.01
    ) -> None:
        self.label, self.ms, self.log, self.drift = label, ms, log, drift

    def prepare(self, name: str) -> None:
        self.log.append((self.label, name))

    def first(self, least: int) -> float:
        if self.ms < 0:
            raise Failed(f"{self.label}: Refused: wrong")
        return self.burst(least, min(2, least))

    def burst(self, count: int, untimed: int) -> float:
        self.log.append((self.label, (count, untimed)))
        bursts = sum(isinstance(told, tuple) for _, told in self.log)
        return self.ms * self.drift**bursts


def test_sides_take_turns_with_bursts_of_one_size() -> None:
    log: list[tuple[str, object]] = []
    sides = {BASE: [FakeProcess(BASE, 4.0, log)], HERE: [FakeProcess(HERE, 5.0, log)]}
    found = compare.compare("d128-full-8k", sides, 4, 0.2, 3)
    assert log[:4] == [
        (BASE, "d128-full-8k"),
        (HERE, "d128-full-8k"),
        (BASE, (3, 2)),
        (HERE, (3, 2)),
    ]
    # as many calls as fit in a burst of the slower side, an eighth before them
    count = round(200 / (5.0 * 1.01**2))
    turns = [BASE, HERE, HERE, BASE, BASE, HERE, HERE, BASE]
    assert log[4:] == [(label, (count, count // 8)) for label in turns]
    # drift of the clocks goes into both sides, now one first and now the other
    assert found.ratio(BASE) == pytest.approx(1.25, rel=1e-3)
    assert found.ratios(BASE) == pytest.approx([1.2625, 1.25 / 1.01, 1.2625, 1.25 / 1.01])
    assert found.apart(BASE) == 0


def test_processes_of_a_side_count_by_their_mean(capsys: pytest.CaptureFixture[str]) -> None:
    """One process of the base is slow: this tree is no faster for that, and it is told."""
    log: list[tuple[str, object]] = []

    @contextmanager
    def launch() -> Iterator[Mapping[str, Sequence[compare.Process]]]:
        yield {
            HERE: [FakeProcess("here 1", 5.0, log, 1.0), FakeProcess("here 2", 5.0, log, 1.0)],
            BASE: [FakeProcess("base 1", 5.0, log, 1.0), FakeProcess("base 2", 5.2, log, 1.0)],
            OLD: [FakeProcess("old 1", 5.5, log, 1.0), FakeProcess("old 2", 5.5, log, 1.0)],
        }

    assert compare.compare_all(["d128-full-8k"], launch, 2, 0.1, 0.03)
    of_base, of_old = capsys.readouterr().out.splitlines()
    assert "of here / base, time x 0.9804, spread 0.0%, processes 3.9% apart: ok (" in of_base
    assert "of here / old, time x 0.9091, spread 0.0%, processes 0.0% apart: faster (" in of_old
    labels = [label for label, told in log if isinstance(told, tuple)]
    round_of_all = ["here 1", "base 1", "old 1", "here 2", "base 2", "old 2"]
    assert labels == [*round_of_all, *round_of_all, *round_of_all[1:], round_of_all[0]]


@pytest.mark.parametrize(
    ("ms", "word", "good"),
    [(5.0, "ok", True), (5.09, "ok", True), (5.2, "slower", False), (4.8, "faster", True)],
)
def test_verdict(ms: float, word: str, good: bool, capsys: pytest.CaptureFixture[str]) -> None:
    @contextmanager
    def launch() -> Iterator[Mapping[str, Sequence[compare.Process]]]:
        yield {BASE: [FakeProcess(BASE, 5.0, [])], HERE: [FakeProcess(HERE, ms, [])]}

    assert compare.compare_all(["d128-full-8k"], launch, 2, 0.1, 0.02) is good
    said = capsys.readouterr().out
    assert f": {word} (" in said and "TFLOP/s of here / base, time x" in said
    assert "apart" not in said  # one process of each


def test_after_a_failure_both_sides_start_again(capsys: pytest.CaptureFixture[str]) -> None:
    log: list[tuple[str, object]] = []
    starts = []

    @contextmanager
    def launch() -> Iterator[Mapping[str, Sequence[compare.Process]]]:
        starts.append(len(log))
        yield {
            BASE: [FakeProcess(BASE, 5.0, log)],
            HERE: [FakeProcess(HERE, -1.0 if len(starts) == 1 else 5.0, log)],
        }

    names = ["d128-full-8k", "d128-causal-8k", "bwd-d128-full-8k"]
    assert not compare.compare_all(names, launch, 1, 0.1, 0.05)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "d128-full-8k: here: Refused: wrong"
    assert [line.split()[0] for line in lines[1:]] == names[1:] and len(starts) == 2
    assert (BASE, (1, 1)) in log  # the first burst of a backward


def test_a_side_answers_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = without_a_gpu(monkeypatch)
    monkeypatch.setitem(CASES, "forward", masked("document", 96))
    monkeypatch.setitem(CASES, "backward", masked("document", 96, kind="backward"))
    called = []
    admit = compare.admitting(3, 4)

    def prepare(case: BenchCase):  # type: ignore[no-untyped-def]
        call = admit(case)

        def timed() -> None:
            called.append((case.kind, call()))
            clock.now += 2.5

        return timed

    asked: list[dict[str, object]] = [
        {"burst": [1, 1]},
        {"prepare": "forward"},
        {"burst": [3, 2]},
        {"prepare": "no such case"},
        {"burst": [1, 1]},
        {"prepare": "backward"},
        {"burst": [1, 1]},
    ]
    answers = io.StringIO()
    questions = io.StringIO("".join(json.dumps(question) + "\n" for question in asked))
    compare.Server(prepare).run(questions, answers)
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [
        {"error": "no case is prepared"},
        {"ms": 0.0},
        {"ms": 2.5},
        {"error": "KeyError: 'no such case'"},
        {"error": "no case is prepared"},
        {"ms": 0.0},
        {"ms": 2.5},
    ]
    assert [kind for kind, _ in called] == ["attention"] * 5 + ["backward"] * 2
    assert [len(result) for _, result in called] == [2] * 5 + [3] * 2


# What a machine without a GPU changes before it serves.
ON_CPU = """
import torch
from bench import cases, measure
torch.cuda.synchronize = lambda: None
measure.make_tensors = lambda case, device, seed: cases.make_tensors(case, "cpu", seed)
"""


def test_a_process_serves_the_package_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No case can be prepared without a GPU, but whose package it was that failed can be seen."""
    (tmp_path / "flash_mask_cute").mkdir()
    (tmp_path / "flash_mask_cute" / "__init__.py").touch()
    (tmp_path / "flash_mask_cute" / "interface.py").write_text("print('noise'); from . import old")
    program = f"{ON_CPU}{compare.PROGRAM}"
    monkeypatch.setattr(compare, "PROGRAM", program)
    with compare.Child(BASE, tmp_path, 0, 1) as side:
        side.prepare("no such case")
        with pytest.raises(Failed, match="base: KeyError"):
            side.first(1)
        side.prepare("host-128")
        with pytest.raises(Failed, match="cannot import name 'old'"):
            side.first(1)
        side._child.kill()
        side._child.wait()
        with pytest.raises(Failed, match="base: its process died"):
            side.prepare("host-128")
            side.first(1)


def test_earlier_commits_are_unpacked(tmp_path: Path) -> None:
    (tmp_path / "flash_mask_cute").mkdir()
    (tmp_path / "bench").mkdir()
    with history.unpacked(str(tmp_path), "flash_mask_cute") as folder:
        assert [path.name for path in folder.iterdir()] == ["flash_mask_cute"]
        assert (folder / "flash_mask_cute").resolve() == (tmp_path / "flash_mask_cute").resolve()
    with pytest.raises(ValueError, match="no-such-commit"), history.unpacked("no-such-commit"):
        pass
    if not (ROOT / ".git").exists():
        pytest.skip("no repository here, so no earlier commit")
    with history.unpacked("HEAD", "flash_mask_cute") as folder:
        assert (folder / "flash_mask_cute" / "interface.py").is_file()
        assert not (folder / "bench").exists() and folder != ROOT
    assert not folder.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_commands_refuse_before_any_work(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for told in ("d128-full-8k", "--base HEAD host-128", "--base HEAD --base HEAD", "--base here",
                 "--base HEAD --processes 0"):  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            compare.parse(told.split())
        assert stopped.value.code == 2
    capfd.readouterr()
    out = tmp_path / "rows"
    commands = {
        "run": ["--out", str(out)],
        "compare": ["--base", str(ROOT)],
        "flex": [],
        "decode": [],
    }
    for name, arguments in commands.items():
        command = [sys.executable, "-m", f"bench.{name}", *arguments]
        assert subprocess.run(command, cwd=ROOT).returncode == 2
        said = "".join(capfd.readouterr())
        assert re.fullmatch(rf"python -m bench\.{name} needs a GPU, and torch .* sees none\n", said)
    assert not out.exists()
