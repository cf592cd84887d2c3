"""Every builder against its definition, written out query by query and key by key."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_builders import DRAW, brute_force
from oracle import attend_rows
from torch import Tensor

from flash_mask_cute import flash_attn_func
from flash_mask_cute.masks import builders
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.rules.intervals import Intervals


@pytest.mark.parametrize("name", DRAW)
def test_against_its_definition(name: str) -> None:
    rng = random.Random(name)
    for _ in range(40):
        drawn = DRAW[name](rng, rng.choice((1, 2, 3, 7, 13, 20)))
        seqlen = drawn.mask.startend_row_indices.shape[2]
        assert drawn.mask.startend_row_indices.shape == (1, 1, seqlen, drawn.form[1])
        assert drawn.mask.causal == drawn.form[0]
        expected = brute_force(drawn.rule, seqlen, seqlen)
        assert torch.equal(drawn.mask.dense(seqlen)[0, 0], expected)


@pytest.mark.parametrize(("tile_m", "tile_n"), [(8, 8), (16, 8), (8, 5), (4, 8)])
@pytest.mark.parametrize("name", DRAW)
def test_bounds_tell_hidden_and_full_tiles(name: str, tile_m: int, tile_n: int) -> None:
    """The form is one in which the smallest and largest values of a key block lose nothing.

    Except, in a tile that the diagonal crosses and is not square, what is hidden by neither the
    diagonal nor a range alone.
    """
    rng = random.Random(f"{name}{tile_n}")
    for _ in range(12):
        mask = DRAW[name](rng, rng.choice((40, 53, 64))).mask
        seqlen = mask.startend_row_indices.shape[2]
        visible = mask.dense(seqlen)[0, 0]
        bounds = mask.bounds(tile_n)[0, 0]
        intervals = Intervals(mask.num_vectors, mask.causal)
        for n_block in range(bounds.shape[1]):
            first_key, end_key = n_block * tile_n, min((n_block + 1) * tile_n, seqlen)
            for first_row in range(0, seqlen, tile_m):
                end_row = min(first_row + tile_m, seqlen)
                hidden, cut = intervals.classify(
                    bounds[:, n_block].tolist(), first_row, end_row, seqlen
                )
                on_diagonal = first_row < end_key and first_key < end_row
                if mask.causal:
                    hidden |= first_key >= end_row
                    cut |= end_key - 1 > first_row
                tile = visible[first_row:end_row, first_key:end_key]
                assert not (hidden and tile.any())
                assert hidden or tile.any() or (on_diagonal and tile_m != tile_n)
                assert hidden or cut == (not tile.all())


def test_random_eviction_keeps_a_full_cache() -> None:
    seqlen, cache_size = 60, 17
    generator = torch.Generator().manual_seed(5)
    mask = builders.random_eviction(seqlen, cache_size, batch=3, heads=2, generator=generator)
    assert (mask.causal, mask.num_vectors) == (True, 1)
    visible = mask.dense(seqlen)
    assert visible.shape == (3, 2, seqlen, seqlen)
    row = torch.arange(seqlen)
    assert torch.equal(visible.sum(-1), (row + 1).clamp(max=cache_size).expand(3, 2, seqlen))
    assert visible.diagonal(dim1=-2, dim2=-1).all()
    later = torch.ones(seqlen, seqlen, dtype=torch.bool).tril(-1)
    comes_back = visible[..., 1:, :] & ~visible[..., :-1, :] & later[1:]
    assert not comes_back.any()
    again = builders.random_eviction(
        seqlen, cache_size, batch=3, heads=2, generator=torch.Generator().manual_seed(5)
    )
    assert torch.equal(again.startend_row_indices, mask.startend_row_indices)
    assert not torch.equal(visible[0, 0], visible[0, 1])


@pytest.mark.parametrize("cache_size", [1, 9, 10, 11])
def test_random_eviction_of_any_size(cache_size: int) -> None:
    visible = builders.random_eviction(10, cache_size).dense(10)[0, 0]
    assert visible.sum(-1).tolist() == [min(q + 1, cache_size) for q in range(10)]


def test_random_eviction_is_uniform() -> None:
    """The first eviction hits each of the keys in the cache equally often."""
    drawn = builders.random_eviction(
        9, 8, batch=4000, generator=torch.Generator().manual_seed(1)
    ).startend_row_indices
    victims = (drawn[:, 0, :, 0] == 8).float().mean(0)
    assert victims[8] == 0
    assert torch.allclose(victims[:8], torch.full((8,), 1 / 8), atol=0.02)


BATCHED: dict[str, tuple[Callable[..., ColumnMask], list[Any]]] = {
    "causal_document": (builders.causal_document, [[3, 4, 1], [8], [2, 0, 5]]),
    "document": (builders.document, [[3, 4, 1], [8], [2, 5]]),
    "causal_blockwise": (builders.causal_blockwise, [[3, 4, 1], [2, 6], [8]]),
    "share_question": (builders.share_question, [[[2, 3, 1], [2]], [[1, 1, 1, 5]], [[4, 2]]]),
}


@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_is_its_entries(name: str) -> None:
    build, lengths = BATCHED[name]
    batch = build(lengths, 8)
    assert batch.startend_row_indices.shape[:3] == (len(lengths), 1, 8)
    for i, alone in enumerate(lengths):
        assert torch.equal(batch.dense(8)[i], build(alone, 8).dense(8)[0])


def test_a_batch_of_prefixes_is_its_entries() -> None:
    lengths, prefixes = [[3, 4, 1], [8], [2, 5]], [[1, 9, 0], [3], [2, 1]]
    batch = builders.prefix_lm_document(lengths, prefixes, 8).dense(8)
    for i in range(3):
        alone = builders.prefix_lm_document(lengths[i], prefixes[i], 8).dense(8)
        assert torch.equal(batch[i], alone[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tensors_mean_what_lists_mean(dtype: torch.dtype) -> None:
    def tensor(value: Any) -> Tensor:
        return torch.tensor(value, dtype=dtype)

    one, two = [3, 0, 4, 1], [[3, 0, 4, 1], [1, 2, 2, 2]]
    for build in (builders.causal_document, builders.document, builders.causal_blockwise):
        for lengths in (one, two):
            from_list, from_tensor = build(lengths, 9), build(tensor(lengths), 9)
            assert torch.equal(from_list.dense(9), from_tensor.dense(9))
    prefixes = [[1, 2, 0, 1], [0, 0, 5, 1]]
    assert torch.equal(
        builders.prefix_lm_document(two, prefixes, 9).dense(9),
        builders.prefix_lm_document(tensor(two), tensor(prefixes), 9).dense(9),
    )
    parts = [[2, 1, 1], [3, 1, 0]]
    for lengths in (parts, [parts, [[8, 0, 0], [0, 0, 0]]]):
        assert torch.equal(
            builders.share_question(lengths, 8).dense(8),
            builders.share_question(tensor(lengths), 8).dense(8),
        )
    cu_seqlens = [[0, 2, 2, 5], [0, 1, 7, 8]]
    for is_causal in (False, True):
        assert torch.equal(
            builders.from_cu_seqlens(cu_seqlens, 8, causal=is_causal).dense(8),
            builders.from_cu_seqlens(tensor(cu_seqlens), 8, causal=is_causal).dense(8),
        )


def test_lengths_in_a_tensor_are_cut_at_seqlen() -> None:
    mask = builders.document(torch.tensor([3, 9, 2]), 8)
    assert torch.equal(mask.dense(8), builders.document([3, 5], 8).dense(8))


def test_ids_of_a_batch() -> None:
    ids = torch.tensor([[4, 4, 4, 2, 2], [0, 1, 1, 1, 0]])
    expected = builders.causal_document([[3, 2], [1, 3, 1]])
    assert torch.equal(builders.from_document_ids(ids).dense(5), expected.dense(5))
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 5, 6, 7, 0]])
    assert torch.equal(builders.from_position_ids(positions).dense(5), expected.dense(5))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int64])
def test_positions_may_fill_their_dtype(dtype: torch.dtype) -> None:
    positions = torch.cat([torch.arange(256), torch.arange(5)])
    mask = builders.from_position_ids(positions.to(dtype))
    expected = builders.causal_document([256, 5])
    assert torch.equal(mask.startend_row_indices, expected.startend_row_indices)


def test_a_prefix_of_all_that_an_int32_tells() -> None:
    mask = builders.prefix_lm_document([3, 3], [2**31 - 1] * 2)
    assert torch.equal(mask.dense(6), builders.document([3, 3]).dense(6))


PADDING = torch.tensor(
    [[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 0, 0, 1], [1] * 7, [0] * 7]
)


@pytest.mark.parametrize("seqlen_q", [1, 3, 7, 12, 400])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padded_keys_are_hidden_from_any_number_of_queries(is_causal: bool, seqlen_q: int) -> None:
    mask = builders.key_padding(PADDING, causal=is_causal)
    assert (mask.seqlen_q, mask.causal, mask.documents) == ("any", is_causal, False)
    assert mask.startend_row_indices.shape == (5, 1, 7, 1 if is_causal else 2)
    expected = PADDING.bool()[:, None, None].expand(5, 1, seqlen_q, 7)
    if is_causal:
        own = torch.arange(seqlen_q)[:, None] + 7 - seqlen_q
        expected = expected & (torch.arange(7) <= own)
    assert torch.equal(mask.dense(seqlen_q), expected)


@pytest.mark.parametrize("seqlen_q", [1, 3, 7, 40])
@pytest.mark.parametrize("is_causal", ["mask", "call", None])
def test_attention_under_padding(is_causal: str | None, seqlen_q: int) -> None:
    """Of a decode step, a chunk, a sequence, and queries of something longer; against float64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(5, n, 2, 16, generator=generator, dtype=torch.float64).requires_grad_()
        for n in (seqlen_q, 7, 7)
    )
    mask = builders.key_padding(PADDING, causal=is_causal == "mask")
    out = flash_attn_func(q, k, v, causal=is_causal == "call", startend_row_indices=mask)
    visible = PADDING.bool()[:, None, None].expand(5, 1, seqlen_q, 7)
    if is_causal:
        visible = visible & torch.ones(seqlen_q, 7, dtype=torch.bool).tril(7 - seqlen_q)
    expected = attend_rows(q, k, v, visible).out
    assert torch.allclose(out, expected)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    gradients = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, expected))
    for found, right in zip(*gradients, strict=True):
        assert torch.allclose(found, right, atol=1e-6)


