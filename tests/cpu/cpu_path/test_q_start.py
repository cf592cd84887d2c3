"""Queries that begin at a position, on the CPU path, against positions that the test compares."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from placed_attention import Draw, assert_calls_and_gradients

from flash_mask_cute import builders, explain, flash_attn_func, flash_attn_varlen_func
from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch
from flash_mask_cute.call import explain as explain_module

pytestmark = pytest.mark.usefixtures("explained_without_compiling")


@pytest.mark.parametrize("earliest", [0, -200])
@pytest.mark.parametrize("seed", range(3))
def test_random_calls(seed: int, earliest: int) -> None:
    assert_calls_and_gradients(Draw(seed, torch.float64, 8, 260, earliest), 14)


def test_the_tiles_that_explain_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles without a visible score may count as visited, tiles with one are."""
    monkeypatch.setattr(explain_module, "_compiled_facts", lambda *_: ({}, {}))
    calls = (Draw(7, torch.bfloat16, 64, 300, earliest).calls(30) for earliest in (0, -200))
    for call in chain(*calls):
        found = explain(call.q, call.k, call.v, **call.keywords)
        assert found.full_key_tiles is not None and found.partial_key_tiles is not None, found.note
        tiles, pack = found.tiles, found.packed_heads
        seen = full = 0
        for b, x in enumerate(call.sequences):
            for h in range(0, call.q.shape[-2], pack):
                heads = torch.stack([call.visible(b, h + i) for i in range(pack)], dim=1)
                rows = heads.flatten(0, 1)
                for by_rows in rows.split(tiles.cluster_tile_m):
                    for tile in by_rows.split(tiles.tile_n, dim=1) if x.seqlen_k else ():
                        seen += bool(tile.any())
                        full += bool(tile.all()) and tile.shape[1] == tiles.tile_n
        assert found.full_key_tiles + found.partial_key_tiles >= seen, call.name
        assert found.full_key_tiles <= full, call.name


def test_partial_blocks_are_read_as_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel masks listed partial blocks with or without a mask_mod; explain says so."""
    monkeypatch.setattr(explain_module, "_compiled_facts", lambda *_: ({}, {}))
    q = torch.empty(1, 256, 1, 128, dtype=torch.bfloat16)
    full = torch.full((1, 1, 2), 1, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    mask = torch.full((1, 1, 2), 1, dtype=torch.int32), torch.ones(1, 1, 2, 2, dtype=torch.int32)
    lists = BlockSparseTensorsTorch(*mask, *full, (128, 128))
    counts = []
    for start in (None, 128):
        more = {"q_start": start, "block_sparse_tensors_torch": lists}
        found = explain(q, q, q, target="sm_90a", **more)
        counts.append((found.full_key_tiles, found.partial_key_tiles, found.empty_key_tiles))
    assert counts == [(4, 0, 0), (2, 2, 0)]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_decode_step_is_the_last_row() -> None:
    """Of a training mask, by a number, a tensor, "end", and by torch.compile."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 64, 2, 16, generator=generator).double() for _ in "qkv")
    mask = builders.causal_document([30, 34])
    expected = flash_attn_func(q, k, v, startend_row_indices=mask)[:, 60:]
    chunk = q[:, 60:].clone().requires_grad_()
    compiled = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
    starts: list[Any] = [60, "end", torch.tensor([60], dtype=torch.int32)]
    for start in starts:
        for call in (flash_attn_func, flash_attn_varlen_func, compiled):
            out = call(chunk, k, v, startend_row_indices=mask, q_start=start)
            assert torch.allclose(out, expected), start
            (found,) = torch.autograd.grad(out.sum(), chunk)
            assert found.isfinite().all() and found.any()


@pytest.mark.usefixtures("fresh_dynamo")
def test_queries_before_the_first_key_see_nothing() -> None:
    """Under causal masking, by a number, a tensor, and by torch.compile; -1 is no "end"."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 9, 2, 16, generator=generator).double() for _ in "qkv")
    compiled = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
    for first in (-1, -4, -9):
        starts: list[Any] = [first, torch.tensor([first], dtype=torch.int32)]
        expected = flash_attn_func(q[:, -first:], k, v, causal=True, q_start=0)
        for start in starts:
            for call in (flash_attn_func, compiled):
                chunk = q.clone().requires_grad_()
                out = call(chunk, k, v, causal=True, q_start=start)
                assert not out[:, :-first].any()
                assert torch.allclose(out[:, -first:], expected)
                (found,) = torch.autograd.grad(out.sum(), chunk)
                assert not found[:, :-first].any()
                assert first == -9 or found[:, 1 - first :].any()


def test_a_tensor_that_changes_before_the_backward_is_noticed() -> None:
    q, k, v = (torch.randn(2, 9, 1, 8, dtype=torch.float64) for _ in "qkv")
    starts = torch.zeros(2, dtype=torch.int32)
    out = flash_attn_func(q.requires_grad_(), k, v, causal=True, q_start=starts)
    starts += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_mask_must_reach_as_far_as_the_call() -> None:
    q, k, v = (torch.randn(1, n, 2, 16, dtype=torch.float64) for n in (8, 64, 64))
    mask = builders.causal_document([30, 34])
    flash_attn_func(q, k, v, startend_row_indices=mask, q_start=56)
    with pytest.raises(ValueError, match=r"64 queries x 64 keys, .*call .* from position 57 on\)"):
        flash_attn_func(q, k, v, startend_row_indices=mask, q_start=57)
