from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch

from flash_mask_cute import plotting
from flash_mask_cute.masks import builders
from flash_mask_cute.plotting import FULL, PARTIAL, SKIPPED, classify_tiles, plot


def test_classes() -> None:
    visible = builders.causal(10).dense(10)[0, 0]
    assert classify_tiles(visible, 4, 3).tolist() == [
        [PARTIAL, PARTIAL, SKIPPED, SKIPPED],
        [FULL, PARTIAL, PARTIAL, SKIPPED],
        [FULL, FULL, FULL, PARTIAL],
    ]
    assert (classify_tiles(torch.ones(5, 7, dtype=torch.bool), 4, 4) == FULL).all()


@pytest.mark.parametrize(
    ("mask", "keywords", "error", "text"),
    [
        (torch.ones(3, 3), {}, ValueError, "torch.float32"),
        (torch.ones(1, 3, 3, dtype=torch.bool), {}, ValueError, r"\(1, 3, 3\)"),
        ([[True]], {}, TypeError, "mask is a list"),
        (torch.ones(3, 3, dtype=torch.bool), {"seqlen_q": 4}, ValueError, "seqlen_q=4"),
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
        classify_tiles(mask, tile_m, 2)


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
    counts = [int(n) for n in re.findall(r"(\d+) (?:skipped|partial|full)", ax.get_title())]
    assert counts == [3, 5, 4]
    image = torch.as_tensor(ax.images[0].get_array())
    assert image.shape == (10, 10, 3)
    colors = torch.tensor(plotting.COLORS, dtype=image.dtype)
    assert torch.equal(image[9, 0], colors[FULL])
    assert torch.equal(image[0, 0], colors[PARTIAL])
    assert torch.equal(image[0, 1], torch.tensor(plotting.HIDDEN_COLOR, dtype=image.dtype))
    assert torch.equal(image[0, 9], colors[SKIPPED])


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