def test_every_mask_tells_its_queries() -> None:
    rng = random.Random(0)
    for name, draw in DRAW.items():
        mask = draw(rng, 13).mask
        rows = mask.startend_row_indices.shape[2]
        assert mask.seqlen_q == ("any" if name == "key_padding" else rows), name
    assert builders.random_eviction(9, 3).seqlen_q == 9
    assert builders.from_dense(torch.ones(2, 5, 9, dtype=torch.bool)).seqlen_q == 5


@torch.inference_mode()
def test_changes_of_a_mask_made_in_inference_mode_are_counted() -> None:
    """So that what is computed of it is kept, and computed again after a change."""
    rng = random.Random(0)
    masks = {name: draw(rng, 13).mask for name, draw in DRAW.items()}
    masks["random_eviction"] = builders.random_eviction(9, 3)
    masks["from_dense"] = builders.from_dense(torch.ones(2, 5, 9, dtype=torch.bool))
    for name, mask in masks.items():
        kept = mask.bounds(4)
        version = kept._version
        assert mask.bounds(4) is kept and kept._version == version, name
        mask.startend_row_indices.fill_(77)
        assert (mask.bounds(4) == 77).all(), name


def test_seqlen_is_what_lists_add_up_to() -> None:
    assert builders.document([[3, 4], [2]]).startend_row_indices.shape == (2, 1, 7, 2)
    assert builders.from_cu_seqlens([0, 3, 5]).startend_row_indices.shape == (1, 1, 5, 1)


