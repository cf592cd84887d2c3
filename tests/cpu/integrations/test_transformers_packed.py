"""Masks of packed documents: what they cost, and what must not be taken for them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[dev]'")

import tiny_models as tiny
import torch
from seen_by_masks import Waits, dense, seen
from torch import Tensor
from transformers import masking_utils as m

from flash_mask_cute.integrations.transformers import packed
from flash_mask_cute.integrations.transformers.masks import AttentionMask, make_mask

SEQLEN = 13
FIRST, SECOND = ([0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 2])
BASES = {
    "causal": m.causal_mask_function,
    "all": m.bidirectional_mask_function,
    "sliding": m.sliding_window_causal_mask_function(3),
    "both sides": m.sliding_window_bidirectional_mask_function(2),
}


def composed(positions: Any, base: Any, is_old: bool, ids: Any = None) -> dict[str, Any]:
    """As transformers composes it; in 5.17 places are those in the row. ids: of documents."""
    given = torch.as_tensor(positions)
    given = given[None] if given.dim() == 1 else given
    if ids is None:
        starts = given.diff(dim=1, prepend=given[:, :1] - 1) != 1
        ids = starts.cumsum(1)
    shown = m.packed_sequence_mask_function(torch.as_tensor(ids))
    remap = getattr(m, "remap_positions_for_packed_sequence", None)
    inner = base if is_old or remap is None else remap(base, given)
    call = {"batch_size": len(given), "q_length": SEQLEN, "kv_length": SEQLEN}
    return call | {"mask_function": m.and_masks(inner, shown)}


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    packed._last.clear()
    packed._last._older.clear()


def found(call: dict[str, Any]) -> AttentionMask:
    mask = make_mask(**call)
    assert isinstance(mask, AttentionMask) and torch.equal(seen(mask), dense(call))
    return mask


@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize("base", BASES)
def test_documents(base: str, is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait and few operators; equal contents get the same mask, with what it keeps."""
    first = found(composed(FIRST, BASES[base], is_old))
    # no general search
    monkeypatch.setattr("flash_mask_cute.integrations.transformers.masks.from_mask_mod", None)
    for positions, most in ((FIRST, 25), (SECOND, 40), ([FIRST, SECOND], 40)):
        call = composed(positions, BASES[base], is_old)
        with Waits() as mode:
            make_mask(**call)
        assert len(mode.waits) == 1 and mode.count <= most
        found(call)
    again = found(composed(FIRST, BASES[base], is_old))
    assert again.found.columns is not first.found.columns  # another one was the last
    with torch.inference_mode():
        third = found(composed(FIRST, BASES[base], is_old))
    assert third.found.columns is again.found.columns
    assert third.form == "documents, by column intervals"


WRONG: dict[str, dict[str, Any]] = {
    "an id that returns": {"ids": [[0] * 4 + [1] * 5 + [0] * 4]},
    "ids that fall": {"ids": [[2] * 4 + [1] * 5 + [0] * 4]},
    "positions that jump inside of a document": {"ids": [[0] * 7 + [1] * 6]},
    "positions below 0": {"positions": [*range(-3, 4), *range(-2, 4)]},
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("wrong", WRONG)
def test_other_contents_go_through_the_general_search(wrong: str, base: str) -> None:
    for _ in range(2):
        found(composed(FIRST, BASES[base], False))
        found(composed(**({"positions": FIRST} | WRONG[wrong]), base=BASES[base], is_old=False))


def test_another_overlay_goes_through_the_general_search() -> None:
    groups = torch.full((1, SEQLEN), -1)
    groups[:, 2:6] = 0
    for base in (m.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),):
        found(composed(FIRST, base, False))
    call = composed(FIRST, m.causal_mask_function, False)
    call["mask_function"] = m.or_masks(call["mask_function"], m.blockwise_overlay(groups))
    found(call)


def test_positions_that_change_in_place_between_steps() -> None:
    positions = torch.tensor(FIRST)
    first = found(composed(positions, m.causal_mask_function, False))
    before = seen(first)
    positions.copy_(torch.tensor(SECOND))
    second = found(composed(positions, m.causal_mask_function, False))
    assert torch.equal(seen(first), before) and not torch.equal(seen(second), before)


def test_a_step_of_a_model_gets_the_mask_of_the_last_step() -> None:
    pair = tiny.decoder("gemma3")
    call = {"input_ids": tiny.IDS[:1], "position_ids": tiny.PACKED, "use_cache": False}

    def masks() -> list[Tensor]:
        return [x.mask.startend_row_indices for x in packed._last.values()]

    assert tiny.error_of(pair, call) <= 7e-6
    kept = masks()
    assert len(kept) == 2
    assert tiny.error_of(pair, call | {"position_ids": tiny.PACKED.clone()}) <= 7e-6
    assert all(x is y for x, y in zip(masks(), kept, strict=True))
