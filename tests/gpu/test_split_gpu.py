"""Forwards in splits on a Hopper GPU: right, the same under every graph replay, without waiting."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from eager import assert_close_to_oracle
from inputs import make_inputs
from oracle import reference_attention
from public_call import capture, no_waiting
from score_tables import TABLES, make_tabled
from split_cases import SPLIT_CASES, TABLED_CASES, SplitCase, take_chunks

from flash_mask_cute.interface import _flash_attn_fwd

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    take_chunks(monkeypatch)


@pytest.mark.shares(2)
@pytest.mark.parametrize("split", SPLIT_CASES)
def test_against_oracle(split: SplitCase) -> None:
    inputs = make_inputs(split.case, CUDA)
    x = inputs.q, inputs.k, inputs.v
    results = [
        _flash_attn_fwd(*x, **inputs.keywords, num_splits=split.num_splits) for _ in range(3)
    ]
    out, lse = results[0]
    assert lse is not None
    assert_close_to_oracle(out, lse, inputs)
    # bits do not depend on who comes first
    assert all(torch.equal(again, out) for again, _ in results)


@pytest.mark.parametrize("split", TABLED_CASES)
def test_scores_of_any_size(split: SplitCase) -> None:
    for name in TABLES:
        inputs = make_tabled(split.case, name, CUDA).inputs
        call = inputs.keywords | {"num_splits": split.num_splits}
        out, lse = _flash_attn_fwd(inputs.q, inputs.k, inputs.v, **call)
        assert lse is not None
        assert_close_to_oracle(out, lse, inputs)


@pytest.mark.parametrize("num_splits", [0, 5])
def test_one_graph_for_every_length(num_splits: int) -> None:
    inputs = make_inputs(Case("graph", 3, 1, 4000, 8, 2, causal=True, seqused_k=(1, 1, 1)), CUDA)
    used = inputs.keywords["seqused_k"]
    inputs.k.normal_()
    inputs.v.normal_()

    def attend() -> torch.Tensor:
        call = inputs.keywords | {"num_splits": num_splits}
        return _flash_attn_fwd(inputs.q, inputs.k, inputs.v, **call)[0]

    graph, out = capture(attend)
    for step in range(200):
        lengths = [step * 20 + 1, 4000 - step * 20, step * 7]
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        want, _ = reference_attention(
            inputs.q, inputs.k, inputs.v, None, causal=True, seqused_k=used
        )
        torch.testing.assert_close(out.double(), want.double(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("num_splits", [0, 5])
def test_nothing_waits_for_the_device(num_splits: int) -> None:
    inputs = make_inputs(Case("host", 2, 1, 4000, 8, 2, causal=True, seqused_k=(3000, 5)), CUDA)
    call = inputs.keywords | {"num_splits": num_splits}
    _flash_attn_fwd(inputs.q, inputs.k, inputs.v, **call)
    torch.cuda.synchronize()
    with no_waiting():
        _flash_attn_fwd(inputs.q, inputs.k, inputs.v, **call)
