"""The selection of each query, and of all queries of a tile, as bits and lists of key blocks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import Compiled
from flash_mask_cute.runtime.compiler import cached_kernel, compile_object, options_for
from flash_mask_cute.runtime.dtypes import dtype_name
from flash_mask_cute.runtime.target import Target

WORD = 32
# blocks of a tile of keys, at most, and so many places behind the end of a list
MOST_OF_TILE = 32


class QueryTiles(NamedTuple):
    """Tiles of tile_m rows; `pack` neighbouring ones belong to a query."""

    tile_m: int
    pack: int

    def number(self, rows: int, num_sequences: int | None) -> int:
        """Tiles of so many queries; with num_sequences, the most that packed sequences have."""
        if num_sequences is None:
            return -(-rows * self.pack // self.tile_m)
        return rows * self.pack // self.tile_m + num_sequences

    def list_length(self, k: int, num_blocks: int, seqlen_q: int) -> int:
        """Room for the blocks of a tile, whose queries chose k each. seqlen_q: of any sequence."""
        queries = min(-(-self.tile_m // self.pack), seqlen_q)
        # words of bits may have more blocks than there are
        return -(-min(queries * k, num_blocks) // WORD) * WORD + MOST_OF_TILE


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
    that GPU, reads all of them when it runs. Raises NotImplementedError: as `Target.from_device`.
    """
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


@cached_kernel("selected_bits")
def compile_selected_bits(dtype: str, is_packed: bool, arch: str) -> Compiled:
    """The kernel. dtype: of the entries.

    `function` takes, by position: the entries, the three tensors of `SelectionBits`, tile_m, pack,
    and cu_seqlens_q, None unless is_packed.
    """
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
    numbers = torch.arange(made.rows.shape[-1] * WORD, device=by_entry.device)
    chosen = (by_entry[..., None] == numbers).any(-2)
    made.rows.copy_(_words_of(chosen))
    made.of_any.zero_(), made.of_every.zero_()
    starts = [0, by_entry.shape[2]] if cu_seqlens_q is None else cu_seqlens_q.tolist()
    tile_m, pack = tiles
    for b, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        number = tiles.number(end - start, None)
        base = 0 if cu_seqlens_q is None else start * pack // tile_m + b
        for tile in range(number):
            first, stop = tile * tile_m // pack, -(-(tile + 1) * tile_m // pack)
            of_tile = chosen[:, :, start + first : min(start + stop, end)]
            made.of_any[:, :, base + tile] = _words_of(of_tile.any(2))
            made.of_every[:, :, base + tile] = _words_of(of_tile.all(2))


def _words_of(chosen: Tensor) -> Tensor:
    weights = 1 << torch.arange(WORD, device=chosen.device)
    return (chosen.unflatten(-1, (-1, WORD)) * weights).sum(-1).to(torch.int32)


class UnionLists(NamedTuple):
    """The blocks that any query of a tile chose, ascending.

    numbers: int32 (lines, length), a line for each of `counts`. Behind the end of a list its last
    number, or 0, follows inverted, MOST_OF_TILE times. counts: int32 (batch | 1, heads, tiles), how
    many blocks a tile has.
    """

    numbers: Tensor
    counts: Tensor


def union_lists(of_any: Tensor, length: int) -> UnionLists:
    """The lists of `SelectionBits.of_any`, by one launch on the current stream of a GPU. length:
    `QueryTiles.list_length`."""
    counts = of_any.new_empty(of_any.shape[:3])
    lists = UnionLists(of_any.new_empty((counts.numel(), length)), counts)
    if of_any.is_cuda and of_any.numel():
        compile_union_lists(Target.from_device(of_any.device).arch).function(of_any, *lists)
    elif not of_any.is_cuda:
        bits = torch.arange(WORD, dtype=torch.int32, device=of_any.device)
        for i, words in enumerate(of_any.flatten(0, 2)):
            blocks = ((words[:, None] >> bits) & 1).flatten().nonzero().flatten()
            lists.numbers[i] = ~int(blocks[-1]) if len(blocks) else -1
            lists.numbers[i, : len(blocks)] = blocks
            counts.view(-1)[i] = len(blocks)
    return lists


@cached_kernel("union_lists")
def compile_union_lists(arch: str) -> Compiled:
    """The kernel. `function` takes the bits, and the tensors of `UnionLists`."""
    from flash_mask_cute.mask_prep.selected_bits_kernel import UnionLists as Kernel

    arguments = [*(fake_tensors.strided(rank) for rank in (4, 2, 3)), fake_tensors.stream()]
    return compile_object(Kernel(), arguments, options_for(arch))
