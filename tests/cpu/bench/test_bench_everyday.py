"""Everyday shapes: their cases, gates, bars and table. All rows here are made up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_cases import rate_row, small

import bench
from bench import everyday, flops, gate, peers, report, run, tables, timing
from bench.cases import CASES, BenchCase, make_tensors
from bench.everyday import SHAPES, WIDTHS, Width

SHAPE = "shape-llama3-8b-b2-n8192"
SMALL_GRID = "shape-gpt2-b8-n1024"


def test_each_shape_is_a_case_in_both_directions() -> None:
    assert len(SHAPES) == 41 and len({shape.case_name() for shape in SHAPES}) == 41
    for shape in SHAPES:
        forward, backward = (CASES[shape.case_name(is_backward=way)] for way in (False, True))
        assert (forward.kind, backward.kind) == ("attention", "backward")
        assert replace(backward, name=forward.name, kind="attention") == forward
        assert forward.tokens == shape.batch * shape.seqlen
    assert set(everyday.table_names()) <= set(CASES)
    packed = CASES["shape-packed-sft-llama3-8b-16384-tokens-11-documents"]
    assert packed.varlen and sum(packed.lengths) == 16384 and len(packed.lengths) == 11
    chunked = CASES["shape-chunked-prefill-b1-q1024-k32768"]
    assert (chunked.n, chunked.n_k, chunked.mask) == (1024, 32768, "causal")
    assert CASES["shape-gpt-oss-20b-b1-n4096-window-128-sink"].sink
    with pytest.raises(ValueError, match="looks ahead"):
        everyday.Shape.create({"name": "x", "window": [3, 3]})


def test_the_table_takes_all_of_them_and_widths_of_ours_alone() -> None:
    args = run.parse(["--table", "shapes"])
    assert args.names == everyday.table_names() and args.peers == ("ours", "fa4", "cudnn")
    assert args.resume and args.shorts == 9
    assert everyday.takes_part("fa4", SHAPE)
    assert not everyday.takes_part("fa4", "bwd-width-full-d72")
    again = run.references(["width-full-d72"], ["width-full-d96", "bwd-width-full-d96", SHAPE])
    assert again == ("width-full-d96",)


CROSS = [
    small("full", 300, tokens=600, n_k=77),
    small("causal", 130, tokens=260, n_k=401),
    small("sliding_window", 300, window=40, sink=True),
    small("causal", 200, tokens=400, sink=True),
]


def seen_of(case: BenchCase) -> np.ndarray:
    """Dense visibility, element by element; the last query is the last key's."""
    keys = case.n_k or case.n
    q, k = np.mgrid[: case.n, :keys]
    seen = np.ones((case.n, keys), dtype=bool)
    if case.mask != "full":
        seen &= k <= q + keys - case.n
    return seen if case.window is None else seen & (k >= q + keys - case.n - case.window)


@pytest.mark.parametrize("case", CROSS, ids=lambda c: f"{c.mask}-{c.n_k}-{c.sink}")
def test_tiles_and_gates(case: BenchCase) -> None:
    seen = seen_of(case)
    tiles = [
        seen[i : i + 128, j : j + 128].any()
        for i in range(0, seen.shape[0], 128)
        for j in range(0, seen.shape[1], 128)
    ]
    assert flops.tile_counts(case) == (sum(tiles) * case.batch, len(tiles) * case.batch)
    tensors = make_tensors(case, "cpu", 2)
    q, k, v = (x.double() for x in tensors[:3])
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * case.d**-0.5
    scores = scores.masked_fill(torch.from_numpy(~seen), -torch.inf)
    lse = scores.logsumexp(-1)
    if tensors.sink is not None:
        lse = torch.logaddexp(lse, tensors.sink.double()[:, None])
    probs = (scores - lse[..., None]).exp()
    out = torch.einsum("bhqk,bkhd->bqhd", probs, v).bfloat16()
    truth = gate.reference(case, tensors, 1)
    assert gate.check(truth, out, lse.float(), rule=gate.RULE).ok
    without = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).bfloat16()
    assert gate.check(truth, without, None, rule=gate.PEER_RULE).ok != case.sink
    backward = replace(case, kind="backward")
    tensors = peers.save_forward(backward, tensors, 2)
    reference = gate.gradient_reference(backward, tensors, 4)
    found = peers.PEERS["ours"].prepare(backward, tensors)()
    assert len(found) == 3 + case.sink
    assert gate.check_gradients(reference, found, rule=gate.RULE).ok
    for place in range(len(found)):
        off = list(found)
        off[place] = found[place] * 1.05
        assert not gate.check_gradients(reference, off, rule=gate.RULE).ok


