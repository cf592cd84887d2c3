"""The tiles of attention on CPU tensors: the tiles that a kernel visits, and the scores that count.

The walk is the kernel's own: `BlockInfo`, the classification of column intervals by their smallest
and largest values, and the block lists. Tiles that these leave out are not computed here either,
and a mask is not applied to tiles that it is said not to cut. So a wrong walk or a wrong
classification gives a wrong result without a GPU.
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
    BlockSparseTensorsTorch,
    ceil_div,
    dense_states,
    retile_lists,
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


class TileRow(NamedTuple):
    """Some key tiles of a query tile: n_blocks, int64, and the keys [starts, ends) of each.
    queries: those of the call that rows of the query tile touch. q_start: as in `Tile`."""

    m_block: int
    queries: range
    n_blocks: Tensor
    starts: Tensor
    ends: Tensor
    q_start: int

    def any_of(self, is_set: Tensor, block: int) -> Tensor:
        """Whether one of the key blocks that a tile touches has its flag set: bool (heads, tiles)
        of flags (heads, blocks of `block` keys)."""
        counts = torch.nn.functional.pad(is_set.long().cumsum(-1), (1, 0))
        last = is_set.shape[-1]
        first, end = self.starts // block, (self.ends + block - 1) // block
        return counts[:, end.clamp(max=last)] > counts[:, first.clamp(max=last)]


class _Mask(Protocol):
    """A mask of one batch entry, by tile and by score, for each query head or one for all."""

    def classify(self, row: TileRow) -> tuple[Tensor, Tensor]:
        """(hidden, cut), bool (heads | 1, tiles | 1): whether it hides a tile, or part of it."""

    def visible(self, tile: Tile, heads: Tensor) -> Tensor:
        """Bool (heads | 1, queries, keys), valid for the heads of `heads`, bool (heads_q,)."""


@dataclass(frozen=True)
class TileClasses:
    """What masks do to the tiles of one batch entry."""

    block_info: BlockInfo
    seqlen_info: SeqlenInfoQK
    masks: Sequence[_Mask]
    heads_q: int

    def classify(self, m_block: int, n_blocks: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The verdicts of each mask on key tiles of a query tile, as `_Mask.classify`."""
        info, used = self.block_info, self.seqlen_info
        starts = n_blocks * info.tile_n
        ends = (starts + info.tile_n).clamp(max=used.seqlen_k)
        queries = range(*info.query_range(used, m_block))
        row = TileRow(m_block, queries, n_blocks, starts, ends, used.q_start or 0)
        return [mask.classify(row) for mask in self.masks]

    def classes(self, m_block: int) -> tuple[int, Tensor]:
        """What a kernel does with the key tiles of a query tile that it may visit: the first one,
        and of each EMPTY (skipped), PARTIAL (masked) or FULL, int64 (heads_q, tiles).

        A kernel judges by the bounds of key blocks, which may err on the side of more work.
        """
        first, end = self.block_info.get_n_block_min_max(self.seqlen_info, m_block)
        n_blocks = torch.arange(first, end, device="cpu")
        verdicts = self.classify(m_block, n_blocks)
        found = torch.full((self.heads_q, len(n_blocks)), int(FULL), device="cpu")
        for _, is_cut in verdicts:
            found.masked_fill_(is_cut, PARTIAL)
        for is_hidden, _ in verdicts:
            found.masked_fill_(is_hidden, EMPTY)
        return first, found


@dataclass(frozen=True)
class SequenceWalk(TileClasses):
    """The tiles of one batch entry: their order, their scores, and which scores count.

    slot_*: index of the used tokens in a tensor of q's or k's layout. Rows of a head group are laid
    out as (heads_kv, lanes, rows), see `to_rows`.
    """

    batch_idx: int
    softmax_scale: float
    softcap: float
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
            verdicts = self.classify(tile.m_block, torch.tensor([tile.n_block], device="cpu"))
            for i, (hidden, cut) in enumerate(verdicts):
                heads, cuts[i] = heads & ~hidden[:, 0], cut[:, 0]
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
    column_mask = masks.column_mask
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
    by_entry = of.cu_seqlens_q, of.cu_seqlens_k, of.seqused_q, of.seqused_k
    *lengths, causal_per_seq = (
        None if y is None else y.tolist() for y in (*by_entry, x.optional.causal_per_seq)
    )
    lists_and_mod = None
    if masks.block_lists is not None or masks.mask_mod is not None:
        lists_and_mod = _ListsAndMod.create(call)
    batch = x.q.shape[0] if of.cu_seqlens_q is None else of.cu_seqlens_q.numel() - 1
    heads_q, heads_kv = x.q.shape[-2], x.k.shape[-2]
    for batch_idx in range(batch):
        seqlen_info = SeqlenInfoQK.create(batch_idx, call.seqlen_q, call.seqlen_k, *lengths)
        start = call.q_start.of_sequence(of.q_starts, batch_idx, seqlen_info)
        right = side_of_sequence(window_right, causal_per_seq, batch_idx)
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
        if lists_and_mod is not None:
            of_entry.append(lists_and_mod.of_entry(batch_idx))
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


