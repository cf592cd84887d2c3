"""Masks that are bands run without a callable, and see what torch's mask sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)
from torch_values import dense_attention

from flash_mask_cute.autograd.attend import PlannedMasks
from flash_mask_cute.call.arguments import NO_MASKS
from flash_mask_cute.flex import flex_attention, keep_block_mask, lower_mod
from flash_mask_cute.lowering.simplify import BandForm

Mod = Callable[..., Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(size: int) -> Mod:
    return lambda b, h, q, k: q - k <= size


BANDS: dict[str, tuple[Mod, BandForm]] = {
    "causal": (causal, BandForm(None, 0)),
    "strictly": (lambda b, h, q, k: q > k, BandForm(None, -1)),
    "from the other side": (lambda b, h, q, k: k <= q, BandForm(None, 0)),
    "shifted": (lambda b, h, q, k: q + 7 >= k, BandForm(None, 7)),
    "window": (and_masks(causal, window(20)), BandForm(20, 0)),
    "strict window": (and_masks(causal, lambda b, h, q, k: q - k < 20), BandForm(19, 0)),
    "two-sided": (lambda b, h, q, k: (q - k).abs() <= 9, BandForm(9, 9)),
    "two-sided, turned": (lambda b, h, q, k: torch.abs(k - q) < 9, BandForm(8, 8)),
    "negated": (lambda b, h, q, k: -q <= -k, BandForm(None, 0)),
    "of int64": (lambda b, h, q, k: q.long() - k.long() + 2 >= 0, BandForm(None, 2)),
    "all": (noop_mask, BandForm(None, None)),
    "the narrower": (and_masks(window(20), window(12), causal), BandForm(12, 0)),
    "what an or shows of all": (or_masks(causal, window(3)), BandForm(None, None)),
    "halves of a window": (
        lambda b, h, q, k: ((q - k >= 0) & (q - k < 6)) | ((q - k < 0) & (k - q < 3)),
        BandForm(5, 2),
    ),
    "or true": (or_masks(causal, lambda *_: torch.tensor(True)), BandForm(None, None)),
    "every query": (lambda b, h, q, k: q >= 0, BandForm(None, None)),
    "a window of all": (lambda b, h, q, k: (abs(q - k) <= 9) & (q + 3 >= 0), BandForm(9, 9)),
    "equal": (lambda b, h, q, k: q == k, BandForm(0, 0)),
    "not": (lambda b, h, q, k: ~(q >= k), BandForm(-1, None)),
    "not a part": (lambda b, h, q, k: ~((q < k) | (q - k > 7)), BandForm(7, 0)),
    "not unequal": (lambda b, h, q, k: torch.logical_not(q + 4 != k), BandForm(-4, 4)),
}
OTHERS: dict[str, Mod] = {
    "a gap between two": lambda b, h, q, k: (q - k > 3) | (k >= q),
    "some queries": lambda b, h, q, k: q >= 5,
    "unequal": lambda b, h, q, k: q != k,
    "not of a float": lambda b, h, q, k: ~(q - k > 3.5),
    "of batch": lambda b, h, q, k: q >= k + b,
    "scaled": lambda b, h, q, k: 2 * q >= k,
    "of keys": lambda b, h, q, k: k < 10,
    "remainder": lambda b, h, q, k: (q - k) % 3 == 0,
    "in floats": lambda b, h, q, k: q.float() >= k.float(),
    "outside": lambda b, h, q, k: (q - k).abs() >= 9,
    "small integers": lambda b, h, q, k: q.to(torch.int8) >= k.to(torch.int8),
    "never": lambda b, h, q, k: b.new_zeros((), dtype=torch.bool),
}


@pytest.mark.parametrize("name", BANDS)
def test_a_band_is_found_and_is_right(name: str) -> None:
    mod, band = BANDS[name]
    assert lower_mod(mod, "mask_mod").band == band
    q, k = torch.arange(40)[:, None], torch.arange(40)
    left = -40 if band.left is None else q - band.left
    right = 40 if band.right is None else q + band.right
    visible = create_mask(mod, 1, 1, 40, 40, "cpu")[0, 0]
    inside = ((k >= left) & (k <= right)).expand(40, 40)
    assert torch.equal(visible.expand(40, 40), inside)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_band_stays_a_mod(name: str) -> None:
    assert lower_mod(OTHERS[name], "mask_mod").band is None


def test_a_number_that_changes_moves_the_band() -> None:
    for size in (20, 30, 31):
        assert lower_mod(and_masks(window(size), causal), "mask_mod").band == BandForm(size, 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What attention is asked with."""
    seen: list[dict[str, Any]] = []
    results = PlannedMasks.results

    def record(known: PlannedMasks, *given: Any) -> Any:
        seen.append((known._masks or NO_MASKS)._asdict())
        return results(known, *given)

    monkeypatch.setattr(PlannedMasks, "results", record)
    return seen


