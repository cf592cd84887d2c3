"""Calls of the public functions on CPU tensors: cases, arguments, results with gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from cases import FP32, FP64, Case
from inputs import Inputs, make_inputs, make_output_gradients
from planned import function_of
from torch import Tensor

OPERATORS = torch.ops.flash_mask_cute
NEG_INF = float("-inf")
# lse is float32, as is what a score_mod computes: 2^-24 of a score moves its exponential so much
RTOL = 5e-5

SMALL: dict[str, Any] = {"head_dim": 16, "dtype": FP64}
FEATURES = (
    Case("full-gqa2", 2, 9, 13, 4, 2, **SMALL),
    Case("causal-empty-rows", 1, 13, 9, causal=True, **SMALL),
    Case("window-softcap-sink", 1, 12, 15, window_left=4, window_right=2, softcap=3.0, sink=FP32,
         **SMALL),
    Case("scale-dv8", 1, 7, 11, head_dim_v=8, softmax_scale=0.7, **SMALL),
    Case("scale-0-sink-fp64", 1, 9, 13, causal=True, softmax_scale=0.0, sink=FP64, **SMALL),
    Case("scale-negative-shifted", 1, 13, 17, softmax_scale=-0.4, window_left=9, window_right=-3,
         softcap=3.0, strided="unreadable", **SMALL),
    Case("packed", lengths_q=(5, 0, 7), lengths_k=(6, 3, 9), causal=True, sink=FP32, **SMALL),
    Case("packed-used", lengths_q=(5, 8), lengths_k=(6, 9), seqused_q=(3, 8), seqused_k=(6, 5),
         **SMALL),
    Case("columns1-causal", 2, 20, 24, 2, 1, causal=True, column="random1", **SMALL),
    Case("columns2-q", 1, 20, 24, 2, 1, column="random2", column_heads="q", **SMALL),
    Case("columns4", 1, 20, 24, column="random4", **SMALL),
    Case("columns-packed", lengths_q=(9, 5), lengths_k=(12, 4), causal=True, column="random1",
         **SMALL),
    Case("mask_mod-aux", 1, 20, 20, mask_mod="documents", **SMALL),
    Case("blocks-mask_mod", 1, 40, 40, mask_mod="checks", blocks=(16, 16), **SMALL),
    Case("blocks-alone", 1, 40, 24, blocks=(16, 16), **SMALL),
    Case("score_mod", 1, 12, 15, causal=True, softcap=4.0, score_mod="scale", **SMALL),
    Case("score_mod-aux", 1, 12, 15, score_mod="t5", **SMALL),
    Case("everything-packed", heads_q=4, heads_kv=2, lengths_q=(20, 11), lengths_k=(24, 17),
         causal=True, window_left=18, softcap=5.0, sink=FP32, column="random1", column_heads="kv",
         mask_mod="checks", score_mod="t5", blocks=(16, 16), **SMALL),
)  # fmt: skip
by_id = pytest.mark.parametrize("case", FEATURES)


class Arguments(NamedTuple):
    """A call of a public function: `function(*operands, **keywords)`, a sink among the operands."""

    function: Callable[..., Any]
    operands: dict[str, Tensor]
    keywords: dict[str, Any]

    @staticmethod
    def create(inputs: Inputs) -> Arguments:
        function, keywords = function_of(inputs)
        sides = keywords["window_size"]
        keywords["window_size"] = tuple(-1 if side is None else side for side in sides)
        sink = keywords.pop("learnable_sink")
        operands = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "learnable_sink": sink}
        given = {name: x for name, x in operands.items() if x is not None}
        return Arguments(function, given, keywords)

    def leaves(self) -> Arguments:
        """With operands of their own that require gradients."""
        operands = {
            name: torch.empty_like(x).copy_(x).requires_grad_() for name, x in self.operands.items()
        }
        return self._replace(operands=operands)

    def __call__(self) -> Any:
        return self.function(**self.operands, **self.keywords)


class Results(NamedTuple):
    """What a call returns, and its gradients for gradients that `make_output_gradients` made."""

    out: Tensor
    lse: Tensor
    gradients: dict[str, Tensor | None]

    def assert_equal(self, other: Results) -> None:
        torch.testing.assert_close(self, other, rtol=0, atol=0, equal_nan=False)


def run(inputs: Inputs, arguments: Arguments, call: Callable[..., Any] | None = None) -> Results:
    """call: what to call instead of the function, with its arguments."""
    leaves = arguments.leaves()
    out, lse = (call or leaves.function)(**leaves.operands, **leaves.keywords)
    torch.autograd.backward((out, lse), make_output_gradients(inputs))
    gradients = {f"d{name}": x.grad for name, x in leaves.operands.items()}
    gradients["dsink"] = gradients.pop("dlearnable_sink", None)
    return Results(out.detach(), lse.detach(), gradients)


@lru_cache
def inputs_of(case: Case) -> Inputs:
    return make_inputs(case)


@lru_cache
def eager_results(case: Case) -> Results:
    inputs = inputs_of(case)
    return run(inputs, Arguments.create(inputs))


def qkv(
    *, batch: int = 1, seqlen: int = 12, heads: int = 2, dim: int = 16, dtype: torch.dtype = FP64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, seqlen, heads, dim, generator=generator) for _ in range(3))
    return tuple(x.to(dtype).requires_grad_() for x in (q, k, v))  # type: ignore[return-value]


def rows_below(limit: int, keys: int) -> Tensor:
    """Causal column intervals: each key hides the queries from `limit` on."""
    return torch.full((1, 1, keys, 1), limit, dtype=torch.int32)
