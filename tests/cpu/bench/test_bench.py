"""The pure parts of bench/: what is charged, what is refused, what a row holds."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_cases import SMALL, masked, rate_row, small

import bench
from bench import (
    DETERMINISTIC,
    cases,
    cudnn_cases,
    everyday,
    flops,
    gate,
    masks,
    peers,
    prep,
    run,
    timing,
)
from bench.cases import CASES, BenchCase, make_tensors

ROW_KEYS = {
    *("run", "date", "gpu", "commit", "versions", "kind", "peer", "mask", "d", "n", "tokens"),
    *("heads", "heads_kv", "dtype", "deterministic", "variant", "sparsity", "fwd_ms", "bwd_ms"),
    *("fwd", "bwd", "us", "bytes", "launches", "tokens_per_s", "note"),
}


def visible_pairs(case: BenchCase, length: int) -> np.ndarray:
    """Dense (length, length) visibility, element by element."""
    q, k = np.mgrid[:length, :length]
    seen = np.ones((length, length), dtype=bool)
    if case.mask != "full":
        seen &= k <= q
    if case.window is not None:
        seen &= k >= q - case.window
    return seen


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.mask}-{case.n}")
def test_tiles_and_flops_match_a_dense_mask(case: BenchCase) -> None:
    visible = total = 0
    for length in case.lengths:
        seen = visible_pairs(case, length)
        for i in range(0, length, 128):
            for j in range(0, length, 128):
                visible += bool(seen[i : i + 128, j : j + 128].any())
                total += 1
    assert flops.tile_counts(case) == (visible, total)
    assert flops.sparsity(case) == 1 - visible / total
    work = 2 * case.heads * 128 * 128 * visible * (case.d + case.d_v)
    assert flops.attention_flops(case) == work
    assert flops.tflops(case, 2.0) == pytest.approx(work / 2e-3 / 1e12)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.mask}-{case.n}")
def test_masks_match_a_dense_mask(case: BenchCase) -> None:
    length = case.lengths[0]
    rows = np.arange(length)
    seen = case.mask_of(length).sees(rows[:, None], rows[None, :])
    assert np.array_equal(seen, visible_pairs(case, length))


def test_published_operation_counts() -> None:
    assert flops.attention_flops(CASES["d128-full-8k"]) == 4 * 16 * 32 * 128 * 8192 * 8192
    assert flops.attention_flops(CASES["d64-full-32k"]) == 4 * 4 * 64 * 64 * 32768 * 32768
    assert flops.tile_counts(CASES["d128-causal-1k"]) == (128 * 36, 128 * 64)
    unequal = CASES["extra-d192v128-causal-8k"]
    assert flops.attention_flops(unequal) == 2 * (192 + 128) * 32 * 16 * (64 * 65 // 2) * 128 * 128
    forward = flops.attention_flops(CASES["d128-full-8k"])
    assert flops.attention_flops(CASES["bwd-d128-full-8k"]) == 2.5 * forward
    forward = flops.attention_flops(CASES["host-128"])
    assert flops.attention_flops(CASES["host-128-train"]) == 3.5 * forward


def test_the_table_of_cases() -> None:
    long = [f"d{d}-{m}-{n}k" for d in (128, 64) for m in ("full", "causal") for n in (8, 32)]
    long += [f"d{d}-window-{n}k" for d in (128, 64) for n in (8, 32)]
    short = [f"d128-causal-{n}" for n in ("512", "1k", "2k")]
    varlen = ["d128-varlen-kv32", "d128-varlen-kv8"]
    other = ["d256-full-8k", "d256-causal-8k", "host-128", "host-128-train", "cold-128"]
    assert {*long, *short, *varlen, *other} <= set(CASES)
    for case in CASES.values():
        if case.name in (*everyday.table_names(), *cudnn_cases.table_names()):
            continue
        if case.kind in ("attention", "backward"):
            assert case.tokens == 131072
            assert case.heads * case.d_v == 4096
        assert case.window is None or case.window * 16 == case.n
    for prefix in ("mask-d128-8k-", "mask-d64-128k-", "bwd-mask-d64-8k-", "bwd-mask-d128-128k-"):
        assert [prefix + mask for mask in masks.MASKS] == [c for c in CASES if c.startswith(prefix)]
    assert [CASES[f"d{d}-full-8k"].heads for d in (64, 128, 256)] == [64, 32, 16]
    for name in varlen:
        assert (CASES[name].batch, CASES[name].heads) == (32, 32)
        assert min(CASES[name].lengths) >= 256 and max(CASES[name].lengths) <= 8192


@pytest.mark.parametrize("seed", range(20))
def test_document_lengths(seed: int) -> None:
    lengths = cases.document_lengths(9, 5000, 100, 900, seed)
    assert sum(lengths) == 5000 and len(lengths) == 9
    assert all(100 <= length <= 900 for length in lengths)
    assert lengths == cases.document_lengths(9, 5000, 100, 900, seed)
    with pytest.raises(ValueError, match="cannot hold"):
        cases.document_lengths(9, 9 * 900 + 1, 100, 900, seed)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": 400}, "300 of 400"),
        ({"heads_kv": 3}, "heads_kv=3"),
        ({"window": 8}, "window=8"),
        ({"mask": "diagonal"}, "diagonal"),
        ({"dtype": "float64"}, "float64"),
        ({"kind": "other"}, "other"),
        ({"doc_lengths": (300,)}, "doc_lengths"),
        ({"mask": "varlen_causal", "doc_lengths": (100, 200)}, "n=300"),
        ({"mask": "document"}, "no native form"),
        ({"mask": "document", "form": "columns", "draw": masks.Draw(((299,),))}, "hold n=300"),
        ({"score_mod": "tanh"}, "tanh"),
        ({"deterministic": True}, "deterministic with kind='attention'"),
    ],
)
def test_contradictory_cases_are_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        small(**changes)  # type: ignore[arg-type]


def test_select() -> None:
    assert cases.select(["host-128", "d256*"]) == ("d256-full-8k", "d256-causal-8k", "host-128")
    assert cases.select(["host-128*"]) == ("host-128", "host-128-train")
    assert cases.select(["*"]) == tuple(CASES)
    with pytest.raises(ValueError, match="no case matches 'd512"):
        cases.select(["d128*", "d512*"])


@pytest.mark.parametrize(
    ("peer", "case", "text"),
    [
        ("cudnn", "d128-window-8k", "no sliding_window mask"),
        ("cudnn", "mod-d128-8k-alibi", "no score_mod"),
        ("sdpa_dense", "mask-d128-32k-document", "up to 8192 tokens"),
        ("flex", "d128-varlen-kv8", "varlen"),
        ("cudnn", "d128-varlen-kv8", "no cu_seqlens"),
        ("cudnn", "extra-d128-softcap-causal-8k", "no softcap"),
        ("cudnn", "host-128", "kind attention and backward only"),
        ("sdpa", "d128-full-8k", "kind host and host_train only"),
        ("flex", "host-128-train", "host time"),
        ("flex", "memory-bwd-8k-causal_document", "the memory of a backward"),
        ("sdpa_dense", "bwd-mask-d128-32k-document", "up to 8192 tokens"),
        (DETERMINISTIC, "bwd-d128-full-8k", "no order of sums"),
        (DETERMINISTIC, "d128-full-8k", "no order of sums"),
    ],
)
def test_peers_say_what_they_cannot_do(peer: str, case: str, text: str) -> None:
    assert text in (peers.PEERS[peer].supports(CASES[case]) or "")


def test_peers_take_what_they_can() -> None:
    assert peers.PEERS["cudnn"].supports(CASES["d128-causal-8k"]) is None
    assert peers.PEERS["sdpa"].supports(CASES["host-128"]) is None
    assert peers.PEERS["sdpa"].supports(CASES["host-128-train"]) is None
    assert peers.PEERS["sdpa_dense"].supports(CASES["mask-d128-8k-document"]) is None
    absent = peers.CutePeer("absent", "no_such_package.cute", None, "lists")
    assert absent.supports(CASES["host-128"]) == "no_such_package is not installed"
    native, by_mod = (
        peers.CutePeer("x", "bench", form, "lists") for form in ("native", "mask_mod")
    )
    assert native.supports(CASES["mask-d64-8k-sliding_window"]) is None
    assert native.supports(CASES["mask-d64-8k-document"]) == "no flag means document"
    assert by_mod.supports(CASES["mask-d64-8k-document"]) is None
    assert by_mod.supports(CASES["mask-d64-8k-causal"]) == "causal needs no mask_mod"
    assert peers.PEERS[DETERMINISTIC].supports(CASES["bwd-det-d128-8k-document"]) is None
    assert peers.PEERS["ours"].supports(CASES["bwd-det-d128-8k-document"]) is None
    assert native.supports(CASES["bwd-d128-window-8k"]) is None
    assert native.supports(CASES["bwd-mask-d64-8k-document"]) == "no flag means document"
    assert native.supports(CASES["host-128-train"]) is None
    assert native.supports(CASES["memory-bwd-128k-causal"]) is None
    remembered = CASES["memory-bwd-8k-causal_document"]
    assert native.supports(remembered) == "no flag means causal_document"
    assert "where ours is told so" in (by_mod.supports(remembered) or "")
    assert native.supports(CASES["bwd-det-d128-8k-causal"]) == "ours is compared with itself"
    assert by_mod.supports(CASES["bwd-mod-d128-8k-document"]) is None
    assert "where ours is told so" in (by_mod.supports(CASES["bwd-mask-d64-8k-document"]) or "")
    scored = small("causal", kind="backward", score_mod="alibi")
    assert "no derivative" in (native.supports(scored) or "")


def test_cute_peer_passes_the_whole_case(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(_flash_attn_fwd=lambda q, k, v, **options: options)
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: module)
    peer = peers.CutePeer("fake", "fake", None, "lists")
    case = small("sliding_window", 256, window=16, softcap=20.0)
    seen = peer.prepare(case, make_tensors(case, "cpu", 0))()
    assert seen == {"causal": True, "return_lse": True, "window_size_left": 16, "softcap": 20.0}
    tensors = make_tensors(SMALL[-1], "cpu", 0)
    seen = peer.prepare(SMALL[-1], tensors)()
    assert seen.pop("cu_seqlens_q") is seen.pop("cu_seqlens_k") is tensors.cu_seqlens
    lengths = {"max_seqlen_q": 515, "max_seqlen_k": 515}
    assert seen == {"causal": True, "return_lse": True, **lengths}


def test_varlen_tensors() -> None:
    case = SMALL[-1]
    q, k, v, cu_seqlens, saved, sink = make_tensors(case, "cpu", 3)
    assert saved is None and sink is None
    assert (q.shape, k.shape, v.shape) == ((773, 4, 64), (773, 2, 64), (773, 2, 64))
    assert cu_seqlens is not None and cu_seqlens.tolist() == [0, 1, 130, 645, 773]
    assert cu_seqlens.dtype == torch.int32 and q.dtype == torch.bfloat16
    assert torch.equal(q, make_tensors(case, "cpu", 3).q)
    assert not torch.equal(q, make_tensors(case, "cpu", 4).q)


def attend(case: BenchCase, tensors: cases.CaseTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole (out, lse) by dense fp32 attention, out rounded to the case's dtype."""
    q, k, v = (t.reshape(-1, *t.shape[-2:]).float() for t in tensors[:3])
    k, v = (t.repeat_interleave(case.heads // case.heads_kv, 1) for t in (k, v))
    outs, lses, start = [], [], 0
    for length in case.lengths:
        part = slice(start, start + length)
        scores = torch.einsum("qhd,khd->hqk", q[part], k[part]) * case.d**-0.5
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        hidden = torch.from_numpy(~visible_pairs(case, length))
        scores = scores.masked_fill(hidden, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[part]))
        lses.append(scores.logsumexp(-1))
        start += length
    out = torch.cat(outs).to(tensors.q.dtype).reshape(*tensors.q.shape[:-1], case.d_v)
    return out, torch.cat(lses, 1) if case.varlen else torch.stack(lses)


GATED = [*SMALL, small("causal", 200, softcap=5.0, d_v=32), small("causal", 200, dtype="float16")]


@pytest.mark.parametrize("case", GATED, ids=lambda c: f"{c.mask}-{c.n}-{c.dtype}-{c.softcap}")
def test_gate_is_green_on_right_and_red_on_wrong_results(case: BenchCase) -> None:
    tensors = make_tensors(case, "cpu", 5)

    truth = gate.reference(case, tensors, seed=1)

    def ok(out: torch.Tensor, lse: torch.Tensor | None, rule: float = gate.RULE) -> bool:
        return gate.check(truth, out, lse, rule=rule).ok

    out, lse = attend(case, tensors)
    assert ok(out, lse)
    assert ok(out, None)
    assert not ok(out, lse + 0.01)
    assert not ok(out + 0.05, lse)
    for wrong in (out, lse):
        damaged = wrong.clone()
        damaged.view(-1)[-1] = torch.nan
        assert not ok(damaged if wrong is out else out, damaged if wrong is lse else lse)
    swapped_heads = out.roll(1, -2)
    assert not ok(swapped_heads, lse, gate.PEER_RULE)


@pytest.mark.parametrize("window", [55, 57, 900])
def test_gate_sees_a_mask_that_is_off_by_one_key(window: int) -> None:
    case = small("sliding_window", 900, window=56)
    tensors = make_tensors(case, "cpu", 5)
    out, lse = attend(small("sliding_window", 900, window=window), tensors)
    right = attend(case, tensors)
    truth = gate.reference(case, tensors, seed=1)
    assert gate.check(truth, *right, rule=gate.RULE).ok
    assert not gate.check(truth, out, None, rule=gate.RULE).ok
    assert not gate.check(truth, right[0], lse, rule=gate.RULE).ok


def test_sampled_rows_hold_the_edges_of_documents() -> None:
    rows = gate.sample_rows(SMALL[-1], seed=7)
    places = {(row.sequence, row.query) for row in rows}
    assert {(0, 0), (1, 0), (1, 128), (2, 0), (2, 127), (2, 128), (2, 514), (3, 127)} <= places
    assert all(row.query < SMALL[-1].lengths[row.sequence] for row in rows)
    assert len(rows) >= 64 + 8
    dense = {(row.sequence, row.query) for row in gate.sample_rows(CASES["d128-full-8k"], seed=7)}
    assert {(0, 0), (0, 8191), (15, 0), (15, 8191)} <= dense


def test_rotation_gives_each_peer_each_place() -> None:
    orders = list(timing.rotations(["a", "b", "c"], 4))
    assert orders == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b"), ("a", "b", "c")]
    assert list(timing.rotations(["a"], 0)) == []
    assert timing.median([3.0, 1.0, 2.0]) == 2.0
    assert timing.spread([3.0, 1.0, 2.0]) == 1.0


def test_nvidia_smi_line() -> None:
    assert timing.parse_smi("1665, 688.10\n") == "SM 1665 MHz, 688 W"
    assert timing.parse_smi("1665, [N/A]") == ""
    assert timing.parse_smi("") == ""


def test_rows_have_the_keys_of_the_format() -> None:
    case = CASES["d128-window-8k"]
    row = bench.row_of(case, "ours", "loop", 2.0, ("spread 1.0%", "", "fine"))
    host = bench.row_of(CASES["host-128"], "fa4", "warm", 104.125, ())
    unequal = bench.row_of(CASES["extra-d192v128-causal-8k"], "fa4", "loop", 1.0, ())
    backward = bench.row_of(CASES["bwd-det-d128-8k-document"], DETERMINISTIC, "loop", 20.0, ())
    assert set(row) | set(host) | set(backward) <= ROW_KEYS
    assert (backward["kind"], backward["peer"], backward["deterministic"]) == (
        "attention",
        "ours",
        True,
    )
    assert backward["note"] == "bwd-det-d128-8k-document; columns"
    assert backward["bwd_ms"] == 20.0 and not {"fwd", "fwd_ms"} & backward.keys()
    twin = flops.tflops(CASES["mask-d128-8k-document"], 20.0)
    assert backward["bwd"] == pytest.approx(2.5 * twin, abs=0.01)
    assert bench.peer_of(backward) == DETERMINISTIC and bench.peer_of(row) == "ours"
    assert row["deterministic"] is False
    assert row["note"] == "d128-window-8k; window=512; spread 1.0%; fine"
    assert (row["kind"], row["mask"], row["d"]) == ("attention", "sliding_window", 128)
    assert row["fwd"] == pytest.approx(flops.tflops(case, row["fwd_ms"]), abs=0.01)
    assert row["fwd_ms"] == 2.0 and row["sparsity"] == pytest.approx(0.9243, abs=1e-4)
    assert host["us"] == 104.12 and host["kind"] == "host" and "fwd" not in host
    assert unequal["note"] == "extra-d192v128-causal-8k; d_v=128"
    json.dumps([row, host])


def test_table_compares_inside_a_run_only() -> None:
    case = CASES["d128-full-8k"]
    flop = flops.attention_flops(case)

    def row(run_id: str, peer: str, variant: str, rate: float) -> bench.Json:
        return {"run": run_id} | bench.row_of(case, peer, variant, flop / rate / 1e9, ())

    rows = [row("a", p, v, r) for v in ("loop", "single") for p, r in (("ours", 660), ("fa4", 600))]
    rows += [row("a", "cudnn", "loop", 550), row("b", "fa4", "loop", 330)]
    rows += [{"run": "c"} | bench.row_of(CASES["host-128"], "ours", "warm", 24.0, ())]
    rows += [rate_row("d", "bwd-det-d128-8k-causal", "ours", 550)]
    rows += [rate_row("d", "bwd-det-d128-8k-causal", DETERMINISTIC, 500)]
    lines = [" ".join(line.split()) for line in bench.format_table(rows).splitlines()]
    assert lines == [
        "d128-full-8k fa4 loop 660.0 / 600.0 = 1.100 single 660.0 / 600.0 = 1.100",
        "d128-full-8k cudnn loop 660.0 / 550.0 = 1.200 single 660.0 / -",
        "d128-full-8k fa4 loop - / 330.0",
        "host-128 ours warm 24.0",
        "bwd-det-d128-8k-causal ours_deterministic loop 550.0 / 500.0 = 1.100",
    ]


def test_a_dead_worker_loses_its_case_only() -> None:
    launched = []

    def launch(names: tuple[str, ...], attempt: int) -> dict[str, str]:
        launched.append((names, attempt))
        return {"a": "done", "b": "died"} if attempt == 0 else dict.fromkeys(names, "done")

    assert run.supervise("abcd", launch) == {"a": "done", "b": "died", "c": "done", "d": "done"}
    assert launched == [(("a", "b", "c", "d"), 0), (("c", "d"), 1)]
    assert set(run.supervise("ab", lambda names, attempt: {}).values()) == {
        "the worker could not start"
    }


def test_a_new_worker_measures_what_its_cases_are_compared_with() -> None:
    for prefix in ("mask-d64-8k", "bwd-mask-d64-8k"):
        check_references([f"{prefix}-{m}" for m in ("full", "causal", "document", "qk_sparse")])


def check_references(names: list[str]) -> None:
    launched = []

    def launch(names: tuple[str, ...], attempt: int) -> dict[str, str]:
        launched.append(names)
        return dict.fromkeys(names, "done") if attempt else {names[0]: "done", names[1]: "died"}

    died = [names[0], names[2], names[1], names[3]]
    outcomes = run.supervise(died, launch)
    assert launched == [tuple(died), (names[0], names[1], names[3])]
    assert outcomes == dict.fromkeys(names, "done") | {names[2]: "died"}


@pytest.mark.parametrize("arguments", [["--peers", "ours,fa5"], ["d512*"]])
def test_wrong_arguments_stop_before_any_work(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run.parse(arguments)
    assert stopped.value.code == 2


def test_listing_imports_neither_torch_nor_cutlass() -> None:
    program = (
        "import sys; from bench.run import main; assert main(['--list']) == 0; "
        "assert not {'torch', 'cutlass'} & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=bench.ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(CASES)


class FakeEvent:
    def __init__(self, clock: list[float]) -> None:
        self.clock, self.at = clock, 0.0

    def record(self) -> None:
        self.at = self.clock[0]

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


@pytest.mark.parametrize(("least", "counted"), [(3, 5 + 2 * 5), (1, 2 + 2 * 2)])
def test_a_burst_has_a_few_calls_at_least(
    monkeypatch: pytest.MonkeyPatch, least: int, counted: int
) -> None:
    clock, calls = [0.0], []

    def call(milliseconds: float = 700.0) -> None:
        clock[0] += milliseconds
        calls.append(milliseconds)

    monkeypatch.setattr(timing, "_events", lambda: (FakeEvent(clock), FakeEvent(clock)))
    assert timing.time_loop({"ours": call}, 2, 0.1, least) == {"ours": [700.0, 700.0]}
    assert len(calls) == counted
    # three rounds at most where a call is longer than a burst
    assert len(timing.time_loop({"ours": call}, 9, 0.1, least)["ours"]) == 3
    assert len(timing.time_loop({"ours": call}, 9, 0.8, least)["ours"]) == 9
    calls.clear()
    timing.time_loop({"ours": lambda: call(1.0)}, 1, 0.1, least)
    assert len(calls) == least + min(2, least) + 100 + 12


def test_preparation_counts_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = masked("share_question", 256, kind="prep")
    ours, flex = prep.prepare_ours(case, "cpu"), prep.prepare_flex(case, "cpu")
    # intervals as given and by documents, where these begin, in slots and in the batch, and bounds
    # of 2 and 2 + 1 blocks
    assert ours.size(ours.call()) == 4 * (2 * 256 + 1 + 2 + 2 * 2 + 2 * (2 + 1))
    # Two tables of 256, and lists of 2 x 2 blocks: counts and indices, partial and full, both ways.
    assert flex.size(flex.call()) == 4 * (2 * 256 + 4 * (2 + 4))