def classes_of_columns(mask: ColumnMask, seqlen_q: int, tile_m: int, tile_n: int) -> Tensor:
    """EMPTY, PARTIAL or FULL, as `SequenceWalk.classes`, for each tile of a mask on the CPU, of its
    first batch entry and head: int64 (ceil(seqlen_q / tile_m), ceil(seqlen_k / tile_n))."""
    _, heads, seqlen_k, _ = mask.startend_row_indices.shape
    block_info = BlockInfo(tile_m, tile_n, is_causal=mask.causal)
    used = SeqlenInfoQK.create(0, seqlen_q, seqlen_k)
    bounds = mask.bounds(tile_n)
    columns = _ColumnIntervals.create(mask, bounds, 0, used, tile_n, heads)
    walk = TileClasses(block_info, used, (_BandMask(block_info, used), columns), heads)
    tiles = ceil_div(seqlen_q, tile_m), ceil_div(seqlen_k, tile_n)
    classes = torch.full(tiles, int(EMPTY), device="cpu")
    for m_block, row in enumerate(classes):
        first, found = walk.classes(m_block)
        row[first : first + found.shape[1]] = found[0]
    return classes


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
        q_idx = _positions(range(first, first + len(of_rows)), tile.q_start)
        yield HeadInTile(head_idx, lane, rows, q_idx, k_idx)


@dataclass(frozen=True)
class _BandMask:
    """Causal and window. The walk's range already excludes the tiles that they hide."""

    block_info: BlockInfo
    seqlen_info: SeqlenInfoQK

    def classify(self, row: TileRow) -> tuple[Tensor, Tensor]:
        info, seqlen = self.block_info, self.seqlen_info
        cut = row.n_blocks >= info.get_n_block_min_causal_local_mask(seqlen, row.m_block, 0)
        if info.window_size_left is not None:
            cut |= row.n_blocks < info.get_n_block_min_before_local_mask(seqlen, row.m_block, 0)
        return _every(False), cut[None]

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

    def classify(self, row: TileRow) -> tuple[Tensor, Tensor]:
        bounds = self.bounds[..., row.n_blocks].unbind(1)
        return self.intervals.classify(bounds, row.queries.start, row.queries.stop, self.seqlen_q)

    def visible(self, tile: Tile, heads: Tensor) -> Tensor:
        q_idx = _int32(tile.queries)[:, None]
        columns = self.columns[:, None, tile.keys.start : tile.keys.stop].unbind(-1)
        visible = torch.ones((1, 1, 1), dtype=torch.bool, device="cpu")
        for start, end in self.intervals.hidden_rows(columns, self.seqlen_q):
            visible = visible & ((q_idx < start) | (q_idx >= end))
        return visible


