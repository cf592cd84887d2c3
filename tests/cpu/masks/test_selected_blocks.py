"""A selection of key blocks for each query, on the CPU path, against its dense mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn_selections import Drawn, dense_attention, dense_selection, draw
from oracle import attend_rows
from torch import Tensor

from flash_mask_cute import (
    SelectedBlocks,
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flex_attention,
    plot,
)
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

DRAWS, PARTS = 200, 8


def attend(drawn: Drawn, **more: Any) -> Any:
    call = flash_attn_varlen_func if drawn.is_packed else flash_attn_func
    given = drawn.keywords | {"block_sparse_tensors": drawn.selected} | more
    return call(drawn.q, drawn.k, drawn.v, **given)


@pytest.mark.parametrize("part", range(PARTS))
def test_draws_against_the_dense_mask(part: int) -> None:
    for seed in range(part, DRAWS, PARTS):
        drawn = draw(seed, sizes=(4, 8, 16, 32))
        inputs = [x.requires_grad_() for x in drawn[:3]]
        if "learnable_sink" in drawn.keywords:
            inputs.append(drawn.keywords["learnable_sink"].requires_grad_())
        wanted, wanted_lse = dense_attention(drawn)
        out, lse = attend(drawn, return_lse=True)
        weights = torch.randn_like(wanted)
        assert (out - wanted).abs().amax() < 1e-7, seed
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
        got = torch.autograd.grad(out, inputs, weights)
        for x, y in zip(got, torch.autograd.grad(wanted, inputs, weights), strict=True):
            # by an LSE in float32
            assert (x - y).abs().amax() < 1e-5, seed


def small(heads: int = 2, k: int = 2, dtype: torch.dtype = torch.int64) -> tuple[Any, ...]:
    gen = torch.Generator().manual_seed(3)
    q = torch.randn(2, 40, 4, 8, generator=gen, dtype=torch.float64)
    key, v = torch.randn(2, 2, 70, 2, 8, generator=gen, dtype=torch.float64).unbind()
    selection = torch.randint(-1, 6, (2, heads, 40, k), generator=gen).to(dtype)
    return q, key, v, SelectedBlocks(selection, 16)


def by_mask(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """visible: bool (batch, heads_q, queries, keys)."""
    return attend_rows(q, k, v, visible).out


def seen_by(selected: SelectedBlocks, heads_q: int, seqlen_k: int) -> Tensor:
    seen = dense_selection(selected.indices, selected.block_size, seqlen_k)
    return seen.repeat_interleave(heads_q // selected.heads, 1)


@pytest.mark.parametrize("start", [0, 7, "end"])
def test_q_start_moves_causal_masking_and_not_the_rows(start: Any) -> None:
    q, k, v, selected = small()
    out = flash_attn_func(q, k, v, causal=True, q_start=start, block_sparse_tensors=selected)
    first = 30 if start == "end" else start
    causal = torch.arange(70) <= torch.arange(40)[:, None] + first
    torch.testing.assert_close(out, by_mask(q, k, v, seen_by(selected, 4, 70) & causal))


def test_with_intervals_a_mask_mod_and_a_score_mod() -> None:
    q, k, v, selected = small(heads=1)
    end = torch.arange(70).add(9).clamp(max=40).int().view(1, 1, 70, 1)
    hidden = torch.arange(40)[:, None] >= end.view(70)
    out = flash_attn_func(
        q, k, v, causal=True, q_start=0, startend_row_indices=end, block_sparse_tensors=selected,
        mask_mod=lambda b, h, i, j: (i + j) % 3 != h,
        score_mod=lambda s, b, h, i, j: s + 0.1 * (i - j),
    )  # fmt: skip
    i, j = torch.arange(40)[:, None], torch.arange(70)
    heads = torch.arange(4)[:, None, None]
    seen = seen_by(selected, 4, 70) & (j <= i) & ~hidden & ((i + j) % 3 != heads)
    distance = 0.1 * (i - j).double()
    wanted = attend_rows(q, k, v, seen, bias=distance).out
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("skip_blocks", [True, False])
@pytest.mark.parametrize("pack_gqa", [True, False])
def test_tiles_do_not_change_the_result(pack_gqa: bool, skip_blocks: bool) -> None:
    q, k, v, selected = small()
    more: dict[str, Any] = {"pack_gqa": pack_gqa, "config": {"skip_blocks": skip_blocks}}
    out = flash_attn_func(q, k, v, block_sparse_tensors=selected, **more)
    torch.testing.assert_close(out, by_mask(q, k, v, seen_by(selected, 4, 70)))


def test_nothing_is_chosen() -> None:
    q, k, v, selected = small()
    for selection in (selected.indices[..., :0], torch.full_like(selected.indices, -1)):
        out, lse = flash_attn_func(
            q, k, v, block_sparse_tensors=SelectedBlocks(selection, 16), return_lse=True
        )
        assert not out.any() and (lse == -torch.inf).all()


def test_keys_in_use_end_before_a_block_that_is_chosen() -> None:
    """Blocks behind the own sequence's end stand for nothing, also where k has such rows."""
    q, k, v, selected = small()
    used = torch.tensor([33, 0], dtype=torch.int32)
    k[0, 33:] = v[0, 33:] = torch.nan
    out, _ = _flash_attn_fwd(q, k, v, seqused_k=used, block_sparse_tensors_torch=selected)
    seen = seen_by(selected, 4, 70)[:1, :, :, :33]
    torch.testing.assert_close(out[:1], by_mask(q[:1], k[:1, :33], v[:1, :33], seen))
    assert not out[1].any()


