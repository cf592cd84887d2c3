"""Training steps in bench/: their cases, timing and bars. All rows here are made up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from small_cases import small
from test_bench_everyday import bar_of, made_up

from bench import gate, measure, peers, timing
from bench.cases import CASES, make_tensors
from bench.measure import Inputs, Options

NAMES = [f"host-step-d{d}-{size}" for d in (128, 64) for size in ("512", "1k", "2k", "4k")]
OPTIONS = Options(
    ("small",), ("ours", "fa4"), 5, 10, 0.1, 1.0, 240.0, 0.0, seed=1, out="", commit="abc", run="r"
)


def test_cases_are_steps_of_4096_tokens() -> None:
    assert {name for name in CASES if name.startswith("host-step")} == set(NAMES)
    for case in map(CASES.__getitem__, NAMES):
        assert (case.tokens, case.heads, case.kind) == (4096, 32, "host_step")
        assert case.returns_gradients and not case.is_backward
        assert peers.PEERS["ours"].supports(case) is None
        assert peers.PEERS["flex"].supports(case)


@pytest.fixture
def without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        measure, "make_tensors", lambda case, _, seed: make_tensors(case, "cpu", seed)
    )
    monkeypatch.setattr(timing, "captured", lambda call: call)
    monkeypatch.setattr(timing, "STEP_ROUNDS", 2)
    monkeypatch.setattr(timing, "STEPS", 1)


@pytest.mark.usefixtures("without_device")
def test_a_row_has_the_wall_and_the_device_time() -> None:
    case = small("causal", 130, kind="host_step")
    rows = list(measure.measure(case, OPTIONS, Inputs()))
    assert [row["peer"] for row in rows] == ["ours"]
    assert rows[0]["us"] > 0 and rows[0]["device_us"] > 0 and rows[0]["variant"] == "step"
    assert "spread of replay" in rows[0]["note"]


def test_a_step_is_a_forward_and_its_backward() -> None:
    case = small("causal", 130, kind="host_step")
    tensors = peers.save_forward(case, make_tensors(case, "cpu", 2), 2)
    found = peers.PEERS["ours"].prepare(case, tensors)()
    assert gate.check_gradients(gate.gradient_reference(case, tensors, 4), found, rule=gate.RULE).ok
    with pytest.raises(ValueError, match="without what its forward saved"):
        peers.PEERS["ours"].prepare(case, tensors._replace(saved=None))


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


def test_bars_of_steps() -> None:
    name = NAMES[0]
    rows = made_up("a", name, "step", ours=104.0, fa4=260.0)
    timed = [row | {"device_us": 100.0} for row in rows]
    bar = bar_of(name, *timed)
    assert (bar.figure, bar.bar, bar.verdict()) == (pytest.approx(1.04), 1.05, "met")
    assert "device 100 us, flash-attn-4 2.600" in bar.remark
    assert bar_of(name, timed[0] | {"us": 106.0}).verdict() == "short"
    assert bar_of(NAMES[1], *timed).verdict() == "not measured"
