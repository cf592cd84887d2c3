"""Pictures of masks, with the tiles that a kernel skips, masks or leaves unmasked.

Plotting needs matplotlib (the extra `plot` installs it), but importing this module does not.
Everything is computed on the CPU, with one or two bytes for each pair of a query and a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.block_sparsity import (
    DEFAULT_BLOCK,
    EMPTY,
    FULL,
    PARTIAL,
    BlockSparseTensorsTorch,
    ComputedLists,
    as_block_size,
    check_block_lists,
    dense_states,
    from_block_mask,
    named_tensors,
)
from flash_mask_cute.cpu.tiles import classes_of_columns
from flash_mask_cute.lowering.pair import named_by_mods, resolve_mods
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.masks.selected_blocks import SelectedBlocks, check_form, is_chosen
from flash_mask_cute.mods.aux_tensors import OutsideError
from flash_mask_cute.mods.on_cpu import eval_mask_mod
from flash_mask_cute.mods.signature import check_mod

LABELS = ("empty", "partial", "full")
# red, green, blue of the tiles of each class, and of a hidden score in a partial tile
COLORS = ((0.92, 0.92, 0.92), (0.90, 0.45, 0.10), (0.15, 0.40, 0.75))
HIDDEN_COLOR = (0.98, 0.90, 0.84)
MAX_LINES = 128
# More points than this on a side are more than a screen shows, and every one costs time.
MAX_POINTS = 2048
DEFAULT_TILE = 128


class _Scores(NamedTuple):
    """The visibility of each pair, bool (seqlen_q, seqlen_k) on the CPU.

    visible: the query sees the key. whole: the pair needs no check; a tile with only such pairs is
    full. tile: tile sizes that suit the mask. columns: the mask, if it is a `ColumnMask`; its tiles
    are classified by its bounds.
    """

    visible: Tensor
    whole: Tensor
    tile: tuple[int, int] = (DEFAULT_TILE, DEFAULT_TILE)
    columns: ColumnMask | None = None

    def classes(self, tile_m: int, tile_n: int) -> Tensor:
        """Tile classes as a kernel sees them: a tile that reaches past the last key is partial."""
        num_q, num_k = self.visible.shape
        if self.columns is not None:
            return classes_of_columns(self.columns, num_q, tile_m, tile_n)
        classes = _classify(self, tile_m, tile_n)
        if num_k % tile_n:
            classes[:, -1].clamp_(max=PARTIAL)
        return classes


def plot(
    mask: Any,
    seqlen_q: int | None = None,
    tile_m: int | None = None,
    tile_n: int | None = None,
    ax: Any = None,
    *,
    seqlen_k: int | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
) -> Any:
    """Draw the visible pairs, queries from top to bottom, coloured by the class of their tile.

    Args:
        mask: one of
            a `ColumnMask`;
            a bool tensor (seqlen_q, seqlen_k) that is true where a query sees a key;
            a `BlockSparseTensorsTorch`, the pair that `compute_block_sparsity` returned, or a torch
            `BlockMask`. Only the lists are drawn: they do not contain what a `mask_mod` hides
            inside a partial block, and a tile that touches such a block is partial;
            a `SelectedBlocks` with seqlen_k, without other masks of its call;
            a `mask_mod`, which is compiled for the CPU and evaluated for every pair.
            If a mask differs between batch entries or heads, batch entry 0 and head 0 are drawn.
        seqlen_q, seqlen_k: numbers of queries and keys. A mask_mod needs seqlen_q; seqlen_k
            defaults to seqlen_q. A `ColumnMask` has the queries that it was made for, or as many
            queries as keys if it does not know them; seqlen_k may leave out its last keys. Lists
            may end inside their last blocks.
        tile_m, tile_n: queries and keys of a tile; by default the block size of lists, else 128.
        ax: matplotlib axes to draw into; by default those of a new figure.
        aux_tensors: the tensors that a mask_mod reads.

    Returns:
        The axes. Their title counts the tiles of each class. Tiles of a `ColumnMask` are classified
        by its bounds, as kernels do; for the tile sizes that `explain` names, the counts agree with
        it. A tile that reaches past the last key is partial, because kernels mask it.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError, ValueError: the mask is of another kind, its sizes are missing or do not fit it,
            there are no tokens, a tile is empty, or nothing reads the aux tensors.
        NotImplementedError: the mask_mod uses a GPU-only instruction.

    Example:
        >>> from flash_mask_cute import builders, plot
        >>> axes = plot(builders.causal_document([100, 156]), tile_m=64, tile_n=64)
        >>> axes.figure.savefig("mask.png")  # doctest: +SKIP
    """
    # before a mask_mod is evaluated, which takes longer
    sizes = {"tile_m": tile_m, "tile_n": tile_n, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    for name, size in sizes.items():
        _check_length(name, size)
    scores = _scores_of(mask, seqlen_q, seqlen_k, aux_tensors)
    tile_m = scores.tile[0] if tile_m is None else tile_m
    tile_n = scores.tile[1] if tile_n is None else tile_n
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
    num_q, num_k = scores.visible.shape
    classes = scores.classes(tile_m, tile_n)
    image = _colour(scores.visible, classes, tile_m, tile_n)
    ax.imshow(image.numpy(), interpolation="nearest", extent=(0, num_k, num_q, 0), aspect="auto")
    edges_q, edges_k = range(0, num_q + 1, tile_m), range(0, num_k + 1, tile_n)
    if max(len(edges_q), len(edges_k)) <= MAX_LINES:
        # one line with gaps: as lines of their own they are most of a file
        gap = float("nan")
        rows = [(x, y) for y in edges_q for x in (0, num_k, gap)]
        columns = [(x, y) for x in edges_k for y in (0, num_q, gap)]
        ax.plot(*zip(*rows, *columns, strict=True), color="white", linewidth=0.5)
        ax.set(xlim=(0, num_k), ylim=(num_q, 0))
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


def _classify(scores: _Scores, tile_m: int, tile_n: int) -> Tensor:
    """EMPTY, PARTIAL or FULL for each tile: int64 (tiles of queries, tiles of keys)."""
    has_visible = _by_tiles(scores.visible, tile_m, tile_n, torch.amax)
    is_whole = _by_tiles(scores.whole, tile_m, tile_n, torch.amin)
    # a tile that is whole has something visible
    return has_visible.long() + is_whole.long()


def _by_tiles(
    flags: Tensor, tile_m: int, tile_n: int, reduce: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """uint8: the largest or smallest flag of each tile; the last tile may be cut."""
    folded = flags.cpu().view(torch.uint8)
    for dim, tile in enumerate((tile_m, tile_n)):
        extent = folded.shape[dim]
        inside = extent - extent % tile
        parts = []
        if inside:
            tiles = folded.narrow(dim, 0, inside).unflatten(dim, (inside // tile, tile))
            parts.append(reduce(tiles, dim + 1))
        if inside < extent:
            rest = folded.narrow(dim, inside, extent - inside)
            parts.append(reduce(rest, dim).unsqueeze(dim))
        folded = torch.cat(parts, dim)
    return folded


def _colour(visible: Tensor, classes: Tensor, tile_m: int, tile_n: int) -> Tensor:
    """float32 (rows, columns, 3): a point for each pair, or for evenly spaced pairs."""
    queries, keys = (_sampled(extent) for extent in visible.shape)
    by_point = classes.index_select(0, queries // tile_m).index_select(1, keys // tile_n)
    is_visible = visible.index_select(0, queries).index_select(1, keys)
    by_point.masked_fill_((by_point == PARTIAL) & ~is_visible, len(COLORS))
    return torch.tensor((*COLORS, HIDDEN_COLOR), device="cpu")[by_point]


def _sampled(extent: int) -> Tensor:
    points = min(extent, MAX_POINTS)
    return (2 * torch.arange(points, device="cpu") + 1) * extent // (2 * points)


# -- what masks say ------------------------------------------------------------------------------


def _scores_of(
    mask: Any, seqlen_q: int | None, seqlen_k: int | None, aux_tensors: Sequence[Tensor] | None
) -> _Scores:
    is_lists = isinstance(mask, BlockSparseTensorsTorch | ComputedLists)
    is_lists = is_lists or hasattr(mask, "BLOCK_SIZE")
    is_mod = callable(mask) and not is_lists
    if aux_tensors is not None and not is_mod:
        raise ValueError(
            "aux_tensors are read by a mask_mod alone, got some beside a mask that is a "
            f"{type(mask).__name__}"
        )
    if is_lists:
        return _of_lists(mask, seqlen_q, seqlen_k)
    if isinstance(mask, SelectedBlocks):
        return _of_selection(mask, seqlen_q, seqlen_k)
    columns = None
    if isinstance(mask, ColumnMask):
        indices = mask.startend_row_indices[:1, :1].cpu()
        if seqlen_q is None:
            seqlen_q = mask.seqlen_q if isinstance(mask.seqlen_q, int) else indices.shape[2]
        first = ColumnMask(indices, mask.causal, seqlen_q=mask.seqlen_q)
        visible = first.dense(seqlen_q, seqlen_k)[0, 0]
        columns = ColumnMask(indices[:, :, : visible.shape[1]], mask.causal)
    elif is_mod:
        visible = _evaluate(mask, seqlen_q, seqlen_k, aux_tensors)
    else:
        visible = mask
    _check_dense(visible)
    given = zip(("seqlen_q", "seqlen_k"), (seqlen_q, seqlen_k), visible.shape, strict=True)
    for name, length, extent in given:
        if length not in (None, extent):
            queries, keys = visible.shape
            raise ValueError(f"{name}={length} of a dense mask with {queries} queries, {keys} keys")
    visible = visible.cpu()
    return _Scores(visible, visible, columns=columns)


def _of_first_head(lists: Any) -> Any:
    """Those of the first sequence and head, on the CPU; what is no tensor is refused later."""
    is_lists = isinstance(lists, Tensor) and lists.dim() > 1
    return lists[:1, :1].cpu() if is_lists else lists


def _of_lists(mask: Any, seqlen_q: int | None, seqlen_k: int | None) -> _Scores:
    lists = from_block_mask(mask)
    lists = lists._replace(**{name: _of_first_head(x) for name, x in named_tensors(lists)})
    block, most = lists.block_size, lists.seqlens
    if most is None:
        sizes = as_block_size(DEFAULT_BLOCK if block is None else block, "block_size")
        shape = tuple(getattr(lists.mask_block_idx, "shape", ()))[2:] or (0, 0)
        most = shape[0] * sizes[0], shape[1] * sizes[1]
        # of the one block of any length too
        most = tuple(getattr(mask, "seq_lengths", most))
    seqlen_q = most[0] if seqlen_q is None else seqlen_q
    seqlen_k = most[1] if seqlen_k is None else seqlen_k
    if lists.seqlens is not None and (seqlen_q > most[0] or seqlen_k > most[1]):
        raise ValueError(
            f"seqlen_q={seqlen_q}, seqlen_k={seqlen_k} of lists that were made for {most[0]} "
            f"queries x {most[1]} keys"
        )
    lists = check_block_lists(lists, 1, 1, seqlen_q, seqlen_k, torch.device("cpu"))
    assert lists.block_size is not None
    states = dense_states(lists)[0, 0]
    if states.numel() == 0:
        raise ValueError(f"mask has {seqlen_q} queries and {seqlen_k} keys")
    for dim, (size, extent) in enumerate(zip(lists.block_size, (seqlen_q, seqlen_k), strict=True)):
        states = states.index_select(dim, torch.arange(extent, device="cpu") // size)
    return _Scores(states != EMPTY, states == FULL, lists.block_size)


def _of_selection(mask: SelectedBlocks, seqlen_q: int | None, seqlen_k: int | None) -> _Scores:
    check_form(mask, mask.indices.device)
    if seqlen_k is None:
        raise ValueError(
            "seqlen_k=None of a SelectedBlocks, which does not store the number of keys"
        )
    rows = mask.by_entry[0, 0].cpu()
    if seqlen_q not in (None, len(rows)) or not len(rows):
        raise ValueError(f"seqlen_q={seqlen_q} of a SelectedBlocks with {len(rows)} queries")
    keys = torch.arange(seqlen_k, device="cpu") // mask.block_size
    visible = is_chosen(rows, 0, mask.num_blocks(seqlen_k)).index_select(1, keys)
    return _Scores(visible, visible, (DEFAULT_TILE, mask.block_size))


def _evaluate(
    mask_mod: Callable[..., Any],
    seqlen_q: int | None,
    seqlen_k: int | None,
    aux_tensors: Sequence[Tensor] | None,
) -> Tensor:
    if seqlen_q is None:
        raise ValueError("seqlen_q=None of a mask_mod, which does not store its number of queries")
    given = None, mask_mod, aux_tensors, None
    mods = resolve_mods(*given)
    mask_mod, aux_tensors = mods.mask_mod or mask_mod, mods.aux_tensors
    check_mod("mask_mod", mask_mod)
    if aux_tensors is not None:
        if not isinstance(aux_tensors, list | tuple):
            raise TypeError(f"aux_tensors is a {type(aux_tensors).__name__}, not a list or a tuple")
        for i, x in enumerate(aux_tensors):
            if not isinstance(x, Tensor):
                raise TypeError(f"aux_tensors[{i}] is a {type(x).__name__}, not a tensor")
        aux_tensors = [x.detach().cpu() for x in aux_tensors]
    queries, keys = (
        torch.arange(extent, dtype=torch.int32, device="cpu")
        for extent in (seqlen_q, seqlen_q if seqlen_k is None else seqlen_k)
    )
    try:
        return eval_mask_mod(mask_mod, aux_tensors, 0, 0, queries, keys)
    except OutsideError as error:
        raise named_by_mods(error, *given) from error


def _check_length(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r} is not an int")
    if int(value) < 1:
        raise ValueError(f"{name}={value} is not positive")


def _check_dense(mask: Any) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"mask is a {type(mask).__name__}, not a ColumnMask, a bool tensor, a "
            "BlockSparseTensorsTorch, the pair of compute_block_sparsity, a torch BlockMask, a "
            "SelectedBlocks or a mask_mod"
        )
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}, not "
            "(seqlen_q, seqlen_k) and torch.bool"
        )
    if 0 in mask.shape:
        raise ValueError(f"mask has {mask.shape[0]} queries and {mask.shape[1]} keys")