@pytest.mark.parametrize("page_size", [16, 48])
def test_over_a_cache_in_pages(page_size: int) -> None:
    """Four queries behind 61 keys, of which 4 are written by the call."""
    gen = torch.Generator().manual_seed(1)
    pages = -(-80 // page_size)
    table = torch.randperm(2 * pages, generator=gen).int().view(2, pages)
    k, v, new_k, new_v = (
        torch.randn(2, n, 2, 8, generator=gen, dtype=torch.float64)
        for n in (pages * page_size, pages * page_size, 4, 4)
    )
    q = torch.randn(2, 4, 4, 8, generator=gen, dtype=torch.float64)
    lengths = torch.tensor([57, 30], dtype=torch.int32)
    selection = torch.randint(-1, 5, (2, 2, 4, 3), generator=gen)
    pools = [torch.empty(2 * pages, page_size, 2, 8, dtype=torch.float64) for _ in range(2)]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[table.long()] = x.unflatten(1, (pages, page_size))
    out = flash_attn_with_kvcache(
        q, *pools, k=new_k, v=new_v, cache_seqlens=lengths, page_table=table, causal=True,
        block_sparse_tensors=SelectedBlocks(selection, 16),
    )  # fmt: skip
    for b, n in enumerate(lengths.tolist()):
        keys, values = (
            torch.cat((x[b : b + 1, :n], new[b : b + 1]), 1) for x, new in ((k, new_k), (v, new_v))
        )
        causal = torch.arange(n + 4) <= torch.arange(4)[:, None] + n
        seen = seen_by(SelectedBlocks(selection[b : b + 1], 16), 4, n + 4) & causal
        torch.testing.assert_close(out[b : b + 1], by_mask(q[b : b + 1], keys, values, seen))


def test_host_calls() -> None:
    q, k, v, selected = small()
    given: dict[str, Any] = {"causal": True, "block_sparse_tensors_torch": selected}
    out, lse = _flash_attn_fwd(q, k, v, **given)
    dq, dk, dv = _flash_attn_bwd(q, k, v, out, torch.ones_like(out), lse, **given)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    causal = torch.arange(70) <= torch.arange(40)[:, None] + 30
    wanted = by_mask(*inputs, seen_by(selected, 4, 70) & causal)
    torch.testing.assert_close(out, wanted)
    for x, y in zip((dq, dk, dv), torch.autograd.grad(wanted.sum(), inputs), strict=True):
        # by an LSE in float32
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_a_compiled_call(device: str = "cpu") -> None:
    q, k, v, selected = small()
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def call(q: Tensor, k: Tensor, v: Tensor, selection: Tensor) -> Tensor:
        chosen = SelectedBlocks(selection, 16)
        return flash_attn_func(q, k, v, causal=True, block_sparse_tensors=chosen)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for selection in (selected.indices, selected.indices.flip(2)):
        out, wanted = compiled(q, k, v, selection), call(q, k, v, selection)
        torch.testing.assert_close(out, wanted)
        got = torch.autograd.grad(out.sum(), inputs)
        for x, y in zip(got, torch.autograd.grad(wanted.sum(), inputs), strict=True):
            torch.testing.assert_close(x, y)


def test_a_choice_that_changes_before_the_backward_is_refused() -> None:
    q, k, v, selected = small()
    out = flash_attn_func(q.requires_grad_(), k, v, block_sparse_tensors=selected)
    selected.indices[0] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda x: x._replace(block_size=24), ValueError, "power of two from 4 to 4096, got 24"),
        (lambda x: x._replace(block_size=2), ValueError, "power of two from 4 to 4096, got 2"),
        (lambda x: x._replace(block_size=16.0), TypeError, "block_size .* must be an int, got 16"),
        (lambda x: x._replace(indices=x.indices.double()), TypeError, "int32 or int64, got .*64"),
        (lambda x: x._replace(indices=[1]), TypeError, "indices of block_sparse_tensors must be"),
        (lambda x: x._replace(indices=x.indices[:, :, 1:]), ValueError, r"\(2, 2, 39, 2\)"),
        (lambda x: x._replace(indices=x.indices[0]), ValueError, "without cu_seqlens_q, got"),
        (lambda x: x._replace(indices=x.indices.repeat(1, 4, 1, 1)), ValueError, "1 or 2 or 4"),
        (lambda x: x._replace(indices=x.indices.repeat(2, 1, 1, 1)), ValueError, "2 or 1"),
        (lambda x: x._replace(indices=x.indices.to("meta")), ValueError, r"device of q \(cpu\)"),
    ],
)  # fmt: skip
def test_refused(change: Any, error: type[Exception], text: str) -> None:
    q, k, v, selected = small()
    with pytest.raises(error, match=text):
        flash_attn_func(q, k, v, block_sparse_tensors=change(selected))


