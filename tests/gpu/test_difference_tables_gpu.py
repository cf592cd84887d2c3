"""Reads by differences that tables answer, by the public functions: the bits as without tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FP16, Case
from inputs import make_output_gradients
from planned import call_of, planned
from public_call import capture, check, forward
from test_aux_gradients_gpu import check as check_gradients
from torch import Tensor
from trained_mods import TRAINED_MODS, TrainedInputs, make_trained

from flash_mask_cute import flash_attn_func, interface
from flash_mask_cute.call import tables as difference_tables
from flash_mask_cute.call.arguments import Direction

# Each with the number of tables, and of the reads whose gradients are summed by difference.
CASES = (
    (Case("t5-long", 2, 2000, 2000, 4, 4, causal=True), "t5", 1, 0),
    (Case("t5-long-not-square-fp16", 2, 700, 1900, 4, 2, head_dim=64, dtype=FP16), "t5", 1, 0),
    (Case("t5-d256", 2, 1000, 1100, 4, 2, head_dim=256, causal=True), "t5", 1, 0),
    (Case("buckets-long-gqa2", 2, 1100, 1000, 4, 2, window_left=300), "buckets", 2, 0),
    (Case("grid-long", 2, 1400, 1400, 4, 4), "grid", 2, 2),
    (Case("grid-long-gqa2-d64", 2, 1400, 1300, 4, 2, head_dim=64, causal=True), "grid", 2, 2),
    # more entries have a kernel of their own for these sums (`batch_sums.py`)
    (Case("swin-windows", 15, 144, 144, 4, 4, head_dim=32), "swin", 0, 1),
    (Case("swin-gqa2-d64", 15, 100, 140, 8, 4, head_dim=64, causal=True), "swin", 0, 1),
    (Case("grid-d192", 2, 1000, 1000, 4, 2, head_dim=192, head_dim_v=64), "grid", 2, 2),
    (Case("grid-d80", 2, 1000, 1000, 4, 2, head_dim=80, causal=True), "grid", 2, 2),
    (Case("grid-softcap", 2, 1000, 1000, 4, 2, head_dim=128, softcap=20.0), "grid", 2, 2),
)  # fmt: skip
cases = pytest.mark.parametrize(("case", "name", "tables", "summed"), CASES)


def has_tables(monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:
    """From the next call on."""
    monkeypatch.setattr(difference_tables, "LEAST_SCORES", 2**20 if is_on else 2**60)
    monkeypatch.setattr(interface, "_prepared_fwd", {})
    monkeypatch.setattr(interface, "_prepared_bwd", {})


@pytest.mark.shares(2)
@pytest.mark.usefixtures("poisoned_allocations")
@cases
def test_forward(
    monkeypatch: pytest.MonkeyPatch, case: Case, name: str, tables: int, summed: int
) -> None:
    inputs = make_trained(case, name, "cuda").inputs
    has_tables(monkeypatch, False)
    expected = forward(inputs)
    has_tables(monkeypatch, True)
    assert len(planned(inputs).problem.tables) == tables
    check(inputs)
    for x, y in zip(forward(inputs), expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.shares(2)
@pytest.mark.usefixtures("poisoned_allocations")
@cases
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    name: str,
    tables: int,
    summed: int,
    deterministic: bool,
) -> None:
    has_tables(monkeypatch, True)
    given = make_trained(case, name, "cuda")
    daux = [x if i in given.wants_aux else None for i, x in enumerate(given.aux_tensors)]
    problem = planned(call_of(given.inputs, Direction.BACKWARD, daux=daux)).problem
    assert (len(problem.tables), len(problem.summed)) == (tables, summed)
    check_gradients(given, deterministic=deterministic)


def gradients(given: TrainedInputs) -> list[Tensor]:
    x, trained = given.inputs, [y.clone().requires_grad_() for y in given.trained]
    q, k, v = (y.clone().requires_grad_() for y in (x.q, x.k, x.v))
    keywords: dict[str, Any] = {"causal": x.case.causal, "deterministic": True}
    mod = TRAINED_MODS["grid"].cute
    out = flash_attn_func(q, k, v, score_mod=mod, aux_tensors=trained, **keywords)
    dout, _ = make_output_gradients(x)
    return list(torch.autograd.grad(out, [q, k, v, *trained], dout))


def test_equal_bits_in_ten_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    has_tables(monkeypatch, True)
    given = make_trained(CASES[4][0], "grid", "cuda")
    first = gradients(given)
    for _ in range(9):
        for x, y in zip(gradients(given), first, strict=True):
            assert torch.equal(x, y)


def test_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are filled in every replay, with the elements of that time."""
    has_tables(monkeypatch, True)
    given = make_trained(CASES[4][0], "grid", "cuda")
    x, (rows, cols) = given.inputs, (y.clone() for y in given.trained)

    def call() -> Tensor:
        mod = TRAINED_MODS["grid"].cute
        return flash_attn_func(x.q, x.k, x.v, score_mod=mod, aux_tensors=[rows, cols])

    graph, out = capture(call, torch.cuda.Stream())
    for factor in (1.0, -2.0):
        rows.mul_(factor), cols.mul_(factor)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, call())
