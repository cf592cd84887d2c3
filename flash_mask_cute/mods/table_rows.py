"""Elements of aux tensors that a thread's scores read along the keys, loaded many at a time.

A score_mod that adds a bias reads `aux_tensors[0][..., q_idx[0], kv_idx[0]]` for each score. With
one load for each score, the L1 cache looks up a line for each of 8 or 32 rows and load, which takes
longer than the products of a tile (docs/facts/hopper_forward.md#score_mod).

So a kernel loads the rows of a key block in as few loads as the layout of its scores allows, and
the reads of the callable are answered from registers. Where a row is not aligned to 16 bytes, or
ends inside the block, elements are loaded one by one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint8, Uint16, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm, vector

from flash_mask_cute.mods.aux_reads import (
    Answer,
    ElementRead,
    PlacedRead,
    ReadAxis,
    answered_reads,
    tensors_of,
)

# bytes of the widest load
LOAD_BYTES = 16
WORD_BITS = 32
_UNSIGNED = {8: Uint8, 16: Uint16, 32: Uint32}


class TableColumns(Protocol):
    """The keys of a block that a thread has scores of, as columns in ascending order."""

    def width(self, num_cols: int) -> int:
        """Keys of a block where a thread has `num_cols` columns."""

    def first(self) -> Int32:
        """Distance of the thread's first key from the block's first."""

    def offset(self, c: int) -> int:
        """Distance of the key of column c from the thread's first key."""

    def load(self, row: cute.Pointer, words: cute.Tensor, bits: int) -> None:
        """Load a thread's elements of a row. row: of the block's first key, aligned to LOAD_BYTES.
        words: int32, filled as `num_words` says. bits: of an element."""


