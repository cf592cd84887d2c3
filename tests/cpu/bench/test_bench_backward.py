"""The pure parts of bench/ that concern backwards."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_cases import ODD, SMALL, masked, rate_row, small

import bench
from bench import (
    DETERMINISTIC,
    cases,
    flops,
    gate,
    masks,
    measure,
    peers,
    report,
    timing,
)
from bench.cases import CASES, BenchCase, make_tensors


def test_backwards_are_those_of_the_forward_cases() -> None:
    names = [name for name in CASES if name.startswith("bwd-")]
    for name in names:
        case = CASES[name]
        plain = CASES[name.removeprefix("bwd-").replace("det-d128", "mask-d128")]
        same = replace(plain, name=name, kind="backward", deterministic="-det-" in name)
        assert case == same
        if name.startswith("bwd-mod"):
            assert case.form == ("mask_mod_alone" if name.endswith("-alone") else "mask_mod")
        else:
            is_by_mod = case.mask in masks.BEYOND_COLUMNS
            assert case.form.startswith("mask_mod") == is_by_mod
    of_shapes, of_widths = 41, 2 * 11
    # three widths of 18 masks at two lengths; two of grouped heads, two of packed documents
    of_cudnn = 3 * 18 * 2 + 4
    of_masks = 8 + 1 + 2 + 2 * 3 * 12 + 2 + 2 * 3
    assert len(names) == of_masks + of_shapes + of_widths + of_cudnn
    assert {name for name, case in CASES.items() if case.kind == "backward"} == set(names)


def test_cute_peer_tells_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    case = masked("document", kind="backward", form="mask_mod")
    dout = torch.zeros(2, ODD, 4, 64)
    saved = cases.Saved(dout + 1, torch.zeros(2, 4, ODD), dout)
    tensors = make_tensors(case, "cpu", 0)._replace(saved=saved)
    with pytest.raises(ValueError, match="saved"):
        peers.PEERS["ours"].prepare(case, tensors._replace(saved=None))

    def backward(*operands: torch.Tensor, **options: object) -> dict[str, object]:
        given = (*tensors[:3], saved.out, saved.dout, saved.lse)
        assert all(x is y for x, y in zip(operands, given, strict=True))
        return options

    def lists(*listed: torch.Tensor, block_size: tuple[int, int]) -> object:
        return ([tuple(t.shape) for t in listed], block_size, listed[1])

    module = SimpleNamespace(_flash_attn_bwd=backward, _flash_attn_fwd=None)
    module.BlockSparseTensorsTorch = lists
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: module)
    ours = peers.CutePeer("ours", "fake", None, "lists")
    fixed = replace(ours, deterministic=True)
    by_mod = peers.CutePeer("theirs", "fake", "mask_mod", "lists", 192)
    native = peers.CutePeer("theirs", "fake", "native", "lists")
    told = ours.prepare(case, tensors)()
    turned = by_mod.prepare(case, tensors)()
    for options, by_key in ((told, False), (turned, True)):
        assert options.keys() == {"mask_mod", "lists", "aux_tensors"}
        shapes, block_size, index = options["lists"]
        assert (shapes, block_size) == ([(1, 1, 6), (1, 1, 6, 6)] * 2, (128, 128))
        expected = flops.block_lists(case.mask_of(ODD), by_key=by_key).partial_index
        assert np.array_equal(index[0, 0].numpy(), expected)
    window = small("sliding_window", ODD, window=16, kind="backward", tokens=2 * ODD)
    sides = {"window_size_left": 16}
    assert ours.prepare(window, tensors)() == {"causal": True, **sides}
    told = fixed.prepare(window, tensors)()
    assert told == {"causal": True, **sides, "deterministic": True}
    told = native.prepare(window, tensors)()
    assert told == {"causal": False, **sides, "window_size_right": 0}


BACKWARDS = [
    *(masked(mask, 300, kind="backward") for mask in masks.MASKS),
    masked("document", 300, kind="backward", form="mask_mod"),
    replace(SMALL[-1], kind="backward"),
    small("sliding_window", 300, kind="backward", window=40, softcap=5.0),
    small("causal", 200, kind="backward", dtype="float16", score_mod="t5_bias"),
]


@pytest.mark.parametrize("case", BACKWARDS, ids=lambda c: f"{c.mask}-{c.form}-{c.dtype}")
def test_gate_of_gradients(case: BenchCase, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = peers.save_forward(case, make_tensors(case, "cpu", 2), 2)
    truth = gate.gradient_reference(case, tensors, 4)
    found = peers.PEERS["ours"].prepare(case, tensors)()
    assert gate.check_gradients(truth, found, rule=gate.RULE).ok
    # in pieces it is the same reference
    monkeypatch.setattr(gate, "SCORES", 96 * case.n)
    for whole, pieces in zip(
        truth.exact, gate.gradient_reference(case, tensors, 4).exact, strict=True
    ):
        assert all(
            torch.allclose(x, y, rtol=1e-9, atol=1e-9) for x, y in zip(whole, pieces, strict=True)
        )
    for place in range(3):
        off, damaged = list(found), list(found)
        off[place] = found[place] * 1.05
        damaged[place] = found[place].clone()
        damaged[place].view(-1)[0] = torch.nan
        for wrong in (off, damaged):
            assert not gate.check_gradients(truth, wrong, rule=gate.RULE).ok
    swapped_heads = [x.roll(1, -2) for x in found]
    assert not gate.check_gradients(truth, swapped_heads, rule=gate.PEER_RULE).ok


@pytest.mark.parametrize("window", [55, 57])
def test_gate_of_gradients_sees_a_mask_that_is_off_by_one_key(window: int) -> None:
    case = small("sliding_window", 900, kind="backward", window=56)
    tensors = peers.save_forward(case, make_tensors(case, "cpu", 5), 5)
    truth = gate.gradient_reference(case, tensors, 1)
    other = replace(case, window=window)
    wrong = peers.PEERS["ours"].prepare(other, peers.save_forward(other, tensors, 5))()
    assert not gate.check_gradients(truth, wrong, rule=gate.RULE).ok


def backward_options(names: tuple[str, ...]) -> measure.Options:
    told = ("ours", DETERMINISTIC, "cudnn")
    return measure.Options(names, told, 1, 0, 0.1, 0.0, 9.0, 9.0, 3, "", "", "")


def test_rows_of_a_backward_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    case = masked("document", 200, kind="backward", deterministic=True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure, "make_tensors", lambda case, device, seed: on_cpu(case, seed))

    def time_loop(calls: dict[str, peers.Call], rounds: int, burst_s: float, least: int) -> object:
        assert (rounds, least) == (1, 1)
        return {name: [2.0] for name in calls if len(calls[name]()) == 3}

    def on_cpu(case: BenchCase, seed: int) -> cases.CaseTensors:
        return make_tensors(case, "cpu", seed)

    monkeypatch.setattr(timing, "time_loop", time_loop)
    rows = list(measure.measure(case, backward_options((case.name,)), measure.Inputs()))
    assert [(row["peer"], row["deterministic"]) for row in rows] == [
        ("ours", False),
        ("ours", True),
    ]
    assert all(row["bwd_ms"] == 2.0 and "of the allowed error: dQ" in row["note"] for row in rows)
    assert all("; bursts of 0.1 s; " in row["note"] for row in rows)


TRAINING = replace(CASES["host-128-train"], n=70, tokens=70, heads=4, heads_kv=2)


def test_host_time_of_training_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        measure, "make_tensors", lambda case, device, s: make_tensors(case, "cpu", s)
    )

    def time_host(calls: dict[str, peers.Call]) -> object:
        for call in calls.values():
            first, second = call(), call()
            assert len(first) == 3 and all(map(torch.equal, first, second))
        return {name: [9.0] for name in calls}

    monkeypatch.setattr(timing, "time_host", time_host)
    options = replace(backward_options((TRAINING.name,)), peers=("sdpa", "cudnn", "ours"))
    rows = list(measure.measure(TRAINING, options, measure.Inputs()))
    assert [row["peer"] for row in rows] == ["ours", "sdpa"]
    for row in rows:
        assert (row["kind"], row["variant"], row["us"]) == ("host_train", "warm", 9.0)
        assert "of the allowed error: dQ" in row["note"] and not {"fwd", "bwd"} & row.keys()


def test_a_call_of_training_makes_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> object:
        told.append(options)
        return q * k.sum() + v.sum(), None  # and lse, as flash-attn-4 does

    monkeypatch.setattr(
        peers.importlib, "import_module", lambda name: SimpleNamespace(flash_attn_func=attention)
    )
    tensors = make_tensors(TRAINING, "cpu", 0)
    peer = peers.CutePeer("theirs", "fake", "native", "lists")
    with pytest.raises(ValueError, match="saved"):
        peer.prepare(TRAINING, tensors)
    saved = cases.Saved(tensors.q, tensors.q, torch.ones_like(tensors.q))
    call = peer.prepare(TRAINING, tensors._replace(saved=saved))
    assert not told
    assert [x.shape for x in call()] == [x.shape for x in tensors[:3]]
    call()
    assert told == [{"causal": True}] * 2
    assert not any(x.requires_grad for x in tensors[:3])


@pytest.mark.parametrize("wrong", ["ours", DETERMINISTIC])
def test_a_wrong_backward_makes_no_row(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    case = masked("document", 200, kind="backward", deterministic=True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        measure, "make_tensors", lambda case, device, s: make_tensors(case, "cpu", s)
    )
    prepare = peers.CutePeer.prepare
    called = []

    def damaged(peer: peers.CutePeer, case: BenchCase, tensors: cases.CaseTensors) -> peers.Call:
        call = prepare(peer, case, tensors)
        if peer.name != wrong or case.kind != "backward":
            return call
        called.append(wrong)
        return lambda: [x * (1 + 0.1 * torch.rand(())) for x in call()]

    monkeypatch.setattr(peers.CutePeer, "prepare", damaged)
    with pytest.raises(measure.Refused, match=f"{wrong}: ") as refused:
        measure.admit(case, backward_options((case.name,)), measure.Inputs())
    assert called == [wrong]
    assert ("two calls differ" in str(refused.value)) == (wrong == DETERMINISTIC)


def test_bars_of_the_backward() -> None:
    levels = {"document": 0.9, "share_question": 0.75, "prefix_lm_causal": 1.0}
    targets: list[bench.Json] = [
        {"d": 128, "n": 8192, "mask": mask, "fwd_rel": 0.1, "bwd_rel": level}
        for mask, level in levels.items()
    ]
    targets += [{"d": 64, "n": 8192, "mask": "document", "fwd_rel": 0.8}]
    rows = [
        rate_row("a", "bwd-d128-causal-8k", "fa4", 560),
        rate_row("a", "bwd-mask-d128-8k-full", "ours", 600),
        rate_row("a", "bwd-mask-d128-8k-document", "ours", 540),
        rate_row("a", "bwd-mask-d128-8k-share_question", "ours", 460),
        rate_row("a", "bwd-mask-d128-8k-prefix_lm_causal", "ours", 575),
        rate_row("a", "mask-d128-8k-document", "ours", 100),
        rate_row("b", "bwd-mask-d64-8k-document", "ours", 400),
        rate_row("b", "bwd-d64-causal-8k", "ours", 515),
        rate_row("b", "bwd-d64-causal-8k", "fa4", 500),
        rate_row("b", "bwd-d128-full-8k", "ours", 595),
        rate_row("b", "bwd-d128-full-8k", "fa4", 600),
        rate_row("b", "bwd-mod-d128-8k-document", "ours", 500),
        rate_row("b", "bwd-mod-d128-8k-document", "fa4_mask_mod", 400),
        rate_row("b", "bwd-mod-d128-8k-random_eviction", "ours", 500),
        rate_row("b", "bwd-mod-d128-8k-random_eviction", "fa4_mask_mod", 400),
        rate_row("b", "bwd-det-d128-8k-causal", "ours", 550),
        rate_row("b", "bwd-det-d128-8k-causal", DETERMINISTIC, 500),
        rate_row("b", "bwd-det-d128-8k-document", DETERMINISTIC, 400),
        rate_row("b", "bwd-det-d128-8k-document", "ours", 500),
    ]
    found = {bar.name: bar for bars in report.bars(rows, targets).values() for bar in bars}

    def of(name: str) -> tuple[float | None, float | None, str]:
        return found[name].figure, found[name].bar, found[name].verdict()

    approx = pytest.approx
    assert of("bwd-mask-d128-8k-document") == (approx(540 / 560, abs=1e-3), approx(0.954), "met")
    assert of("bwd-mask-d128-8k-share_question")[1:] == (approx(0.795), "met")
    near_full = approx(0.95 * 600 / 560, abs=1e-3)
    assert of("bwd-mask-d128-8k-prefix_lm_causal") == (
        approx(575 / 560, abs=1e-3),
        near_full,
        "met",
    )
    # without a level there is no bar; a forward's causal figure, or another run's, does not count
    assert of("bwd-mask-d64-8k-document") == (approx(0.8, abs=1e-3), None, "no bar")
    assert of("mask-d128-8k-document")[2] == "not measured"
    mean = 460 / 560 / 0.75
    assert of("bwd-mask mean d128") == (approx(mean, abs=1e-3), 1.15, "short")
    assert of("bwd-mask mean all") == (approx(mean, abs=1e-3), 1.15, "short")
    assert of("bwd-mask mean d64")[2] == "not measured"
    assert of("bwd-d64-causal-8k") == (approx(1.03, abs=1e-3), 1.03, "met")
    assert of("bwd-d128-full-8k") == (approx(595 / 600, abs=1e-3), 1.0, "short")
    assert of("bwd-mod-d128-8k-document") == (approx(1.25, abs=1e-3), 1.25, "met")
    assert of("bwd-mod-d128-8k-random_eviction") == (approx(1.25, abs=1e-3), 1.8, "short")
    assert of("bwd-det-d128-8k-causal") == (approx(1.1, abs=1e-3), 1.2, "met")
    assert of("bwd-det-d128-8k-document") == (approx(1.25, abs=1e-3), 1.2, "short")
    named = {*report.BACKWARD, *report.BACKWARD_CALLABLES, *report.DETERMINISTIC_SHARE}
    assert named <= set(CASES) and named <= found.keys()
