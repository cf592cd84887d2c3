"""Outputs in float32 of inputs in 16 bits, against float64 and against what 16 bits can hold."""

from __future__ import annotations

import torch
from cases import FP32, Case
from eager import assert_close_to_oracle
from inputs import Inputs
from torch import Tensor

CASES = (
    Case("dense", 2, 70, 200, 4, 2, head_dim=64, causal=True),
    Case("sink", 1, 130, 260, 2, 2, sink=FP32),
    Case("decode", 3, 1, 700, 8, 2, head_dim=64, causal=True, seqused_k=(700, 0, 131)),
)


def new_out(inputs: Inputs) -> Tensor:
    """NaN, for a call to fill."""
    shape = (*inputs.q.shape[:-1], inputs.v.shape[-1])
    return torch.full(shape, torch.nan, dtype=FP32)


def assert_wide(out: Tensor, lse: Tensor, inputs: Inputs) -> None:
    """As good as an output in 16 bits before it is rounded to them."""
    assert out.dtype == FP32
    rounded = out.to(inputs.q.dtype)
    assert_close_to_oracle(rounded, lse, inputs)
    exact, _ = inputs.reference
    assert (out != rounded.float()).any()

    def error(x: Tensor) -> float:
        return float((x.double() - exact).square().mean())

    assert error(out) < error(rounded)
