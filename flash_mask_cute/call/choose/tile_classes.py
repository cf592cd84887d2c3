"""The key tiles of a call that are skipped, masked or left unmasked: a kernel's verdicts, on the
host.

`explain` counts them, and `plot` colours and counts those of a `ColumnMask`. A kernel decides by
the bounds of key blocks, which may err on the side of more work. So the verdicts can differ from
those by single scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_mask_cute.block_sparsity import (
    EMPTY,
    FULL,
    PARTIAL,
    BlockSparseTensorsTorch,
    dense_states,
    retile_lists,
)
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.masks.selected_blocks import SelectedBlocks, is_chosen
from flash_mask_cute.rules.block_info import BlockInfo
from flash_mask_cute.rules.intervals import Intervals, rows_of_call
from flash_mask_cute.seqlen_info import SeqlenInfoQK


@dataclass(frozen=True)
class ColumnVerdicts:
    """Column intervals, read by tile: bounds (batch | 1, heads_mask, 2 n, blocks)."""

    mask: ColumnMask
    bounds: Tensor
    block_info: BlockInfo

    def classify(
        self, batch_idx: int, seqlen: SeqlenInfoQK, m_block: int, n_blocks: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(hidden, cut), bool (heads_mask, n_blocks)."""
        bounds = self.bounds[min(batch_idx, self.bounds.shape[0] - 1)]
        first = 0
        if seqlen.has_cu_seqlens_k:
            first = seqlen.offset_k // self.block_info.tile_n + batch_idx
        return Intervals(self.mask.num_vectors, self.mask.causal).classify(
            rows_of_call(bounds[..., first + n_blocks].unbind(1), seqlen.q_start, seqlen.seqlen_q),
            *self.block_info.query_range(seqlen, m_block),
            seqlen.seqlen_q,
        )


