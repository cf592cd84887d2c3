"""Mask bits: a `mask_mod` evaluated once for all heads, before attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_mask_cute.limits import LONGEST, MAX_COLUMNS
from flash_mask_cute.mask_prep.column_bounds import num_key_blocks
from flash_mask_cute.mask_prep.documents import BOUNDS_TILE, DOCUMENT_STRIDE, max_documents
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.compiler import CACHE, compile_object, options_of
from flash_mask_cute.runtime.target import Target

KERNEL_NAME = "mask_bits"

Form: TypeAlias = Literal["entries", "sequences", "documents"]


class BitTiles(NamedTuple):
    """Bit tiles that are stored for a kernel with these tiles: `lines` of `words` of 32 bits.
    by_key: a line is a key, as in the backward, else a query row."""

    tile_m: int
    tile_n: int
    by_key: bool
    lines: int
    words: int

    @staticmethod
    def for_forward(tile_m: int, tile_n: int) -> BitTiles:
        return BitTiles(tile_m, tile_n, False, tile_m, MAX_COLUMNS // 32)

    @staticmethod
    def for_backward(tile_m: int, tile_n: int) -> BitTiles:
        return BitTiles(tile_m, tile_n, True, tile_n, tile_m // 32)


@dataclass(frozen=True)
class MaskBitsProblem:
    """Facts that determine the code, besides the callable.

    aux: as in `AttentionProblem`. has_bits: there are block lists, which the kernel takes as bits.
    form: tiles of batch entries of one length, of packed sequences, or of documents that are found
    first. The other fields are those of attention.
    """

    tiles: BitTiles
    aux: tuple[tuple[str, int], ...]
    has_bits: bool
    form: Form = "entries"
    is_causal: bool = False
    has_window_left: bool = False
    has_window_right: bool = False


def compile_mask_bits(
    mask_mod: Callable[..., Any],
    problem: MaskBitsProblem,
    target: Target,
    columns: Any,
    cache: CompileCache = CACHE,
) -> Compiled:
    """The compiled kernels.

    columns: the `Columns` of the target's attention kernels, which read the bits.
    `function` takes positional arguments that depend on the form:

    entries: tiles and states (a pair), seqlen_q, seqlen_k, mask_inputs, window, query_chunk.
    sequences: tiles, states and places (a triple), cu_seqlens_q, cu_seqlens_k, mask_inputs, window,
    query_chunk.
    documents: such a triple, cu_seqlens, spans, their bounds, begins, mask_inputs, window, the
    tiles of an entry, query_chunk (`mask_prep/mask_bits_documents_kernel.py`).

    mask_inputs: block bits (visible, full, block_q, block_k) and aux_tensors (a tuple), None for
    what the problem does not have. window: its sides, None if both are open. query_chunk: a pair
    (`MaskBitsArgs`).
    """
    identity = callable_key(mask_mod)
    return cache.get(
        KERNEL_NAME,
        lambda: {"problem": asdict(problem), "mask_mod": identity},
        lambda: _build(mask_mod, problem, target, columns),
        arch=target.arch,
        options=options_of(target),
        token=(problem, identity),
    )


def _build(
    mask_mod: Callable[..., Any], problem: MaskBitsProblem, target: Target, columns: Any
) -> Compiled:
    from flash_mask_cute.mask_prep.mask_bits_documents_kernel import DocumentMaskBits
    from flash_mask_cute.mask_prep.mask_bits_kernel import KeyMaskBits, QueryMaskBits
    from flash_mask_cute.mask_prep.mask_bits_varlen_kernel import SequenceMaskBits

    tiles, form = problem.tiles, problem.form
    kind = KeyMaskBits if tiles.by_key else QueryMaskBits
    sides = problem.has_window_left, problem.has_window_right
    band = problem.is_causal, any(sides)
    kernel: Any = kind(mask_mod, tiles.tile_m, tiles.tile_n, columns, bool(problem.aux), *band)
    arguments: list[Any] = [fake_mask_bits(tiles, has_places=form != "entries")]
    mask_inputs = (
        fake_tensors.block_bits(problem.has_bits),
        fake_tensors.aux_tensors(problem.aux),
        tuple(map(fake_tensors.int32, sides)) if any(sides) else None,
    )
    if form == "entries":
        arguments += [*fake_tensors.int32_pair(), *mask_inputs]
    elif form == "sequences":
        kernel = SequenceMaskBits(kernel, are_parts=False)
        arguments += [*map(fake_tensors.int32_vector, (True, True)), *mask_inputs]
    else:
        kernel = DocumentMaskBits(kernel, DOCUMENT_STRIDE, BOUNDS_TILE)
        scratch = (fake_tensors.strided(rank) for rank in (4, 4, 2))
        arguments += [fake_tensors.int32_vector(True), *scratch, *mask_inputs, fake_tensors.int32()]
    arguments += [fake_tensors.int32_pair(), fake_tensors.stream()]
    return compile_object(kernel, arguments, options_of(target))


def fake_mask_bits(tiles: BitTiles, has_places: bool) -> tuple[Any, ...]:
    """Fake tensors: bit tiles (batch | 1, m_blocks, n_blocks, lines, words), contiguous, their
    states, and their places if sequences differ in length."""
    size = tiles.lines * tiles.words
    shape, strides = (
        (None, None, None, tiles.lines, tiles.words),
        (None, None, size, tiles.words, 1),
    )
    bits = fake_tensors.tensor("int32", shape, strides, fake_tensors.BASE_ALIGNMENT, step=size)
    places = (fake_tensors.strided(2),) if has_places else ()
    return bits, fake_tensors.strided(3), *places


class MaskInputs(NamedTuple):
    """Inputs of a call's bits: aux_tensors and block bits for a kernel, and both cu_seqlens."""

    aux_tensors: Any
    block_bits: Any
    cu_seqlens: tuple[Tensor | None, Tensor | None] = (None, None)