@dataclass(frozen=True)
class OwnRowColumns:
    """`TableColumns` of a thread that has all scores of a row, or of a chunk of it."""

    def width(self, num_cols: int) -> int:
        return num_cols

    def first(self) -> Int32:
        return Int32(0)

    def offset(self, c: int) -> int:
        return c

    def load(self, row: cute.Pointer, words: cute.Tensor, bits: int) -> None:
        at_once = LOAD_BYTES * 8 // WORD_BITS
        for first in range(0, cute.size(words), at_once):
            of_load = load_words(row + first * WORD_BITS // bits, LOAD_BYTES * 8)
            for i, word in enumerate(of_load):
                words[first + i] = word


def num_words(num_cols: int, bits: int) -> int:
    """Words of a thread's columns in a row, lower columns in lower bits."""
    return -(-num_cols * bits // WORD_BITS)


@contextmanager
def noted_row_reads() -> Iterator[list[PlacedRead]]:
    """Context around a call of a callable: finds its reads along the keys, in rows that differ by
    query. Reads under a condition are left out: what they ask for may not exist otherwise."""
    found: list[PlacedRead] = []
    block = ir.InsertionPoint.current.block

    def note(read: ElementRead) -> None:
        placed = read.placed
        if placed is None:
            return
        *others, last = placed.indices
        is_row = last is ReadAxis.KEY and ReadAxis.QUERY in others and ReadAxis.KEY not in others
        is_always_read = ir.InsertionPoint.current.block == block
        if is_row and is_always_read and placed not in found:
            found.append(placed)

    with answered_reads(note):
        yield found


def shared_bits(reads: Sequence[PlacedRead], aux_tensors: Any) -> int:
    """Bits of a score of these reads, if batch entries share them and `LoadedRows` loads them, or
    0."""
    dtypes = [tensors_of(aux_tensors)[read.number].element_type for read in reads]
    are_shared = all(ReadAxis.BATCH not in read.indices for read in reads)
    are_loaded = all(map(_is_loaded, dtypes))
    return sum(x.width for x in dtypes) if are_shared and are_loaded else 0


def _is_loaded(dtype: type[cutlass.Numeric]) -> bool:
    # Booleans are bytes in memory
    return dtype is not Boolean and dtype.width <= WORD_BITS


@dataclass(frozen=True)
class LoadedRows:
    """What a thread has loaded for a key block: of each read, int32 words (rows, `num_words`)."""

    reads: tuple[PlacedRead, ...]
    dtypes: tuple[type[cutlass.Numeric], ...]
    words: tuple[cute.Tensor, ...]

    @staticmethod
    def load(
        reads: Sequence[PlacedRead],
        aux_tensors: Any,
        places: Sequence[Sequence[Int32]],
        first_key: Int32,
        num_cols: int,
        columns: TableColumns,
        max_words: int,
        keep: Callable[[Callable[[], None], tuple[cute.Tensor, ...]], None] | None = None,
    ) -> "LoadedRows | None":
        """Load the rows of as many reads as there is room for; None if for none.

        places: batch entry, head and query of each row. first_key: of the key block. num_cols: of a
        thread. max_words: registers of a thread for all loaded rows; more would be spilled. keep:
        gets what loads the words, and these, which it may know from before.
        """
        chosen, tensors, words = list[PlacedRead](), list[cute.Tensor](), list[cute.Tensor]()
        left = max_words
        for read in reads:
            tensor = tensors_of(aux_tensors)[read.number]
            dtype = tensor.element_type
            shape = len(places), num_words(num_cols, dtype.width)
            if _is_loaded(dtype) and shape[0] * shape[1] <= left:
                left -= shape[0] * shape[1]
                chosen.append(read)
                tensors.append(tensor)
                words.append(cute.make_rmem_tensor(shape, Int32))
        if not chosen:
            return None
        rows = tuple(
            tuple(_row(tensor, read, place) for place in places)
            for tensor, read in zip(tensors, chosen, strict=True)
        )
        load = partial(_load, rows, first_key, num_cols, columns, tuple(words))
        if keep is None:
            load()
        else:
            assert shared_bits(chosen, aux_tensors) > 0, "entries share rows that stay"
            keep(load, tuple(words))
        return LoadedRows(tuple(chosen), tuple(x.element_type for x in tensors), tuple(words))

    def answer(self, r: int, c: int) -> Answer:
        """Answers the reads for the score in row r and column c of the thread."""

        def element(read: ElementRead) -> cutlass.Numeric | None:
            if read.placed not in self.reads:
                return None
            i = self.reads.index(read.placed)
            dtype = self.dtypes[i]
            word, shift = divmod(c * dtype.width, WORD_BITS)
            return _as(dtype, self.words[i][r, word] >> shift)

        return element


def _row(tensor: cute.Tensor, read: PlacedRead, place: Sequence[Int32]) -> cute.Tensor:
    """The keys of a row, which is the last one where an index is past the end."""
    indices = (place[x.value] if isinstance(x, ReadAxis) else Int32(x) for x in read.indices[:-1])
    lasts = (Int32(cute.size(tensor, mode=[d])) - 1 for d in range(len(read.indices) - 1))
    coordinates = (*(cutlass.min(x, last) for x, last in zip(indices, lasts, strict=True)), None)
    return tensor[coordinates]


@cute.jit
def _load(
    rows: tuple,
    first_key: Int32,
    num_cols: cutlass.Constexpr[int],
    columns: cutlass.Constexpr,
    words: tuple,
):
    """Fill each of `words` from its rows."""
    end = first_key + columns.width(num_cols)
    is_scattered = Boolean(False)
    for of_read in rows:
        for row in of_read:
            is_aligned = _at(row, first_key).toint() % LOAD_BYTES == 0
            is_row = (row.layout.stride[0] == 1) & (end <= row.layout.shape[0])
            is_scattered |= (is_aligned & is_row) == Boolean(False)
    if cute.arch.vote_any_sync(is_scattered):
        first = first_key + columns.first()
        for of_read, of_words in zip(rows, words, strict=True):
            for r, row in enumerate(of_read):
                _load_elements(row, first, num_cols, columns, of_words[r, None])
    else:
        for of_read, of_words in zip(rows, words, strict=True):
            for r, row in enumerate(of_read):
                columns.load(_at(row, first_key), of_words[r, None], row.element_type.width)


def _load_elements(
    row: cute.Tensor, first: Int32, num_cols: int, columns: TableColumns, words: cute.Tensor
) -> None:
    """As `TableColumns.load`, from any addresses; keys past the end become the last key."""
    width, last = row.element_type.width, row.layout.shape[0] - 1
    words.fill(Int32(0))
    for c in range(num_cols):
        key = cutlass.min(first + columns.offset(c), last)
        (element,) = load_words(_at(row, key), width)
        word, shift = divmod(c * width, WORD_BITS)
        words[word] = words[word] | (element << shift)


def _at(row: cute.Tensor, key: Int32) -> cute.Pointer:
    return row.iterator + cute.crd2idx(key, row.layout)


def load_words(address: cute.Pointer, bits: int) -> list[Int32]:
    """8 to 128 aligned bits in one load, which may be moved: nobody writes aux tensors."""
    if bits <= WORD_BITS:
        dtype = _UNSIGNED[bits]
        return [Int32(dtype(_load_invariant(address, dtype.mlir_type)))]
    count = bits // WORD_BITS
    found = _load_invariant(address, ir.VectorType.get([count], Int32.mlir_type))
    return [Int32(vector.extract(found, [], [i])) for i in range(count)]


def _as(dtype: type[cutlass.Numeric], word: Int32) -> cutlass.Numeric:
    """The element in the low bits of a word."""
    bits = word.ir_value()
    if dtype.width < WORD_BITS:
        bits = arith.trunci(_UNSIGNED[dtype.width].mlir_type, bits)
    return dtype(bits if dtype.is_integer else arith.bitcast(dtype.mlir_type, bits))


def _load_invariant(address: cute.Pointer, ir_type: ir.Type) -> ir.Value:
    return llvm.load(ir_type, address.to_llvm_ptr(), invariant=True)
