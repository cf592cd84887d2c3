"""Messages say what the caller wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_mask_cute import (
    flash_attn_func,
    flash_attn_with_kvcache,
    flashmask_attention,
    flex_attention,
)

Q = torch.zeros(1, 8, 2, 16)


def operands(grad: bool = False) -> list[Tensor]:
    return [torch.zeros_like(Q, requires_grad=grad) for _ in range(3)]


@pytest.mark.parametrize("appends", [False, True])
def test_an_index_past_a_captured_tensor_of_a_call_over_a_cache(appends: bool) -> None:
    per_key = torch.zeros(4)

    def biased(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + per_key[k]

    new: dict[str, Any] = {}
    if appends:
        new = {name: torch.zeros(1, 1, 2, 16) for name in "kv"} | {"cache_seqlens": 6}
    cache = torch.zeros(2, 1, 8, 2, 16)
    with pytest.raises(IndexError, match="score_mod .*biased.* reads .*per_key.* extent is 4"):
        flash_attn_with_kvcache(Q[:, :1], *cache, **new, score_mod=biased)


@pytest.mark.shares(4)
@pytest.mark.parametrize("kind", ["score_mod", "mask_mod", "made inside", "over a cache"])
def test_an_index_past_a_captured_tensor_of_a_compiled_call(kind: str) -> None:
    per_key, others = torch.zeros(4), torch.zeros(8)

    def biased(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + others[q] + per_key[k]

    def hides(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return per_key[k] == 0

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if kind == "over a cache":
            return flash_attn_with_kvcache(q, k, v, score_mod=biased)
        if kind == "mask_mod":
            plain = lambda s, b, h, q, k: s + others[q]  # noqa: E731
            return flash_attn_func(q, k, v, score_mod=plain, mask_mod=hides)
        if kind == "made inside":
            biased_inside = lambda s, b, h, q, k: s + others[q] + per_key[k]  # noqa: E731
            return flash_attn_func(q, k, v, score_mod=biased_inside)
        return flash_attn_func(q, k, v, score_mod=biased)

    name = {"mask_mod": "mask_mod .*hides", "made inside": "score_mod .*lambda"}
    said = f"{name.get(kind, 'score_mod .*biased')}.* reads .*'per_key'.* index 4 .* extent is 4"
    with pytest.raises(IndexError, match=said):
        torch.compile(call, backend="eager")(*operands())


def test_gradients_through_a_score_mod_beside_splits() -> None:
    with pytest.raises(NotImplementedError, match="num_splits=2 .* gradients by score_mod"):
        flash_attn_func(*operands(True), score_mod=lambda s, b, h, q, k: s * 2, num_splits=2)


def test_the_largest_logit_beside_splits() -> None:
    with pytest.raises(NotImplementedError, match="num_splits=2 .* return_max_logit"):
        flash_attn_func(*operands(), return_max_logit=True, num_splits=2)


@pytest.mark.parametrize("scale", ["x", float("nan"), [1.0]])
def test_the_scale_of_flex_attention(scale: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="^scale must be"):
        flex_attention(*operands(), scale=scale)


def test_one_cache_in_fp8() -> None:
    k = torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="^k_cache and v_cache must both be in float8_e4m3fn"):
        flash_attn_with_kvcache(Q.bfloat16(), k.to(torch.float8_e4m3fn), k)


@pytest.mark.parametrize("value", [float("nan"), "x", 1])
def test_flags(value: Any) -> None:
    with pytest.raises(TypeError, match="^enable_gqa must be True or False"):
        flex_attention(*operands(), enable_gqa=value)
    with pytest.raises(TypeError, match="^training must be True or False"):
        flashmask_attention(*operands(), training=value)


def test_kernel_options_of_the_flexattention_post() -> None:
    wanted = flex_attention(*operands())
    for value in (True, False):
        assert torch.equal(
            flex_attention(*operands(), kernel_options={"force_flash": value}), wanted
        )