class MaskBits(NamedTuple):
    """Mask bits as a kernel takes them.

    query_chunk: the query blocks that they cover (`MaskBitsArgs`). cu_seqlens: starts of the
    sequences, if these are documents that were found in the bits.
    """

    arguments: tuple[Tensor, ...]
    query_chunk: tuple[int, int]
    cu_seqlens: Tensor | None = None


# of a call whose kernel evaluates the mask_mod itself
NO_MASK_BITS = ((None, None, None),)


# what `compile_mask_bits` made
MaskBitsFunction: TypeAlias = Callable[..., None]
# `query_chunks` of a `MaskBitsPlan` with its function
MakeMaskBits: TypeAlias = Callable[[Tensor, MaskInputs], Iterator[MaskBits]]


WORD_BYTES = 4


# None: open on both sides
Window: TypeAlias = tuple[int | None, int | None] | None


@dataclass(frozen=True)
class _MaskBitsPlan:
    """shape: of the bit tiles of a launch, int32 (.., .., .., lines, words). problem: for
    `compile_mask_bits`. window: for its function.

    `query_chunks` of each kind makes bits for successive launches of attention, on q's device, the
    current one. The bits of the next chunk overwrite those of a chunk.
    """

    shape: tuple[int, int, int, int, int]
    problem: MaskBitsProblem
    window: Window

    @property
    def num_bytes(self) -> int:
        """Bytes of tiles and states."""
        return (torch.Size(self.shape).numel() + torch.Size(self.shape[:3]).numel()) * WORD_BYTES


