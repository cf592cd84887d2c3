"""Text of lowered mods that costs little on a GPU, and what errors of users say."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flash_mask_cute import flash_attn_func, flex_attention, mod_source
from flash_mask_cute.flex import lower_mod
from flash_mask_cute.lowering.pair import named_as_captured
from flash_mask_cute.mods.aux_tensors import OutsideError
from flash_mask_cute.mods.on_cpu import eval_mask_mod, eval_score_mod

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


def test_products_of_integers_are_integers() -> None:
    """Also those of several factors, and their negatives: floats would round, and not wrap."""
    places = torch.arange(300, dtype=torch.int32)
    mods: list[Callable[..., Tensor]] = [
        lambda b, h, q, k: (q * 7919 * 4096 + k * 40503) % 100 < 10,
        lambda b, h, q, k: -(q * 65537 * 1024) // 7 + k * 3001 * 8 >= 0,
        lambda b, h, q, k: TABLE[q * 2 * 4 % 33] > k % 33,
    ]
    for mod in mods:
        lowered = lower_mod(mod, "mask_mod")
        found = eval_mask_mod(lowered.mod, lowered.aux_tensors, 0, 0, places, places)
        wanted = mod(torch.tensor(0), torch.tensor(0), places[:, None], places)
        assert torch.equal(found, wanted), mod_source(mod)
        assert not re.search(r"[qk] \* -?\d+\.", mod_source(mod))
    assert "s * -0.6\n" in mod_source(lambda s, b, h, q, k: -(s * 0.3 * 2))


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


def test_an_index_outside_is_told_by_fields() -> None:
    short = torch.zeros(3, 30)
    lowered = lower_mod(lambda s, b, h, q, k: s + short[h, k - 40], "score_mod")
    places = torch.arange(20, dtype=torch.int32)
    with pytest.raises(OutsideError) as found:
        eval_score_mod(lowered.mod, torch.zeros(20, 20), lowered.aux_tensors, 0, 1, places, places)
    for error in (found.value, pickle.loads(pickle.dumps(found.value))):
        told = error.kind, error.tensor, error.where, error.index, error.extent
        assert told == ("score_mod", 0, "dimension 1", -10, 30)
        assert "reads aux_tensors[0] at index -10 of dimension 1, whose extent is 30" in str(error)
    named = named_as_captured(found.value, [None], {"score_mod": None})
    assert type(named) is OutsideError and str(named) == str(found.value)


def test_a_text_is_written_behind_other_tensors() -> None:
    """With a table that no line needs, a number, and bounds that the table may have."""
    table, unread, slopes = torch.rand(9), torch.rand(3), torch.rand(2)

    def scaled(factor: float) -> Callable[..., Tensor]:
        def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            chosen = torch.where(torch.tensor(True), table[k.clamp(max=8)], unread[k])
            return s * factor + chosen + slopes[h]

        return mod

    lower_mod(scaled(1.5), "score_mod")
    lowered = lower_mod(scaled(2.5), "score_mod")
    # the first call's number is an aux tensor now
    assert lowered.kind == "score_mod" and len(lowered.aux_tensors) == 3
    places = torch.arange(12, dtype=torch.int32)
    given = 0, 1, places, places
    scores = torch.rand(12, 12)
    wanted = eval_score_mod(lowered.mod, scores, lowered.aux_tensors, *given)
    others = [torch.zeros(1), torch.zeros(1, dtype=torch.int32)]
    for first, checks in ((0, True), (2, False), (2, True)):
        written = lowered.written(first, checks)
        found = eval_score_mod(written.mod, scores, [*others[:first], *lowered.aux_tensors], *given)
        assert torch.equal(found, wanted)
        assert ("ops.below(" in written.source) is not checks
        numbers = {int(x) for x in re.findall(r"aux\[(\d+)\]", written.source)}
        assert numbers == {first, first + 1, first + 2}
    again = lowered.written(checks=True).written(2)
    assert again.mod is lowered.written(2, checks=True).mod
    assert lowered.written() is lowered


def test_a_power_that_is_not_known() -> None:
    with pytest.raises(NotImplementedError, match=r"a power that is not known: .*1 << x") as told:
        lower_mod(lambda b, h, q, k: 2**q > k, "mask_mod")
    assert "Element(" not in str(told.value)


def test_wrong_arguments_name_both_forms() -> None:
    q = torch.randn(1, 20, 1, 8)
    with pytest.raises(TypeError, match=r"kv_idx, aux_tensors\), got .*; written in torch, \(b, h"):
        flash_attn_func(q, q, q, mask_mod=lambda q, k: q >= k)