def test_packed_queries_want_packed_rows() -> None:
    q, k, v, selected = small()
    starts = torch.tensor([0, 40, 80], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"total_q, beside cu_seqlens_q, got \(2, 2, 40, 2\)"):
        flash_attn_varlen_func(
            q.flatten(0, 1), k, v, cu_seqlens_q=starts, block_sparse_tensors=selected
        )


def test_flex_attention_names_the_function_to_call() -> None:
    q, k, v, selected = small()
    with pytest.raises(TypeError, match="block_sparse_tensors of flash_attn_func"):
        flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=selected)  # type: ignore


def test_fixed_splits_are_refused_beside_a_selection() -> None:
    q, k, v, selected = small()
    with pytest.raises(NotImplementedError, match="seqlen_k_per_split=512 .* SelectedBlocks"):
        flash_attn_func(q, k, v, seqlen_k_per_split=512, block_sparse_tensors=selected)


def test_the_largest_score_and_a_mixed_batch() -> None:
    q, k, v, selected = small()
    causal_per_seq = torch.tensor([1, 0], dtype=torch.int32)
    out, largest = flash_attn_varlen_func(
        q, k, v, causal=causal_per_seq, block_sparse_tensors=selected, return_max_logit=True
    )
    seen = seen_by(selected, 4, 70)
    seen[0] &= torch.arange(70) <= torch.arange(40)[:, None] + 30
    torch.testing.assert_close(out, by_mask(q, k, v, seen))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * 8**-0.5
    wanted = scores.masked_fill(~seen, -torch.inf).amax((0, 2, 3))
    torch.testing.assert_close(largest.double(), wanted, rtol=1e-5, atol=1e-5)


def test_pack_gqa_is_refused_for_a_choice_by_query_head() -> None:
    q, k, v, selected = small(heads=4)
    with pytest.raises(NotImplementedError, match="differ by query head, of 4 heads"):
        flash_attn_func(q, k, v, pack_gqa=True, block_sparse_tensors=selected)


# -- what is said of it ---------------------------------------------------------------------------


def causal_selection(n: int, block: int, k: int) -> Tensor:
    """Of each query the last k blocks up to its own: int32 (n, k)."""
    own = torch.arange(n) // block
    return (own[:, None] - torch.arange(k)).int()


