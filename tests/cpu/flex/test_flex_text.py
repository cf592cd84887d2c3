"""Text of lowered mods that costs little on a GPU, and what errors of users say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_mask_cute import flash_attn_func, flex_attention, mod_source
from flash_mask_cute.flex import lower_mod

TABLE = torch.arange(33.0)


def t5(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s + TABLE[(k - q).clamp(-16, 16) + 16]


def test_a_range_that_fits_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ops.below(aux[0], 0, 33, " in mod_source(t5)
    # the same structure with a table that is too small, and is not read there
    monkeypatch.setattr(f"{__name__}.TABLE", torch.arange(20.0))
    assert "ops.inside(aux[0], 0, " in mod_source(t5)
    q = torch.randn(1, 1, 4, 8)
    scores = q @ q.mT * 8**-0.5 + torch.arange(4.0) - torch.arange(4.0)[:, None] + 16
    torch.testing.assert_close(
        flex_attention(q, q, q, score_mod=t5), scores.softmax(-1) @ q, rtol=1e-5, atol=1e-5
    )


def test_what_is_divided_by_a_number() -> None:
    assert "s * 0.4" in mod_source(lambda s, b, h, q, k: s / 2.5)
    # of integers, whose quotient may be rounded next
    assert " / 3" in mod_source(lambda s, b, h, q, k: s + torch.floor(q / 3))
    assert "s / 1e-38" in mod_source(lambda s, b, h, q, k: s / 1e-38)


def test_functions_of_one_instruction() -> None:
    for name in ("exp", "exp2", "log", "log2", "tanh"):
        mod = eval(f"lambda s, b, h, q, k: torch.{name}(s)", {"torch": torch})
        assert f"cute.math.{name}(s, fastmath=True)" in mod_source(mod)


def test_an_index_outside_names_what_was_captured() -> None:
    short = torch.zeros(30)

    def biased(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + short[k - 40]

    q = torch.randn(1, 1, 20, 8)
    with pytest.raises(IndexError) as told:
        flex_attention(q, q, q, score_mod=biased)
    text = str(told.value)
    assert "biased (" in text and "closure variable 'short' of " in text
    assert "at index -40 of dimension 0, whose extent is 30" in text
    assert "aux_tensors" not in text and "CuTe" not in text


def test_a_power_that_is_not_known() -> None:
    with pytest.raises(NotImplementedError, match=r"a power that is not known: .*1 << x") as told:
        lower_mod(lambda b, h, q, k: 2**q > k, "mask_mod")
    assert "Element(" not in str(told.value)


def test_wrong_arguments_name_both_forms() -> None:
    q = torch.randn(1, 20, 1, 8)
    with pytest.raises(TypeError, match=r"kv_idx, aux_tensors\), got .*; written in torch, \(b, h"):
        flash_attn_func(q, q, q, mask_mod=lambda q, k: q >= k)