def check(mask: BlockMask, mod: Mod, lq: int, lk: int) -> None:
    g = torch.Generator().manual_seed(lq)
    q, k, v = (torch.randn(1, 2, n, 8, generator=g) for n in (lq, lk, lk))
    out, lse = flex_attention(q, k, v, block_mask=mask, return_lse=True)
    visible = create_mask(mod, 1, 1, lq, lk, "cpu")
    wanted = dense_attention(q.double(), k.double(), v.double(), None, lambda *_: visible)
    torch.testing.assert_close(out.double(), wanted[0], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse.double(), wanted[1], rtol=2e-6, atol=2e-6)


LENGTHS = [(150, 150), (150, 151), (151, 150), (100, 150), (150, 100), (1, 150), (150, 1)]


@pytest.mark.parametrize(("lq", "lk"), LENGTHS)
@pytest.mark.parametrize("name", ["causal", "strictly", "shifted", "window", "two-sided", "all"])
def test_bands_of_unequal_lengths(name: str, lq: int, lk: int, calls: list[dict[str, Any]]) -> None:
    mod, band = BANDS[name]
    mask = create_block_mask(mod, None, None, lq, lk, device="cpu", BLOCK_SIZE=32)
    check(mask, mod, lq, lk)
    assert calls[-1]["mask_mod"] is not None
    check(keep_block_mask(mask), mod, lq, lk)
    if band.as_window(lq, lk) is not None:
        assert calls[-1]["mask_mod"] is None and calls[-1]["block_sparse_tensors_torch"] is None


def test_causal_is_our_causal_where_lengths_agree_only() -> None:
    assert BandForm(None, 0).as_window(150, 150) == (None, 0)
    assert BandForm(None, 0).as_window(151, 150) == (None, 1)
    # -1 would be an open side
    assert BandForm(None, 0).as_window(150, 151) is None
    assert BandForm(None, 0).as_window(150, 152) == (None, -2)
    assert BandForm(3, -5).as_window(9, 9) is None


def test_lists_that_hide_more_are_applied(calls: list[dict[str, Any]]) -> None:
    mask = create_block_mask(causal, None, None, 150, 150, device="cpu", BLOCK_SIZE=32)
    check(keep_block_mask(mask), causal, 150, 150)
    assert calls[-1]["block_sparse_tensors_torch"] is None
    assert mask.full_kv_num_blocks is not None
    mask.full_kv_num_blocks[0, 0, 3] -= 1
    row = int(mask.full_kv_indices[0, 0, 3, 2])  # type: ignore[index]
    edited = lambda b, h, q, k: causal(b, h, q, k) & ~((q // 32 == 3) & (k // 32 == row))  # noqa: E731
    check(mask, edited, 150, 150)
    assert calls[-1]["block_sparse_tensors_torch"] is not None


def test_blocks_that_are_called_full_are_not_cut(calls: list[dict[str, Any]]) -> None:
    lists = create_block_mask(noop_mask, None, None, 150, 150, device="cpu", BLOCK_SIZE=32)
    everything = torch.full((1, 1, 5), 5, dtype=torch.int32)
    blocks = torch.arange(5, dtype=torch.int32).expand(1, 1, 5, 5).contiguous()
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(everything), blocks, everything, blocks, 32, causal, lists.seq_lengths
    )
    check(mask, noop_mask, 150, 150)
    check(keep_block_mask(mask), noop_mask, 150, 150)
    assert calls[-1]["block_sparse_tensors_torch"] is not None
