from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flash_mask_cute import (
    BlockSparseTensorsTorch,
    ColumnMask,
    create_block_mask,
    explain,
    plotting,
)
from flash_mask_cute.compute_block_sparsity import compute_block_sparsity
from flash_mask_cute.masks import builders
from flash_mask_cute.plotting import EMPTY, FULL, PARTIAL, plot


def classify_tiles(visible: torch.Tensor, tile_m: int, tile_n: int) -> torch.Tensor:
    return plotting._classify(plotting._Scores(visible, visible), tile_m, tile_n)


def test_classes() -> None:
    visible = builders.causal(10).dense(10)[0, 0]
    assert classify_tiles(visible, 4, 3).tolist() == [
        [PARTIAL, PARTIAL, EMPTY, EMPTY],
        [FULL, PARTIAL, PARTIAL, EMPTY],
        [FULL, FULL, FULL, PARTIAL],
    ]
    assert (classify_tiles(torch.ones(5, 7, dtype=torch.bool), 4, 4) == FULL).all()


def near(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return (k <= q) & (q - k < 100)


def in_document(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return aux[0][q[0]] == aux[0][k[0]]


LISTS = create_block_mask(near, None, None, 300, 200, device="cpu", BLOCK_SIZE=(32, 64))


@pytest.mark.parametrize(
    ("mask", "keywords", "error", "text"),
    [
        (torch.ones(3, 3), {}, ValueError, "torch.float32"),
        (torch.ones(1, 3, 3, dtype=torch.bool), {}, ValueError, r"\(1, 3, 3\)"),
        ([[True]], {}, TypeError, "mask is a list, not a ColumnMask, a bool tensor, a BlockSparse"),
        (None, {}, TypeError, "mask is a NoneType"),
        (torch.ones(3, 3, dtype=torch.bool), {"seqlen_q": 4}, ValueError, "seqlen_q=4"),
        (torch.ones(3, 3, dtype=torch.bool), {"seqlen_k": 4}, ValueError, "seqlen_k=4 of a dense"),
        (builders.causal(3), {"seqlen_k": 4}, ValueError, "seqlen_k=4 of a mask with 3 keys"),
        (builders.causal(3), {"seqlen_q": 0}, ValueError, "seqlen_q=0 is not positive"),
        (builders.causal(3), {"seqlen_q": True}, TypeError, "seqlen_q=True is not an int"),
        (builders.causal(3), {"aux_tensors": []}, ValueError, "beside a mask that is a ColumnMask"),
        (near, {}, ValueError, "seqlen_q=None of a mask_mod"),
        (near, {"seqlen_q": 4, "aux_tensors": 3}, TypeError, "aux_tensors is a int"),
        (near, {"seqlen_q": 4, "aux_tensors": [3]}, TypeError, r"aux_tensors\[0\] is a int"),
        (lambda q, k: q >= k, {"seqlen_q": 4}, TypeError, "mask_mod must take the arguments"),
        (LISTS, {"seqlen_q": 310}, ValueError, "seqlen_q=310, seqlen_k=200 of lists .* 300 que"),
        (LISTS._replace(seqlens=None), {"seqlen_q": 400}, ValueError, "seqlen_q 400"),
        (LISTS._replace(mask_block_idx=3), {}, TypeError, "mask_block_idx must be a torch tensor"),
        (LISTS._replace(block_size=(0, 64)), {}, ValueError, r"block_size must be .*\(0, 64\)"),
        (torch.ones(3, 3, dtype=torch.bool), {"tile_n": 0}, ValueError, "tile_n=0"),
        (torch.ones(3, 3, dtype=torch.bool), {"tile_m": 2.5}, TypeError, r"tile_m=2\.5"),
        (torch.ones(3, 3, dtype=torch.bool), {"tile_n": True}, TypeError, "tile_n=True"),
        (builders.causal(3), {"seqlen_q": 2.5}, TypeError, r"seqlen_q=2\.5"),
        (torch.ones(0, 3, dtype=torch.bool), {}, ValueError, "0 queries and 3 keys"),
    ],
)
def test_refusals(mask: Any, keywords: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        plot(mask, **keywords)


@pytest.mark.parametrize(
    ("mask", "tile_m", "error", "text"),
    [
        ([[True]], 2, TypeError, "mask is a list"),
        (torch.ones(1, 3, 3, dtype=torch.bool), 2, ValueError, r"\(1, 3, 3\)"),
        (torch.ones(0, 3, dtype=torch.bool), 2, ValueError, "0 queries and 3 keys"),
        (torch.ones(3, 3, dtype=torch.bool), 0, ValueError, "tile_m=0"),
    ],
)
def test_refusals_of_classes(mask: Any, tile_m: int, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        plot(mask, tile_m=tile_m, tile_n=2)


def test_without_matplotlib_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"flash-mask-cute\[plot\]"):
        plot(builders.causal(8))


@pytest.fixture
def pyplot() -> Any:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def test_picture(pyplot: Any) -> None:
    mask = builders.causal(10)
    ax = plot(mask, tile_m=4, tile_n=3)
    counts = [int(n) for n in re.findall(r"(\d+) (?:empty|partial|full)", ax.get_title())]
    assert counts == [3, 5, 4]
    image = torch.as_tensor(ax.images[0].get_array())
    assert image.shape == (10, 10, 3)
    colors = torch.tensor(plotting.COLORS, dtype=image.dtype)
    assert torch.equal(image[9, 0], colors[FULL])
    assert torch.equal(image[0, 0], colors[PARTIAL])
    assert torch.equal(image[0, 1], torch.tensor(plotting.HIDDEN_COLOR, dtype=image.dtype))
    assert torch.equal(image[0, 9], colors[EMPTY])


def test_picture_of_a_dense_mask_in_given_axes(pyplot: Any) -> None:
    mask = builders.document([40, 200, 60])
    _, axes = pyplot.subplots(1, 2)
    assert plot(mask, ax=axes[0]) is axes[0]
    plot(mask.dense(300)[0, 0], ax=axes[1])
    drawn = [torch.as_tensor(ax.images[0].get_array()) for ax in axes]
    assert torch.equal(*drawn)
    assert axes[0].get_title() == axes[1].get_title()
    assert axes[0].get_xlim() == (0, 300) and axes[0].get_ylim() == (300, 0)


def test_picture_of_other_lengths(pyplot: Any) -> None:
    ax = plot(builders.causal(100), seqlen_q=30, tile_m=16, tile_n=64)
    assert torch.as_tensor(ax.images[0].get_array()).shape == (30, 100, 3)


def image_of(ax: Any) -> torch.Tensor:
    return torch.as_tensor(ax.images[0].get_array())


def test_picture_of_fewer_keys(pyplot: Any) -> None:
    mask = builders.document([40, 60])
    cut = plot(mask, seqlen_q=30, seqlen_k=70, tile_m=16, tile_n=16)
    dense = plot(mask.dense(30, 70)[0, 0], tile_m=16, tile_n=16)
    assert torch.equal(image_of(cut), image_of(dense))


def test_classes_of_tiles_that_do_not_divide_the_mask() -> None:
    visible = torch.rand((37, 53), generator=torch.Generator().manual_seed(0)) < 0.9
    for tile_m, tile_n in ((1, 1), (5, 3), (37, 53), (64, 7), (36, 100)):
        expected = [
            [
                FULL if tile.all() else PARTIAL if tile.any() else EMPTY
                for tile in rows.split(tile_n, dim=1)
            ]
            for rows in visible.split(tile_m)
        ]
        assert classify_tiles(visible, tile_m, tile_n).tolist() == expected
        # other strides
        turned = classify_tiles(visible.T, tile_n, tile_m)
        assert turned.T.tolist() == expected


MASKS: dict[str, Callable[[], ColumnMask]] = {
    "full": lambda: builders.full(500),
    "causal": lambda: builders.causal(500),
    "sliding_window": lambda: builders.sliding_window(700, 90),
    "global_sliding_window": lambda: builders.global_sliding_window(700, 9, 150),
    "key_padding": lambda: builders.key_padding(torch.arange(640)[None] >= 200),
    "random_eviction": lambda: builders.random_eviction(512, 100),
    "prefix_lm_causal": lambda: builders.prefix_lm_causal(600, 300),
    "prefix_tree": lambda: builders.prefix_tree([-1, 0, 0, 2], [200, 150, 100, 90]),
    "image_blocks": lambda: builders.image_blocks(torch.arange(640) // 160 % 2 - 1),
    "block_diffusion": lambda: builders.block_diffusion(320, 64),
    # documents, of which packed sequences are made
    "causal_document": lambda: builders.causal_document([520, 110, 70, 300]),
    "document": lambda: builders.document([300, 1, 299, 200]),
    "share_question": lambda: builders.share_question([[200, 100, 240], [60, 500]]),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_it_counts_as_explain_does(pyplot: Any, name: str, head_dim: int) -> None:
    """On the grid of the dense call, in the kernel's tiles."""
    mask = MASKS[name]()
    seqlen = mask.startend_row_indices.shape[2]
    q = torch.zeros(1, seqlen, 2, head_dim)
    told = explain(q, q, q, startend_row_indices=mask)
    tile_m, tile_n = told.tiles.tile_m, told.tiles.tile_n
    title = plot(mask, tile_m=tile_m, tile_n=tile_n).get_title()
    counts = [int(n) for n in re.findall(r"(\d+) (?:empty|partial|full)", title)]
    of_explain = (told.empty_key_tiles, told.partial_key_tiles, told.full_key_tiles)
    assert of_explain == tuple(2 * count for count in counts)
    assert sum(counts) == -(-seqlen // tile_m) * -(-seqlen // tile_n)
    # what scores say: a tile past the last key is masked; a mask of blocks may be visited in vain
    classes = classify_tiles(mask.dense(seqlen)[0, 0], tile_m, tile_n)
    if seqlen % tile_n:
        classes[:, -1].clamp_(max=PARTIAL)
    exact = [int((classes == state).sum()) for state in range(3)]
    assert counts[2] == exact[2]
    assert counts[0] == exact[0] or (counts[0] < exact[0] and (mask.causal or tile_m != tile_n))
    assert ("packed sequences" in told.note) == mask.documents


def test_a_mask_has_the_queries_that_it_was_made_for(pyplot: Any) -> None:
    mask = builders.from_dense(torch.ones(16, 64, dtype=torch.bool).tril(48), seqlen_q=16)
    assert plot(mask).get_ylim() == (16, 0)
    with pytest.raises(ValueError, match="seqlen_q=17 of a mask with 16 queries"):
        plot(mask, seqlen_q=17)
    assert plot(builders.key_padding(torch.ones(1, 30).int())).get_ylim() == (30, 0)
    assert plot(builders.key_padding(torch.ones(1, 30).int()), seqlen_q=99).get_ylim() == (99, 0)


def test_long_masks_are_drawn_with_fewer_points(
    pyplot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = builders.causal_document([100, 30, 70])
    titles = [plot(mask, tile_m=16, tile_n=16).get_title()]
    monkeypatch.setattr(plotting, "MAX_POINTS", 40)
    ax = plot(mask, tile_m=16, tile_n=16)
    titles.append(ax.get_title())
    # tiles are counted from all scores
    assert titles[0] == titles[1]
    assert ax.get_xlim() == (0, 200) and image_of(ax).shape == (40, 40, 3)
    colors = torch.tensor((*plotting.COLORS, plotting.HIDDEN_COLOR))
    middle = torch.arange(2, 200, 5)
    classes = classify_tiles(mask.dense(200)[0, 0], 16, 16)[middle // 16][:, middle // 16]
    hidden = (classes == PARTIAL) & ~mask.dense(200)[0, 0][middle][:, middle]
    assert torch.equal(image_of(ax), colors[classes.masked_fill(hidden, 3)])


def test_picture_of_a_mask_mod(pyplot: Any) -> None:
    key = torch.arange(70)
    seen = (key <= key[:50, None]) & (key[:50, None] - key < 100)
    ax = plot(near, seqlen_q=50, seqlen_k=70, tile_m=16, tile_n=32)
    assert torch.equal(image_of(ax), image_of(plot(seen, tile_m=16, tile_n=32)))
    ids = torch.arange(60, dtype=torch.int32) // 25 % 2
    ax = plot(in_document, seqlen_q=60, aux_tensors=[ids], tile_m=20, tile_n=20)
    expected = plot(ids[:, None] == ids, tile_m=20, tile_n=20)
    assert torch.equal(image_of(ax), image_of(expected))
    assert ax.get_title() == expected.get_title()


def test_picture_of_block_lists(pyplot: Any) -> None:
    blocks = torch.zeros((10, 4), dtype=torch.int64)
    for counts, indices, state in (
        (LISTS.mask_block_cnt, LISTS.mask_block_idx, PARTIAL),
        (LISTS.full_block_cnt, LISTS.full_block_idx, FULL),
    ):
        assert counts is not None and indices is not None
        for row in range(10):
            blocks[row, indices[0, 0, row, : counts[0, 0, row]].long()] = state
    assert {*blocks.flatten().tolist()} == {EMPTY, PARTIAL, FULL}
    ax = plot(LISTS, seqlen_q=300, seqlen_k=200)
    # the last blocks reach past the last key
    blocks[:, -1].clamp_(max=PARTIAL)
    counts = [int((blocks == state).sum()) for state in range(3)]
    named = "{} empty, {} partial, {} full".format(*counts)
    assert ax.get_title() == f"40 tiles of 32 x 64: {named}"
    assert ax.get_xlim() == (0, 200) and ax.get_ylim() == (300, 0)
    colors = torch.tensor(plotting.COLORS)
    by_score = blocks.repeat_interleave(32, 0).repeat_interleave(64, 1)[:300, :200]
    assert torch.equal(image_of(ax), colors[by_score])
    # as far as the lists were made for, or to the end of the last blocks, if nothing else is said
    assert plot(LISTS).get_ylim() == (300, 0)
    assert plot(LISTS._replace(seqlens=None)).get_ylim() == (320, 0)
    assert plot(LISTS._replace(block_size=None, seqlens=None)).get_ylim() == (1280, 0)


def test_tiles_across_blocks_are_partial_unless_all_agree(pyplot: Any) -> None:
    counts = torch.tensor([[[1, 0]]], dtype=torch.int32)
    partial = torch.zeros((1, 1, 2, 4), dtype=torch.int32)
    full = torch.tensor([[[[1, 2, 0, 0], [2, 3, 0, 0]]]], dtype=torch.int32)
    lists = BlockSparseTensorsTorch(counts, partial, 2 * torch.ones_like(counts), full, (8, 8))
    ax = plot(lists, tile_m=8, tile_n=16)
    image = image_of(ax)
    colors = torch.tensor(plotting.COLORS)
    # full beside partial, full beside absent; below absent twice, full twice
    for (row, col), color in {
        (0, 0): colors[PARTIAL],
        (0, 8): colors[PARTIAL],
        (0, 16): colors[PARTIAL],
        (0, 24): torch.tensor(plotting.HIDDEN_COLOR),
        (8, 0): colors[EMPTY],
        (8, 16): colors[FULL],
    }.items():
        assert torch.equal(image[row, col], color)


def test_picture_of_computed_lists(pyplot: Any) -> None:
    """The pair is drawn as the lists in it are."""
    pair = compute_block_sparsity(
        64, 32, 1, 1, 128, 64, lambda b, h, q, k, aux: k <= q, None, "cpu"
    )
    assert plot(pair).get_title() == plot(pair.torch_lists).get_title()
    assert plot(pair).get_title() == "4 tiles of 64 x 32: 0 empty, 2 partial, 2 full"


def test_picture_of_a_torch_block_mask(pyplot: Any) -> None:
    from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

    lists = torch_block_mask(lambda b, h, q, k: k <= q, 2, 3, 300, 200, device="cpu")
    ax = plot(lists)
    # torch lists a block that the end of a sequence cuts as partial
    assert ax.get_title() == "6 tiles of 128 x 128: 1 empty, 4 partial, 1 full"
    assert ax.get_xlim() == (0, 200) and ax.get_ylim() == (300, 0)
