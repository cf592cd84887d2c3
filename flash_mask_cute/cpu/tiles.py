"""The tiles of attention on CPU tensors: the tiles that a kernel visits, and the scores that count.

The walk is the kernel's own: `BlockInfo`, the classification of column intervals by their smallest
and largest values, and the block lists. Tiles that these leave out are not computed here either,
and a mask is not applied to tiles that it is said not to cut. So a wrong walk or a wrong
classification gives a wrong result without a GPU. A `mask_mod` is the user's own, compiled for the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flash_mask_cute.block_sparsity import (
    EMPTY,
    FULL,
    PARTIAL,
    ceil_div,
    dense_states,
)
from flash_mask_cute.cpu.call import CpuCall
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.masks.selected_blocks import SelectedBlocks, is_chosen
from flash_mask_cute.mods.on_cpu import eval_mask_mod
from flash_mask_cute.rules.band import side_of_sequence
from flash_mask_cute.rules.block_info import BlockInfo
from flash_mask_cute.rules.intervals import Intervals, rows_of_call
from flash_mask_cute.seqlen_info import SeqlenInfoQK

# the score of a key that a query does not see, and the LSE of a query that sees none
NEG_INF = float("-inf")


class Tile(NamedTuple):
    """One score tile, with ranges clipped at the end of the sequence.

    rows: of `pack` interleaved heads. queries: the queries of the call that these rows touch.
    q_start: the position of the first query, as masks and callables count.
    """

    m_block: int
    n_block: int
    rows: range
    queries: range
    keys: range
    pack: int
    q_start: int = 0

    def positions(self, queries: range) -> Tensor:
        """Positions of some queries, int32; positions before 0 become 0."""
        return (_int32(queries) + self.q_start).clamp(min=0)


class _Mask(Protocol):
    """A mask of one batch entry, read by tile and by score.

    Heads are query heads; one entry stands for all of them.
    """

    def classify(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """(hidden, cut), bool (heads | 1,): whether it hides all of the tile, or part of it."""

    def visible(self, tile: Tile, heads: Tensor) -> Tensor:
        """Bool (heads | 1, queries, keys). The values of heads that are not in `heads`, bool
        (heads_q,), are not used."""


@dataclass(frozen=True)
class SequenceWalk:
    """The tiles of one batch entry: their order, their scores, and which scores count.

    slot_*: index of the used tokens in a tensor of q's or k's layout. Rows of a head group are laid
    out as (heads_kv, lanes, rows), see `to_rows`.
    """

    batch_idx: int
    block_info: BlockInfo
    seqlen_info: SeqlenInfoQK
    masks: list[_Mask]
    softmax_scale: float
    softcap: float
    heads_q: int
    heads_kv: int
    slot_q: Any
    slot_k: Any
    skip_blocks: bool

    @property
    def pack(self) -> int:
        return self.block_info.qhead_per_kvhead_packgqa

    @property
    def num_m_blocks(self) -> int:
        return ceil_div(self.seqlen_info.seqlen_q * self.pack, self.block_info.tile_m)

    @property
    def num_n_blocks(self) -> int:
        return ceil_div(self.seqlen_info.seqlen_k, self.block_info.tile_n)

    def n_blocks(self, m_block: int) -> range:
        """The key blocks that a query block visits."""
        if not self.skip_blocks:
            return range(self.num_n_blocks)
        return range(*self.block_info.get_n_block_min_max(self.seqlen_info, m_block))

    def m_blocks(self, n_block: int) -> range:
        """The query blocks that a key block visits."""
        if not self.skip_blocks:
            return range(self.num_m_blocks)
        return range(*self.block_info.get_m_block_min_max(self.seqlen_info, n_block))

    def rows(self, m_block: int) -> slice:
        last = self.seqlen_info.seqlen_q * self.pack
        return _cut_off(m_block, self.block_info.tile_m, last)

    def keys(self, n_block: int) -> slice:
        return _cut_off(n_block, self.block_info.tile_n, self.seqlen_info.seqlen_k)

    def tile(self, m_block: int, n_block: int) -> Tile:
        rows, keys = self.rows(m_block), self.keys(n_block)
        return Tile(
            m_block,
            n_block,
            range(rows.start, rows.stop),
            range(rows.start // self.pack, ceil_div(rows.stop, self.pack)),
            range(keys.start, keys.stop),
            self.pack,
            self.seqlen_info.q_start or 0,
        )

    def rows_of_q(self, x: Tensor) -> Tensor:
        """Rows of a tensor laid out like q, with or without its last mode, as float64."""
        return to_rows(x[self.slot_q].double(), self.heads_kv, self.pack)

    def rows_of_k(self, x: Tensor) -> Tensor:
        """Rows of a tensor laid out like k: float64 (heads_kv, 1, seqlen_k, .)."""
        return to_rows(x[self.slot_k].double(), self.heads_kv, 1)

    def rows_of_sink(self, sink: Tensor | None) -> Tensor | None:
        """One logit per query head, for each row."""
        if sink is None:
            return None
        by_query = sink.double().expand(self.seqlen_info.seqlen_q, -1)
        return to_rows(by_query, self.heads_kv, self.pack)

    def capped_scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores of one tile after scale and softcap."""
        scores = q @ k.mT * self.softmax_scale
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores

    def visible(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """The heads that see anything in a tile, bool (heads_q,), and the scores that they see,
        bool (heads_kv, lanes, rows, keys).

        A mask is evaluated only for heads whose tile it cuts.
        """
        heads = torch.ones(self.heads_q, dtype=torch.bool, device="cpu")
        cuts = [heads for _ in self.masks]
        if self.skip_blocks:
            for i, mask in enumerate(self.masks):
                hidden, cuts[i] = mask.classify(tile)
                heads = heads & ~hidden
        visible = heads[:, None, None]
        for mask, cut in zip(self.masks, cuts, strict=True):
            cut_heads = heads & cut
            if cut_heads.any():
                visible = visible & (mask.visible(tile, cut_heads) | ~cut_heads[:, None, None])
        by_query = visible.expand(-1, len(tile.queries), len(tile.keys)).movedim(1, 0)
        first = tile.rows.start - tile.queries.start * tile.pack
        by_row = to_rows(by_query, self.heads_kv, tile.pack)
        return heads, by_row[:, :, first : first + len(tile.rows)]


def sequence_walks(call: CpuCall) -> Iterator[SequenceWalk]:
    """The walk of each batch entry."""
    x, masks, tiles = call.tensors, call.masks, call.tiles
    column_mask, block_lists, mask_mod = masks.column_mask, masks.block_lists, masks.mask_mod
    tile_n, window_right = tiles.tile_n, call.window_right
    if column_mask is not None and column_mask.causal:
        window_right = 0 if window_right is None else min(window_right, 0)
    block_info = BlockInfo(
        tiles.tile_m,
        tile_n,
        is_local=True,
        window_size_left=call.window_left,
        window_size_right=window_right,
        qhead_per_kvhead_packgqa=tiles.pack_gqa,
    )
    of = x.lengths
    bounds = None if column_mask is None else column_mask.bounds(tile_n, of.cu_seqlens_k)
    states = None if block_lists is None else dense_states(block_lists)
    lengths = [
        None if y is None else y.tolist()
        for y in (of.cu_seqlens_q, of.cu_seqlens_k, of.seqused_q, of.seqused_k)
    ]
    causals = None if x.optional.causals is None else x.optional.causals.tolist()
    batch = x.q.shape[0] if of.cu_seqlens_q is None else of.cu_seqlens_q.numel() - 1
    heads_q, heads_kv = x.q.shape[-2], x.k.shape[-2]
    for batch_idx in range(batch):
        seqlen_info = SeqlenInfoQK.create(batch_idx, call.seqlen_q, call.seqlen_k, *lengths)
        start = call.q_start.of_sequence(of.q_starts, batch_idx, seqlen_info)
        right = side_of_sequence(window_right, causals, batch_idx)
        seqlen_info = replace(seqlen_info, q_start=start, window_right=right)
        of_entry: list[_Mask] = [_BandMask(block_info, seqlen_info)]
        if column_mask is not None and bounds is not None:
            of_entry.append(
                _ColumnIntervals.create(
                    column_mask, bounds, batch_idx, seqlen_info, tile_n, heads_q
                )
            )
        if masks.selected is not None:
            of_entry.append(_Choice.create(masks.selected, batch_idx, seqlen_info, heads_q))
        if block_lists is not None or mask_mod is not None:
            of_entry.append(
                _ListsAndMod(
                    None if states is None else _of_batch(states, batch_idx),
                    None if block_lists is None else block_lists.block_size,
                    mask_mod,
                    masks.aux_tensors,
                    batch_idx,
                )
            )
        yield SequenceWalk(
            batch_idx=batch_idx,
            block_info=block_info,
            seqlen_info=seqlen_info,
            masks=of_entry,
            softmax_scale=call.softmax_scale,
            softcap=call.softcap,
            heads_q=heads_q,
            heads_kv=heads_kv,
            slot_q=_slot(batch_idx, seqlen_info.offset_q, seqlen_info.seqlen_q, of.cu_seqlens_q),
            slot_k=_slot(
                min(batch_idx, x.k.shape[0] - 1),
                seqlen_info.offset_k,
                seqlen_info.seqlen_k,
                of.cu_seqlens_k,
            ),
            skip_blocks=tiles.skip_blocks,
        )


class HeadInTile(NamedTuple):
    """The place of one query head's scores in a tile, and their positions, int32."""

    head_idx: int
    lane: int
    rows: slice
    q_idx: Tensor
    k_idx: Tensor

    def part(self, scores: Tensor) -> Tensor:
        """View (queries, keys) of the scores (heads_kv, lanes, rows, keys) of the tile."""
        heads_kv_idx, lane = divmod(self.lane, scores.shape[1])
        return scores[heads_kv_idx, lane, self.rows]


def heads_in_tile(tile: Tile, heads: Tensor) -> Iterator[HeadInTile]:
    """The `HeadInTile` of each query head in `heads`, bool (heads_q,)."""
    k_idx = _int32(tile.keys)
    for head_idx in heads.nonzero().flatten().tolist():
        lane, head_in_lane = divmod(head_idx, tile.pack)
        rows = slice((head_in_lane - tile.rows.start) % tile.pack, None, tile.pack)
        of_rows = tile.rows[rows]
        first = of_rows.start // tile.pack
        q_idx = tile.positions(range(first, first + len(of_rows)))
        yield HeadInTile(head_idx, lane, rows, q_idx, k_idx)


@dataclass(frozen=True)
class _BandMask:
    """Causal and window. The walk's range already excludes the tiles that they hide."""

    block_info: BlockInfo
    seqlen_info: SeqlenInfoQK

    def classify(self, tile: Tile) -> tuple[Tensor, Tensor]:
        info, seqlen = self.block_info, self.seqlen_info
        cut = tile.n_block >= info.get_n_block_min_causal_local_mask(seqlen, tile.m_block, 0)
        if info.window_size_left is not None:
            cut |= tile.n_block < info.get_n_block_min_before_local_mask(seqlen, tile.m_block, 0)
        return torch.tensor([False], device="cpu"), torch.tensor([cut], device="cpu")

    def visible(self, tile: Tile, heads: Tensor) -> Tensor:
        k_idx = _int32(tile.keys)
        lo, hi = self.block_info.band(self.seqlen_info).k_range(_int32(tile.queries)[:, None])
        return ((lo <= k_idx) & (k_idx < hi))[None]


@dataclass(frozen=True)
class _ColumnIntervals:
    """columns (heads_q, seqlen_k, n), bounds (heads_q, 2n, blocks) of one sequence."""

    intervals: Intervals
    columns: Tensor
    bounds: Tensor
    seqlen_q: int

    @staticmethod
    def create(
        mask: ColumnMask,
        bounds: Tensor,
        batch_idx: int,
        seqlen_info: SeqlenInfoQK,
        tile_n: int,
        heads_q: int,
    ) -> _ColumnIntervals:
        columns = _of_batch(mask.startend_row_indices, batch_idx)
        bounds = _of_batch(bounds, batch_idx)
        if seqlen_info.has_cu_seqlens_k:
            columns = columns[:, seqlen_info.offset_k :]
            bounds = bounds[..., seqlen_info.offset_k // tile_n + batch_idx :]
        columns, bounds = rows_of_call((columns, bounds), seqlen_info.q_start, seqlen_info.seqlen_q)
        return _ColumnIntervals(
            Intervals(mask.num_vectors, mask.causal),
            columns.repeat_interleave(heads_q // columns.shape[0], dim=0),
            bounds.repeat_interleave(heads_q // columns.shape[0], dim=0),
            seqlen_info.seqlen_q,
        )

    def classify(self, tile: Tile) -> tuple[Tensor, Tensor]:
        bounds = self.bounds[..., tile.n_block].unbind(-1)
        return self.intervals.classify(bounds, tile.queries.start, tile.queries.stop, self.seqlen_q)

    def visible(self, tile: Tile, heads: Tensor) -> Tensor:
        q_idx = _int32(tile.queries)[:, None]
        columns = self.columns[:, None, tile.keys.start : tile.keys.stop].unbind(-1)
        visible = torch.ones((1, 1, 1), dtype=torch.bool, device="cpu")
        for start, end in self.intervals.hidden_rows(columns, self.seqlen_q):
            visible = visible & ((q_idx < start) | (q_idx >= end))
        return visible


@dataclass(frozen=True)
class _ListsAndMod:
    """Block lists and mask_mod, at least one of them; together they define what a block shows.

    states (heads | 1, num_q_blocks, num_k_blocks) is that of `dense_states` for one batch entry, in
    blocks of block_size scores; None: all are partial.
    """

    states: Tensor | None
    block_size: tuple[int, int] | None
    mask_mod: Callable[..., Any] | None
    aux_tensors: Sequence[Tensor] | None
    batch_idx: int

    def classify(self, tile: Tile) -> tuple[Tensor, Tensor]:
        if self.states is None or self.block_size is None:
            return torch.tensor([False], device="cpu"), torch.tensor([True], device="cpu")
        block_k = self.block_size[1]
        q_blocks = self._q_blocks(tile.positions(tile.queries)).unique()
        k_blocks = slice(tile.keys.start // block_k, ceil_div(tile.keys.stop, block_k))
        states = self.states[:, q_blocks, k_blocks].flatten(1)
        cutting = states == EMPTY if self.mask_mod is None else states != FULL
        return (states == EMPTY).all(dim=1), cutting.any(dim=1)

    def visible(self, tile: Tile, heads: Tensor) -> Tensor:
        q_idx, k_idx = tile.positions(tile.queries), _int32(tile.keys)
        states = torch.full((1, len(q_idx), len(k_idx)), PARTIAL, device="cpu")
        if self.states is not None and self.block_size is not None:
            k_block = k_idx // self.block_size[1]
            states = self.states[:, self._q_blocks(q_idx)[:, None], k_block]
        if self.mask_mod is None:
            return states != EMPTY
        visible = (states == FULL).repeat(len(heads) // len(states), 1, 1)
        is_partial = (states == PARTIAL).expand_as(visible)
        for head_idx in heads.nonzero().flatten().tolist():
            visible[head_idx] |= is_partial[head_idx] & eval_mask_mod(
                self.mask_mod, self.aux_tensors, self.batch_idx, head_idx, q_idx, k_idx
            )
        return visible

    def _q_blocks(self, q_idx: Tensor) -> Tensor:
        """Query blocks of positions; positions behind the lists are in the last block."""
        assert self.states is not None and self.block_size is not None
        return (q_idx // self.block_size[0]).clamp(max=self.states.shape[1] - 1)


@dataclass(frozen=True)
class _Choice:
    """The choice of one sequence's queries: indices (heads, queries, k) of blocks of block_size
    keys, whose heads are shared by heads_per_choice query heads each.

    A tile is visited if one of its queries chose a block of it, and not cut if all of them chose
    all its blocks, as kernels find by the union of a tile.
    """

    indices: Tensor
    block_size: int
    heads_per_choice: int

    @staticmethod
    def create(
        selected: SelectedBlocks, batch_idx: int, seqlen_info: SeqlenInfoQK, heads_q: int
    ) -> _Choice:
        indices = _of_batch(selected.by_entry, batch_idx)[:, seqlen_info.offset_q :]
        return _Choice(indices, selected.block_size, heads_q // selected.heads)

    def classify(self, tile: Tile) -> tuple[Tensor, Tensor]:
        chosen = self._of_heads(self._chosen(tile)).flatten(1)
        return ~chosen.any(1), ~chosen.all(1)

    def visible(self, tile: Tile, heads: Tensor) -> Tensor:
        place = _int32(tile.keys) // self.block_size - tile.keys.start // self.block_size
        return self._of_heads(self._chosen(tile)[..., place])

    def _chosen(self, tile: Tile) -> Tensor:
        """Bool (heads, queries, blocks that the tile touches)."""
        blocks = tile.keys.start // self.block_size, ceil_div(tile.keys.stop, self.block_size)
        return is_chosen(self.indices[:, tile.queries.start : tile.queries.stop], *blocks)

    def _of_heads(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads_per_choice, dim=0)


def _of_batch(x: Tensor, batch_idx: int) -> Tensor:
    """One batch entry of a tensor that may have a single entry for all."""
    return x[min(batch_idx, x.shape[0] - 1)]


def _int32(positions: range) -> Tensor:
    return torch.arange(
        positions.start, positions.stop, positions.step, dtype=torch.int32, device="cpu"
    )


def _cut_off(block: int, size: int, end: int) -> slice:
    return slice(block * size, min((block + 1) * size, end))


def _slot(batch_idx: int, offset: int, length: int, cu_seqlens: Tensor | None) -> Any:
    """Index of the used tokens of a batch entry in a tensor of either layout."""
    return (batch_idx, slice(length)) if cu_seqlens is None else slice(offset, offset + length)


def to_rows(x: Tensor, heads_kv: int, pack: int) -> Tensor:
    """(seqlen, heads, ...) to (heads_kv, lanes, rows, ...): heads of a KV head are interleaved as
    rows, `pack` at a time; each such set of heads is a lane."""
    lanes = x.shape[1] // (heads_kv * pack)
    by_head = x.reshape(x.shape[0], heads_kv, lanes, pack, *x.shape[2:])
    return by_head.movedim(0, 2).flatten(2, 3)


def from_rows(x: Tensor, pack: int) -> Tensor:
    """The inverse of `to_rows`."""
    by_head = x.unflatten(2, (x.shape[2] // pack, pack))
    return by_head.movedim(2, 0).flatten(1, 3)
