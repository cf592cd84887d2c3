"""Several sequences of queries with the keys of one batch entry in common, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from public_call import capture
from shared_keys_on_devices import (  # noqa: F401
    test_backward,
    test_backward_in_order,
    test_forward,
    test_split_groups,
)
from torch import Tensor

from flash_mask_cute import flash_attn_func, flash_attn_varlen_func

BF16, INT, CUDA = torch.bfloat16, torch.int32, torch.device("cuda")
# each case compiles ten kernels
test_forward, test_backward = map(pytest.mark.shares(4), (test_forward, test_backward))


@pytest.mark.parametrize("seqlen_q", [1, 300])
def test_views_have_the_bits_of_copies(seqlen_q: int) -> None:
    """Of a stride of 0 over the batch, without memory for copies."""
    q = torch.randn(4, seqlen_q, 8, 128, dtype=BF16, device=CUDA)
    k, v = (torch.randn(1, 5000, 2, 128, dtype=BF16, device=CUDA) for _ in "kv")
    views = [x.expand(4, -1, -1, -1) for x in (k, v)]
    copies = [x.contiguous() for x in views]

    def attend(keys: list[Tensor]) -> tuple[Tensor, int]:
        """The output, and the bytes that a warm call asks for at most, those of splits among them.
        (The allocator may give more, by what lies free.)"""
        flash_attn_func(q, *keys, causal=True)
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        out = flash_attn_func(q, *keys, causal=True)
        return out, torch.cuda.memory_stats()["requested_bytes.all.peak"] - before

    (expected, of_copies), (found, of_views) = attend(copies), attend(views)
    assert torch.equal(found, expected)
    assert of_views <= of_copies


def test_a_graph_of_forward_and_backward() -> None:
    """Whose tensors of lengths and positions change between replays."""
    k, v = (torch.randn(1, 3000, 2, 64, dtype=BF16, device=CUDA, requires_grad=True) for _ in "kv")
    q = torch.randn(2000, 8, 64, dtype=BF16, device=CUDA, requires_grad=True)
    dout = torch.randn(2000, 8, 64, dtype=BF16, device=CUDA)
    starts, firsts = (torch.tensor(x, dtype=INT, device=CUDA) for x in ([0, 2, 2000], [9, 800]))

    def step() -> tuple[Tensor, ...]:
        out = flash_attn_varlen_func(
            q, k, v, starts, max_seqlen_q=2000, q_start=firsts, causal=True
        )
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    graph, found = capture(step, torch.cuda.Stream())
    others: list[Any] = [([0, 1100, 2000], [1900, 0]), ([0, 0, 2000], [5, 1000])]
    for ends, positions in others:
        starts.copy_(torch.tensor(ends, dtype=INT))
        firsts.copy_(torch.tensor(positions, dtype=INT))
        graph.replay()
        parts = []
        for first, end, position in zip(ends, ends[1:], positions, strict=False):
            if end > first:
                rows = q[None, first:end]
                parts.append(flash_attn_func(rows, k, v, causal=True, q_start=position)[0])
        expected = torch.cat(parts)
        gradients = torch.autograd.grad(expected, (q, k, v), dout)
        for ours, theirs in zip(found, (expected, *gradients), strict=True):
            assert torch.allclose(ours.float(), theirs.float(), atol=0.06, rtol=0.03)
