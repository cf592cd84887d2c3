"""Query lists by torch, which the simulator's calls use, against the dense mask of a selection."""

from __future__ import annotations

import pytest
import torch
from drawn_lists import check_lists, draw_lists

from flash_mask_cute.core import query_lists as on_device
from flash_mask_cute.mask_prep import query_lists, query_lists_kernel
from flash_mask_cute.mask_prep.query_lists import lists_by_torch


def test_constants_are_those_of_the_device_code() -> None:
    assert query_lists.SEGMENT == on_device.SEGMENT
    assert query_lists.ITEM_WORDS == on_device.ITEM_WORDS
    assert query_lists.CHUNK_ROWS == query_lists_kernel.CHUNK_ROWS


@pytest.mark.parametrize("segment", [64, 1024])
def test_draws(segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_lists, "SEGMENT", segment)
    for seed in range(40):
        drawn = draw_lists(seed, 200)
        made = lists_by_torch(*drawn)
        check_lists(drawn, made, segment)
        assert made.tokens.dtype == made.items.dtype == torch.int32


def test_a_wrong_place_is_noticed() -> None:
    """The check above can fail: two entries exchanged, a query too many."""
    drawn = draw_lists(3, 200)
    for spoil in (
        lambda x: x.tokens[:, :2].copy_(x.tokens[:, :2].flip(-1)),
        lambda x: x.tokens[:, 0].add_(1),
        lambda x: x.num_items.sub_(1),
        lambda x: x.items[:, 0, 3].sub_(1),
    ):
        made = lists_by_torch(*drawn)
        spoil(made)
        with pytest.raises(AssertionError):
            check_lists(drawn, made, 1024)
