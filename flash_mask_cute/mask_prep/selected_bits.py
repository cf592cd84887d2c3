"""The selection of each query, and of all queries of a tile, as bits of key blocks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.compiler import CACHE, by_names, compile_object, options_for
from flash_mask_cute.runtime.dtypes import dtype_name
from flash_mask_cute.runtime.target import Target

KERNEL_NAME = "selected_bits"
WORD = 32


class QueryTiles(NamedTuple):
    """Tiles of tile_m rows; `pack` neighbouring ones belong to a query."""

    tile_m: int
    pack: int

    def number(self, rows: int, num_sequences: int | None) -> int:
        """Tiles of so many queries; with num_sequences, the most that packed sequences have."""
        if num_sequences is None:
            return -(-rows * self.pack // self.tile_m)
        return rows * self.pack // self.tile_m + num_sequences


class SelectionBits(NamedTuple):
    """Bit n % 32 of word n // 32 says that block n was chosen: of a row, int32 (batch | 1, heads,
    rows, words), and by any or by every row of a tile, int32 (batch | 1, heads, tiles, words).

    The tiles of packed sequence b begin with tile cu_seqlens_q[b] * pack // tile_m + b.
    """

    rows: Tensor
    of_any: Tensor
    of_every: Tensor


def row_bytes(by_entry_shape: torch.Size, num_blocks: int) -> int:
    """The memory that the bits of a selection's rows take; the tiles take less."""
    return 4 * math.prod(by_entry_shape[:3]) * -(-num_blocks // WORD)


def selected_bits(
    by_entry: Tensor, num_blocks: int, tiles: QueryTiles, cu_seqlens_q: Tensor | None
) -> SelectionBits:
    """The bits of a selection.

    by_entry: int32 or int64 (batch | 1, heads, rows, k), any strides. num_blocks: of the longest
    sequence; larger and negative numbers are in no bit. cu_seqlens_q: where the rows of all
    sequences are in one entry. On a GPU one launch on the current stream, which must be a stream of
    that GPU, reads all of them when it runs; a replayed CUDA graph reads them again. Raises
    NotImplementedError: there is no kernel for the device."""
    made = empty_bits(by_entry, num_blocks, tiles, cu_seqlens_q)
    if made.of_any.numel() == 0:
        return made
    if not by_entry.is_cuda:
        _fill_by_torch(by_entry, made, tiles, cu_seqlens_q)
        return made
    arch = Target.from_device(by_entry.device).arch
    compiled = compile_selected_bits(dtype_name(by_entry.dtype), cu_seqlens_q is not None, arch)
    compiled.function(by_entry, *made, *tiles, cu_seqlens_q)
    return made


def empty_bits(
    by_entry: Tensor, num_blocks: int, tiles: QueryTiles, cu_seqlens_q: Tensor | None
) -> SelectionBits:
    """Memory for the bits."""
    batch, heads, rows, _ = by_entry.shape
    words = -(-num_blocks // WORD)
    number = tiles.number(rows, None if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1)
    of_rows, of_any, of_every = (
        by_entry.new_empty((batch, heads, lines, words), dtype=torch.int32)
        for lines in (rows, number, number)
    )
    return SelectionBits(of_rows, of_any, of_every)


def compile_selected_bits(
    dtype: str, is_packed: bool, arch: str, cache: CompileCache = CACHE
) -> Compiled:
    """The compiled kernel, from the cache or built now. dtype: of the entries.

    `function` takes, by position: the entries, the three tensors of `SelectionBits`, tile_m, pack,
    and cu_seqlens_q, None unless is_packed. Extents and strides are run-time values.
    """
    facts = {"dtype": dtype, "is_packed": is_packed}
    return by_names(KERNEL_NAME, facts, _build, arch, cache)


def _build(dtype: str, is_packed: bool, arch: str) -> Compiled:
    from flash_mask_cute.mask_prep.selected_bits_kernel import SelectedBits

    arguments = [
        fake_tensors.strided(4, dtype),
        *(fake_tensors.strided(4) for _ in range(3)),
        *fake_tensors.int32_pair(),
        fake_tensors.int32_vector(is_packed),
        fake_tensors.stream(),
    ]
    return compile_object(SelectedBits(), arguments, options_for(arch))


def _fill_by_torch(
    by_entry: Tensor, made: SelectionBits, tiles: QueryTiles, cu_seqlens_q: Tensor | None
) -> None:
    """Fill the bits on the CPU."""
    bits = made.rows.zero_()
    one = torch.ones((), dtype=torch.int32, device=bits.device)
    for entries in by_entry.unbind(-1):
        word = entries // WORD
        exists = (entries >= 0) & (word < bits.shape[-1])
        place = torch.where(exists, word, 0).long()[..., None]
        bit = torch.where(exists, one << (entries % WORD).int(), 0)[..., None]
        bits.scatter_(-1, place, bits.gather(-1, place) | bit)
    made.of_any.zero_(), made.of_every.zero_()
    starts = [0, bits.shape[2]] if cu_seqlens_q is None else cu_seqlens_q.tolist()
    tile_m, pack = tiles
    for b, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        number = tiles.number(end - start, None)
        base = 0 if cu_seqlens_q is None else start * pack // tile_m + b
        for tile in range(number):
            first, stop = tile * tile_m // pack, -(-(tile + 1) * tile_m // pack)
            of_tile = bits[:, :, start + first : min(start + stop, end)].unbind(2)
            any_word, every_word = of_tile[0].clone(), of_tile[0].clone()
            for of_row in of_tile[1:]:
                any_word |= of_row
                every_word &= of_row
            made.of_any[:, :, base + tile] = any_word
            made.of_every[:, :, base + tile] = every_word
