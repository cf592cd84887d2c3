"""Statistics of P on a Hopper GPU, against the whole matrix in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cases import Case
from inputs import make_inputs
from statistics_cases import (
    CASES,
    STATISTICS,
    Wanted,
    arguments,
    assert_right,
    draw_case,
    draw_wanted,
)

import flash_mask_cute
from flash_mask_cute import attention_statistics, flash_attn_func

# of the exponentials of the hardware, of fp32 exponents
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}


def run(name: str, *operands: Any, **keywords: Any) -> Any:
    return getattr(flash_mask_cute, name)(*operands, **keywords)


@pytest.mark.shares(3)
@pytest.mark.parametrize("name", CASES)
def test_right(name: str) -> None:
    case, wanted = CASES[name]
    assert_right(run, make_inputs(case, "cuda"), wanted, **TOLERANCE)


@pytest.mark.shares(3)
@pytest.mark.parametrize("seed", range(30))
def test_drawn(seed: int) -> None:
    rng = random.Random(f"statistics gpu {seed}")
    assert_right(run, make_inputs(draw_case(rng), "cuda", seed), draw_wanted(rng), **TOLERANCE)


def test_equal_bits_and_a_graph() -> None:
    inputs = make_inputs(Case("bits", 2, 2000, 2000, 8, 2, 128, causal=True), "cuda")
    _, operands, keywords = arguments(inputs, Wanted(deterministic=True))
    first, second = (attention_statistics(*operands, **keywords) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention_statistics(*operands, **keywords)
    graph.replay()
    for x, y, z in zip(first, second, captured, strict=True):
        assert torch.equal(x, y) and torch.equal(x, z)


def test_lse_of_the_forward_and_its_graph_stay() -> None:
    """A loss through attention has its gradient after its statistics were taken."""
    q, k, v = (
        torch.randn(1, 700, heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    )
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    found: Any = attention_statistics(q, k, lse, STATISTICS, causal=True)
    out.float().square().sum().backward()
    assert q.grad is not None
    torch.testing.assert_close(
        found.block_sums.sum(-1).mean(), torch.tensor(4.0, device="cuda"), rtol=1e-3, atol=0
    )
