"""Cuts of a work tile's key blocks into splits on the CPU: as on a GPU, head by head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.core.stream_k import StreamKChunks, TileOnLine, tile_cost
from flash_mask_cute.cpu.tiles import SequenceWalk


class RowCuts(NamedTuple):
    """Each work tile in `num_splits` splits (`BlockInfo`), the same for all heads."""

    walks: Sequence[SequenceWalk]
    num_heads: int
    num_splits: int

    def of(self, sequence: int, m_block: int) -> Mapping[int, Tensor]:
        """The key blocks at which splits of a query block begin, except the first split, and the
        heads that have a cut there: Boolean (heads,)."""
        walk = self.walks[sequence]
        info = replace(walk.block_info, is_split_kv=True)
        first = walk.n_blocks(m_block).start
        splits = (
            info.get_n_block_min_max(walk.seqlen_info, m_block, i, self.num_splits)
            for i in range(self.num_splits)
        )
        every = torch.ones(self.num_heads, dtype=torch.bool, device="cpu")
        return {begin: every for begin, end in splits if begin < end and begin != first}


class StreamKCuts:
    """Equal stream-K chunks of all key blocks, one for each CTA (`core/stream_k.py`)."""

    def __init__(
        self, walks: Sequence[SequenceWalk], num_heads: int, num_ctas: int, tile_m: int
    ) -> None:
        self._walks, self._num_heads = walks, num_heads
        self._tiles: dict[tuple[int, int, int], TileOnLine] = {}
        tiles = [max(len(walk.n_blocks(i)), 1) for walk in walks for i in range(walk.num_m_blocks)]
        cost = tile_cost(tile_m)
        of_head = sum(TileOnLine(0, num_blocks, cost).end for num_blocks in tiles)
        chunks = StreamKChunks.create(of_head, num_heads, num_ctas, tile_m)
        self._size = chunks.size
        heads_of_line = num_heads // chunks.num_lines
        place = 0
        for sequence, walk in enumerate(walks):
            for head_idx in range(heads_of_line):
                for m_block in range(walk.num_m_blocks):
                    tile = TileOnLine(place, max(len(walk.n_blocks(m_block)), 1), cost)
                    for line in range(chunks.num_lines):
                        self._tiles[sequence, head_idx + line, m_block] = tile
                    place = tile.end

    def of(self, sequence: int, m_block: int) -> Mapping[int, Tensor]:
        """As `RowCuts.of`."""
        cuts: dict[int, Tensor] = {}
        first_block = self._walks[sequence].n_blocks(m_block).start
        for head_idx in range(self._num_heads):
            tile = self._tiles[sequence, head_idx, m_block]
            first = tile.first_chunk(self._size)
            for chunk in range(first + 1, first + tile.num_splits(self._size)):
                begin, _ = tile.split(chunk, self._size)
                none = torch.zeros(self._num_heads, dtype=torch.bool, device="cpu")
                cuts.setdefault(first_block + begin, none)[head_idx] = True
        return cuts