@dataclass(frozen=True)
class EntryBitsPlan(_MaskBitsPlan):
    """The plan for the bits of a dense call.

    shape: (batch | 1, blocks of queries, blocks of keys, ...), for the blocks of one launch of
    attention. blocks: all blocks of queries; attention is launched as often as necessary.
    """

    blocks: int
    seqlens: tuple[int, int]

    @property
    def num_query_chunks(self) -> int:
        return -(-self.blocks // self.shape[1])

    def query_chunks(
        self, function: MaskBitsFunction, q: Tensor, mask_inputs: MaskInputs
    ) -> Iterator[MaskBits]:
        entries, most, *inner = self.shape
        for first in range(0, self.blocks, most):
            query_chunk = first, min(most, self.blocks - first)
            mask_bits = _new_mask_bits(q, (entries, query_chunk[1], *inner))
            call_args = mask_inputs.block_bits, mask_inputs.aux_tensors, self.window
            function(mask_bits, *self.seqlens, *call_args, query_chunk)
            yield MaskBits(mask_bits, query_chunk)
            # so that the next chunk has its memory
            del mask_bits


@dataclass(frozen=True)
class SequenceBitsPlan(_MaskBitsPlan):
    """The plan for the bits of a call with packed sequences. shape: (1, 1, tiles, ...), the most
    tiles that the sequences may have."""

    batch: int
    num_query_chunks = 1

    def query_chunks(
        self, function: MaskBitsFunction, q: Tensor, mask_inputs: MaskInputs
    ) -> Iterator[MaskBits]:
        places = q.new_empty((self.batch + LONGEST + 1, 2), dtype=torch.int32)
        mask_bits, query_chunk = (*_new_mask_bits(q, self.shape), places), (0, self.shape[2])
        call_args = mask_inputs.block_bits, mask_inputs.aux_tensors, self.window
        function(mask_bits, *mask_inputs.cu_seqlens, *call_args, query_chunk)
        yield MaskBits(mask_bits, query_chunk)


@dataclass(frozen=True)
class DocumentBitsPlan(_MaskBitsPlan):
    """The plan for the bits of a call by documents.

    shape: (1, 1, tiles, ...), for one launch of attention: the most tiles that the documents of all
    entries may have, or a part of them plus the tiles of one block of queries. seqlen: of each
    entry; the entries are the batch, or one that serves all of it. tiles: the most tiles of one
    entry. step: number of tiles from one launch to the next.
    """

    entries: int
    batch: int
    seqlen: int
    tiles: int
    step: int

    @property
    def num_query_chunks(self) -> int:
        return -(-self.entries * self.tiles // self.step)

    def query_chunks(
        self, function: MaskBitsFunction, q: Tensor, mask_inputs: MaskInputs
    ) -> Iterator[MaskBits]:
        """With the starts of the documents. The last chunks are empty unless there is only one."""
        slots = max_documents(self.seqlen)
        num_bounds = num_key_blocks(self.seqlen, BOUNDS_TILE, None)
        places = q.new_empty((self.batch * slots + LONGEST + 1, 2), dtype=torch.int32)
        cu_seqlens = q.new_empty((self.batch * slots + 1,), dtype=torch.int32)
        spans = q.new_empty((self.entries, 1, self.seqlen, 2), dtype=torch.int32)
        bounds = q.new_empty((self.entries, 1, 4, num_bounds), dtype=torch.int32)
        begins = q.new_empty((self.entries, slots), dtype=torch.int32)
        mask_bits = (*_new_mask_bits(q, self.shape), places)
        call_args = mask_inputs.block_bits, mask_inputs.aux_tensors, self.window
        of_all = cu_seqlens, spans, bounds, begins, *call_args, self.tiles
        for first in range(0, self.entries * self.tiles, self.step):
            query_chunk = first, self.step
            function(mask_bits, *of_all, query_chunk)
            yield MaskBits(mask_bits, query_chunk, cu_seqlens)


def most_tiles(tiles: BitTiles, pairs: int, rows: int, keys: int, sequences: int) -> int:
    """The most tiles of sequences with these totals of pairs, queries and keys.

    Tiles of m x n scores number sum(ceil(q / m) * ceil(k / n)), less than
    sum(q * k) / mn + sum(q) / m + sum(k) / n + sequences.
    """
    tile_m, tile_n = tiles.tile_m, tiles.tile_n
    of_pairs = -(-pairs // (tile_m * tile_n))
    return of_pairs + -(-rows // tile_m) + -(-keys // tile_n) + sequences


def _new_mask_bits(q: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    tiles = q.new_empty(shape, dtype=torch.int32)
    return tiles, q.new_empty(shape[:3], dtype=torch.int32)


MaskBitsPlan: TypeAlias = EntryBitsPlan | SequenceBitsPlan | DocumentBitsPlan
