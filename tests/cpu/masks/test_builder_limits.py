"""Builders of nothing, and builders inside of a compiled region."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flash_mask_cute import ColumnMask, builders, flash_attn_func, flash_attn_with_kvcache


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


NOTHING: dict[str, Callable[[], ColumnMask]] = {
    "full": lambda: builders.full(0),
    "causal_document": lambda: builders.causal_document([]),
    "causal_document of a batch": lambda: builders.causal_document([[], []]),
    "causal_document of a tensor": lambda: builders.causal_document(ids(0), 0),
    "document": lambda: builders.document([]),
    "prefix_lm_document": lambda: builders.prefix_lm_document([], []),
    "share_question": lambda: builders.share_question([]),
    "share_question of no parts": lambda: builders.share_question([[]]),
    "causal_blockwise": lambda: builders.causal_blockwise([]),
    "qk_sparse": lambda: builders.qk_sparse(0, []),
    "prefix_tree": lambda: builders.prefix_tree([], []),
    "from_tin_tout": lambda: builders.from_tin_tout(ids(0)),
    "from_cu_seqlens": lambda: builders.from_cu_seqlens([0]),
    "from_cu_seqlens of no edge": lambda: builders.from_cu_seqlens([]),
    "from_cu_seqlens, not causal": lambda: builders.from_cu_seqlens([[0], [0]], causal=False),
    "from_cu_seqlens of a tensor": lambda: builders.from_cu_seqlens(ids(1), 0),
    "from_document_ids": lambda: builders.from_document_ids(ids(0)),
    "from_document_ids, not causal": lambda: builders.from_document_ids(ids(2, 0), causal=False),
    "from_position_ids": lambda: builders.from_position_ids(ids(0)),
    "image_blocks": lambda: builders.image_blocks(ids(0)),
    "image_blocks with a window": lambda: builders.image_blocks(ids(0), 3),
    "key_padding": lambda: builders.key_padding(ids(2, 0)),
    "block_diffusion": lambda: builders.block_diffusion(0, 4),
}


@pytest.mark.parametrize("name", NOTHING)
def test_of_nothing(name: str) -> None:
    mask = NOTHING[name]()
    batch, _, keys, _ = mask.startend_row_indices.shape
    assert keys == 0
    q = torch.zeros(batch, 0, 2, 8)
    assert flash_attn_func(q, q, q, startend_row_indices=mask).shape == q.shape


@pytest.mark.parametrize("builder", [builders.causal_document, builders.document])
def test_tokens_of_no_document_see_nothing(builder: Callable[..., ColumnMask]) -> None:
    for lengths in ([], ids(0)):
        assert not builder(lengths, 5).dense(5).any()
    is_causal = builder is builders.causal_document
    for edges in ([0], ids(1)):
        assert not builders.from_cu_seqlens(edges, 5, causal=is_causal).dense(5).any()


@pytest.mark.parametrize("parents", [[], [[]], ids(0), ids(1, 0)], ids=repr)
def test_a_tree_without_drafts(parents: list[int] | Tensor) -> None:
    """Queries see the tokens before the drafts that there could be."""
    tree = builders.draft_tree(parents)
    assert tree.bits.shape == tree.depths.shape == (1, 0)
    first = torch.tensor([4], dtype=torch.int32)
    cache, q = torch.randn(2, 1, 9, 2, 16), torch.randn(1, 1, 2, 16)
    given = {"cache_seqlens": first, "mask_mod": tree.mask_mod(first)}
    assert flash_attn_with_kvcache(q[:, :0], *cache, **given).shape == (1, 0, 2, 16)
    given["cache_seqlens"] = first + 3
    out = flash_attn_with_kvcache(q, *cache, **given)
    wanted = flash_attn_func(q, *cache[:, :, :4])
    torch.testing.assert_close(out, wanted)


def test_an_empty_batch() -> None:
    for mask in (builders.from_document_ids(ids(0, 8)), builders.key_padding(ids(0, 8))):
        assert mask.startend_row_indices.shape[:3] == (0, 1, 8)


TRACED: dict[str, Callable[[Tensor], ColumnMask]] = {
    "from_tin_tout": lambda x: builders.from_tin_tout(x + torch.tensor([3, 2, 3])),
    "from_document_ids": lambda x: builders.from_document_ids(x),
    "image_blocks": lambda x: builders.image_blocks(x),
    "key_padding": lambda x: builders.key_padding(x[None] + 1),
    "causal_document": lambda x: builders.causal_document(x + 1, 3),
    "from_cu_seqlens": lambda x: builders.from_cu_seqlens(torch.cat([x[:1], x + 1]), 3),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", TRACED)
def test_tensors_in_a_graph(name: str) -> None:
    def indices(x: Tensor) -> Tensor:
        return TRACED[name](x).startend_row_indices

    x = ids(3)
    assert torch.equal(torch.compile(indices, fullgraph=True, backend="eager")(x), indices(x))


LISTS: dict[str, Callable[[], object]] = {
    "causal_document": lambda: builders.causal_document([2, 1]),
    "document": lambda: builders.document([2, 1]),
    "prefix_lm_document": lambda: builders.prefix_lm_document([2, 1], [1, 1]),
    "share_question": lambda: builders.share_question([[1, 1, 1]]),
    "causal_blockwise": lambda: builders.causal_blockwise([2, 1]),
    "qk_sparse": lambda: builders.qk_sparse(4, [(1, 2)]),
    "prefix_tree": lambda: builders.prefix_tree([-1, 0, 0], [1, 1, 1]),
    "from_cu_seqlens": lambda: builders.from_cu_seqlens([0, 2, 3]),
    "draft_tree": lambda: builders.draft_tree([-1, 0]),
    "from_dense": lambda: builders.from_dense(torch.ones(3, 3).bool()),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", LISTS)
def test_what_a_graph_cannot_trace_is_refused_with_the_remedy(name: str) -> None:
    def indices(x: Tensor) -> Tensor:
        LISTS[name]()
        return x

    with pytest.raises(Exception, match="(?s)make the mask outside of the compiled region"):
        torch.compile(indices, fullgraph=True, backend="eager")(ids(3))
