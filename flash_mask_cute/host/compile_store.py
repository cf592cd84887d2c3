"""Compile what stores the answers of a `mask_mod` for attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from flash_mask_cute.host import stand_ins
from flash_mask_cute.host.problem import BitTiles
from flash_mask_cute.masks.documents import BOUNDS_TILE, SLOT
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.compiler import CACHE, compile_object, options_of
from flash_mask_cute.runtime.target import Target

KERNEL_NAME = "bit_store"

Form: TypeAlias = Literal["entries", "sequences", "documents"]


@dataclass(frozen=True)
class StoreProblem:
    """What the code depends on beside the callable.

    aux: as in `AttentionProblem`. has_bits: there are block lists, which the kernel takes as bits.
    form: of what tiles are stored: of entries of one length, of packed sequences, or of documents
    that are found first. The others: of attention.
    """

    tiles: BitTiles
    aux: tuple[tuple[str, int], ...]
    has_bits: bool
    form: Form = "entries"
    is_causal: bool = False
    has_window_left: bool = False
    has_window_right: bool = False


def compile_store(
    mask_mod: Callable[..., Any], problem: StoreProblem, target: Target, cache: CompileCache = CACHE
) -> Compiled:
    """The compiled kernels, from the cache or built now.

    `function` takes, by position and by the form:

    entries: tiles and states (a pair), seqlen_q, seqlen_k, asked, window, part.
    sequences: tiles, states and places (a triple), cu_seqlens_q, cu_seqlens_k, asked, window, part.
    documents: such a triple, cu_seqlens, spans, their bounds, begins, asked, window, the tiles of
    an entry, part (`kernels/document_bits.py`).

    asked: block bits (visible, full, block_q, block_k) and aux_tensors (a tuple), None for what the
    problem does not have; window: its left and its right side; part: a pair (`StoredArgs`). `meta`:
    relies_on_batch, relies_on_head, and what `compile_object` tells.
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

    from flash_mask_cute.kernels.document_bits import DocumentBitStore
    from flash_mask_cute.kernels.sequence_bits import SequenceBitStore
    from flash_mask_cute.masks.stored_bits import KeyBitStore, QueryBitStore
    from flash_mask_cute.sm90.wgmma import COLUMNS

    tiles, form = problem.tiles, problem.form
    kind = KeyBitStore if tiles.by_key else QueryBitStore
    band = problem.is_causal, problem.has_window_left or problem.has_window_right
    store: Any = kind(mask_mod, tiles.tile_m, tiles.tile_n, COLUMNS, bool(problem.aux), *band)
    arguments: list[Any] = [stand_ins.stored_tiles(tiles, has_places=form != "entries")]
    asked = (
        stand_ins.block_bits(problem),
        stand_ins.aux_tensors(problem),
        *stand_ins.window(problem),
    )
    if form == "entries":
        arguments += [*stand_ins.int32_pair(), *asked]
    elif form == "sequences":
        store = SequenceBitStore(store, are_parts=False)
        arguments += [stand_ins.int32_vector(True), stand_ins.int32_vector(True), *asked]
    else:
        store = DocumentBitStore(store, SLOT, BOUNDS_TILE)
        scratch = (stand_ins.strided(rank) for rank in (4, 4, 2))
        arguments += [stand_ins.int32_vector(True), *scratch, *asked, cutlass.Int32(0)]
    arguments += [stand_ins.int32_pair(), stand_ins.stream()]
    function, meta = compile_object(store, arguments, options_of(target))
    assert store.reliance is not None
    relies_on = {f"relies_on_{name}": uses for name, uses in store.reliance._asdict().items()}
    return Compiled(function, {**meta, **relies_on})
