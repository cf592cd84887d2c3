"""float64 tensors on the CPU: what autograd saves, and what `sdpa()` adds, is float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_mask_cute import flash_attn_func
from flash_mask_cute.integrations.torch import Ran, kernels_run, sdpa

RTOL = 1e-10
"""Of the largest gradient; float32 anywhere would give 1e-8 and more."""
SHAPE = 2, 3, 21, 16
MASKS = {"scores": SHAPE[:3] + SHAPE[2:3], "rows": (21, 21), "keys": (21,), "heads": (3, 1, 21)}


def tensors_of(size: float) -> list[Tensor]:
    """q, k and v in float64; the largest score is `size`."""
    q, k, v = torch.randn(3, *SHAPE, dtype=torch.float64)
    return [q * (4.0 * size / (q @ k.mT).abs().max()), k, v]


def values_and_gradients(call: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in given]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]


def assert_near(found: list[Tensor], wanted: list[Tensor]) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype == torch.float64
        assert (x - y).abs().max() <= RTOL * y.abs().max()


def ours(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    with sdpa():
        return F.scaled_dot_product_attention(q, k, v, mask)


sizes = pytest.mark.parametrize("size", [1.0, 200.0, 700.0])


@sizes
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_at_large_scores(size: float, is_compiled: bool) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).mT

    def of_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).mT

    given = tensors_of(size)
    tried = torch.compile(call, backend="aot_eager") if is_compiled else call
    assert_near(values_and_gradients(tried, given), values_and_gradients(of_torch, given))


@sizes
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_masks_that_are_added(size: float, shape: tuple[int, ...]) -> None:
    """The mask's own gradient, too."""
    given = [*tensors_of(size), torch.randn(shape, dtype=torch.float64)]
    with kernels_run() as ran:
        found = values_and_gradients(ours, given)
    assert ran == [Ran("scaled_dot_product_attention", "flash_mask_cute", None)]
    assert_near(found, values_and_gradients(F.scaled_dot_product_attention, given))


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_rows_of_the_least_number_give_the_mean(is_compiled: bool) -> None:
    mask = torch.randn(21, 21, dtype=torch.float64)
    mask[4] = torch.finfo(torch.float64).min
    given = [*tensors_of(20.0), mask]
    tried = torch.compile(ours, backend="aot_eager") if is_compiled else ours
    found = values_and_gradients(tried, given)
    torch.testing.assert_close(found[0][:, :, 4], given[2].mean(2), atol=1e-14, rtol=1e-14)
    assert_near(found, values_and_gradients(F.scaled_dot_product_attention, given))


def test_the_public_lse_stays_float32() -> None:
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in tensors_of(200.0))
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert lse.dtype == torch.float32 and out.dtype == torch.float64
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1).float(), atol=0, rtol=1e-6)
    (found,) = torch.autograd.grad(lse.sum(), q)
    (wanted,) = torch.autograd.grad(scores.logsumexp(-1).sum(), q)
    assert (found - wanted).abs().max() <= RTOL * wanted.abs().max()
