"""`flashmask_attention` by the names of PaddlePaddle, and its block_mask, against dense masks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from oracle import attend_rows
from torch import Tensor

from flash_mask_cute import builders, flash_attn_func, flashmask_attention

BATCH, HEADS, HEADS_KV, D = 2, 4, 2, 8


def operands(seqlen_q: int = 300, seqlen_k: int = 300) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    sizes = (seqlen_q, HEADS), (seqlen_k, HEADS_KV), (seqlen_k, HEADS_KV)
    return [torch.randn(BATCH, *size, D, generator=g, dtype=torch.double) for size in sizes]


def cached_bias_blocks(heads: int, seqlen_q: int, seqlen_k: int, batch: int = BATCH) -> Tensor:
    g = torch.Generator().manual_seed(heads)
    shape = batch, heads, -(-seqlen_q // 128), -(-seqlen_k // 128)
    return torch.randint(0, 2, shape, generator=g, dtype=torch.int32)


def visible_of(block_mask: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    by_token = block_mask.bool().repeat_interleave(128, 2).repeat_interleave(128, 3)
    by_token = by_token[:, :, :seqlen_q, :seqlen_k]
    return by_token.repeat_interleave(HEADS // by_token.shape[1], dim=1)


def test_names_of_tensors() -> None:
    q, k, v = operands()
    mask = builders.causal_document([100, 200])
    plain = flashmask_attention(q, k, v, mask)
    neutral = {
        "return_seed_offset": False, "fixed_seed_offset": None, "rng_name": "", "name": None,
        "block_mask": None, "dropout": 0.0,
    }  # fmt: skip
    assert torch.equal(
        flashmask_attention(query=q, key=k, value=v, startend_row_indices=mask), plain
    )
    assert torch.equal(flashmask_attention(q, k, value=v, startend_row_indices=mask), plain)
    found = flashmask_attention(q, k, v, mask, return_softmax_lse=True, **neutral)
    assert torch.equal(found[0], plain)
    compiled = torch.compile(flashmask_attention, backend="eager", fullgraph=True)
    compiled_out = compiled(query=q, key=k, value=v, startend_row_indices=mask, **neutral)
    torch.testing.assert_close(compiled_out, plain)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"q": 0, "k": 1}, "v or value, which is the same; got neither"),
        ({"q": 0, "query": 0, "k": 1, "v": 2}, "q or query, which is the same; got both"),
        ({"key": 1, "k": 1, "q": 0, "v": 2}, "k or key, which is the same; got both"),
        ({}, "q or query, which is the same; got neither"),
    ],
)
def test_names_that_are_missing_or_given_twice(given: dict[str, int], words: str) -> None:
    tensors = operands()
    with pytest.raises(TypeError, match=re.escape(words)):
        flashmask_attention(**{name: tensors[i] for name, i in given.items()})  # type: ignore


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("return_seed_offset", True, "dropout is not supported"),
        ("fixed_seed_offset", torch.zeros(2), "dropout is not supported"),
        ("rng_name", "global_seed", "dropout is not supported"),
        ("name", "attention", "leave it out"),
    ],
)
def test_values_of_dropout_are_refused(name: str, value: Any, words: str) -> None:
    q, k, v = operands()
    with pytest.raises(TypeError, match=rf"has no argument {name} .*{words}"):
        flashmask_attention(query=q, key=k, value=v, **{name: value})


@pytest.mark.parametrize("heads", [1, HEADS_KV, HEADS])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 300), (130, 300), (256, 100)])
def test_block_mask(heads: int, seqlen_q: int, seqlen_k: int) -> None:
    leaves = [x.requires_grad_() for x in operands(seqlen_q, seqlen_k)]
    for batch in (1, BATCH):
        block_mask = cached_bias_blocks(heads, seqlen_q, seqlen_k, batch)
        visible = visible_of(block_mask, seqlen_q, seqlen_k)
        out = flashmask_attention(*leaves, block_mask=block_mask)
        wanted = attend_rows(*leaves, visible).out
        torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
        found, exact = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, wanted))
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_block_mask_joins_the_others() -> None:
    q, k, v = operands()
    mask = builders.document([140, 160])
    block_mask = cached_bias_blocks(HEADS_KV, 300, 300)
    visible = visible_of(block_mask, 300, 300) & mask.dense(300)
    visible = visible & (torch.arange(300)[:, None] - torch.arange(300) <= 90)
    for given in (block_mask, block_mask.bool()):
        out, lse = flashmask_attention(
            q, k, v, mask, window_size=(90, -1), block_mask=given, return_softmax_lse=True
        )
        wanted = attend_rows(q, k, v, visible).out
        torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
        assert torch.equal(lse == -torch.inf, ~visible.expand(BATCH, -1, -1, -1).any(-1))
    part = flashmask_attention(q[:, 130:170], k, v, mask, block_mask=block_mask, q_start=130)
    visible = (visible_of(block_mask, 300, 300) & mask.dense(300))[:, :, 130:170]
    wanted = attend_rows(q[:, 130:170], k, v, visible).out
    torch.testing.assert_close(part, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("block_mask", "error", "words"),
    [
        ([[1]], TypeError, "block_mask must be an int32 tensor, got list"),
        (torch.ones(2, 1, 3, 3), TypeError, "block_mask must be int32, 0 or 1, got torch.float32"),
        (torch.ones(2, 1, 3, 2, dtype=torch.int32), ValueError, "block_mask must have shape"),
        (torch.ones(2, 3, 3, 3, dtype=torch.int32), ValueError, "1, 2 or 4 heads; 3; 3"),
        (torch.ones(3, 1, 3, 3, dtype=torch.int32), ValueError, "2 or 1; "),
        (torch.ones(3, 3, dtype=torch.int32), ValueError, "got \\(3, 3\\)"),
        (torch.full((1, 1, 3, 3), 2, dtype=torch.int32), ValueError, "values 0 and 1, got 2"),
    ],
)
def test_block_masks_that_are_none(block_mask: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        flashmask_attention(*operands(), block_mask=block_mask)


def test_other_calls_say_what_to_write() -> None:
    q, k, v = operands()
    with pytest.raises(TypeError, match="has no argument block_mask .*block_sparse_tensors"):
        flash_attn_func(q, k, v, block_mask=torch.ones(1, 1, 3, 3))
