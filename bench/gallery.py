"""The picture of masks by name, which `bench.plot` draws beside the figures of rows.

The twelve masks of the FlashMask paper and attention sinks with a window, by `flash_mask_cute.plot`
over the builders, small enough that single tiles can be told apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.figure import save, subplots

if TYPE_CHECKING:
    from flash_mask_cute import ColumnMask

TOKENS, TILE = 512, 32
COLUMNS = 5
# Not multiples of a tile, as lengths of documents seldom are.
DOCUMENTS = (210, 120, 182)


def named_masks() -> dict[str, ColumnMask]:
    """What is drawn, by name of its builder."""
    import torch

    from flash_mask_cute import builders

    n, window = TOKENS, 100
    return {
        "full": builders.full(n),
        "causal": builders.causal(n),
        "sliding_window": builders.sliding_window(n, window),
        "sink_window": builders.sink_window(n, sinks=40, window=window),
        "causal_document": builders.causal_document(DOCUMENTS),
        "document": builders.document(DOCUMENTS),
        "share_question": builders.share_question([[110, 60, 130], [80, 70, 62]]),
        "global_sliding_window": builders.global_sliding_window(n, 40, window=70),
        "causal_blockwise": builders.causal_blockwise([120, 90, 150, 152]),
        "prefix_lm_causal": builders.prefix_lm_causal(n, prefix=200),
        "prefix_lm_document": builders.prefix_lm_document(DOCUMENTS, prefixes=[90, 50, 80]),
        "qk_sparse": builders.qk_sparse(n, dropped=[(70, 110), (260, 150)]),
        "random_eviction": builders.random_eviction(
            n, cache_size=256, generator=torch.Generator("cpu").manual_seed(0)
        ),
    }


def draw(path: str) -> None:
    """Write the picture, an svg or a png by the end of the path. ImportError without matplotlib."""
    from flash_mask_cute import plot

    masks = named_masks()
    rows = -(-len(masks) // COLUMNS)
    figure, grid = subplots(rows, COLUMNS, figsize=(10, 2.25 * rows), layout="constrained")
    panels = list(grid.flat)
    legend: Any = None
    for panel, (name, mask) in zip(panels, masks.items(), strict=False):
        plot(mask, tile_m=TILE, tile_n=TILE, ax=panel)
        # what each panel would repeat is said once
        legend = panel.get_legend()
        legend.remove()
        panel.set(title="", xlabel="", ylabel="", xticks=[], yticks=[], aspect="equal")
        panel.set_title(name, fontsize=8.5)
    for panel in panels[len(masks) :]:
        panel.set_axis_off()
    handles = legend.legend_handles
    labels = [text.get_text() for text in legend.get_texts()]
    panels[-1].legend(handles, labels, loc="center", frameon=False, title=f"{TILE} x {TILE} tiles")
    save(figure, path)
