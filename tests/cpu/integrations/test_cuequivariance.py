"""Triangle attention with the arguments of cuequivariance, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_mask_cute.integrations.cuequivariance import triangle_attention

B, N, H, Q, K, D = 2, 5, 3, 7, 9, 8


def drawn(dtype: torch.dtype = torch.float64, dim_v: int = D) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    made = {"q": normal(B, N, H, Q, D), "k": normal(B, N, H, K, D), "v": normal(B, N, H, K, dim_v)}
    # what float32 holds, so that the bias is exact
    made["bias"] = normal(B, 1, H, Q, K).float().to(dtype)
    return {name: x.requires_grad_() for name, x in made.items()}


def exact(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, shown: Tensor, scale: float = D**-0.5
) -> tuple[Tensor, Tensor, Tensor]:
    """By the formula, in float64; a row that sees nothing gets 0."""
    scores = (scale * q @ k.mT + bias).masked_fill(~shown, -torch.inf)
    largest = scores.amax(-1)
    sees = largest.isfinite()[..., None]
    weights = scores.masked_fill(~sees, 0.0).softmax(-1) * sees
    return weights @ v, scores.logsumexp(-1), largest


SHOWN = torch.rand(B, N, 1, 1, K, generator=torch.Generator().manual_seed(1)) > 0.4
SHOWN[1, 2] = False
LENGTHS = torch.tensor([[9, 3, 0, 8, 1], [2, 9, 5, 40, 7]], dtype=torch.int32).view(B, N, 1, 1, 1)
ALL = torch.ones(B, N, 1, 1, K, dtype=torch.bool)
CASES: dict[str, tuple[dict[str, Any], Tensor]] = {
    "no mask": ({}, ALL),
    "a mask": ({"mask": SHOWN}, SHOWN),
    "a mask of numbers": ({"mask": SHOWN.float()}, SHOWN),
    "lengths, one too long": ({"kv_lengths": LENGTHS}, torch.arange(K) < LENGTHS),
}


@pytest.mark.shares(2)
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(case: str) -> None:
    more, shown = CASES[case]
    given = drawn()
    out, lse, largest = triangle_attention(**given, **more, return_aux=True)
    assert torch.equal(out, triangle_attention(**given, **more))
    expected = exact(**given, shown=shown)
    assert out.shape == (B, N, H, Q, D) and lse.shape == largest.shape == (B, N, H, Q)
    for x, y in zip((out, lse, largest), expected, strict=True):
        assert torch.allclose(x.double(), y, atol=1e-5)
    weight = torch.randn(out.shape, dtype=torch.float64)
    leaves = list(given.values())
    found = torch.autograd.grad((out * weight).sum(), leaves)
    wanted = torch.autograd.grad((expected[0] * weight).sum(), leaves)
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype and torch.allclose(x, y, atol=1e-5)


def test_a_row_that_sees_nothing_is_zero() -> None:
    out, lse, largest = triangle_attention(**drawn(), mask=SHOWN, return_aux=True)
    assert not out[1, 2].any() and (lse[1, 2] == -torch.inf).all()
    assert (largest[1, 2] == -torch.inf).all()


def test_without_b_and_with_a_scale_and_another_width() -> None:
    given = {name: x[1].detach() for name, x in drawn(dim_v=16).items()}
    out = triangle_attention(**given, mask=SHOWN[1], scale=0.3)
    assert out.shape == (N, H, Q, 16)
    assert torch.allclose(out, exact(**given, shown=SHOWN[1], scale=0.3)[0], atol=1e-5)
    out, lse, _ = triangle_attention(**given, return_aux=True)
    assert out.shape == (N, H, Q, 16) and lse.shape == (N, H, Q)


def test_bfloat16_beside_a_bias_in_float32() -> None:
    given = {name: x.detach() for name, x in drawn(torch.bfloat16).items()}
    given["bias"] = drawn()["bias"].detach().float()
    out = triangle_attention(**given, mask=SHOWN)
    expected = exact(**{name: x.double() for name, x in given.items()}, shown=SHOWN)[0]
    assert out.dtype == torch.bfloat16 and (out.double() - expected).abs().max() < 2e-2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mask": SHOWN, "kv_lengths": LENGTHS}, "mask and kv_lengths are both given"),
        ({"q": torch.ones(3, 4)}, r"q must have shape .*got \(3, 4\)"),
        ({"k": torch.ones(B, N, H + 1, K, D)}, r"k must have shape \(2, 5, 3, 9, 8\), got \(2, 5"),
        ({"bias": torch.ones(B, N, H, Q, K)}, r"bias must have shape \(2, 1, 3, 7, 9\)"),
        ({"bias": torch.ones(1, H, Q, K)}, r"bias must have 5 dimensions as q, got \(1, 3, 7, 9\)"),
        ({"mask": SHOWN[..., :4]}, r"mask must have shape \(2, 5, 1, 1, 9\)"),
        ({"kv_lengths": LENGTHS[:1]}, r"kv_lengths must have shape \(2, 5, 1, 1, 1\)"),
    ],
)
def test_shapes_that_do_not_fit(changes: dict[str, Tensor], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        triangle_attention(**(drawn() | changes))


def test_float32_on_a_gpu_is_refused() -> None:
    class OnGpu:
        """A tensor as far as the check looks."""

        is_cuda, dtype, device = True, torch.float32, torch.device("cuda", 1)

    with pytest.raises(NotImplementedError, match="q is float32 on cuda:1.*autocast"):
        triangle_attention(OnGpu(), *[torch.ones(1)] * 3)  # type: ignore[arg-type]