# -- from_dense ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAW)
def test_from_dense_finds_the_mask_again(name: str) -> None:
    rng = random.Random(f"dense {name}")
    for _ in range(20):
        drawn = DRAW[name](rng, rng.choice((1, 2, 7, 13, 20)))
        seqlen = drawn.mask.startend_row_indices.shape[2]
        dense = drawn.mask.dense(seqlen)
        found = builders.from_dense(dense)
        assert torch.equal(found.dense(seqlen), dense)
        assert found.num_vectors <= max(drawn.mask.num_vectors, 1)


def draw_runs(rng: random.Random, seqlen_q: int, seqlen_k: int, most: int) -> Tensor:
    """A mask whose columns hide up to `most` ranges of queries."""
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    for column in range(seqlen_k):
        edges = sorted(rng.sample(range(seqlen_q + 1), min(2 * rng.randint(0, most), seqlen_q)))
        for start, end in zip(edges[::2], edges[1::2], strict=False):
            mask[start:end, column] = False
    return mask


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_from_dense_is_exact_or_names_the_column(most: int, is_causal: bool) -> None:
    rng = random.Random(most)
    refused = 0
    for _ in range(60):
        seqlen_q, seqlen_k = rng.choice((1, 4, 9, 12)), rng.choice((1, 5, 9))
        mask = draw_runs(rng, seqlen_q, seqlen_k, most)
        counts = torch.ones_like(mask)
        lower = counts.tril(seqlen_k - seqlen_q)
        if is_causal:
            mask &= lower
        if not (mask & ~lower).any():
            counts = lower
        too_many = [
            column
            for column in range(seqlen_k)
            if num_runs((~mask & counts)[:, column].tolist()) > 2
        ]
        if too_many:
            refused += 1
            with pytest.raises(ValueError, match=rf"column {too_many[0]} of .*batch 0, head 0"):
                builders.from_dense(mask, seqlen_q=seqlen_q)
        else:
            found = builders.from_dense(mask, seqlen_q=seqlen_q)
            assert torch.equal(found.dense(seqlen_q)[0, 0], mask)
    assert (refused > 0) == (most > 2)


