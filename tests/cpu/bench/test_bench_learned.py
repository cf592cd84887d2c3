"""Learned tables, as `bench.learned` measures them: right in float64 before anything is timed."""

from __future__ import annotations

import sys

import pytest
import torch

from bench import learned


@pytest.mark.parametrize("reads", ["slopes", "t5"])
def test_gradients_are_checked(reads: str) -> None:
    case = learned.Case(reads, 24, causal=True, d=16, heads=4, heads_kv=2)
    peers, told = learned.check_case(case, "cpu", torch.float32)
    assert peers == ["learned", "detached", "learned_in_order", "detached_in_order"]
    assert told.startswith("learned ")


def test_a_wrong_gradient_is_not_timed() -> None:
    problem = learned.Problem(learned.Case("slopes", 24, d=16, heads=2), "cpu", torch.float32, 24)
    (expected,) = problem.table_gradients()
    problem.check("learned", [expected])
    with pytest.raises(ValueError, match="learned: the gradient of a table is off by"):
        problem.check("learned", [expected * 1.1])


def test_names_and_ratios(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["learned", "--list", "learned-t5-*-n8192-d128"])
    assert learned.main() == 0
    assert capsys.readouterr().out.split() == [
        "learned-t5-full-n8192-d128",
        "learned-t5-causal-n8192-d128",
    ]
    row = {"learned_ms": 2.0, "learned_tflops": 5.0, "detached_ms": 1.0, "detached_tflops": 10.0}
    assert "learned / detached 0.500" in learned.shown(row | {"note": ""})
