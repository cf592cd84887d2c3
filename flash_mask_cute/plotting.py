"""Pictures of masks, with the tiles that a kernel skips, masks and leaves alone.

Needs matplotlib, which the extra `plot` installs; importing this module does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.masks.column_mask import ColumnMask

SKIPPED, PARTIAL, FULL = 0, 1, 2
LABELS = ("skipped", "partial", "full")
# red, green, blue of the tiles of each class, and of a hidden score in a partial tile
COLORS = ((0.92, 0.92, 0.92), (0.90, 0.45, 0.10), (0.15, 0.40, 0.75))
HIDDEN_COLOR = (0.98, 0.90, 0.84)
MAX_LINES = 128


def classify_tiles(visible: Tensor, tile_m: int, tile_n: int) -> Tensor:
    """SKIPPED, PARTIAL or FULL for each tile of a bool (seqlen_q, seqlen_k) tensor.

    Returns:
        int64 (ceil(seqlen_q / tile_m), ceil(seqlen_k / tile_n)); what lies past the end of the last
        tiles does not count.

    Raises:
        TypeError, ValueError: a mask of another kind, or without tokens, or an unusable tile.
    """
    _check_dense(visible)
    _check_tile(tile_m, tile_n)
    classes = []
    for rows in visible.split(tile_m):
        tiles = rows.split(tile_n, dim=1)
        classes.append([FULL if t.all() else PARTIAL if t.any() else SKIPPED for t in tiles])
    return torch.tensor(classes, dtype=torch.int64, device="cpu")


def plot(
    mask: ColumnMask | Tensor,
    seqlen_q: int | None = None,
    tile_m: int = 128,
    tile_n: int = 128,
    ax: Any = None,
) -> Any:
    """Draw what is visible, queries from top to bottom, coloured by the class of its tile.

    Args:
        mask: a `ColumnMask`, of which batch entry 0 and head 0 are drawn (slice its tensor for
            others), or a bool tensor (seqlen_q, seqlen_k) that is true where a query sees a key.
        seqlen_q: number of queries of a `ColumnMask`, by default that of its keys.
        tile_m, tile_n: queries and keys of a tile.
        ax: matplotlib axes to draw into; by default those of a new figure.

    Returns:
        the axes, whose title counts the tiles of each class.

    Raises:
        ImportError: there is no matplotlib.
        TypeError, ValueError: a mask of another kind, no tokens, or tiles without any.
    """
    visible = _visible(mask, seqlen_q)
    _check_tile(tile_m, tile_n)
    try:
        from matplotlib import pyplot
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "plot needs matplotlib: install flash-mask-cute with its extra, "
            "pip install 'flash-mask-cute[plot]'"
        ) from error

    if ax is None:
        _, ax = pyplot.subplots()
    num_q, num_k = visible.shape
    classes = classify_tiles(visible, tile_m, tile_n)
    by_score = classes.repeat_interleave(tile_m, 0).repeat_interleave(tile_n, 1)[:num_q, :num_k]
    image = torch.tensor(COLORS, device="cpu")[by_score]
    image[(by_score == PARTIAL) & ~visible] = torch.tensor(HIDDEN_COLOR, device="cpu")
    ax.imshow(image.numpy(), interpolation="nearest", extent=(0, num_k, num_q, 0), aspect="auto")
    edges_q, edges_k = range(0, num_q + 1, tile_m), range(0, num_k + 1, tile_n)
    if max(len(edges_q), len(edges_k)) <= MAX_LINES:
        ax.hlines(edges_q, 0, num_k, colors="white", linewidth=0.5)
        ax.vlines(edges_k, 0, num_q, colors="white", linewidth=0.5)
    counts = [int((classes == value).sum()) for value in range(len(LABELS))]
    named = [f"{count} {label}" for count, label in zip(counts, LABELS, strict=True)]
    ax.set_title(f"{classes.numel()} tiles of {tile_m} x {tile_n}: {', '.join(named)}")
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    ax.legend(
        handles=[Patch(color=c, label=text) for c, text in zip(COLORS, LABELS, strict=True)],
        loc="upper right",
    )
    return ax


def _visible(mask: ColumnMask | Tensor, seqlen_q: int | None) -> Tensor:
    """Bool (seqlen_q, seqlen_k) on the CPU."""
    if isinstance(mask, ColumnMask):
        first = ColumnMask(mask.startend_row_indices[:1, :1], mask.causal)
        num_keys = first.startend_row_indices.shape[2]
        visible = first.dense(num_keys if seqlen_q is None else seqlen_q)[0, 0]
    else:
        visible = mask
    _check_dense(visible)
    if seqlen_q not in (None, visible.shape[0]):
        raise ValueError(f"seqlen_q={seqlen_q} of a dense mask with {visible.shape[0]} queries")
    return visible.cpu()


def _check_dense(mask: Any) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask is a {type(mask).__name__}, not a ColumnMask or a bool tensor")
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}, not "
            "(seqlen_q, seqlen_k) and torch.bool"
        )
    if 0 in mask.shape:
        raise ValueError(f"mask has {mask.shape[0]} queries and {mask.shape[1]} keys")


def _check_tile(tile_m: Any, tile_n: Any) -> None:
    if any(isinstance(x, bool) or not isinstance(x, int) for x in (tile_m, tile_n)):
        raise TypeError(f"tile_m={tile_m!r}, tile_n={tile_n!r} are not ints")
    if tile_m <= 0 or tile_n <= 0:
        raise ValueError(f"tile_m={tile_m}, tile_n={tile_n} are not positive")