@dataclass(frozen=True)
class ListVerdicts:
    """Block lists, read by tile: states (batch | 1, heads_q | 1, m_blocks, n_blocks).

    needs_mask_mod: whether a mask_mod decides about the scores of a tile that is not full.
    """

    states: Tensor
    needs_mask_mod: bool

    @staticmethod
    def create(
        block_lists: BlockSparseTensorsTorch,
        has_mod: bool,
        tile: tuple[int, int],
        seqlens: tuple[int, int],
    ) -> ListVerdicts:
        """block_lists: with their block size. tile, seqlens: (queries, keys)."""
        lists, bits = retile_lists(block_lists, *tile, *seqlens)
        states = dense_states(lists)
        if bits is None and lists.block_size is not None:
            states = states.repeat_interleave(lists.block_size[0] // tile[0], 2)
            states = states.repeat_interleave(lists.block_size[1] // tile[1], 3)
        return ListVerdicts(states, bits is not None or has_mod)

    def classify(
        self, batch_idx: int, seqlen: SeqlenInfoQK, m_block: int, n_blocks: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(hidden, cut), bool (heads_q | 1, n_blocks)."""
        # the slot of a sequence may have more rows than the lists
        m_block = min(m_block, self.states.shape[2] - 1)
        states = self.states[min(batch_idx, self.states.shape[0] - 1), :, m_block, n_blocks]
        return states == EMPTY, (states != FULL) & self.needs_mask_mod


@dataclass(frozen=True)
class PlacedLists:
    """Block lists, read by position, for calls with a q_start: states (batch | 1, heads_q | 1,
    q_blocks, k_blocks) of blocks of block_size."""

    states: Tensor
    block_size: tuple[int, int]
    needs_mask_mod: bool
    block_info: BlockInfo

    def classify(
        self, batch_idx: int, seqlen: SeqlenInfoQK, m_block: int, n_blocks: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(hidden, cut), bool (heads_q | 1, n_blocks)."""
        block_q, block_k = self.block_size
        states = self.states[min(batch_idx, self.states.shape[0] - 1)]
        rows = torch.arange(*self.block_info.query_range(seqlen, m_block), device="cpu")
        q_blocks = ((rows + seqlen.shift) // block_q).clamp(0, states.shape[1] - 1).unique()
        first = n_blocks * self.block_info.tile_n
        end = (first + self.block_info.tile_n).clamp(max=seqlen.seqlen_k)
        verdicts = [
            (
                of_tile == EMPTY,
                (of_tile != (FULL if self.needs_mask_mod else of_tile)) | (of_tile == EMPTY),
            )
            for a, b in zip(first.tolist(), end.tolist(), strict=True)
            for of_tile in [states[:, q_blocks, a // block_k : -(-b // block_k)].flatten(1)]
        ]
        if not verdicts:
            nothing = torch.empty((states.shape[0], 0), dtype=torch.bool, device="cpu")
            return nothing, nothing
        hidden = torch.stack([absent.all(dim=1) for absent, _ in verdicts], dim=1)
        return hidden, torch.stack([cut.any(dim=1) for _, cut in verdicts], dim=1)


@dataclass(frozen=True)
class ChoiceVerdicts:
    """The blocks that each query chose, read by tile."""

    selected: SelectedBlocks
    block_info: BlockInfo

    def classify(
        self, batch_idx: int, seqlen: SeqlenInfoQK, m_block: int, n_blocks: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(hidden, cut), bool (heads of the choice, n_blocks)."""
        by_entry, block_k = self.selected.by_entry, self.selected.block_size
        first, end = self.block_info.query_range(seqlen, m_block)
        rows = by_entry[min(batch_idx, len(by_entry) - 1), :, : seqlen.offset_q + seqlen.seqlen_q]
        rows = rows[:, seqlen.offset_q + first : seqlen.offset_q + end]
        chosen = is_chosen(rows, 0, self.selected.num_blocks(seqlen.seqlen_k))
        starts = n_blocks * self.block_info.tile_n
        ends = (starts + self.block_info.tile_n).clamp(max=seqlen.seqlen_k)
        # how many of the first blocks any, or every, query chose
        counts = (torch.nn.functional.pad(x.long().cumsum(-1), (1, 0)) for x in _both(chosen))
        first_k, end_k = starts // block_k, -(-ends // block_k)
        of_any, of_every = (count[:, end_k] - count[:, first_k] for count in counts)
        return of_any == 0, of_every != end_k - first_k


def _both(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """What any and what every row of (heads, rows, blocks) has."""
    return chosen.any(1), chosen.all(1)


Verdicts: TypeAlias = ColumnVerdicts | ListVerdicts | PlacedLists | ChoiceVerdicts


class RowOfTiles(NamedTuple):
    """The key tiles that a query tile might visit, from `first` on: bool (heads, tiles)."""

    first: int
    is_visible: Tensor
    is_cut: Tensor


def judge_row(
    block_info: BlockInfo,
    verdicts: Sequence[Verdicts],
    needs_mask_mod: bool,
    heads: int,
    batch_idx: int,
    seqlen: SeqlenInfoQK,
    m_block: int,
) -> RowOfTiles:
    """needs_mask_mod: whether a mask_mod is evaluated for every tile."""
    first, end = block_info.get_n_block_min_max(seqlen, m_block)
    n_blocks = torch.arange(first, end, device="cpu")
    is_cut = n_blocks >= block_info.get_n_block_min_causal_local_mask(seqlen, m_block, 0)
    if block_info.window_size_left is not None:
        is_cut |= n_blocks < block_info.get_n_block_min_before_local_mask(seqlen, m_block, 0)
    is_cut = (is_cut | needs_mask_mod).repeat(heads, 1)
    is_visible = torch.ones_like(is_cut)
    for verdict in verdicts:
        hidden, cuts = (
            x.repeat_interleave(heads // len(x), dim=0)
            for x in verdict.classify(batch_idx, seqlen, m_block, n_blocks)
        )
        is_visible &= ~hidden
        is_cut = is_cut | cuts
    return RowOfTiles(first, is_visible, is_cut)


def classes_of_columns(mask: ColumnMask, seqlen_q: int, tile_m: int, tile_n: int) -> Tensor:
    """EMPTY (skipped), PARTIAL (masked) or FULL for each tile of a mask on the CPU, of its first
    batch entry and head: int64 (ceil(seqlen_q / tile_m), ceil(seqlen_k / tile_n))."""
    seqlen_k = mask.startend_row_indices.shape[2]
    block_info = BlockInfo(tile_m, tile_n, is_causal=mask.causal)
    verdicts = [ColumnVerdicts(mask, mask.bounds(tile_n), block_info)]
    seqlen = SeqlenInfoQK.create(0, seqlen_q, seqlen_k)
    classes = torch.full((-(-seqlen_q // tile_m), -(-seqlen_k // tile_n)), EMPTY, device="cpu")
    for m_block, row in enumerate(classes):
        first, is_visible, is_cut = judge_row(block_info, verdicts, False, 1, 0, seqlen, m_block)
        of_row = torch.where(is_cut[0], PARTIAL, FULL).where(is_visible[0], EMPTY)
        row[first : first + len(of_row)] = of_row
    return classes
