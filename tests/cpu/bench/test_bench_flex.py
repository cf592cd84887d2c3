"""Mods of torch through flex_attention, as `bench.flex` measures them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench import flex
from bench.flex_mods import NAMED, OTHERS


def test_cases() -> None:
    cases = flex.all_cases()
    assert len({case.name for case in cases}) == len(cases)
    attention = [case for case in cases if case.kind == "attention"]
    assert len(NAMED) == 12 and len(attention) == 4 * 12 + len(OTHERS)
    assert all(case.batch * case.n == 32768 and case.heads * case.d == 4096 for case in attention)
    large = {case.mod for case in attention if case.n > 8192}
    assert not large & {entry.name for entry in (*NAMED, *OTHERS) if entry.has_table}


@pytest.mark.parametrize("name", ["prefix_lm", "alibi", "relative_bias", "block_map"])
def test_calls_agree(name: str) -> None:
    """flex_attention, our own way of saying the same, and rows in float64."""
    case = flex.Case(name, 160, 16, batch=2, heads=2)
    problem = flex.Problem(case, "cpu", torch.float32)
    calls, remarks = flex.ready_calls(problem)
    assert list(calls["fwd"]) == list(calls["bwd"]) == ["ours", "own"]
    (remark,) = remarks
    assert remark.startswith("torch left out: NotImplementedError")
    for peers in flex.AHEAD[1:]:
        flex.compile_calls(problem, peers)


def test_a_forward_stays_without_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = flex.Problem(flex.Case("causal", 64, 16, heads=1), "cpu", torch.float32)
    own = problem.call_of("own")

    def call_of(peer: str) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            if peer == "torch" and torch.is_grad_enabled():
                raise RuntimeError("no backward")
            return own()

        return call

    monkeypatch.setattr(problem, "call_of", call_of)
    calls, remarks = flex.ready_calls(problem)
    assert list(calls["fwd"]) == ["ours", "own", "torch"] and list(calls["bwd"]) == ["ours", "own"]
    assert remarks == ["torch's backward left out: RuntimeError: no backward"]


MASKED = [x.name for x in NAMED if x.name not in ("alibi", "soft_cap", "t5_bias")]


@pytest.mark.parametrize("name", MASKED)
def test_masks_by_hand_are_those_of_the_mods(name: str) -> None:
    """By the mean of the values that a query sees, at a length that the windows do not cover."""
    case = flex.Case(name, 1300, 8, heads=1)
    problem = flex.Problem(case, "cpu", torch.float64)
    if problem.made.own is None:
        pytest.skip("nothing by hand")
    problem.q, problem.k = (torch.zeros_like(x) for x in (problem.q, problem.k))
    with torch.no_grad():
        ours, own = (problem.call_of(peer)() for peer in ("ours", "own"))
    torch.testing.assert_close(own, ours, rtol=1e-9, atol=1e-9)


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = flex.Problem(flex.Case("causal", 64, 16, heads=1), "cpu", torch.float32)
    right = problem.call_of("own")()
    assert problem.check_rows(right) < 1e-5
    with pytest.raises(ValueError, match="rows of O are off"):
        problem.check_rows(right * 1.02)
