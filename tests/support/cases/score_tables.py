"""Tables of numbers of any size that a score_mod adds to scores, as additive masks are ported.

As in `oracle`, nothing here uses the package. A score is what fp32 makes of the scaled product and
the number, and the oracle is the float64 softmax of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from cases import BF16, FP16, FP32, Case
from dense_masks import DenseMasks
from inputs import make_inputs
from oracle import NEG_INF
from torch import Tensor
from trained_mods import TrainedInputs, TrainedMasks, TrainedRecipe

LOWEST, LARGEST = torch.finfo(FP32).min, torch.finfo(FP32).max
ADDED = {"1e10": -1e10, "1e15": -1e15, "1e30": -1e30, "bf16": torch.finfo(BF16).min, "fp32": LOWEST}

PLAIN = Case("tables", 1, 300, 300, 1, 1, head_dim=64)
# Each has a kernel that goes another way: three warpgroups or two, with registers for the scores
# beside the probabilities or without, cut blocks that are passed over, packed heads, sequences.
HOPPER_CASES = (
    Case("tables-sink-softcap", 1, 300, 300, 1, 1, head_dim=64, softcap=5.0, sink=FP32),
    Case("tables-d128-fp16", 1, 300, 300, 1, 1, dtype=FP16, sink=BF16),
    Case("tables-mask-d128", 1, 300, 300, 1, 1, mask_mod="causal_offset"),
    Case("tables-gqa2-packed", 1, 60, 300, 2, 1, head_dim=64, pack_gqa=True),
    Case("tables-window", 1, 300, 300, 1, 1, head_dim=64, window_left=200, window_right=40),
    Case(
        "tables-varlen", 0, 0, 0, 1, 1, head_dim=64, lengths_q=(70, 0, 140), lengths_k=(70, 9, 280),
        causal=True,
    ),
)  # fmt: skip


def _causal(hidden: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Rows that see what they may, and some in which all is hidden."""
    return lambda q, k: torch.where((k <= q) & (q % 50 != 7), 0.0, hidden)


def _by_keys(*numbers: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A number for each third of the keys; shifted by one in some rows."""
    values = torch.tensor(numbers, dtype=FP32)
    return lambda q, k: values.to(k.device)[(3 * k // k.shape[-1] + (q % 16 == 3)) % 3]


def _steps(q: Tensor, k: Tensor) -> Tensor:
    """Far from 0 on either side, and yet near each other: steps of an ulp."""
    return torch.where(q % 2 == 0, 1e8, -1e8) + 8.0 * ((7 * q + 3 * k) % 5)


def _offsets(q: Tensor, k: Tensor) -> Tensor:
    """Sums that are of any size at every distance from 0, where kernels change their way."""
    offsets = torch.tensor([-900.0, 1100.0, -3e3, 3e4, -7e5, 8e5, 4e6, -2e7], device=q.device)
    return offsets[q % 8].expand(-1, k.shape[-1])


def _hidden(q: Tensor, k: Tensor) -> Tensor:
    """-inf in places, in all of some rows, and beside nothing but the lowest number in others."""
    table = torch.where(k <= q, 0.0, -1e30)
    table = torch.where(q % 40 == 5, LOWEST, table)
    return table.masked_fill(((q + k) % 3 == 0) | (q % 40 == 3) | (k >= 280) & (q < 60), NEG_INF)


TABLES = {f"causal-{name}": _causal(value) for name, value in ADDED.items()} | {
    "ascending": _by_keys(-1e30, -1e10, 0.0),
    "descending": _by_keys(0.0, -1e10, -1e30),
    "positive-ascending": _by_keys(0.0, 1e10, 1e30),
    "positive-descending": _by_keys(1e30, 1e10, 0.0),
    "extremes": _by_keys(LOWEST, LARGEST, 0.0),
    "extremes-descending": _by_keys(LARGEST, 1e30, LOWEST),
    "steps": _steps,
    "offsets": _offsets,
    "hidden": _hidden,
}


def _add(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score + aux[-1][q[0], k[0]]


def _add_twice(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """With a last factor, which the forward's softmax multiplies by, and which rounds."""
    return (score + aux[-1][q[0], k[0]]) * 1.7


class _Rounded(torch.autograd.Function):
    """Scores as fp32 has them. The derivative knows nothing of that, and is 0 where one is -inf."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, table: Tensor, factor: float) -> Tensor:
        rounded = scores.float() + table.float()
        if factor != 1.0:
            rounded = rounded * factor
        ctx.factor, ctx.hidden = factor, rounded.isneginf()
        return rounded.to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        by_score = (grads[0] * ctx.factor).masked_fill(ctx.hidden, 0.0)
        return by_score, by_score, None


def _recipe(cute: Callable[..., Any], factor: float) -> TrainedRecipe:
    def dense(score: Tensor, b: int, h: int, q: Tensor, k: Tensor, *trained: Tensor) -> Tensor:
        table = trained[-1][: q.shape[0], : k.shape[-1]]
        return _Rounded.apply(score, table, factor)

    return TrainedRecipe(cute, dense, lambda x: [((x.seqlen_q, x.seqlen_k), FP32)])


def make_tabled(
    case: Case, name: str, device: torch.device | str = "cpu", *, has_factor: bool = False
) -> TrainedInputs:
    """`make_inputs` with a score_mod that adds a table of `TABLES`, the last aux tensor, and, with
    has_factor, multiplies by a number."""
    inputs = make_inputs(case, device)
    recipe = _recipe(_add_twice, 1.7) if has_factor else _recipe(_add, 1.0)
    rows, cols = (
        max(lengths) if lengths else extent
        for lengths, extent in ((case.lengths_q, case.seqlen_q), (case.lengths_k, case.seqlen_k))
    )
    q = torch.arange(rows, device=device)[:, None]
    table = TABLES[name](q, torch.arange(cols, device=device)[None, :]).contiguous()
    masks = inputs.dense or DenseMasks.create(case, 0).to(device)
    aux_tensors = [*(masks.aux or ()), table]
    keywords = inputs.mask_keywords | {"score_mod": recipe.cute, "aux_tensors": aux_tensors}
    dense: Any = TrainedMasks(masks, recipe, (table,))
    inputs = replace(inputs, mask_keywords=keywords, dense=dense)
    return TrainedInputs(inputs, (len(aux_tensors) - 1,))
