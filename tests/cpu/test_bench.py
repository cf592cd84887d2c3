"""The pure parts of bench/: what is charged, what is refused, what a row holds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bench
from bench import cases, flops, peers, run, timing
from bench.cases import CASES, BenchCase, make_tensors

ROW_KEYS = {
    *("run", "date", "gpu", "commit", "versions", "kind", "peer", "mask", "d", "n", "tokens"),
    *("heads", "heads_kv", "dtype", "deterministic", "variant", "sparsity", "fwd_ms", "bwd_ms"),
    *("fwd", "bwd", "us", "bytes", "launches", "tokens_per_s", "note"),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Hundreds of tiny operations are ten times slower when threads share them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(mask: str = "causal", n: int = 300, **changes: object) -> BenchCase:
    fields: dict[str, object] = {"d": 64, "d_v": 64, "heads": 4, "heads_kv": 2, "tokens": n}
    return BenchCase("small", mask, n=n, **(fields | changes))  # type: ignore[arg-type]


SMALL = [
    small("full", 257),
    small("causal", 1000),
    small("causal", 128, tokens=384),
    small("sliding_window", 900, window=56),
    small("sliding_window", 512, window=128),
    small("varlen_causal", 515, tokens=773, doc_lengths=(1, 129, 515, 128)),
]


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
def test_key_bounds_match_a_dense_mask(case: BenchCase) -> None:
    length = case.lengths[0]
    first, last = flops.key_bounds(np.arange(length), length, case.causal, case.window)
    keys = np.arange(length)
    between = (keys >= first[:, None]) & (keys <= last[:, None])
    assert np.array_equal(between, visible_pairs(case, length))


def test_published_operation_counts() -> None:
    assert flops.attention_flops(CASES["d128-full-8k"]) == 4 * 16 * 32 * 128 * 8192 * 8192
    assert flops.attention_flops(CASES["d64-full-32k"]) == 4 * 4 * 64 * 64 * 32768 * 32768
    assert flops.tile_counts(CASES["d128-causal-1k"]) == (128 * 36, 128 * 64)
    unequal = CASES["extra-d192v128-causal-8k"]
    assert flops.attention_flops(unequal) == 2 * (192 + 128) * 32 * 16 * (64 * 65 // 2) * 128 * 128


def test_the_table_of_cases() -> None:
    long = [f"d{d}-{m}-{n}k" for d in (128, 64) for m in ("full", "causal") for n in (8, 32)]
    long += [f"d{d}-window-{n}k" for d in (128, 64) for n in (8, 32)]
    short = [f"d128-causal-{n}" for n in ("512", "1k", "2k")]
    varlen = ["d128-varlen-kv32", "d128-varlen-kv8"]
    other = ["d256-full-8k", "d256-causal-8k", "host-128", "cold-128"]
    assert {*long, *short, *varlen, *other} <= set(CASES)
    for case in CASES.values():
        if case.kind == "attention":
            assert case.tokens == 131072
            assert case.heads * case.d_v == 4096
        assert case.window is None or case.window * 16 == case.n
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
    ],
)
def test_contradictory_cases_are_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        small(**changes)  # type: ignore[arg-type]


def test_select() -> None:
    assert cases.select(["host*", "d256*"]) == ("d256-full-8k", "d256-causal-8k", "host-128")
    assert cases.select(["*"]) == tuple(CASES)
    with pytest.raises(ValueError, match="no case matches 'd512"):
        cases.select(["d128*", "d512*"])


@pytest.mark.parametrize(
    ("peer", "case", "text"),
    [
        ("cudnn", "d128-window-8k", "no window"),
        ("cudnn", "d128-varlen-kv8", "no cu_seqlens"),
        ("cudnn", "extra-d128-softcap-causal-8k", "no softcap"),
        ("cudnn", "host-128", "kind 'attention' only"),
        ("sdpa", "d128-full-8k", "kind 'host' only"),
    ],
)
def test_peers_say_what_they_cannot_do(peer: str, case: str, text: str) -> None:
    assert text in (peers.PEERS[peer].supports(CASES[case]) or "")


def test_peers_take_what_they_can() -> None:
    assert peers.PEERS["cudnn"].supports(CASES["d128-causal-8k"]) is None
    assert peers.PEERS["sdpa"].supports(CASES["host-128"]) is None
    absent = peers.CutePeer("absent", "no_such_package.interface")
    assert absent.supports(CASES["host-128"]) == "no_such_package is not installed"


def test_cute_peer_passes_the_whole_case(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(_flash_attn_fwd=lambda q, k, v, **options: options)
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: module)
    peer = peers.CutePeer("fake", "fake")
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
    q, k, v, cu_seqlens = make_tensors(case, "cpu", 3)
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

    def ok(out: torch.Tensor, lse: torch.Tensor | None, rule: float = peers.RULE) -> bool:
        return peers.check(case, tensors, out, lse, rule=rule, seed=1).ok

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
    assert not ok(swapped_heads, lse, peers.PEER_RULE)


@pytest.mark.parametrize("window", [55, 57, 900])
def test_gate_sees_a_mask_that_is_off_by_one_key(window: int) -> None:
    case = small("sliding_window", 900, window=56)
    tensors = make_tensors(case, "cpu", 5)
    out, lse = attend(small("sliding_window", 900, window=window), tensors)
    right = attend(case, tensors)
    assert not peers.check(case, tensors, out, None, rule=peers.RULE, seed=1).ok
    assert not peers.check(case, tensors, right[0], lse, rule=peers.RULE, seed=1).ok


def test_sampled_rows_hold_the_edges_of_documents() -> None:
    rows = peers.sample_rows(SMALL[-1], seed=7)
    places = {(row.sequence, row.query) for row in rows}
    assert {(0, 0), (1, 0), (1, 128), (2, 0), (2, 127), (2, 128), (2, 514), (3, 127)} <= places
    assert all(row.query < SMALL[-1].lengths[row.sequence] for row in rows)
    assert len(rows) >= 64 + 8
    dense = {(row.sequence, row.query) for row in peers.sample_rows(CASES["d128-full-8k"], seed=7)}
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
    assert set(row) | set(host) <= ROW_KEYS
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
    lines = [" ".join(line.split()) for line in bench.format_table(rows).splitlines()]
    assert lines == [
        "d128-full-8k fa4 loop 660.0 / 600.0 = 1.100 single 660.0 / 600.0 = 1.100",
        "d128-full-8k cudnn loop 660.0 / 550.0 = 1.200 single 660.0 / -",
        "d128-full-8k fa4 loop - / 330.0",
        "host-128 ours warm 24.0",
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