class _Blocks(NamedTuple):
    """States (heads | 1, num_q_blocks, num_k_blocks), in blocks of size scores, or of a batch."""

    states: Tensor
    size: tuple[int, int]

    @staticmethod
    def create(lists: BlockSparseTensorsTorch) -> _Blocks:
        assert lists.block_size is not None
        return _Blocks(dense_states(lists), lists.block_size)

    def of_entry(self, batch_idx: int) -> _Blocks:
        return _Blocks(_of_batch(self.states, batch_idx), self.size)

    def q_blocks(self, q_idx: Tensor) -> Tensor:
        """Query blocks of positions; positions after the lists are in the last block."""
        return (q_idx // self.size[0]).clamp(max=self.states.shape[1] - 1)


@dataclass(frozen=True)
class _ListsAndMod:
    """Block lists and mask_mod, at least one of them; together they define what a block shows.

    blocks: those of the lists, None: all are partial. walked: those by which a walk judges tiles.
    cuts_partial: a partial block is masked even if no mask_mod decides about it.
    """

    blocks: _Blocks | None
    walked: _Blocks | None
    cuts_partial: bool
    mask_mod: Callable[..., Any] | None
    aux_tensors: Sequence[Tensor] | None
    batch_idx: int = 0

    @staticmethod
    def create(call: CpuCall) -> _ListsAndMod:
        """Of all batch entries. As in a kernel, lists whose blocks are not made of whole tiles are
        walked as lists of tiles, and with a q_start as bits of the blocks."""
        lists, mods = call.masks.block_lists, (call.masks.mask_mod, call.masks.aux_tensors)
        if lists is None:
            return _ListsAndMod(None, None, True, *mods)
        blocks = walked = _Blocks.create(lists)
        cuts_partial = call.masks.mask_mod is not None or call.q_start.is_given
        if not call.q_start.is_given:
            tile = call.tiles.tile_m, call.tiles.tile_n
            retiled = retile_lists(lists, *tile, call.seqlen_q, call.seqlen_k)
            if retiled.bits is not None:
                walked, cuts_partial = _Blocks.create(retiled.lists), True
        return _ListsAndMod(blocks, walked, cuts_partial, *mods)

    def of_entry(self, batch_idx: int) -> _ListsAndMod:
        blocks, walked = (
            None if x is None else x.of_entry(batch_idx) for x in (self.blocks, self.walked)
        )
        return replace(self, blocks=blocks, walked=walked, batch_idx=batch_idx)

    def classify(self, row: TileRow) -> tuple[Tensor, Tensor]:
        if self.walked is None:
            return _every(False), _every(True)
        block_k = self.walked.size[1]
        positions = _positions(row.queries, row.q_start)
        states = self.walked.states[:, self.walked.q_blocks(positions).unique()]
        cutting = states != FULL if self.cuts_partial else states == EMPTY
        is_listed = row.any_of((states != EMPTY).any(1), block_k)
        return ~is_listed, row.any_of(cutting.any(1), block_k)

    def visible(self, tile: Tile, heads: Tensor) -> Tensor:
        q_idx, k_idx = _positions(tile.queries, tile.q_start), _int32(tile.keys)
        states = torch.full((1, len(q_idx), len(k_idx)), PARTIAL, device="cpu")
        if self.blocks is not None:
            q_blocks = self.blocks.q_blocks(q_idx)[:, None]
            states = self.blocks.states[:, q_blocks, k_idx // self.blocks.size[1]]
        if self.mask_mod is None:
            return states != EMPTY
        visible = (states == FULL).repeat(len(heads) // len(states), 1, 1)
        is_partial = (states == PARTIAL).expand_as(visible)
        for head_idx in heads.nonzero().flatten().tolist():
            visible[head_idx] |= is_partial[head_idx] & eval_mask_mod(
                self.mask_mod, self.aux_tensors, self.batch_idx, head_idx, q_idx, k_idx
            )
        return visible


@dataclass(frozen=True)
class _Choice:
    """The selection of one sequence's queries: indices (heads, queries, k) of blocks of block_size
    keys, whose heads are shared by heads_per_selection query heads each.

    A tile is visited if one of its queries chose a block of it, and not cut if all of them chose
    all its blocks, as kernels find by the union of a tile.
    """

    indices: Tensor
    block_size: int
    heads_per_selection: int

    @staticmethod
    def create(
        selected: SelectedBlocks, batch_idx: int, seqlen_info: SeqlenInfoQK, heads_q: int
    ) -> _Choice:
        indices = _of_batch(selected.by_entry, batch_idx)[:, seqlen_info.offset_q :]
        return _Choice(indices, selected.block_size, heads_q // selected.heads)

    def classify(self, row: TileRow) -> tuple[Tensor, Tensor]:
        num_blocks = ceil_div(int(row.ends.max()) if len(row.ends) else 0, self.block_size)
        chosen = self._of_heads(self._chosen(row.queries, range(num_blocks)))
        is_chosen_by_any = row.any_of(chosen.any(1), self.block_size)
        return ~is_chosen_by_any, row.any_of(~chosen.all(1), self.block_size)

    def visible(self, tile: Tile, heads: Tensor) -> Tensor:
        first = tile.keys.start // self.block_size
        touched = range(first, ceil_div(tile.keys.stop, self.block_size))
        chosen = self._chosen(tile.queries, touched)
        return self._of_heads(chosen[..., _int32(tile.keys) // self.block_size - first])

    def _chosen(self, queries: range, blocks: range) -> Tensor:
        """Bool (heads, queries, blocks)."""
        return is_chosen(self.indices[:, queries.start : queries.stop], blocks.start, blocks.stop)

    def _of_heads(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads_per_selection, dim=0)


def _of_batch(x: Tensor, batch_idx: int) -> Tensor:
    """One batch entry of a tensor that may have a single entry for all."""
    return x[min(batch_idx, x.shape[0] - 1)]


def _every(value: bool) -> Tensor:
    """The same answer for all heads and tiles."""
    return torch.tensor([[value]], device="cpu")


def _positions(queries: range, q_start: int) -> Tensor:
    """Positions of some queries, int32; positions before 0 become 0."""
    return (_int32(queries) + q_start).clamp(min=0)


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
