"""Kept masks that are column intervals run without a callable, and see what torch's mask sees."""

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
    or_masks,
)
from torch_values import dense_attention

from flash_mask_cute import explain, keep_block_mask
from flash_mask_cute.autograd.attend import PlannedMasks
from flash_mask_cute.call.arguments import NO_MASKS, Masks
from flash_mask_cute.flex import flex_attention, lower_mod

Mod = Callable[..., Tensor]
N = 150
IDS = torch.stack((torch.arange(N) // 40, torch.arange(N).clamp(max=99) // 7)).int()
PADDED = torch.where(torch.arange(N) < 120, torch.arange(N) // 50, -1)
LENGTHS = torch.tensor([150, 90])
PREFIX = torch.tensor([13, 70], dtype=torch.int32)
VALID = torch.rand((2, N), generator=torch.Generator().manual_seed(0)) < 0.7
FALLING = torch.arange(N).flip(0)
PARTS = torch.arange(N) // 30
SHUFFLED = torch.randint(0, 3, (N,), generator=torch.Generator().manual_seed(0))


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return IDS[b, q] == IDS[b, k]


FOUND: dict[str, Mod] = {
    "documents": documents,
    "keys first": lambda b, h, q, k: IDS[b, k] == IDS[b, q],
    "causal documents": and_masks(causal, documents),
    "documents in a window": and_masks(documents, causal, lambda b, h, q, k: q - k < 12),
    "documents, padding": lambda b, h, q, k: (PADDED[q] == PADDED[k]) & (PADDED[k] != -1),
    "blocks": lambda b, h, q, k: q // 16 == k // 16,
    "valid keys": lambda b, h, q, k: VALID[b, k],
    "lengths": lambda b, h, q, k: (q < LENGTHS[b]) & (k < LENGTHS[b]) & (q >= k),
    "prefix": lambda b, h, q, k: (k < PREFIX[b]) | (q >= k),
    "shared question": lambda b, h, q, k: (q >= k) & ((PARTS[q] == PARTS[k]) | (PARTS[k] == 0)),
    "two sides of one direction": lambda b, h, q, k: (q >= k) | (q >= 100),
    "a diagonal of some keys": lambda b, h, q, k: (q == k + 5) & VALID[b, k],
    "nothing for a key": lambda b, h, q, k: (q >= k) & (k % 3 != 1),
    "a table of ends": lambda b, h, q, k: q < LENGTHS[b] - PREFIX[b] + k,
    "parts near the diagonal": or_masks(documents, lambda b, h, q, k: (q - k).abs() < 9),
    "two tables": lambda b, h, q, k: IDS[b, q] == PARTS[k],
    "what rises": lambda b, h, q, k: IDS[b, q] >= IDS[b, k],
}
LEFT: dict[str, Mod] = {
    "ids without runs": lambda b, h, q, k: SHUFFLED[q] == SHUFFLED[k],
    "of heads": lambda b, h, q, k: (q >= k) & (k > h),
    "two ranges": or_masks(documents, lambda b, h, q, k: (q - k).abs() == 60),
    "a table that falls": lambda b, h, q, k: FALLING[q] >= FALLING[k],
    "of two tables": lambda b, h, q, k: IDS[b, q] >= PARTS[k] + 1,
    "remainder": lambda b, h, q, k: (q - k) % 3 == 0,
    "a row of a table": lambda b, h, q, k: (q >= k) & (k == PREFIX).any(),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Masks]:
    """What attention is asked with."""
    seen: list[Any] = []
    results = PlannedMasks.results

    def record(known: PlannedMasks, *given: Any) -> Any:
        seen.append(known._masks or NO_MASKS)
        return results(known, *given)

    monkeypatch.setattr(PlannedMasks, "results", record)
    return seen


def made(mod: Mod, lq: int = N, lk: int = N) -> BlockMask:
    mask = create_block_mask(mod, 2, None, lq, lk, device="cpu", BLOCK_SIZE=32)
    return keep_block_mask(mask)


def check(mask: BlockMask, visible: Tensor, *seqlens: int) -> None:
    g = torch.Generator().manual_seed(1)
    lq, lk = seqlens or (N, N)
    q, k, v = (torch.randn(2, 2, n, 8, generator=g) for n in (lq, lk, lk))
    out = flex_attention(q, k, v, block_mask=mask)
    wanted, _ = dense_attention(q.double(), k.double(), v.double(), None, lambda *_: visible)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-6, atol=2e-6)


def visible_of(mod: Mod, lq: int = N, lk: int = N) -> Tensor:
    return create_mask(mod, 2, 2, lq, lk, "cpu")


@pytest.mark.parametrize("name", FOUND)
def test_intervals_are_found_and_are_right(name: str, calls: list[Any]) -> None:
    check(made(FOUND[name]), visible_of(FOUND[name]))
    assert calls[-1].mask_mod is calls[-1].block_sparse_tensors_torch is None
    mask = calls[-1].startend_row_indices
    is_documents = name.startswith(("documents", "causal documents", "blocks", "keys first"))
    assert mask.documents is is_documents and mask.startend_row_indices.shape[1] == 1


def test_gradients() -> None:
    g = torch.Generator().manual_seed(2)
    leaves = [torch.randn(2, 2, N, 8, generator=g, requires_grad=True) for _ in range(3)]
    mod = FOUND["causal documents"]
    out = flex_attention(*leaves, block_mask=made(mod))
    wanted, _ = dense_attention(*(x.double() for x in leaves), None, lambda *_: visible_of(mod))
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    for got, exact in zip(
        gradients, torch.autograd.grad(wanted.square().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(got, exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_none_stays_a_mod(name: str, calls: list[Any]) -> None:
    check(made(LEFT[name]), visible_of(LEFT[name]))
    assert calls[-1].mask_mod is not None and calls[-1].startend_row_indices is None


@pytest.mark.parametrize(("lq", "lk"), [(100, 150), (150, 100), (149, 150), (150, 149)])
@pytest.mark.parametrize("name", ["documents", "valid keys", "prefix", "nothing for a key"])
def test_unequal_lengths(name: str, lq: int, lk: int, calls: list[Any]) -> None:
    check(made(FOUND[name], lq, lk), visible_of(FOUND[name], lq, lk), lq, lk)
    assert calls[-1].mask_mod is None


def test_found_once_for_an_object(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ids = IDS.clone()
    mod = lambda b, h, q, k: ids[b, q] == ids[b, k]  # noqa: E731
    mask = made(mod)
    check(mask, visible_of(mod))
    check(mask, visible_of(mod))
    assert calls[0].startend_row_indices is calls[1].startend_row_indices
    # contents that the lists were not made of
    ids[:, :10] = 7
    q = torch.randn(2, 2, N, 8)
    flex_attention(q, q, q, block_mask=mask)
    assert calls[-1].startend_row_indices is None and calls[-1].mask_mod is not None
    mask = made(mod)
    check(mask, visible_of(mod))
    assert calls[-1].mask_mod is not None or calls[-1].startend_row_indices is not None


def test_lists_that_hide_more_are_applied(calls: list[Any]) -> None:
    mask = made(documents)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    visible = visible_of(documents).clone()
    row = next(i for i in range(5) if mask.full_kv_num_blocks[0, 0, i])
    column = int(mask.full_kv_indices[0, 0, row, 0])
    mask.full_kv_num_blocks[0, 0, row] = 0
    visible[0, :, 32 * row : 32 * row + 32, 32 * column : 32 * column + 32] = False
    check(mask, visible)
    assert calls[-1].block_sparse_tensors_torch is not None


def test_an_index_outside_of_a_table() -> None:
    short = torch.arange(100)
    mod = lambda b, h, q, k: short[q] == short[k]  # noqa: E731
    mask = keep_block_mask(BlockMask.from_kv_blocks(*_lists(), 32, mod, (N, N)))
    q = torch.randn(2, 2, N, 8)
    with pytest.raises(IndexError, match="short"):
        flex_attention(q, q, q, block_mask=mask)


def _lists() -> tuple[Tensor, Tensor, None, None]:
    blocks = torch.arange(5, dtype=torch.int32).expand(2, 1, 5, 5).contiguous()
    return torch.full((2, 1, 5), 5, dtype=torch.int32), blocks, None, None


def test_explain_says_the_form() -> None:
    q = torch.randn(2, N, 2, 64)
    for mod, said in (
        (causal, "a window, keys 0 to q + 0"),
        (FOUND["blocks"], "documents, by column intervals"),
        (documents, "documents, by column intervals"),
        (FOUND["prefix"], "column intervals"),
        (FOUND["two tables"], "column intervals"),
        (LEFT["remainder"], "a mask_mod"),
    ):
        assert lower_mod(mod, "mask_mod").form == said
        note = explain(q, q, q, mask_mod=mod).note
        if mod in (causal, FOUND["blocks"]):
            assert note.endswith(f"mask_mod is torch's, and runs as {said}")
        elif said == "a mask_mod":
            assert note.endswith("flex_attention would run it as a mask_mod")
        else:
            assert note.endswith(
                f"flex_attention would run it as {said} if its block mask is kept "
                "(keep_block_mask); builders.from_mask_mod makes this mask"
            )