def made_up(run_id: str, name: str, variant: str = "loop", **ms: float) -> list[bench.Json]:
    head = {"run": run_id, "commit": "abc", "gpu": "a GPU", "versions": {"torch": "2"}}
    return [head | bench.row_of(CASES[name], p, variant, of, ()) for p, of in ms.items()]


def bar_of(name: str, *rows: bench.Json) -> report.Bar:
    found = report.bars(rows, [])
    return next(bar for group in found.values() for bar in group if bar.name == name)


def test_bars_of_shapes() -> None:
    rows = made_up("a", SHAPE, ours=1.0, fa4=1.2, cudnn=0.9)
    assert bar_of(SHAPE, *rows).figure == pytest.approx(1.2)
    assert bar_of(SHAPE, *rows).verdict() == "met"
    # without flash-attn-4 in the run nothing tells that it refused
    only = made_up("a", SHAPE, ours=1.0, cudnn=0.9)
    assert bar_of(SHAPE, *only).verdict() == "not measured"
    refused = [*only, *made_up("a", "shape-flux-b1-n4608", ours=1.0, fa4=1.0)]
    bar = bar_of(SHAPE, *refused)
    assert (bar.figure, bar.verdict()) == (pytest.approx(0.9), "short")
    assert "against cuDNN" in bar.remark
    mean = bar_of("shape mean", *refused)
    assert mean.figure is None and "2 of 41" in mean.remark
    everything = [row for s in SHAPES for row in made_up("a", s.case_name(), ours=1.0, fa4=1.16)]
    assert bar_of("shape mean", *everything).verdict() == "met"
    assert bar_of("bwd-shape mean", *everything).verdict() == "not measured"


def test_short_calls_are_held_by_short_bursts() -> None:
    loop = made_up("a", SMALL_GRID, ours=0.1, fa4=0.3)
    assert bar_of(SMALL_GRID, *loop).verdict() == "not measured"
    short = made_up("a", SMALL_GRID, "short", ours=0.1, fa4=0.09)
    bar = bar_of(SMALL_GRID, *loop, *short)
    assert bar.figure == pytest.approx(0.9) and "bursts of ten calls" in bar.remark
    text = tables.shape_table([*loop, *short])
    assert "| gpt2 b8 n1024, causal |" in text and "a* -" in text and "\n- a: run a" in text
    assert tables.shape_table([]) == "No everyday shape is among the rows."


def test_exceptions_of_the_bars() -> None:
    by_name = {shape.name: shape for shape in SHAPES}
    flux, gemma = by_name["flux b1 n4608"], by_name["gemma3-4b b1 n8192"]
    llama, mla = by_name["llama3-8b b2 n8192"], by_name["deepseek mla training b2 n4096 full"]
    assert [report.shape_bar(s, "bwd") for s in (flux, gemma, llama, mla)] == [0.97, 1, 1, 1]
    assert [report.shape_bar(s, "fwd") for s in (flux, gemma, llama, mla)] == [1, 0.97, 1, 1]


def test_no_head_dimension_takes_longer_than_a_larger_one() -> None:
    bounds = {width.label: getattr(everyday.bound(width), "label", None) for width in WIDTHS}
    assert bounds["d72"] == bounds["d80"] == bounds["d64"] == "d96"
    assert bounds["d104"] == bounds["d112"] == bounds["d96"] == "d128"
    assert bounds["d160"] == bounds["d192v128"] == "d192" and bounds["d256"] is None
    name = Width(72, 72).case_name("full")
    rows = [*made_up("a", name, ours=1.5), *made_up("a", "width-full-d96", ours=1.2)]
    bar = bar_of(name, *rows)
    assert bar.figure == pytest.approx(1.25) and bar.verdict() == "short"
    other_run = made_up("b", "width-full-d96", ours=1.2)
    assert bar_of(name, rows[0], *other_run).verdict() == "not measured"


def test_a_short_burst_has_ten_calls_behind_a_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("sync"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: said.append("spin"), raising=False)
    monkeypatch.setattr(timing, "burst", lambda call, count, untimed: [count, untimed, call()][0])
    found = timing.time_short({"ours": lambda: said.append("call")}, 2, idle_s=0.0)
    assert found == {"ours": [10, 10]}
    assert said == ["sync", *["call"] * 10, "sync", *["sync", "spin", "call"] * 2]
    assert timing.time_short({"ours": lambda: None}, 0) == {"ours": []}


def test_rates_of_a_row_are_those_of_its_keys() -> None:
    row = rate_row("a", "shape-cross-attention-b8-q4096-k77", "ours", 100)
    assert row["note"].endswith("; n_k=77") and row["fwd"] == pytest.approx(100, rel=0.01)
