"""`python -m flash_mask_cute bench FILE`, on the CPU."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_mask_cute import __main__ as command
from flash_mask_cute import time_my_mask
from flash_mask_cute.time_my_mask import Mods, Problem, check, exact, ours

BOTH = """
import torch

slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])


def mask_mod(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 9 + 3 * h) & (q_idx != 5 + b)


def score_mod(score, b, h, q_idx, kv_idx):
    return score - slopes[h] * (q_idx - kv_idx)
"""
SIZES = ("--heads", "4", "--heads-kv", "2", "--head-dim", "16", "--seqlen", "40", "--batch", "2")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (path := tmp_path / "my_mod.py").write_text(BOTH)
    return path


def problem_of(file: Path, *more: str) -> Problem:
    given = time_my_mask.parse([str(file), *SIZES, *more])
    mods = time_my_mask.load_mods(file)
    return Problem.draw(given, given.seqlen, torch.device("cpu"), mods)


def test_the_reference_is_attention_written_out(file: Path) -> None:
    """Score by score in Python; row 5 of batch entry 0 sees nothing."""
    problem = problem_of(file, "--seqlen", "12")
    out = exact(problem, torch.float64)[0]
    q, k, v = (x.detach().double() for x in problem[:3])
    for b in range(2):
        for h in range(4):
            for i in range(12):
                weights, total = torch.zeros(16, dtype=torch.float64), 0.0
                for j in range(12):
                    if i >= j and i - j < 9 + 3 * h and i != 5 + b:
                        score = float(q[b, h, i] @ k[b, h // 2, j]) / 4 - 0.1 * (h + 1) * (i - j)
                        weights += math.exp(score) * v[b, h // 2, j]
                        total += math.exp(score)
                expected = weights / total if total else weights
                # the slopes are float32
                assert torch.allclose(out[b, h, i], expected, atol=1e-6)


def test_results_are_compared_before_anything_is_timed(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["bench", str(file), *SIZES]) == 0
    told = capsys.readouterr().out
    assert all(f"{x} " in told for x in ("out", "dq", "dk", "dv")) and "WRONG" not in told
    assert told.endswith("nothing is timed: torch sees no GPU with kernels\n")


def test_a_wrong_result_is_noticed(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = time_my_mask.flex_attention
    monkeypatch.setattr(time_my_mask, "flex_attention", lambda *x, **more: right(*x, **more) * 1.1)
    assert command.main(["bench", str(file), *SIZES]) == 1
    told = capsys.readouterr().out
    assert "WRONG" in told and told.endswith("a result is wrong: nothing is timed\n")


def test_what_torch_cannot_do_is_said(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(problem: Problem, block_mask: Any) -> Tensor:
        raise NotImplementedError("no such mod\nand more")

    calls = {"flash_mask_cute": ours, "torch": broken}
    assert check(problem_of(file), calls) and list(calls) == ["flash_mask_cute"]
    assert "raised NotImplementedError: no such mod\n" in capsys.readouterr().out


def test_the_table_of_times(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([1.0, 3.0, 2.5, 4.5])
    steps: list[Any] = []

    def milliseconds(step: Any) -> float:
        steps.append(step())
        return next(times)

    monkeypatch.setattr(time_my_mask, "milliseconds", milliseconds)
    time_my_mask.time_calls(problem_of(file), {"flash_mask_cute": ours, "torch": ours})
    title, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert title == ["milliseconds", "forward", "backward"]
    assert rows == [
        ["flash_mask_cute", "1.000", "3.000"],
        ["torch", "2.500", "4.500"],
        ["times", "as", "fast", "2.50", "1.50"],
    ]
    # a forward, then a backward of its own graph
    assert [isinstance(x, Tensor) for x in steps] == [True, False] * 2 and len(steps[1]) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "must be a Python file that exists, got"),
        ("x = 1", "must define mask_mod or score_mod"),
    ],
)
def test_a_file_without_a_mod(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    assert command.main(["bench", str(path)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--seqlen", "0"), "--seqlen must be at least 1, got 0"),
        (("--heads-kv", "3"), "--heads 16 must be a multiple of --heads-kv 3"),
    ],
)
def test_sizes_are_checked(
    more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        time_my_mask.parse(["mine.py", *more])
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_one_mod_is_enough(tmp_path: Path) -> None:
    (path := tmp_path / "alone.py").write_text(BOTH.partition("def score_mod")[0])
    mods = time_my_mask.load_mods(path)
    assert mods.score_mod is None and mods.mask_mod is not None
    given = argparse.Namespace(batch=1, heads=2, heads_kv=2, head_dim=16)
    problem = Problem.draw(given, 20, torch.device("cpu"), mods)
    assert check(problem, {"flash_mask_cute": ours})
    assert check(problem._replace(mods=Mods(None, lambda s, b, h, q, k: s * 2)), {"ours": ours})
