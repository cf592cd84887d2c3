"""Batches with some causal sequences, and results in memory of the caller, on a GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from causal_sequences import draw_mixed
from causal_sequences_on_devices import test_random_calls  # noqa: F401
from test_serving_gpu import on_cuda
from torch import Tensor

from flash_mask_cute import compile_count, flash_attn_func, flash_attn_varlen_func

BF16, CUDA = torch.bfloat16, torch.device("cuda")


def test_a_graph_reads_the_tensor_and_writes_out() -> None:
    call = draw_mixed(random.Random(0), BF16, 64, 300)
    keywords = on_cuda(call.keywords)
    operands = [x.to(CUDA) for x in (call.q, call.k, call.v)]
    room = torch.full((*call.q.shape[:-1], 192), torch.nan, dtype=BF16, device=CUDA)
    out = room[..., 64:128]

    def run() -> Any:
        return flash_attn_varlen_func(*operands, **keywords, out=out, return_lse=True)

    run()
    graph, compiled = torch.cuda.CUDAGraph(), compile_count()
    with torch.cuda.graph(graph):
        _, lse = run()
    for given in (call, call.turned()):
        keywords["causal"].copy_(given.keywords["causal"])
        graph.replay()
        given.assert_close(out, lse)
    assert compile_count() == compiled
    assert room[..., :64].isnan().all() and room[..., 128:].isnan().all()


@pytest.mark.parametrize("stride", [128, 136, 1024])
def test_rows_of_out_may_lie_apart(stride: int) -> None:
    q, k, v = torch.randn(3, 2, 300, 4, 128, dtype=BF16, device=CUDA)
    expected = flash_attn_func(q, k, v, causal=True)
    room = torch.full((2, 300, 4, stride), torch.nan, dtype=BF16, device=CUDA)
    out = room[..., :128]
    found: Tensor = flash_attn_func(q, k, v, causal=True, out=out)
    assert found is out and torch.equal(out, expected)
    assert room[..., 128:].isnan().all()


def test_places_off_16_bytes_are_refused() -> None:
    q, k, v = torch.randn(3, 2, 8, 4, 64, dtype=BF16, device=CUDA)
    out = torch.empty(q.numel() + 1, dtype=BF16, device=CUDA)[1:].view(q.shape)
    rows = torch.empty(2, 8, 4, 66, dtype=BF16, device=CUDA)[..., :64]
    for given in (out, rows, out, rows):
        with pytest.raises(ValueError, match="^out must"):
            flash_attn_func(q, k, v, out=given)