def num_runs(flags: list[bool]) -> int:
    return sum(flag and not before for before, flag in zip([False, *flags], flags, strict=False))


@pytest.mark.parametrize(
    ("rows", "form"),
    [
        (["x..", "xx.", "xxx"], (True, 1)),
        (["...", "...", "..."], (True, 1)),
        (["x..", ".x.", "xxx"], (True, 2)),
        (["x....", ".x...", "x.x..", ".xxx.", "xxxxx"], (True, 4)),
        (["xx.", "xx.", ".xx"], (False, 2)),
        (["xxx", ".x.", "xxx"], (False, 4)),
        (["xx"], (True, 1)),
        (["x.", "xx"], (True, 1)),
        (["xx", "xx"], (False, 2)),
    ],
)
def test_from_dense_takes_the_first_form_that_holds(
    rows: list[str], form: tuple[bool, int]
) -> None:
    mask = torch.tensor([[c == "x" for c in row] for row in rows])
    found = builders.from_dense(mask, seqlen_q=len(rows))
    assert (found.causal, found.num_vectors) == form
    assert torch.equal(found.dense(len(rows))[0, 0], mask)


def test_from_dense_of_heads_and_batches() -> None:
    masks = torch.ones(2, 9, 4, dtype=torch.bool)
    masks[0] = masks[0].tril(-5)
    assert builders.from_dense(masks).startend_row_indices.shape == (2, 1, 4, 2)
    found = builders.from_dense(masks[None])
    assert found.startend_row_indices.shape == (1, 2, 4, 2)
    assert torch.equal(found.dense(9)[0], masks)
    masks[1, ::3, 2] = False
    with pytest.raises(
        ValueError, match=r"column 2 of the mask \(batch 0, head 1\) hides 3 ranges"
    ):
        builders.from_dense(masks[None])
    with pytest.raises(
        ValueError, match=r"column 2 of the mask \(batch 1, head 0\) hides 3 ranges"
    ):
        builders.from_dense(masks)


