"""Whether a call's `mask_mod` is asked once for all heads, and how.

It is where its answers do not depend on the head and there is room for them: a bit for each pair of
a query and a key, and a word for each tile, of one batch entry where the callable and the lists are
the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.host import stand_ins
from flash_mask_cute.host.bwd_launch import ResolvedBwd
from flash_mask_cute.host.cache import CompileCache, Compiled
from flash_mask_cute.host.callable_key import callable_key
from flash_mask_cute.host.compile import CACHE, compile_fwd, compile_object, options_of
from flash_mask_cute.host.compile_bwd import BwdKernels, compile_bwd
from flash_mask_cute.host.launch import ResolvedFwd
from flash_mask_cute.host.mask_args import ResolvedMasks
from flash_mask_cute.host.problem import AttentionProblem, BitTiles
from flash_mask_cute.host.target import HOPPER, Target
from flash_mask_cute.host.validate import FwdShapes

KERNEL_NAME = "bit_store"
# heads that share the answers: with fewer, a second kernel is not worth its launch
MIN_HEADS = 4
# pairs of a query and a key that a launch may store answers for: one entry of 32K tokens, 16 of 8K
MAX_PAIRS = 1 << 30
# work tiles for each SM, the least that a part of a call should have: its last ones leave SMs idle
MIN_TILES = 8
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
        of_tiles, of_states = torch.Size(self.shape), torch.Size(self.shape[:3])
        return (of_tiles.numel() + of_states.numel()) * WORD_BYTES

    @property
    def launches(self) -> range:
        """The first block of queries of each launch."""
        return range(0, self.blocks, self.shape[1])

    def __call__(
        self, q: Tensor, aux_tensors: Any, block_bits: Any, first_block: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Tiles and states for a launch, on q's device, which is the current one; the rest as the
        kernel takes it."""
        entries, most, *inner = self.shape
        shape = (entries, min(most, self.blocks - first_block), *inner)
        tiles = q.new_empty(shape, dtype=torch.int32)
        states = q.new_empty(shape[:3], dtype=torch.int32)
        self.function((tiles, states), *self.seqlens, block_bits, aux_tensors, first_block)
        return tiles, states


def compile_call(
    resolved: ResolvedFwd, masks: ResolvedMasks, target: Target
) -> tuple[ResolvedFwd, Compiled, BitStoring | None]:
    """The call as its attention kernel sees it, that kernel, and what stores bits for it, if
    anything does; all compiled or from the cache."""
    resolved, storing = choose_storing(resolved, masks, target)
    mods = masks.mods if storing is None else masks.mods._replace(mask_mod=None)
    return resolved, compile_fwd(resolved.problem, resolved.choice.tiles, target, mods), storing


def compile_bwd_call(
    resolved: ResolvedBwd, masks: ResolvedMasks, target: Target
) -> tuple[ResolvedBwd, BwdKernels, BitStoring | None]:
    """As `compile_call`, for a backward."""
    resolved, storing = choose_bwd_storing(resolved, masks, target)
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
    resolved: ResolvedFwd, masks: ResolvedMasks, target: Target
) -> tuple[ResolvedFwd, BitStoring | None]:
    """The call as its attention kernel has to see it, and how bits are stored for it, or None.

    A kernel that reads answers may have other tiles than one that asks. Compiles the callable where
    that is needed to know.
    """
    if _choose_fwd(resolved, masks, target) is None:
        return resolved, None
    reading = resolved.with_choice(resolved.choose(_reading(resolved.problem)))
    storing = _choose_fwd(reading, masks, target)
    if storing is None:
        return resolved, None
    return replace(reading, problem=_reading(reading.problem)), storing


def _choose_fwd(resolved: ResolvedFwd, masks: ResolvedMasks, target: Target) -> BitStoring | None:
    tiles = resolved.choice.tiles
    bit_tiles = BitTiles.of_queries(tiles.tile_m, tiles.tile_n)
    return _choose(resolved.problem, resolved.shapes, bit_tiles, masks, target)


def choose_bwd_storing(
    resolved: ResolvedBwd, masks: ResolvedMasks, target: Target
) -> tuple[ResolvedBwd, BitStoring | None]:
    """As `choose_storing`, for a backward."""
    if _choose_bwd(resolved, masks, target) is None:
        return resolved, None
    of_attention = _reading(resolved.problem)
    reading = replace(resolved, choice=resolved.choose(of_attention.mask_kind))
    storing = _choose_bwd(reading, masks, target)
    if storing is None:
        return resolved, None
    return replace(reading, problem=of_attention), storing


