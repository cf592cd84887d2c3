"""Derivatives of lowered score_mods, function by function, against autograd in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from flex_catalogue import CatalogueMod, Draw, Extents, Mod
from test_flex_catalogue import check_attention
from torch import Tensor

from flash_mask_cute.flex import flex_attention

EXTENTS = Extents(1, 2, 40, 50)
Of = Callable[..., Tensor]

# Of the score and numbers read from two trained tensors, one by keys and one by queries.
FUNCTIONS: dict[str, Of] = {
    "abs and relu": lambda s, x, y: s.abs() - torch.relu(x - s) + y,
    "clamp": lambda s, x, y: s.clamp(-0.5, 0.5) + x.clamp(min=0) * y.clamp(max=0.3),
    "larger and smaller": lambda s, x, y: torch.maximum(s, x) + torch.minimum(2 * s, y),
    "roots and logarithms": lambda s, x, y: (
        torch.sqrt(s * s + 1) + torch.log(x**2 + 1) / (1 + y**2)
    ),
    "sine and cosine": lambda s, x, y: torch.sin(s) * torch.cos(x) - torch.sin(y),
    "powers": lambda s, x, y: (s.abs() + 1) ** 1.5 + x**3 - (y**2 + 1) ** -0.5,
    "erf": lambda s, x, y: torch.erf(s) + torch.erf(x * y),
    "of two numbers": lambda s, x, y: torch.hypot(s, x + 2) + torch.atan2(x, y.abs() + 0.5),
    "copysign and asinh": lambda s, x, y: torch.copysign(x, s + 0.1) * torch.asinh(s * y),
    "gelu": lambda s, x, y: F.gelu(s + x) + F.gelu(y, approximate="tanh"),
    "silu and softplus": lambda s, x, y: F.silu(s) * x + F.softplus(s + y),
    "exponentials": lambda s, x, y: torch.exp2(0.2 * s) + torch.exp(-x.abs()) * torch.expm1(y / 4),
    "tanh and sigmoid": lambda s, x, y: torch.tanh(x) * torch.sigmoid(s) + F.logsigmoid(s + y),
    "reciprocals": lambda s, x, y: torch.rsqrt(s * s + 0.5) + x / (y.abs() + 1) + 1 / (x**2 + 2),
    "steps": lambda s, x, y: s + x + y + torch.floor(3 * x) + torch.sign(s) + torch.round(y),
    "remainder": lambda s, x, y: s % 0.7 + x % 0.5 + y,
    "choices": lambda s, x, y: torch.where(x > 0.3, s * y, s + x),
    "hidden": lambda s, x, y: torch.where(x > 1.0, float("-inf"), s + x * y),
    "detached numbers": lambda s, x, y: s + x.detach() * x + y.detach() + y,
    "a detached score": lambda s, x, y: s + 0.3 * s.detach() * x + y,
    "detached products": lambda s, x, y: s * x + (s.clone() * x * y).detach() * y,
    "products": lambda s, x, y: s * x * x * y,
    "a score that is not used": lambda s, x, y: x * y,
}


def _of_two(function: Of) -> Callable[[Draw], Mod]:
    def write(draw: Draw) -> Mod:
        of_keys = draw.parameter(draw.extents.seqlen_k, std=1.0)
        of_queries = draw.parameter(draw.extents.heads, draw.extents.seqlen_q, std=1.0)
        return lambda score, b, h, q, k: function(score, of_keys[k], of_queries[h, q])

    return write


@pytest.mark.shares(4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_scores_and_of_captured_numbers(name: str) -> None:
    row = CatalogueMod(name, "score_mod", _of_two(FUNCTIONS[name]), is_trained=True)
    check_attention(EXTENTS, 1, row)


# Of trained rows (length, 6), read at a query and at a key, and the whole of a trained vector.
OF_ROWS: dict[str, Of] = {
    "distance of rows": lambda s, x, y, whole: s - (x - y).square().sum(),
    "dot": lambda s, x, y, whole: s + 0.1 * torch.dot(x, y),
    "matmul": lambda s, x, y, whole: s + 0.1 * (x @ y),
    "mean and maximum": lambda s, x, y, whole: s + x.mean() + y.amax(),
    "a table computed inside": lambda s, x, y, whole: s + (2 * whole + 1)[3] * torch.tanh(whole)[0],
    "softmax of a table": lambda s, x, y, whole: s + torch.softmax(whole, 0)[2],
    "a view": lambda s, x, y, whole: s * whole.view(2, 3).t()[1, 1],
}


def _of_rows(function: Of) -> Callable[[Draw], Mod]:
    def write(draw: Draw) -> Mod:
        rows, whole = draw.parameter(draw.extents.longest, 6), draw.parameter(6)

        def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return function(score, rows[q], rows[k], whole)

        return mod

    return write


@pytest.mark.shares(4)
@pytest.mark.parametrize("name", OF_ROWS)
def test_of_rows_and_tables(name: str) -> None:
    row = CatalogueMod(name, "score_mod", _of_rows(OF_ROWS[name]), is_trained=True)
    check_attention(EXTENTS, 1, row)


def test_a_tensor_that_is_detached_has_no_gradient() -> None:
    table = torch.nn.Parameter(torch.randn(EXTENTS.seqlen_k))
    x = torch.randn(1, 1, EXTENTS.seqlen_k, 16)
    assert not flex_attention(
        x, x, x, score_mod=lambda score, b, h, q, k: score + table.detach()[k]
    ).requires_grad