PADDING_OF_5 = torch.tensor([[True, True, True, False, False], [True, True, False, False, False]])


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        (PADDING_OF_5, 2),
        (PADDING_OF_5[:1], 1),
        (PADDING_OF_5[:, None], 1),
        (PADDING_OF_5[:, None, None], 1),
        (torch.ones(9, 5, dtype=torch.bool), 9),
    ],
)
def test_from_dense_refuses_what_may_be_padding(mask: Tensor, rows: int) -> None:
    text = rf"{re.escape(str(tuple(mask.shape)))}, which might be a padding mask of 5 keys: key_pa"
    with pytest.raises(ValueError, match=text + rf".*say seqlen_q={rows}"):
        builders.from_dense(mask)
    with pytest.raises(ValueError, match=rf"seqlen_q=4 of a mask with {rows} rows"):
        builders.from_dense(mask, seqlen_q=4)
    # rows that are said to be queries
    found = builders.from_dense(mask, seqlen_q=rows)
    assert found.seqlen_q == rows
    assert torch.equal(found.dense(rows).flatten(), mask.flatten())


def test_from_dense_takes_a_square_as_it_is() -> None:
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    for same in (mask, mask[None], mask[None, None]):
        assert torch.equal(builders.from_dense(same).dense(5)[0, 0], mask)


# -- documentation ------------------------------------------------------------------------------