def test_explain_counts_blocks_of_tiles() -> None:
    q = torch.zeros(1, 512, 16, 128, dtype=torch.bfloat16)
    k = torch.zeros(1, 512, 1, 128, dtype=torch.bfloat16)
    selection = causal_selection(512, 64, 2)
    selection[4, 0] = 5  # of a tile of 8 queries, one has a third block
    chosen = SelectedBlocks(selection[None, None], 64)
    told = explain(q, k, k, block_sparse_tensors=chosen, target="sm_90a")
    assert told.packed_heads == 16 and (told.tiles.tile_m, told.tiles.tile_n) == (128, 64)
    # 64 tiles of 8 queries: the first 8 have the own block, the others two; and the third one
    assert (told.work_tiles, told.full_key_tiles, told.partial_key_tiles) == (64, 119, 2)
    assert told.empty_key_tiles == 64 * 8 - 121
    assert "tiles of 8 queries x 16 heads" in told.selection
    assert f"{4 * 512} bytes of bits" in told.selection
    assert "1.9 blocks a query, 1.9 a tile (1.01 times as many), 98% of these" in told.selection
    assert "advice" not in told.selection and "2 selected blocks of 64 keys" in told.masks
    assert "selection" in str(told)


def test_the_kernel_reads_the_entries_of_one_query() -> None:
    """Of all sizes; not where a mask_mod decides as well, or comparisons are many."""
    q, k = torch.randn(1, 1, 4, 64).bfloat16(), torch.randn(1, 512, 2, 64).bfloat16()
    selection = torch.tensor([0, 3]).expand(1, 2, 1, 2)

    def told(block: int = 128, **more: Any) -> str:
        chosen = SelectedBlocks(selection, block)
        return explain(q, k, k, block_sparse_tensors=chosen, target="sm_90a", **more).selection

    assert "reads the entries of the only query" in told()
    assert "reads the entries" in told(256, causal=True)
    assert "reads the entries of the only query; keys are gathered, 16 in a copy" in told(16)
    assert "bytes of bits" in told(mask_mod=lambda b, h, i, j: j % 3 != 0)


def test_decoding_in_whole_tiles_where_all_choose_as_much() -> None:
    """Sequences of any length do then, unless they are hardly longer than what is chosen."""
    q = torch.empty(64, 1, 64, 64, dtype=torch.bfloat16)
    used = torch.arange(64, dtype=torch.int32) * 128 + 64

    def told(k: int) -> str:
        keys = torch.empty(1, 8192, 4, 64, dtype=torch.bfloat16).expand(64, -1, -1, -1)
        chosen = SelectedBlocks(torch.zeros(1, 4, 1, k, dtype=torch.int64), 128)
        given: Any = {"block_sparse_tensors": chosen, "seqused_k": used, "target": "sm_90a"}
        return explain(q, keys, keys, **given).splits

    assert not told(16) and "equal stream-K chunks" in told(48)


def test_explain_advises_where_neighbours_share_little() -> None:
    q = torch.zeros(1, 512, 4, 64, dtype=torch.bfloat16)
    selection = (torch.arange(512) % 8).view(1, 1, 512, 1)
    told = explain(q, q, q, block_sparse_tensors=SelectedBlocks(selection, 64), target="sm_90a")
    assert "1.0 blocks a query, 8.0 a tile (8.00 times as many)" in told.selection
    assert "advice: neighbouring queries share little" in told.selection


def test_bits_of_more_than_two_gigabytes_are_refused_by_their_number() -> None:
    q = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16).expand(1, 1 << 20, 4, 64)
    selection = torch.zeros(1, 1, 1, 1, dtype=torch.int32).expand(1, 4, 1 << 20, 16)
    with pytest.raises(NotImplementedError, match="8589934592 bytes as bits .* block_size 64"):
        explain(q, q, q, block_sparse_tensors=SelectedBlocks(selection, 64), target="sm_90a")


def test_a_picture_has_the_pairs_of_the_choice() -> None:
    pytest.importorskip("matplotlib")
    chosen = SelectedBlocks(causal_selection(128, 16, 2)[None, None], 16)
    axes = plot(chosen, seqlen_k=128, tile_m=16, tile_n=16)
    assert "64 tiles of 16 x 16: 49 empty, 0 partial, 15 full" in axes.get_title()
    with pytest.raises(ValueError, match="seqlen_k=None of a SelectedBlocks"):
        plot(chosen)
    with pytest.raises(ValueError, match="seqlen_q=3 of a SelectedBlocks with 128 queries"):
        plot(chosen, seqlen_q=3, seqlen_k=128)
