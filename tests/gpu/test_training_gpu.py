"""examples/09_training.py on a Hopper GPU: its loss curves depend on the mask only."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from example_modules import ROOT, load_example

# heads of 128 columns, which share a KV head
SMALL = (
    *("--device", "cuda", "--layers", "2", "--hidden", "512", "--heads", "4"),
    *("--seqlen", "2048", "--steps", "8"),
)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example, with the same bits in every run from the rest of its model."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield load_example(ROOT / "examples" / "09_training.py", monkeypatch)
    torch.use_deterministic_algorithms(was_deterministic)


def curves(training: ModuleType, *arguments: str) -> dict[str, list[float]]:
    settings = training.parse([*SMALL, *arguments])
    found: dict[str, list[float]] = training.train(settings, settings.attention)
    return found


def test_skipping_blocks_changes_no_bit(training: ModuleType) -> None:
    skipping = curves(training, "--deterministic")
    assert sorted(skipping) == ["dpo", "sft"]
    assert curves(training, "--deterministic") == skipping
    assert curves(training, "--deterministic", "--skip-blocks", "off") == skipping


def test_curves_are_those_of_dense_attention(
    training: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To rounding: the command fails otherwise."""
    monkeypatch.setattr(training, "plot_losses", lambda *_: None)
    training.main([*SMALL, "--deterministic", "--compare"])
    said = capsys.readouterr().out
    assert said.count("largest error") == said.count("largest difference") == 2
    assert "skipping on and off: equal bit for bit" in said


@pytest.mark.slow
def test_report(training: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    torch.use_deterministic_algorithms(False)
    training.main([*SMALL, "--report", "--steps", "2"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-6:]]
    assert [row[:2] for row in rows] == [
        [task, name] for task in ("sft", "dpo") for name in training.ATTENTIONS
    ]
    assert all(float(row[2]) > 0 and row[-1] == "GiB" for row in rows)
