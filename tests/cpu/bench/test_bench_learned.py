"""Learned tables, as `bench.learned` measures them: right in float64 before anything is timed."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

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


def triangle_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None
) -> Tensor:
    """What cuequivariance_torch documents: (1, rows, heads, n, d), a bias (1, 1, heads, n, n) and a
    mask (1, rows, 1, 1, n), True where a key counts."""
    scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
    assert mask is not None and mask.shape == (1, q.shape[1], 1, 1, k.shape[3])
    return scores.masked_fill(~mask, -1e9).softmax(-1) @ v


def test_triangles_are_told_to_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("cuequivariance_torch")
    module.triangle_attention = triangle_attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuequivariance_torch", module)
    case = learned.Case("triangle", 24, d=16, heads=2)
    problem = learned.Problem(case, "cpu", torch.float32, 24)
    assert problem.valid is not None and not problem.valid.all()
    expected = problem.table_gradients()
    for peer in ("learned", "cuequivariance"):
        assert problem.check(peer, expected) < 1e-5
    problem.valid = ~problem.valid
    with pytest.raises(ValueError, match="cuequivariance: the gradient of a table is off by"):
        problem.check("cuequivariance", expected)


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