def sketches() -> dict[str, list[str]]:
    """The masks drawn in the gallery by the call above each: rows such as "xx.."."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "mask_gallery.md").read_text()
    found = {}
    for block in re.findall(r"```\n(.*?)```", page, flags=re.DOTALL):
        first, *rows = block.splitlines()
        for call in re.finditer(r"\w+\(.*?\)(?=   |$)", first):
            found[call.group()] = [row[call.start() :][:17].replace(" ", "") for row in rows]
    return found


def test_the_gallery_shows_what_is_built() -> None:
    drawn = sketches()
    assert len(drawn) == 19
    for call, rows in drawn.items():
        mask = eval(call, vars(builders))
        visible = mask.dense(len(rows))[0, 0]
        assert mask.seqlen_q in (len(rows), "any"), call
        assert rows == ["".join("x" if seen else "." for seen in row) for row in visible], call


# -- arguments ----------------------------------------------------------------------------------


def test_integers_of_numpy_are_ints() -> None:
    lengths = np.array([3, 4])
    mask = builders.causal_document(list(lengths), np.int64(9))
    expected = builders.causal_document([3, 4], 9)
    assert torch.equal(mask.startend_row_indices, expected.startend_row_indices)
    assert torch.equal(mask.dense(np.int64(9)), expected.dense(9))


def test_a_cache_that_never_fills_may_have_any_size() -> None:
    evicted_by = builders.random_eviction(5, 2**40).startend_row_indices
    assert evicted_by.flatten().tolist() == [5] * 5


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: builders.full(-1), ValueError, "seqlen=-1 is less than 0"),
        (lambda: builders.causal(True), TypeError, "seqlen=True is not an int"),
        (lambda: builders.sliding_window(8, 2.0), TypeError, r"window=2\.0 is not an int"),
        (lambda: builders.sink_window(8, -1, 2), ValueError, "sinks=-1"),
        (lambda: builders.global_sliding_window(8, -2, 2), ValueError, "global_tokens=-2"),
        (lambda: builders.prefix_lm_causal(8, "3"), TypeError, "prefix='3'"),
        (lambda: builders.causal_document([3, 4], 6), ValueError, "adds up to 7.*seqlen=6"),
        (lambda: builders.document([3, [4]]), ValueError, "mixes numbers and lists"),
        (lambda: builders.document([3, -4], 6), ValueError, "lengths=-4 is less than 0"),
        (lambda: builders.document([3.5]), TypeError, r"a number in lengths=3\.5 is not an int"),
        (lambda: builders.document(7), TypeError, "lengths=7 is no list of ints and no integer"),
        (lambda: builders.document("12"), TypeError, "lengths='12' is no list"),
        (lambda: builders.document([[[7]]]), ValueError, "is not 1 or 2 lists deep"),
        (lambda: builders.document([2**31]), ValueError, "lengths=2147483648 is more than"),
        (lambda: builders.document([2**31 - 1, 5]), ValueError, "lengths adds up to 2147483652"),
        (lambda: builders.document(torch.tensor([3])), ValueError, "seqlen is needed"),
        (lambda: builders.document(torch.tensor([3.0]), 3), TypeError, "torch.float32"),
        (lambda: builders.document(torch.ones(1, 1, 1).int(), 3), ValueError, r"\(1, 1, 1\)"),
        (lambda: builders.document(torch.tensor([3]), 3, device="meta"), ValueError, "meta"),
        (lambda: builders.prefix_lm_document([3, 4], [1]), ValueError, "prefixes has shape"),
        (lambda: builders.share_question([3, 4]), ValueError, "not 2 or 3 lists deep"),
        (lambda: builders.qk_sparse(9, [(3, 4), (6, 1)]), ValueError, r"dropped\[1\]=\(6, 1\)"),
        (lambda: builders.qk_sparse(9, [(3, 7)]), ValueError, r"dropped\[0\]=\(3, 7\)"),
        (lambda: builders.qk_sparse(9, 3), TypeError, "dropped=3 is not a list"),
        (lambda: builders.qk_sparse(9, [3]), ValueError, r"dropped\[0\]=3 is not \(start, length"),
        (lambda: builders.qk_sparse(9, [(3, 1, 2)]), ValueError, r"dropped\[0\]=\(3, 1, 2\)"),
        (lambda: builders.random_eviction(9, 0), ValueError, "cache_size=0 is less than 1"),
        (lambda: builders.random_eviction(9, 2, batch=0), ValueError, "batch=0"),
        (lambda: builders.from_cu_seqlens([0, 4, 3]), ValueError, "cu_seqlens"),
        (lambda: builders.from_cu_seqlens([1, 4]), ValueError, "cu_seqlens"),
        (lambda: builders.from_cu_seqlens([0, 4], 3), ValueError, "cu_seqlens"),
        (lambda: builders.from_cu_seqlens([0, 4], causal=1), TypeError, "causal=1"),
        (lambda: builders.from_document_ids([0, 1]), TypeError, "document_ids is a list"),
        (lambda: builders.from_dense(torch.ones(3, 3)), ValueError, "torch.float32"),
        (lambda: builders.from_dense(torch.ones(3).bool()), ValueError, r"\(3,\)"),
        (lambda: builders.from_dense([[True]]), ValueError, "list"),
        (lambda: builders.from_dense(torch.ones(2, 5)), ValueError, "float32.*key_padding takes"),
        (lambda: builders.from_dense(PADDING_OF_5, seqlen_q=2.0), TypeError, r"seqlen_q=2\.0 is"),
        (lambda: builders.key_padding([1, 0]), TypeError, "mask is a list, not a tensor"),
        (lambda: builders.key_padding(torch.ones(2, 3)), TypeError, "dtype torch.float32; it hol"),
        (lambda: builders.key_padding(PADDING[0]), ValueError, r"mask has shape \(7,\), not"),
        (lambda: builders.key_padding(PADDING[:, None]), ValueError, r"\(5, 1, 7\), not"),
        (
            lambda: builders.key_padding(PADDING[:, None, None].expand(5, 1, 7, 7)),
            ValueError,
            r"\(5, 1, 7, 7\), not .*; from_dense takes masks",
        ),
        (lambda: builders.key_padding(PADDING, causal=1), TypeError, "causal=1 is not a bool"),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
