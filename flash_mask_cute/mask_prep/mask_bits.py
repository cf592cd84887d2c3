"""Compile what stores the answers of a `mask_mod` for attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from flash_mask_cute.limits import MAX_COLUMNS
from flash_mask_cute.mask_prep.documents import BOUNDS_TILE, SLOT
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.compiler import CACHE, compile_object, options_of
from flash_mask_cute.runtime.target import Target

KERNEL_NAME = "bit_store"

Form: TypeAlias = Literal["entries", "sequences", "documents"]


class BitTiles(NamedTuple):
    """Bit tiles that are stored for a kernel with these tiles: `lines` of `words` of 32 bits.

    by_key: a line is a key, as the backward has it, else a query row.
    """

    tile_m: int
    tile_n: int
    by_key: bool
    lines: int
    words: int

    @staticmethod
    def of_queries(tile_m: int, tile_n: int) -> BitTiles:
        return BitTiles(tile_m, tile_n, False, tile_m, MAX_COLUMNS // 32)

    @staticmethod
    def of_keys(tile_m: int, tile_n: int) -> BitTiles:
        return BitTiles(tile_m, tile_n, True, tile_n, tile_m // 32)


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
    an entry, part (`mask_prep/mask_bits_documents_kernel.py`).

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

    from flash_mask_cute.mask_prep.mask_bits_documents_kernel import DocumentBitStore
    from flash_mask_cute.mask_prep.mask_bits_kernel import KeyBitStore, QueryBitStore
    from flash_mask_cute.mask_prep.mask_bits_varlen_kernel import SequenceBitStore
    from flash_mask_cute.sm90.wgmma import COLUMNS

    tiles, form = problem.tiles, problem.form
    kind = KeyBitStore if tiles.by_key else QueryBitStore
    band = problem.is_causal, problem.has_window_left or problem.has_window_right
    store: Any = kind(mask_mod, tiles.tile_m, tiles.tile_n, COLUMNS, bool(problem.aux), *band)
    arguments: list[Any] = [stored_tiles(tiles, has_places=form != "entries")]
    asked = (
        fake_tensors.block_bits(problem),
        fake_tensors.aux_tensors(problem),
        *fake_tensors.window(problem),
    )
    if form == "entries":
        arguments += [*fake_tensors.int32_pair(), *asked]
    elif form == "sequences":
        store = SequenceBitStore(store, are_parts=False)
        arguments += [fake_tensors.int32_vector(True), fake_tensors.int32_vector(True), *asked]
    else:
        store = DocumentBitStore(store, SLOT, BOUNDS_TILE)
        scratch = (fake_tensors.strided(rank) for rank in (4, 4, 2))
        arguments += [fake_tensors.int32_vector(True), *scratch, *asked, cutlass.Int32(0)]
    arguments += [fake_tensors.int32_pair(), fake_tensors.stream()]
    function, meta = compile_object(store, arguments, options_of(target))
    assert store.reliance is not None
    relies_on = {f"relies_on_{name}": uses for name, uses in store.reliance._asdict().items()}
    return Compiled(function, {**meta, **relies_on})


def stored_tiles(tiles: BitTiles, has_places: bool) -> tuple[Any, ...]:
    """Fake tensors: bit tiles (batch | 1, m_blocks, n_blocks, lines, words), contiguous, their
    states, and their places where sequences differ in length."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    size = tiles.lines * tiles.words
    outer = tuple(cute.sym_int64(divisibility=size) for _ in range(2))
    bits = make_fake_tensor(
        cutlass.Int32,
        (*fake_tensors.extents(3), tiles.lines, tiles.words),
        (*outer, size, tiles.words, 1),
        assumed_align=fake_tensors.BASE_ALIGNMENT,
    )
    return (
        (bits, fake_tensors.strided(3), fake_tensors.strided(2))
        if has_places
        else (bits, fake_tensors.strided(3))
    )
