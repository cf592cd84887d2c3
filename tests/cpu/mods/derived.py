"""Derivatives of a score modifier: computed on the CPU, checked against autograd, and traced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from evaluated_reads import fake_tensor
from torch import Tensor

from flash_mask_cute.mods import derivative
from flash_mask_cute.mods.calling import ScorePlace
from flash_mask_cute.mods.derivative import differentiate
from flash_mask_cute.mods.on_cpu import compile_for_host
from flash_mask_cute.runtime.cache import compile_lock

BATCH, HEAD = 1, 2
Q_IDX = torch.tensor([69, 0, 3, 3, 17, 40], dtype=torch.int32)
K_IDX = torch.arange(1, 90, 11, dtype=torch.int32)
SHAPE = len(Q_IDX), len(K_IDX)
GENERATOR = torch.Generator()


class Derivative(NamedTuple):
    """values and slopes, (rows, cols): modified scores and their derivatives. sums: for each wanted
    aux tensor, in its shape, sum over the scores of weight * derivative."""

    values: Tensor
    slopes: Tensor
    sums: list[Tensor]


@cute.jit
def _differentiate_all(
    score_mod: cutlass.Constexpr,
    wants_aux: cutlass.Constexpr,
    scores: Any,
    weights: Any,
    values: Any,
    slopes: Any,
    q_idx: Any,
    k_idx: Any,
    aux_tensors: Any,
    sums: Any,
) -> None:
    for i in range(cute.size(q_idx)):
        for j in range(cute.size(k_idx)):
            value, slope, terms = differentiate(
                score_mod,
                scores[i, j],
                ScorePlace(Int32(BATCH), Int32(HEAD), q_idx[i], k_idx[j]),
                aux_tensors,
                wants_aux,
            )
            values[i, j] = value
            slopes[i, j] = slope
            _add_terms(terms, wants_aux, weights[i, j], sums)


def _add_terms(
    terms: Sequence[derivative.AuxTerm], wants_aux: Sequence[int], weight: Any, sums: Any
) -> None:
    for number, coordinates, term in terms:
        target = sums[wants_aux.index(number)]
        assert all(type(c) is Int32 for c in coordinates)
        target[coordinates] = target[coordinates] + weight * term


def derive(
    score_mod: Callable[..., Any],
    scores: Tensor,
    aux: Sequence[Tensor] | None = None,
    wants_aux: Sequence[int] = (),
    weights: Tensor | None = None,
) -> Derivative:
    values, slopes = torch.full(SHAPE, math.nan), torch.full(SHAPE, math.nan)
    weights = torch.ones(SHAPE) if weights is None else weights
    sums = [torch.zeros((aux or [])[i].shape) for i in wants_aux]
    tensors = scores, weights, values, slopes, Q_IDX, K_IDX
    lists = [None if x is None else tuple(x) for x in (aux, sums or None)]
    with compile_lock():
        function = compile_for_host(
            ("score_mod", score_mod),
            _differentiate_all,
            score_mod,
            tuple(wants_aux),
            *map(fake_tensor, tensors),
            *(None if x is None else tuple(map(fake_tensor, x)) for x in lists),
        )
    function(*tensors, *lists)
    return Derivative(values, slopes, sums)


def check(
    score_mod: Callable[..., Any],
    reference: Callable[[Tensor], Tensor],
    scores: Tensor,
    rtol: float = 2e-6,
    atol: float = 2e-6,
) -> None:
    """reference: the same function of fp64 scores (rows, cols)."""
    x = scores.double().requires_grad_()
    expected = reference(x)
    (slopes,) = torch.autograd.grad(expected.sum(), x)
    got = derive(score_mod, scores)
    torch.testing.assert_close(got.values.double(), expected.detach(), rtol=rtol, atol=atol)
    torch.testing.assert_close(got.slopes.double(), slopes, rtol=rtol, atol=atol)


def points(low: float, high: float) -> Tensor:
    return torch.rand(SHAPE, generator=GENERATOR) * (high - low) + low


class _Traced(Exception):
    pass


def trace(score_mod: Callable[..., Any], *aux: Tensor, wants_aux: Sequence[int] = ()) -> str:
    """What `differentiate` traces, with nothing to put the terms of aux tensors into."""
    texts: list[str] = []

    def keep(_dsl: Any, module: Any, _name: str) -> None:
        texts.append(str(module.operation))
        raise _Traced

    tensors = points(0, 1), points(0, 1), points(0, 1), points(0, 1), Q_IDX, K_IDX
    try:
        with compile_lock():
            cute.compile(
                _differentiate_all,
                score_mod,
                tuple(wants_aux),
                *map(fake_tensor, tensors),
                tuple(map(fake_tensor, aux)) or None,
                None,
                options="--enable-tvm-ffi",
                trace_finalize_hooks=keep,
            )
    except Exception:
        if not texts:
            raise
    return texts[0]
