"""Queries that begin at a position, in compiled kernels of either architecture."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import simulated_backward
import torch
from conftest import ACTIVE_ARCH
from placed_attention import Draw, PlacedCall
from planned import forward_call
from quiet_runs import quiet_run
from simulated_forward import run_on_simulator

ARCH = ACTIVE_ARCH
SEED = os.environ.get("FLASH_MASK_SIM_SEED", "0")
# Seed of `Draw` and number of calls with intervals and lists: "end" with a score_mod; a tensor; and
# queries before position 0 with a mask_mod.
DRAWN = (0, 8), (1, 11), (5, 3)
# The same of draws whose positions begin at EARLIEST: a number with a mask_mod and lists; a number
# with intervals, causal and a score_mod; a tensor with lists.
BEFORE = (0, 4), (5, 12), (4, 1)
EARLIEST = -130


def calls(drawn: tuple[tuple[int, int], ...], earliest: int = 0) -> Iterator[PlacedCall]:
    if SEED != "0":
        rng = random.Random(f"q_start {SEED}")
        drawn = tuple((rng.randrange(1 << 30), number) for number in range(12))
    for seed, number in drawn:
        *_, call = Draw(seed, torch.bfloat16, 64, 200, earliest).calls(number + 1)
        yield call


def run_forward(call: PlacedCall) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = run_on_simulator(forward_call(call.q, call.k, call.v, **call.keywords))
    assert lse is not None
    return out, lse


@pytest.mark.parametrize(("drawn", "earliest"), [(DRAWN, 0), (BEFORE, EARLIEST)])
def test_forward(simulator: ModuleType, drawn: tuple[tuple[int, int], ...], earliest: int) -> None:
    for delay, call in enumerate(calls(drawn, earliest)):
        with quiet_run(simulator, delay):
            out, lse = run_forward(call)
        call.assert_output(out, lse)


@pytest.mark.parametrize(("drawn", "earliest"), [(DRAWN[1:], 0), (BEFORE[:2], EARLIEST)])
def test_backward(simulator: ModuleType, drawn: tuple[tuple[int, int], ...], earliest: int) -> None:
    for delay, call in enumerate(calls(drawn, earliest)):
        out, lse = call.attend(call.q.double(), call.k.double(), call.v.double())
        dout = torch.randn_like(out).bfloat16()
        operands = call.q, call.k, call.v, out.bfloat16(), dout, lse.float()
        with quiet_run(simulator, delay):
            found = simulated_backward.launch(operands, call.keywords)
        call.assert_gradients(found, dout)


def _four_tables(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """By key, by query, by distance, and by places."""
    import cutlass
    from cutlass import Float32

    of_key, of_query, of_distance, of_pair = aux
    distance = cutlass.min(cutlass.max(q[0] - k[0], -9), 9) + 9
    of_query = of_query[b[0], q[0]] * Float32(k[0] % 3)
    found = of_query + of_key[h[0], k[0]] + of_distance[distance, h[0]]
    return score + (found + of_pair[h[0], q[0], k[0]])


@pytest.mark.parametrize("in_order", [False, True])
def test_gradients_of_tables(simulator: ModuleType, in_order: bool) -> None:
    """Of queries that begin before the first position, and behind it."""
    starts, rows, cols, heads = [-30, 45], 75, 140, 2
    generator = torch.Generator().manual_seed(5)
    q, k, v, dout = (
        torch.randn(2, n, heads, 64, generator=generator).bfloat16()
        for n in (rows, cols, cols, rows)
    )
    shapes = (heads, cols), (2, 128), (19, heads), (heads, 128, cols)
    tables = [torch.randn(shape, generator=generator) / 2 for shape in shapes]
    leaves = [x.double().requires_grad_() for x in (q, k, v, *tables)]
    of_key, of_query, of_distance, of_pair = leaves[3:]
    places = (torch.tensor(starts)[:, None] + torch.arange(rows)).clamp(min=0)
    distance = (places[..., None] - torch.arange(cols)).clamp(-9, 9) + 9
    scores = torch.einsum("bqhd,bkhd->bhqk", *leaves[:2]) / 8 + of_key[:, None]
    scores = scores + of_query.gather(1, places)[:, None, :, None] * (torch.arange(cols) % 3)
    scores = scores + of_distance[distance].permute(0, 3, 1, 2)
    scores = scores + of_pair[:, places].transpose(0, 1)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), leaves[2])
    expected = torch.autograd.grad(out, leaves, dout.double())
    daux = [torch.full_like(x, float("nan")) for x in tables]
    operands = q, k, v, out.detach().bfloat16(), dout, scores.logsumexp(-1).detach().float()
    keywords = {
        "score_mod": _four_tables, "aux_tensors": tables, "daux": daux,
        "q_start": torch.tensor(starts, dtype=torch.int32),
        "deterministic": in_order and ACTIVE_ARCH == "sm_90a",
    }  # fmt: skip
    with quiet_run(simulator, 1):
        found = [*simulated_backward.launch(operands, keywords), *daux]
    for x, y in zip(found, expected, strict=True):
        assert (x.double() - y).abs().max() < 1.5e-2 * y.abs().max()
