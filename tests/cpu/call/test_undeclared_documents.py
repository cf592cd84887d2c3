"""Masks that say whether they hold documents, and calls that look for them in other masks."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from recording import calls_of

from flash_mask_cute import explain, flash_attn_func
from flash_mask_cute.call import documents as packed
from flash_mask_cute.call.arguments import Masks
from flash_mask_cute.call.documents import PackedBackward, PackedForward, holds_documents
from flash_mask_cute.call.lookup import mask_key
from flash_mask_cute.masks import builders
from flash_mask_cute.masks.column_mask import ColumnMask

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

SEQLEN = 1300
INDICES = builders.causal_document([700, 600]).startend_row_indices


@pytest.fixture
def small_calls_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are looked for in calls of any size."""
    from flash_mask_cute import interface

    monkeypatch.setattr(packed, "MIN_UNDECLARED_SEQLEN", 0)
    monkeypatch.setattr(packed, "MIN_UNDECLARED_OPERATIONS", 0)
    # a launch of the same metadata may have been prepared before
    for launches in ("_prepared_fwd", "_prepared_bwd"):
        monkeypatch.setattr(interface, launches, {})


def test_a_mask_says_yes_or_no_or_nothing() -> None:
    masks = {x: ColumnMask(INDICES, True, x) for x in (None, True, False)}
    assert ColumnMask(INDICES, True).documents is None
    told = {x: repr(mask) for x, mask in masks.items()}
    assert "documents=True" in told[True] and "documents=False" in told[False]
    assert "documents" not in told[None]
    assert all(pickle.loads(pickle.dumps(mask)).documents is x for x, mask in masks.items())
    assert len({mask_key(Masks(startend_row_indices=mask)) for mask in masks.values()}) == 3
    with pytest.raises(TypeError, match="documents='yes' is not a bool or None"):
        ColumnMask(INDICES, True, documents="yes")  # type: ignore[arg-type]


def test_builders_know_but_for_any_visible_pairs() -> None:
    assert builders.causal_document([3, 4]).documents is True
    assert builders.sliding_window(7, 3).documents is False
    assert builders.key_padding(torch.ones(1, 7).bool()).documents is False
    assert builders.from_dense(torch.ones(7, 7).tril().bool()).documents is None


@pytest.mark.parametrize(
    ("batch", "seqlen", "heads", "causal", "is_large"),
    [
        (1, 32768, 32, True, True),
        (4, 16384, 32, True, True),
        (2, 16384, 32, True, False),
        (2, 16384, 37, False, True),
        (16, 8192, 64, True, False),
        (1, 32768, 18, True, False),
    ],
)
def test_large_calls_look(
    batch: int, seqlen: int, heads: int, causal: bool, is_large: bool
) -> None:
    q, k = (torch.empty(batch, seqlen, x, 128, device="meta") for x in (heads, 1))
    vectors = 1 if causal else 2
    indices = torch.empty(1, 1, seqlen, vectors, dtype=torch.int32, device="meta")

    def holds(mask: Any) -> bool:
        return holds_documents(q, k, k, mask, causal, ())

    assert holds(indices) is holds(ColumnMask(indices, causal)) is is_large
    assert holds(ColumnMask(indices, causal, True))
    assert not holds(ColumnMask(indices, causal, False))
    # a mask for each head
    assert not holds(indices.expand(1, heads, seqlen, vectors))


@pytest.mark.shares(3)
@pytest.mark.usefixtures("small_calls_count")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("is_tensor", [True, False])
@pytest.mark.parametrize("name", ["document", "none"])
def test_results_and_gradients_are_those_of_the_mask(
    monkeypatch: pytest.MonkeyPatch, name: str, is_tensor: bool, causal: bool
) -> None:
    if name == "document":
        build = builders.causal_document if causal else builders.document
        mask = build([[700, 600], [1300]])
    else:
        mask = builders.sliding_window(SEQLEN, 100) if causal else builders.full(SEQLEN)
    assert mask.causal is causal
    indices = mask.startend_row_indices
    given = indices if is_tensor else ColumnMask(indices, causal)
    torch.manual_seed(0)
    qkv = [torch.randn(2, SEQLEN, heads, 16, requires_grad=True) for heads in (2, 1, 1)]
    called = [calls_of(kind, monkeypatch) for kind in (PackedForward, PackedBackward)]

    def results(mask: Any) -> list[torch.Tensor]:
        out, lse = flash_attn_func(*qkv, startend_row_indices=mask, causal=causal, return_lse=True)
        loss = out.square().sum() + lse.square().sum()
        return [out, lse, *torch.autograd.grad(loss, qkv)]

    expected = results(ColumnMask(indices, causal, documents=False))
    assert called == [[], []]
    found = results(given)
    assert [len(calls) for calls in called] == [1, 1]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("small_calls_count")
def test_explain_counts_what_runs() -> None:
    q = torch.zeros(1, SEQLEN, 2, 64).bfloat16()
    found = explain(q, q, q, causal=True, startend_row_indices=INDICES)
    declared = explain(
        q, q, q, causal=True, startend_row_indices=ColumnMask(INDICES, True, documents=True)
    )
    assert "packed sequences" in found.note and found.note == declared.note
    never = explain(
        q, q, q, causal=True, startend_row_indices=ColumnMask(INDICES, True, documents=False)
    )
    assert "packed sequences" not in (never.note or "")


@pytest.mark.usefixtures("small_calls_count")
def test_traces_look_for_none() -> None:
    """A limit would be a guard on lengths: exports of a range of them would be refused."""

    class Attend(torch.nn.Module):
        def forward(self, q: torch.Tensor, indices: torch.Tensor) -> Any:
            return flash_attn_func(q, q, q, causal=True, startend_row_indices=indices)

    q = torch.randn(1, SEQLEN, 2, 16)
    length = torch.export.Dim("length", min=600, max=100_000)
    exported = torch.export.export(
        Attend(), (q, INDICES), dynamic_shapes={"q": {1: length}, "indices": {2: length}}
    )
    assert not any("split_documents" in str(node.target) for node in exported.graph.nodes)
    longer = builders.causal_document([700, 900]).startend_row_indices
    q = torch.randn(1, 1600, 2, 16)
    torch.testing.assert_close(exported.module()(q, longer), Attend()(q, longer))
