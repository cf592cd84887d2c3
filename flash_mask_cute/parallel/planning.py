"""Which rows of a sequence each rank holds, so that all have the same work.

Work is counted in the tiles of BLOCK x BLOCK scores that kernels visit. A plan starts from
contiguous ranges, with which few keys travel. It swaps chunks of two ranks as long as that makes
the slowest rank faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.parallel.visibility import NO_WINDOW, Visibility, Window, rows_before
from flash_mask_cute.rules.intervals import Intervals
from flash_mask_cute.runtime.checks import INTS

BLOCK = 128  # rows and keys of a counted tile
# A plan of fewer chunks is taken if its slowest rank has at most so many times the mean work.
_EVEN = 1.03
# How many swaps are compared by the keys that travel after them.
_MOST_COMPARED = 64

Ranges: TypeAlias = tuple[tuple[int, int], ...]


class Load(NamedTuple):
    """What a plan means for one mask.

    tiles: the visited tiles of each rank, summed over the batch and averaged over heads. keys: how
    many keys each rank receives from others in a call, forward, and again in the backward unless
    they were kept; without "ulysses". seqlen: of the plan.

    Example:
        >>> from flash_mask_cute import builders, parallel
        >>> parallel.plan(builders.causal(512), 2, seqlen=512).load(builders.causal(512)).imbalance
        1.0
    """

    tiles: tuple[float, ...]
    keys: tuple[int, ...]
    seqlen: int

    @property
    def imbalance(self) -> float:
        """The most tiles of a rank over the mean."""
        mean = sum(self.tiles) / len(self.tiles)
        return max(self.tiles) / mean if mean else 1.0

    @property
    def foreign_share(self) -> float:
        """The share of the keys of other ranks that a rank receives, on average."""
        world = len(self.keys)
        foreign = (world - 1) * self.seqlen
        return sum(self.keys) / foreign if foreign else 0.0


@dataclass(frozen=True)
class Plan:
    """The rows of a sequence that each rank holds, as ascending ranges (begin, end).

    All ranks hold equally many rows, and each row is in one range.

    Raises:
        TypeError: rows are no ranges of integers.
        ValueError: ranges overlap, are not ascending, leave rows out, or ranks hold unequally many.

    Example:
        >>> from flash_mask_cute.parallel import Plan
        >>> plan = Plan([[(0, 2), (6, 8)], [(2, 6)]])
        >>> plan.world, plan.seqlen, plan.index(0).tolist()
        (2, 8, [0, 1, 6, 7])
    """

    rows: tuple[Ranges, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _checked_rows(self.rows))

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.rows)

    @property
    def rows_per_rank(self) -> int:
        return sum(end - begin for begin, end in self.rows[0])

    @property
    def seqlen(self) -> int:
        return self.world * self.rows_per_rank

    def index(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """The positions of the rows of a rank, int64 (rows_per_rank,): the position_ids of its
        tokens in one sequence.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank={rank} of a plan for {self.world} ranks")
        parts = [torch.arange(*x, device=device) for x in self.rows[rank]]
        return torch.cat(parts) if parts else torch.arange(0, device=device)

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """The rows of a rank, of a tensor with all rows in dimension dim.

        Raises:
            TypeError, ValueError: x is no tensor, or has another number of rows.
        """
        _check_num_rows("x", x, self.seqlen, dim)
        return x.index_select(dim, self.index(rank, x.device))

    def unshard(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The tensor with all rows, of those of all ranks: the inverse of `shard`.

        Raises:
            TypeError, ValueError: there are not as many parts as ranks, or one is no tensor or has
                not as many rows as each rank holds.
        """
        if len(parts) != self.world:
            raise ValueError(f"{len(parts)} parts of a plan for {self.world} ranks")
        for rank, part in enumerate(parts):
            _check_num_rows(f"parts[{rank}]", part, self.rows_per_rank, dim)
        joined = torch.cat(list(parts), dim)
        return joined.index_select(dim, self.places(joined.device))

    def load(
        self, mask: ColumnMask | None, *, causal: bool = False, window_size: Any = NO_WINDOW
    ) -> Load:
        """What the plan means for a mask, or for causal masking and a window. It waits for the
        device.

        Raises:
            TypeError, ValueError: mask is no mask of the plan's sequence, or ranges of the plan
                are not of whole blocks of 128 rows.
        """
        if any(x % BLOCK for ranges in self.rows for pair in ranges for x in pair):
            raise ValueError(f"ranges are not of whole blocks of {BLOCK} rows: {self.rows}")
        check_plan_mask("mask", mask, self.seqlen)
        cost = visited_blocks(mask, self.seqlen, causal, window_size).cost
        tiles = tuple(
            float(sum(cost[a // BLOCK : b // BLOCK].sum() for a, b in x)) for x in self.rows
        )
        seen = Visibility.of(mask, causal, window_size, self.seqlen, "cpu")
        keys = []
        for rank in range(self.world):
            own = self.index(rank)
            needed = seen.among(rows_before(own, self.seqlen)).is_seen(len(own))
            needed[own] = False
            keys.append(int(needed.sum()))
        return Load(tiles, tuple(keys), self.seqlen)

    def order(self, device: torch.device | str | None = None) -> Tensor:
        """The rows of all ranks, one rank after the other, int64 (seqlen,)."""
        return torch.cat([self.index(rank, device) for rank in range(self.world)])

    def places(self, device: torch.device | str | None = None) -> Tensor:
        """Where each row of the sequence is in `order`."""
        return self.order(device).argsort()


def plan(
    masks: ColumnMask | None | Sequence[ColumnMask | None],
    world: int,
    *,
    seqlen: int,
    max_ranges: int = 16,
) -> Plan:
    """Divide the rows of a sequence among `world` ranks, so that the slowest does little more than
    the mean work, and few keys travel.

    masks: the mask of the sequence, or one for each kind of layer, to add up their work; None shows
    everything. Causal masking and windows are masks, too: `builders.causal(seqlen)`. The call
    waits for the device. Ranges are of whole blocks of 128 rows, up to max_ranges of them for each
    rank.

    Raises:
        TypeError: masks, world, seqlen or max_ranges are of other types.
        ValueError: seqlen is no multiple of 128 * world, and the message says how far to pad; a
            mask is of another length; world or max_ranges is not positive.

    Example:
        >>> from flash_mask_cute import builders, parallel
        >>> mask = builders.causal(1024)
        >>> even, halves = parallel.plan(mask, 2, seqlen=1024), [[(0, 512)], [(512, 1024)]]
        >>> [round(x.load(mask).imbalance, 2) for x in (even, parallel.Plan(halves))]
        [1.0, 1.44]
        >>> even.rows
        (((256, 768),), ((0, 256), (768, 1024)))
    """
    for name, value in (("world", world), ("seqlen", seqlen), ("max_ranges", max_ranges)):
        if isinstance(value, bool) or not isinstance(value, INTS):
            raise TypeError(f"{name}={value!r} is not an int")
        if value < 1:
            raise ValueError(f"{name}={value} is less than 1")
    step = BLOCK * world
    if seqlen % step:
        raise ValueError(
            f"seqlen={seqlen} is no multiple of {BLOCK} * world = {step}: pad the sequence to "
            f"{-(-seqlen // step) * step} tokens"
        )
    layers: list[Any] = list(masks) if isinstance(masks, (list, tuple)) else [masks]
    if not layers:
        raise ValueError("masks is empty")
    for mask in layers:
        check_plan_mask("masks", mask, seqlen)
    counted = [visited_blocks(mask, seqlen) for mask in layers]
    cost = torch.stack([x.cost for x in counted]).sum(0)
    seen = torch.stack([x.seen for x in counted]).any(0)
    of_rank = seqlen // step
    best: _Assignment | None = None
    chunks = 1
    while chunks <= min(max_ranges, of_rank):
        found = _swapped(cost, seen, world, chunks)
        if best is None or found.imbalance < best.imbalance:
            best = found
        if best.imbalance <= _EVEN:
            break
        chunks = min(2 * chunks, max(chunks + 1, min(max_ranges, of_rank)))
    assert best is not None
    return Plan(tuple(_joined(starts) for starts in best.blocks))


class VisitedBlocks(NamedTuple):
    """The tiles that kernels visit, on the CPU. cost: how many, float64 (row blocks,), summed over
    the batch and averaged over heads. seen: bool (row blocks, key blocks), in any entry or head."""

    cost: Tensor
    seen: Tensor


def visited_blocks(
    mask: ColumnMask | None, seqlen: int, causal: bool = False, window: Window = NO_WINDOW
) -> VisitedBlocks:
    """Of self-attention over seqlen tokens."""
    blocks = -(-seqlen // BLOCK)
    first_row = torch.arange(blocks, device="cpu") * BLOCK
    end_row = (first_row + BLOCK).clamp(max=seqlen)
    first_key, end_key = first_row, end_row
    hidden = torch.zeros((blocks, blocks), dtype=torch.bool, device="cpu")
    if causal or (mask is not None and mask.causal):
        hidden |= first_key >= end_row[:, None]
    left, right = window
    if left is not None:
        hidden |= end_key - 1 < first_row[:, None] - left
    if right is not None:
        hidden |= first_key > end_row[:, None] - 1 + right
    if mask is None:
        return VisitedBlocks((~hidden).sum(1).double(), ~hidden)
    intervals = Intervals(mask.num_vectors, mask.causal)
    bounds = mask.bounds(BLOCK).cpu()
    cost = torch.zeros(blocks, dtype=torch.float64, device="cpu")
    seen = torch.zeros_like(hidden)
    for of_batch in bounds:
        for values in of_batch:
            is_hidden, _ = intervals.classify(
                [x[None] for x in values.long()], first_row[:, None], end_row[:, None], seqlen
            )
            is_visited = ~(hidden | is_hidden)
            cost += is_visited.sum(1) / len(of_batch)
            seen |= is_visited
    return VisitedBlocks(cost, seen)


def check_plan_mask(name: str, mask: object, seqlen: int) -> None:
    """Raise NotImplementedError for a mask_mod, and TypeError or ValueError for what is no mask of
    self-attention over seqlen tokens."""
    if mask is None:
        return
    if not isinstance(mask, ColumnMask):
        if callable(mask):
            raise NotImplementedError(
                f"{name} is a mask_mod, {getattr(mask, '__name__', mask)!r}: rows and keys of a "
                "rank have other numbers, so only a ColumnMask or None is supported"
            )
        raise TypeError(f"{name} is a {type(mask).__name__}, not a ColumnMask or None")
    rows, keys = mask.seqlen_q, mask.startend_row_indices.shape[2]
    if keys != seqlen or (isinstance(rows, INTS) and rows != seqlen):
        raise ValueError(
            f"{name} was made for {mask.extents}, and the sequence has {seqlen} tokens"
        )


def _check_num_rows(name: str, x: object, rows: int, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, not a tensor")
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != rows:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, not {rows} rows in dim={dim}")


def _checked_rows(rows: Any) -> tuple[Ranges, ...]:
    if not isinstance(rows, (list, tuple)) or not all(isinstance(x, (list, tuple)) for x in rows):
        raise TypeError(f"rows={rows!r} is not a list of ranges for each rank")
    if not rows:
        raise ValueError("rows has no ranks")
    checked: list[Ranges] = []
    for rank, ranges in enumerate(rows):
        end = 0
        for pair in ranges:
            is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
            if not is_pair or any(isinstance(x, bool) or not isinstance(x, INTS) for x in pair):
                raise TypeError(f"rows[{rank}] has {pair!r}, which is not (begin, end)")
            if not end <= pair[0] < pair[1]:
                raise ValueError(
                    f"rows[{rank}] has {tuple(pair)}, which is empty or not after the range before"
                )
            end = pair[1]
        checked.append(tuple((int(begin), int(end)) for begin, end in ranges))
    counts = [sum(end - begin for begin, end in ranges) for ranges in checked]
    if len(set(counts)) > 1:
        raise ValueError(f"ranks hold {counts} rows, not equally many")
    at = 0
    for begin, end in sorted(pair for ranges in checked for pair in ranges):
        if begin != at:
            what = f"row {at} is in no range" if begin > at else f"row {begin} is in two ranges"
            raise ValueError(f"{what} of rows={tuple(checked)}")
        at = end
    return tuple(checked)


class _Assignment(NamedTuple):
    """The chunks of each rank as ranges of blocks, and the most work of a rank over the mean."""

    blocks: tuple[Ranges, ...]
    imbalance: float


def _swapped(cost: Tensor, seen: Tensor, world: int, chunks: int) -> _Assignment:
    """`chunks` chunks for each rank, which begin as one range and are then swapped."""
    of_rank = len(cost) // world
    # chunk i has as many blocks in all ranks, and is swapped for a chunk of as many only
    cuts = [i * of_rank // chunks for i in range(chunks + 1)]
    spans = torch.tensor(
        [
            [(r * of_rank + a, r * of_rank + b) for a, b in zip(cuts, cuts[1:], strict=False)]
            for r in range(world)
        ],
        device="cpu",
    )
    sums = torch.cat((cost.new_zeros(1), cost.cumsum(0)))
    work = sums[spans[..., 1]] - sums[spans[..., 0]]
    sizes = spans[..., 1] - spans[..., 0]
    # the key blocks that each chunk sees, and those that it has
    is_own = torch.zeros((world, chunks, len(cost)), dtype=torch.bool, device="cpu")
    is_seen = torch.zeros_like(is_own)
    for r, i in product(range(world), range(chunks)):
        span = slice(*spans[r, i].tolist())
        is_own[r, i, span] = True
        is_seen[r, i] = seen[span].any(0)
    for _ in range(world * chunks * 4):
        load = work.sum(1)
        slowest = int(load.argmax())
        # of giving chunk i of the slowest rank for chunk j of rank r: (i, r, j)
        gain = work[slowest][:, None, None] - work[None]
        new_most = torch.maximum(load[slowest] - gain, load[None, :, None] + gain)
        is_allowed = sizes[slowest][:, None, None] == sizes[None]
        is_allowed[:, slowest] = False
        new_most = new_most.masked_fill(~is_allowed, torch.inf)
        least = new_most.min()
        if not least < load[slowest] * (1 - 1e-9):
            break
        # of swaps that gain half as much as the best one, that after which fewest keys travel
        enough = (load[slowest] + least) / 2
        order = new_most.flatten().topk(min(_MOST_COMPARED, new_most.numel()), largest=False)
        likely = torch.unravel_index(order.indices[order.values <= enough], new_most.shape)
        places = zip(*(x.tolist() for x in likely), strict=True)
        i, r, j = min(places, key=lambda x: _travelling(is_seen, is_own, slowest, *x))
        for table in (spans, work, is_own, is_seen):
            mine = table[slowest, i].clone()
            table[slowest, i] = table[r, j]
            table[r, j] = mine
    mean = float(work.sum()) / world
    imbalance = float(work.sum(1).max()) / mean if mean else 1.0
    ranges = tuple(tuple((int(a), int(b)) for a, b in of_rank) for of_rank in spans.tolist())
    return _Assignment(ranges, imbalance)


def _travelling(is_seen: Tensor, is_own: Tensor, slowest: int, i: int, r: int, j: int) -> int:
    """The key blocks that two ranks need of others after a swap of their chunks."""
    total = 0
    for rank, given, other, taken in ((slowest, i, r, j), (r, j, slowest, i)):
        kept = [x for x in range(is_seen.shape[1]) if x != given]
        needed = is_seen[rank, kept].any(0) | is_seen[other, taken]
        own = is_own[rank, kept].any(0) | is_own[other, taken]
        total += int((needed & ~own).sum())
    return total


def _joined(blocks: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges of blocks as ranges of rows; neighbors are one range."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(blocks):
        if joined and joined[-1][1] == begin * BLOCK:
            joined[-1] = (joined[-1][0], end * BLOCK)
        else:
            joined.append((begin * BLOCK, end * BLOCK))
    return tuple(joined)
