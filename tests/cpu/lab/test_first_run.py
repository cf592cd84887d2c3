"""The script for a first run on Blackwell: its steps, and what it says of those that go wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from bench import ROOT
from lab import first_run
from lab.calls import Call, Machine, WrongResult, _hold, check_forward


def test_steps_are_those_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "lab" / "README.md").read_text()
    assert first_run.main(["--list"]) == 0
    names = capsys.readouterr().out.split()
    assert names[0] == "one-cta-64" and len(names) == len(set(names)) == 12
    for name, step in first_run.steps().items():
        assert f"`{name}`" in page or f"`{name.removeprefix('one-cta')}`" in page, name
        assert str(step.seconds) in page, name
    assert sum(step.seconds for step in first_run.steps().values()) <= 3600


def test_it_is_refused_without_such_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        first_run.main([])
    assert "compute capability 10.0 or 10.3 is needed, there is none" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        first_run.main(["--simulate", "no-step"])
    assert "no step is called no-step" in capsys.readouterr().err


SAYS = "print('first_run: [1]', flush=True); "


@pytest.mark.parametrize(
    ("code", "state", "said", "seconds"),
    [
        (SAYS, "right", "", 60),
        (SAYS + "1 / 0", "wrong", "ZeroDivisionError", 60),
        (SAYS + "import time; time.sleep(60)", "late", "", 5),
    ],
    ids=["right", "wrong", "late"],
)
def test_a_step_costs_its_limit_at_most(code: str, state: str, said: str, seconds: int) -> None:
    """The rows of a step that fails or hangs are kept."""
    row = first_run.supervise("-", seconds, False, [sys.executable, "-c", code])
    assert (row["state"], row["figures"]) == (state, [[1]])
    assert said in row["error"]
    assert row["seconds"] < 50


def test_rows_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"state": "late", "seconds": 1.0, "figures": [], "error": "x"}
    monkeypatch.setattr(first_run, "supervise", lambda *more: row)
    out = tmp_path / "rows.jsonl"
    assert first_run.run_all(["pairs", "rates"], True, out) == 2
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [x["step"] for x in rows] == ["pairs", "rates"]
    assert rows[0]["gpu"] == "software GPU" and rows[0]["state"] == "late"


def test_results_are_held_to_fp64() -> None:
    truth = torch.linspace(-1, 1, 64, dtype=torch.float64)
    eager = truth.bfloat16()
    assert _hold("a call", "out", (eager,), (truth,), (eager,)) < 1
    with pytest.raises(WrongResult, match=r"a call: out is off by 0\.1"):
        _hold("a call", "out", (truth + 0.1,), (truth,), (eager,))
    with pytest.raises(WrongResult):
        _hold("a call", "out", (truth * float("nan"),), (truth,), (eager,))


@pytest.mark.parametrize("page", [0, 16])
def test_calls_are_right_on_the_cpu(page: int) -> None:
    """By the CPU path, which is what a target of None means for tensors there."""
    call = Call((64, 64), (20, 50), causal=True, page=page)
    row = check_forward(call, Machine("cpu"))
    assert 0 < row["share"] < 1