def _choose_bwd(resolved: ResolvedBwd, masks: ResolvedMasks, target: Target) -> BitStoring | None:
    choice = resolved.choice
    bit_tiles = BitTiles.of_keys(choice.tiles.tile_m, choice.tile_n)
    return _choose(resolved.problem, resolved.shapes, bit_tiles, masks, target)


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


def _choose(
    problem: AttentionProblem,
    shapes: FwdShapes,
    tiles: BitTiles,
    masks: ResolvedMasks,
    target: Target,
) -> BitStoring | None:
    lists = masks.block_lists
    lengths = (problem.varlen_q, problem.varlen_k, problem.has_seqused_q, problem.has_seqused_k)
    if (
        masks.mask_mod is None
        or target.family != HOPPER
        or shapes.heads_q < MIN_HEADS
        or problem.packed_heads > 1
        or any(lengths)
        or (lists is not None and lists.mask_block_cnt.shape[1] > 1)
    ):
        return None
    if _blocks_of_launch(1, shapes, tiles, target) is None:
        return None
    store = StoreProblem(tiles, problem.aux, has_bits=lists is not None)
    compiled = compile_store(masks.mask_mod, store, target)
    lists_differ = lists is not None and lists.mask_block_cnt.shape[0] > 1
    entries = shapes.batch if compiled.meta["relies_on_batch"] or lists_differ else 1
    blocks = _blocks_of_launch(entries, shapes, tiles, target)
    if compiled.meta["relies_on_head"] or blocks is None:
        return None
    shape = (entries, blocks, -(-shapes.seqlen_k // tiles.tile_n), tiles.lines, tiles.words)
    seqlens = shapes.seqlen_q, shapes.seqlen_k
    return BitStoring(shape, -(-shapes.seqlen_q // tiles.tile_m), seqlens, compiled.function)


def _blocks_of_launch(
    entries: int, shapes: FwdShapes, tiles: BitTiles, target: Target
) -> int | None:
    """How many blocks of queries a launch computes; None where there is no room for bits.

    A forward with more pairs than there is room for computes some rows of all heads after the
    others, a backward does not.
    """
    blocks = -(-shapes.seqlen_q // tiles.tile_m)
    if entries * shapes.seqlen_q * shapes.seqlen_k <= MAX_PAIRS:
        return blocks
    most = MAX_PAIRS // (entries * shapes.seqlen_k * tiles.tile_m)
    if tiles.by_key or most == 0:
        return None
    of_launch = -(-blocks // -(-blocks // most))
    tiles_of_launch = of_launch * shapes.heads_q * shapes.batch
    return of_launch if tiles_of_launch >= MIN_TILES * target.num_sms else None


# -- compilation --------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoreProblem:
    """What the code depends on beside the callable. aux: as in `AttentionProblem`; has_bits: there
    are block lists, which the kernel takes as bits."""

    tiles: BitTiles
    aux: tuple[tuple[str, int], ...]
    has_bits: bool


def compile_store(
    mask_mod: Callable[..., Any], problem: StoreProblem, target: Target, cache: CompileCache = CACHE
) -> Compiled:
    """The compiled kernel, from the cache or built now.

    `function` takes, by position: tiles and states (a pair), seqlen_q, seqlen_k, block bits
    (visible, full, block_q, block_k), aux_tensors (a tuple), first block of queries; None for what
    the problem does not have. `meta`: relies_on_batch, relies_on_head, and what `compile_object`
    tells.
    """
    identity = callable_key(mask_mod)
    return cache.get(
        KERNEL_NAME,
        lambda: {"problem": asdict(problem), "mask_mod": identity},
        lambda: _build(mask_mod, problem, target),
        arch=target.arch,
        options=options_of(target),
        token=(problem, identity),
    )


def _build(mask_mod: Callable[..., Any], problem: StoreProblem, target: Target) -> Compiled:
    import cutlass

    from flash_mask_cute.masks.stored_bits import KeyBitStore, QueryBitStore
    from flash_mask_cute.sm90.wgmma import COLUMNS

    tiles = problem.tiles
    kind = KeyBitStore if tiles.by_key else QueryBitStore
    store = kind(mask_mod, tiles.tile_m, tiles.tile_n, COLUMNS, bool(problem.aux))
    arguments = [
        stand_ins.stored_tiles(tiles),
        cutlass.Int32(0),
        cutlass.Int32(0),
        stand_ins.block_bits(problem),
        stand_ins.aux_tensors(problem),
        cutlass.Int32(0),
        stand_ins.stream(),
    ]
    function, meta = compile_object(store, arguments, options_of(target))
    assert store.reliance is not None
    relies_on = {f"relies_on_{name}": uses for name, uses in store.reliance._asdict().items()}
    return Compiled(function, {**meta, **relies_on})
