"""Whether a call's `mask_mod` is asked once for all heads, and how.

It is where its answers do not depend on the head and there is room for them: a bit for each pair of
a query and a key, and a word for each tile, of one batch entry where the callable and the lists are
the same for all. Large calls attend to the documents that answers tell of as to packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from flash_mask_cute.host.bwd_launch import ResolvedBwd
from flash_mask_cute.host.cache import Compiled
from flash_mask_cute.host.compile import compile_fwd
from flash_mask_cute.host.compile_bwd import BwdKernels, compile_bwd
from flash_mask_cute.host.compile_store import StoreProblem, compile_store
from flash_mask_cute.host.launch import ONE_LAUNCH, Asked, ResolvedFwd, Stored
from flash_mask_cute.host.mask_args import ResolvedMasks
from flash_mask_cute.host.problem import AttentionProblem, BitTiles
from flash_mask_cute.host.target import HOPPER, Target
from flash_mask_cute.host.validate import FwdShapes
from flash_mask_cute.masks.documents import BOUNDS_TILE, SLOT

# heads that share the answers: with fewer, a second kernel is not worth its launch
MIN_HEADS = 4
# pairs of a query and a key that a launch may store answers for: one entry of 32K tokens, 16 of 8K
MAX_PAIRS = 1 << 30
# work tiles for each SM, the least that a part of a call should have: its last ones leave SMs idle
MIN_TILES = 8
# work tiles for each SM, the least of a call whose documents are looked for: seven small launches
MIN_TILES_PACKED = 32
WORD_BYTES = 4


@dataclass(frozen=True)
class BitStoring:
    """How the answers of a call are stored.

    shape: of the bit tiles, int32 (batch | 1, blocks of queries, blocks of keys, lines, words),
    those of a launch of attention; blocks: of queries in all, for which there are as many launches
    as it takes. function: see `compile_store`.
    """

    shape: tuple[int, int, int, int, int]
    blocks: int
    seqlens: tuple[int, int]
    function: Callable[..., None]

    @property
    def num_bytes(self) -> int:
        """Of tiles and states."""
        return _num_bytes(self.shape)

    @property
    def launches(self) -> range:
        """The first block of queries of each launch."""
        return range(0, self.blocks, self.shape[1])

    def __call__(self, q: Tensor, asked: Asked, first_block: int | None = None) -> Stored:
        """See `StoreBits`."""
        entries, most, *inner = self.shape
        first_block = first_block or 0
        shape = (entries, min(most, self.blocks - first_block), *inner)
        stored = _new_stored(q, shape)
        self.function(stored, *self.seqlens, asked.block_bits, asked.aux_tensors, first_block)
        return Stored(stored)


@dataclass(frozen=True)
class SequenceStoring:
    """How the answers of a call with packed sequences are stored.

    shape: of the bit tiles, int32 (1, 1, tiles, lines, words), as many as the sequences may have.
    function: see `compile_store`.
    """

    shape: tuple[int, int, int, int, int]
    batch: int
    function: Callable[..., None]
    launches: ClassVar = ONE_LAUNCH

    @staticmethod
    def create(
        tiles: BitTiles, shapes: FwdShapes, function: Callable[..., None]
    ) -> SequenceStoring:
        rows = shapes.total_q // tiles.tile_m + shapes.batch
        most = rows * -(-shapes.seqlen_k // tiles.tile_n)
        return SequenceStoring((1, 1, most, tiles.lines, tiles.words), shapes.batch, function)

    @property
    def num_bytes(self) -> int:
        """Of tiles and states."""
        return _num_bytes(self.shape)

    def __call__(self, q: Tensor, asked: Asked, first_block: int | None = None) -> Stored:
        """See `StoreBits`."""
        places = q.new_empty((self.batch, 2), dtype=torch.int32)
        stored = (*_new_stored(q, self.shape), places)
        self.function(stored, *asked.cu_seqlens, asked.block_bits, asked.aux_tensors)
        return Stored(stored)


@dataclass(frozen=True)
class DocumentStoring:
    """How the answers of a call are stored by documents.

    shape: of the bit tiles, int32 (1, 1, tiles, lines, words), as many as the documents of all
    entries may have; seqlen: of each of the entries, which are the batch or serve all of it.
    function: see `compile_store`.
    """

    shape: tuple[int, int, int, int, int]
    entries: int
    batch: int
    seqlen: int
    function: Callable[..., None]
    launches: ClassVar = ONE_LAUNCH

    @staticmethod
    def create(
        tiles: BitTiles, entries: int, shapes: FwdShapes, function: Callable[..., None]
    ) -> DocumentStoring:
        seqlen, tile_m, tile_n = shapes.seqlen_q, tiles.tile_m, tiles.tile_n
        # of lengths that add up to seqlen: rounded up, the sum of their products with themselves
        # is at most so much
        most = (
            -(-seqlen * seqlen // (tile_m * tile_n))
            + -(-seqlen // tile_m)
            + -(-seqlen // tile_n)
            + num_slots(seqlen)
        )
        shape = (1, 1, entries * most, tiles.lines, tiles.words)
        return DocumentStoring(shape, entries, shapes.batch, seqlen, function)

    @property
    def num_bytes(self) -> int:
        """Of tiles and states."""
        return _num_bytes(self.shape)

    def __call__(self, q: Tensor, asked: Asked, first_block: int | None = None) -> Stored:
        """See `StoreBits`; and tells where the documents begin."""
        slots = num_slots(self.seqlen)
        num_bounds = -(-self.seqlen // BOUNDS_TILE)
        places = q.new_empty((self.batch * slots, 2), dtype=torch.int32)
        cu_seqlens = q.new_empty((self.batch * slots + 1,), dtype=torch.int32)
        spans = q.new_empty((self.entries, 1, self.seqlen, 2), dtype=torch.int32)
        bounds = q.new_empty((self.entries, 1, 4, num_bounds), dtype=torch.int32)
        begins = q.new_empty((self.entries, slots), dtype=torch.int32)
        stored = (*_new_stored(q, self.shape), places)
        scratch = spans, bounds, begins
        self.function(stored, cu_seqlens, *scratch, asked.block_bits, asked.aux_tensors)
        return Stored(stored, cu_seqlens)


def num_slots(seqlen: int) -> int:
    """Sequences that an entry is packed as, many of which may be empty."""
    return -(-seqlen // SLOT)


def _new_stored(q: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    tiles = q.new_empty(shape, dtype=torch.int32)
    return tiles, q.new_empty(shape[:3], dtype=torch.int32)


def _num_bytes(shape: tuple[int, ...]) -> int:
    return (torch.Size(shape).numel() + torch.Size(shape[:3]).numel()) * WORD_BYTES


Storing: TypeAlias = BitStoring | SequenceStoring | DocumentStoring


def compile_call(
    resolved: ResolvedFwd, masks: ResolvedMasks, target: Target, can_pack: bool = False
) -> tuple[ResolvedFwd, Compiled, Storing | None]:
    """The call as its attention kernel sees it, that kernel, and what stores bits for it, if
    anything does; all compiled or from the cache.

    can_pack: operands may be seen as packed sequences. The call is one of these then if what stores
    bits is a `DocumentStoring`.
    """
    resolved, storing = choose_storing(resolved, masks, target, can_pack)
    mods = masks.mods if storing is None else masks.mods._replace(mask_mod=None)
    return resolved, compile_fwd(resolved.problem, resolved.choice.tiles, target, mods), storing


def compile_bwd_call(
    resolved: ResolvedBwd, masks: ResolvedMasks, target: Target, can_pack: bool = False
) -> tuple[ResolvedBwd, BwdKernels, Storing | None]:
    """As `compile_call`, for a backward."""
    resolved, storing = choose_bwd_storing(resolved, masks, target, can_pack)
    mods = masks.mods._replace(score_mod_bwd=resolved.score_mod_bwd)
    if storing is not None:
        mods = mods._replace(mask_mod=None)
    kernels = compile_bwd(
        resolved.problem,
        resolved.choice,
        target,
        mods,
        resolved.has_dlse,
        resolved.sink_dtype,
        resolved.tails,
    )
    return resolved, kernels, storing


def choose_storing(
    resolved: ResolvedFwd, masks: ResolvedMasks, target: Target, can_pack: bool = False
) -> tuple[ResolvedFwd, Storing | None]:
    """The call as its attention kernel has to see it, and how bits are stored for it, or None.

    A kernel that reads answers may have other tiles than one that asks. Compiles the callable where
    that is needed to know.
    """
    if _choose_fwd(resolved, masks, target, can_pack) is None:
        return resolved, None
    reading = resolved.with_choice(resolved.choose(_reading(resolved.problem)))
    storing = _choose_fwd(reading, masks, target, can_pack)
    if storing is None:
        return resolved, None
    reading = replace(reading, problem=_reading(reading.problem))
    if isinstance(storing, DocumentStoring):
        shapes, problem = _packed(reading.shapes, reading.problem)
        rows, heads = shapes.total_q, shapes.heads_q
        out_shape, lse_shape = (rows, heads, shapes.head_dim_v), (heads, rows)
        reading = replace(
            reading, shapes=shapes, problem=problem, out_shape=out_shape, lse_shape=lse_shape
        )
    return reading, storing


def _choose_fwd(
    resolved: ResolvedFwd, masks: ResolvedMasks, target: Target, can_pack: bool
) -> Storing | None:
    tiles = resolved.choice.tiles
    bit_tiles = BitTiles.of_queries(tiles.tile_m, tiles.tile_n)
    return _choose(resolved.problem, resolved.shapes, bit_tiles, masks, target, can_pack)


def choose_bwd_storing(
    resolved: ResolvedBwd, masks: ResolvedMasks, target: Target, can_pack: bool = False
) -> tuple[ResolvedBwd, Storing | None]:
    """As `choose_storing`, for a backward."""
    if _choose_bwd(resolved, masks, target, can_pack) is None:
        return resolved, None
    of_attention = _reading(resolved.problem)
    reading = replace(resolved, choice=resolved.choose(of_attention.mask_kind))
    storing = _choose_bwd(reading, masks, target, can_pack)
    if storing is None:
        return resolved, None
    reading = replace(reading, problem=of_attention)
    if isinstance(storing, DocumentStoring):
        shapes, problem = _packed(reading.shapes, reading.problem)
        reading = replace(reading, shapes=shapes, problem=problem)
    return reading, storing


def _choose_bwd(
    resolved: ResolvedBwd, masks: ResolvedMasks, target: Target, can_pack: bool
) -> Storing | None:
    choice, problem = resolved.choice, resolved.problem
    if choice.tiles.cta_pair:
        # a part of a walk may lie behind its sequence, which places do not tell
        can_pack = False
        if problem.varlen_k:
            return None
    bit_tiles = BitTiles.of_keys(choice.tiles.tile_m, choice.tile_n)
    return _choose(problem, resolved.shapes, bit_tiles, masks, target, can_pack)


def _reading(problem: AttentionProblem) -> AttentionProblem:
    """The problem of a kernel that reads what the callable and block lists say."""
    return replace(
        problem,
        mask_mod=None,
        aux=() if problem.score_mod is None else problem.aux,
        has_lists=False,
        has_full_lists=False,
        has_bits=False,
        reads_bits=True,
    )


def _packed(shapes: FwdShapes, problem: AttentionProblem) -> tuple[FwdShapes, AttentionProblem]:
    """The same, where documents are sequences."""
    sequences, rows = shapes.batch * num_slots(shapes.seqlen_q), shapes.batch * shapes.seqlen_q
    shapes = shapes._replace(batch=sequences, total_q=rows, total_k=rows)
    return shapes, replace(problem, varlen_q=True, varlen_k=True)


def _choose(
    problem: AttentionProblem,
    shapes: FwdShapes,
    tiles: BitTiles,
    masks: ResolvedMasks,
    target: Target,
    can_pack: bool,
) -> Storing | None:
    lists = masks.block_lists
    if (
        masks.mask_mod is None
        or target.family != HOPPER
        or shapes.heads_q < MIN_HEADS
        or problem.packed_heads > 1
        or problem.has_seqused_q
        or problem.has_seqused_k
        or problem.varlen_q != problem.varlen_k
        or (lists is not None and lists.mask_block_cnt.shape[1] > 1)
    ):
        return None
    store = StoreProblem(tiles, problem.aux, has_bits=lists is not None)
    if problem.varlen_q:
        if shapes.total_q * shapes.seqlen_k > MAX_PAIRS:
            return None
        compiled = compile_store(masks.mask_mod, replace(store, form="sequences"), target)
        if compiled.meta["relies_on_head"]:
            return None
        return SequenceStoring.create(tiles, shapes, compiled.function)
    if _blocks_of_launch(1, shapes, tiles, target) is None:
        return None
    if can_pack and _may_hold_documents(problem, shapes, target):
        store = replace(store, form="documents")
    compiled = compile_store(masks.mask_mod, store, target)
    if compiled.meta["relies_on_head"]:
        return None
    lists_differ = lists is not None and lists.mask_block_cnt.shape[0] > 1
    entries = shapes.batch if compiled.meta["relies_on_batch"] or lists_differ else 1
    of_launch = _blocks_of_launch(entries, shapes, tiles, target)
    if of_launch is None:
        return None
    blocks = _num_blocks(shapes, tiles)
    if store.form == "documents":
        if of_launch == blocks:
            return DocumentStoring.create(tiles, entries, shapes, compiled.function)
        compiled = compile_store(masks.mask_mod, replace(store, form="entries"), target)
    shape = (entries, of_launch, -(-shapes.seqlen_k // tiles.tile_n), tiles.lines, tiles.words)
    seqlens = shapes.seqlen_q, shapes.seqlen_k
    return BitStoring(shape, blocks, seqlens, compiled.function)


def _may_hold_documents(problem: AttentionProblem, shapes: FwdShapes, target: Target) -> bool:
    """Whether a call is large enough to look for documents, and has nothing that would have to be
    told where it is in them."""
    work_tiles = shapes.batch * shapes.heads_q * (shapes.seqlen_q // BOUNDS_TILE)
    return (
        shapes.seqlen_q == shapes.seqlen_k > SLOT
        and problem.score_mod is None
        and problem.intervals is None
        and work_tiles >= MIN_TILES_PACKED * target.num_sms
    )


def _num_blocks(shapes: FwdShapes, tiles: BitTiles) -> int:
    return -(-shapes.seqlen_q // tiles.tile_m)


def _blocks_of_launch(
    entries: int, shapes: FwdShapes, tiles: BitTiles, target: Target
) -> int | None:
    """How many blocks of queries a launch computes; None where there is no room for bits.

    A forward with more pairs than there is room for computes some rows of all heads after the
    others, a backward does not.
    """
    blocks = _num_blocks(shapes, tiles)
    if entries * shapes.seqlen_q * shapes.seqlen_k <= MAX_PAIRS:
        return blocks
    most = MAX_PAIRS // (entries * shapes.seqlen_k * tiles.tile_m)
    if tiles.by_key or most == 0:
        return None
    of_launch = -(-blocks // -(-blocks // most))
    tiles_of_launch = of_launch * shapes.heads_q * shapes.batch
    return of_launch if tiles_of_launch >= MIN_TILES * target.num_sms else None
