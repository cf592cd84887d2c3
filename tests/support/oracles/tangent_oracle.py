"""Tangents of dense attention by torch's forward mode: in float64, and as a torch user has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from inputs import Inputs
from oracle import eager_same_dtype, reference_attention
from tolerances import assert_as_good
from torch import Tensor
from torch.autograd import forward_ad


class Pair(NamedTuple):
    """Of out and lse, or their tangents."""

    out: Tensor
    lse: Tensor


def make_tangents(inputs: Inputs, seed: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Normal tangents of q, k and v, contiguous."""
    generator = torch.Generator().manual_seed(seed)
    tensors = inputs.q, inputs.k, inputs.v
    made = [torch.randn(x.shape, generator=generator).to(x) for x in tensors]
    return made[0], made[1], made[2]


def dual_results(
    attend: Callable[..., tuple[Tensor, Tensor]], operands: tuple[Tensor, ...], tangents: tuple
) -> tuple[Pair, Pair]:
    """The results of `attend` and their tangents, 0 where there are none."""
    with forward_ad.dual_level():
        pairs = zip(operands, tangents, strict=True)
        duals = [x if t is None else forward_ad.make_dual(x, t) for x, t in pairs]
        found = [forward_ad.unpack_dual(x) for x in attend(*duals)]
        primals = Pair(*(x.primal.clone() for x in found))
        given = (torch.zeros_like(x.primal) if x.tangent is None else x.tangent for x in found)
        return primals, Pair(*(x.clone() for x in given))


def reference_tangents(inputs: Inputs, tangents: tuple) -> Pair:
    """In float64, of out and lse; 0 in rows that see nothing and in rows that are not in use."""

    def attend(*operands: Tensor) -> tuple[Tensor, Tensor]:
        return reference_attention(*operands, inputs.dense, **inputs.plain_keywords)

    return dual_results(attend, (inputs.q, inputs.k, inputs.v), tangents)[1]


def eager_tangents(inputs: Inputs, tangents: tuple) -> Pair:
    """In the dtype of the inputs, as a torch user would have them."""

    def attend(*operands: Tensor) -> tuple[Tensor, Tensor]:
        return eager_same_dtype(*operands, inputs.dense, **inputs.plain_keywords)

    found = dual_results(attend, (inputs.q, inputs.k, inputs.v), tangents)[1]
    # a softmax of nothing is NaN there
    return Pair(*(x.nan_to_num(0.0) for x in found))


def assert_tangents_close(found: Pair, inputs: Inputs, tangents: tuple) -> None:
    """On both tangents: twice the error of eager attention in the same dtype, and an ulp."""
    exact, eager = reference_tangents(inputs, tangents), eager_tangents(inputs, tangents)
    assert_as_good_as_eager(found, exact, eager, inputs.case.id)


def assert_as_good_as_eager(found: Pair, exact: Pair, eager: Pair, name: str) -> None:
    """As `assert_tangents_close`, of tangents that are known."""
    for what, tensor in found._asdict().items():
        assert_as_good(f"t{what}", tensor, getattr(exact, what), getattr(eager, what), name)
