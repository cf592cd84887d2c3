"""Builders on a Hopper GPU: no mask is waited for, and each is that of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from public_call import no_waiting

from flash_mask_cute import ColumnMask, builders, flash_attn_func

SEQLEN = 1500
LENGTHS = [600, 0, 700, 200]
PARTS = [[300, 200, 100], [500, 200], [150, 50]]
STARTS = torch.tensor([0, 600, 600, 1300, 1500], dtype=torch.int32, device="cpu")
IDS = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])

BUILDS: dict[str, Callable[[Any], ColumnMask]] = {
    "full": lambda to: builders.full(SEQLEN, **to),
    "causal": lambda to: builders.causal(SEQLEN, **to),
    "sliding_window": lambda to: builders.sliding_window(SEQLEN, 300, **to),
    "sink_window": lambda to: builders.sink_window(SEQLEN, 4, 300, **to),
    "global_sliding_window": lambda to: builders.global_sliding_window(SEQLEN, 4, 300, **to),
    "causal_document": lambda to: builders.causal_document(LENGTHS, **to),
    "document": lambda to: builders.document(LENGTHS, **to),
    "share_question": lambda to: builders.share_question(PARTS, **to),
    "causal_blockwise": lambda to: builders.causal_blockwise(LENGTHS, **to),
    "prefix_lm_causal": lambda to: builders.prefix_lm_causal(SEQLEN, 400, **to),
    "prefix_lm_document": lambda to: builders.prefix_lm_document(LENGTHS, [9, 0, 300, 200], **to),
    "qk_sparse": lambda to: builders.qk_sparse(SEQLEN, [(100, 300), (900, 64)], **to),
    "prefix_tree": lambda to: builders.prefix_tree([-1, 0, 0, -1], LENGTHS, **to),
    "block_diffusion": lambda to: builders.block_diffusion(SEQLEN // 2, 100, **to),
}
# what is made of tensors lies where they lie
FROM_TENSORS: dict[str, tuple[Callable[[Any], ColumnMask], torch.Tensor]] = {
    "from_cu_seqlens": (lambda x: builders.from_cu_seqlens(x, SEQLEN), STARTS),
    "from_document_ids": (builders.from_document_ids, IDS),
    "from_position_ids": (builders.from_position_ids, POSITIONS),
    "from_tin_tout": (builders.from_tin_tout, torch.full((SEQLEN,), SEQLEN)),
    "image_blocks": (builders.image_blocks, IDS % 2 - 1),
    "image_blocks, window": (lambda x: builders.image_blocks(x, 300), IDS % 2 - 1),
    "key_padding": (builders.key_padding, torch.arange(SEQLEN)[None] % 7 > 2),
    "key_padding, causal": (
        lambda x: builders.key_padding(x, causal=True),
        (torch.arange(SEQLEN) >= 300)[None, None, None].long(),
    ),
}


def check(build: Callable[[], ColumnMask], expected: ColumnMask) -> None:
    """Build, and attend once, without a synchronisation; after a first time, which compiles."""
    qkv = [torch.randn(1, SEQLEN, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def step() -> ColumnMask:
        mask = build()
        flash_attn_func(*qkv, startend_row_indices=mask)
        return mask

    step()
    with no_waiting():
        mask = step()
    assert mask.causal == expected.causal
    assert torch.equal(mask.startend_row_indices.cpu(), expected.startend_row_indices)


@pytest.mark.parametrize("name", BUILDS)
def test_no_builder_waits_for_the_device(name: str) -> None:
    build = BUILDS[name]
    check(lambda: build({"device": "cuda"}), build({"device": "cpu"}))


@pytest.mark.parametrize("name", FROM_TENSORS)
def test_nor_does_one_that_reads_tensors(name: str) -> None:
    build, tensor = FROM_TENSORS[name]
    there = tensor.cuda()
    check(lambda: build(there), build(tensor))


def test_evictions_are_drawn_on_the_device() -> None:
    with no_waiting():
        mask = builders.random_eviction(SEQLEN, 300, device="cuda")
    seen = mask.dense(SEQLEN).sum(dim=-1)
    assert torch.equal(
        seen, torch.arange(1, SEQLEN + 1, device="cuda").clamp(max=300).expand_as(seen)
    )
