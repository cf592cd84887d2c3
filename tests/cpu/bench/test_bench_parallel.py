"""bench.parallel: its masks and plans, and what is said. Times need several GPUs."""

from __future__ import annotations

import random

import pytest
import torch

from bench import parallel as bench_parallel
from bench.overlap import overlap_of, union
from bench.parallel import CASES, Case, calls_of, shown, why_wrong
from flash_mask_cute import flash_attn_func, parallel


def test_documents_are_those_of_a_length() -> None:
    case = Case(4096, 512)
    mask = case.mask()
    found = parallel.plan(mask, 4, seqlen=case.seqlen).load(mask)
    whole = parallel.plan(None, 4, seqlen=case.seqlen).load(None)
    assert 0 < sum(found.tiles) < sum(whole.tiles) / 4


@pytest.mark.parametrize("name", [x for x in CASES if x.endswith("-64k")])
def test_ranks_have_the_same_work(name: str) -> None:
    mask = CASES[name].mask()
    for world in (2, 4):
        load = parallel.plan(mask, world, seqlen=CASES[name].seqlen).load(mask)
        assert load.imbalance < 1.06


def test_a_wrong_gradient_is_told() -> None:
    q, k, v, dout = (torch.randn(1, 20, 2, 16) for _ in range(4))
    calls = calls_of(lambda *x: flash_attn_func(*x, causal=True), [q, k, v], dout)
    expected = calls["both"]()
    assert torch.equal(calls["forward"](), expected[0])
    assert why_wrong(calls["both"](), expected) is None
    out, dq, dk, dv = expected
    told = why_wrong((out, dq, dk + 1, dv), expected)
    assert told is not None and told.startswith("dk differs from that of one GPU by ")


def test_a_row_is_told_with_its_rate() -> None:
    row = {"case": "causal-64k", "world": 2, "method": "ring", "imbalance": 1.0}
    row |= {"keys_received": 5, "forward_ms": 2.0, "forward_one_ms": 3.6, "forward_rate": 0.9}
    assert ": 0.90" in shown(row)
    assert "failed: x" in shown(row | {"note": "failed: x"})
    profile = {"forward_messages_ms": 0.5, "forward_hidden": 0.874}
    assert "messages 0.500 ms, 87 % under attention" in shown(row | profile)


def test_time_of_messages_under_attention() -> None:
    """By counting microseconds."""
    rng = random.Random(5)
    for _ in range(50):
        kernels = []
        for _ in range(rng.randint(0, 12)):
            begin = rng.randint(0, 90)
            name = rng.choice(["ncclDevKernel_SendRecv", "flash_mask_cutesm90flash_fwd", "copy"])
            kernels.append((name, (float(begin), float(begin + rng.randint(0, 20)))))
        times: dict[str, set[int]] = {"nccl": set(), "flash": set()}
        for name, (first, last) in kernels:
            for kind, at in times.items():
                if kind in name:
                    at.update(range(int(first), int(last)))
        found = overlap_of(kernels)
        assert found.messages * 1e3 == pytest.approx(len(times["nccl"]))
        assert found.attention * 1e3 == pytest.approx(len(times["flash"]))
        assert found.hidden * 1e3 == pytest.approx(len(times["nccl"] & times["flash"]))
    assert union([(3.0, 4.0), (0.0, 2.0), (1.0, 2.5)]) == [(0.0, 2.5), (3.0, 4.0)]
    assert overlap_of([]).share == 1.0


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_parallel.main([]) == 2
    assert "python -m bench.parallel needs a GPU" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench_parallel.main(["nothing"])
