"""Compile a forward kernel from its problem, without real tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from flash_mask_cute.call.arch import arch_spec
from flash_mask_cute.call.config import BwdTiles, FwdTiles
from flash_mask_cute.call.problem import AttentionProblem, Mods
from flash_mask_cute.core.shares import BY_SLOTS
from flash_mask_cute.mask_prep.mask_bits import BitTiles, fake_mask_bits
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.compiler import CACHE, compile_object, options_of
from flash_mask_cute.runtime.fake_tensors import int32_pair, operand, strided
from flash_mask_cute.runtime.target import Target

NO_MODS = Mods()


def compile_fwd(
    problem: AttentionProblem,
    tiles: FwdTiles,
    target: Target,
    mods: Mods = NO_MODS,
    cache: CompileCache = CACHE,
) -> Compiled:
    """The compiled kernel, from the cache or built now. mods: the callables of problem's keys.

    `function` takes, by position: q, k, v, out, lse, softmax_scale, cu_seqlens_q, cu_seqlens_k,
    seqused_q, seqused_k, page_table, window_left, window_right, learnable_sink, block lists (four
    tensors, the last two may be None), aux_tensors (a tuple), softcap, tile_counter, column tensors
    (indices, bounds), block size (a pair), block bits (visible, full, block_q, block_k), stored
    bits, the part of the call that these cover (a pair), lse_low, max_scores, q_start (a tensor, or
    a number, where -1 is the end), destination of pieces (partial outputs, partial LSE, merges,
    number of splits); None for what the problem does not have.
    """
    name = arch_spec(target).forward.cache_name
    return cached_attention(
        name, problem, tiles, target, lambda: build_fwd(problem, tiles, target, mods), cache
    )


def cached_attention(
    name: str,
    problem: AttentionProblem,
    tiles: FwdTiles | BwdTiles,
    target: Target,
    build: Callable[[], Compiled],
    cache: CompileCache,
) -> Compiled:
    """The attention kernel `name` with these tiles, from the cache or built now."""
    return cache.get(
        name,
        lambda: {"problem": asdict(problem), "tiles": asdict(tiles), "num_sms": target.num_sms},
        build,
        arch=target.arch,
        options=options_of(target),
        token=(problem, tiles, target),
    )


def build_fwd(
    problem: AttentionProblem,
    tiles: FwdTiles,
    target: Target,
    mods: Mods = NO_MODS,
) -> Compiled:
    """Compile now. `meta`: smem_bytes, and what `compile_object` tells."""
    from flash_mask_cute.rules.intervals import Intervals

    kernel = arch_spec(target).forward.load_class()(
        fake_tensors.cutlass_dtype(problem.dtype),
        problem.head_dim,
        problem.head_dim_v,
        qhead_per_kvhead=problem.packed_heads,
        is_causal=problem.is_causal,
        is_local=problem.is_local,
        pack_gqa=problem.packed_heads > 1,
        mask_mod=mods.mask_mod,
        score_mod=mods.score_mod,
        has_aux_tensors=bool(problem.aux),
        intervals=None if problem.intervals is None else Intervals(*problem.intervals),
        num_sms=target.num_sms,
        split=problem.split,
        page_box=problem.page_box,
        **asdict(tiles),
    )
    smem_bytes = kernel.plan.smem_bytes
    arguments = _fake_arguments(problem, tiles)
    return compile_object(kernel, arguments, options_of(target), smem_bytes=smem_bytes)


def ranks(problem: AttentionProblem) -> tuple[int, int]:
    """Numbers of dimensions of query tensors and of key tensors: one less if packed."""
    return 3 if problem.varlen_q else 4, 3 if problem.varlen_k else 4


def lengths(problem: AttentionProblem) -> tuple[Any, ...]:
    """cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k."""
    return (
        fake_tensors.int32_vector(problem.varlen_q),
        fake_tensors.int32_vector(problem.varlen_k),
        fake_tensors.int32_vector(problem.has_seqused_q),
        fake_tensors.int32_vector(problem.has_seqused_k),
    )


def aux_grads(problem: AttentionProblem) -> tuple[Any, ...] | None:
    """Sums of the gradients of aux tensors."""
    return (
        tuple(fake_tensors.strided(problem.aux[i][1], "float32") for i in problem.wants_aux) or None
    )


def columns(problem: AttentionProblem) -> tuple[Any, Any] | None:
    """Indices and bounds of column intervals."""
    return None if problem.intervals is None else (fake_tensors.strided(4), fake_tensors.strided(4))


def mask_bit_tensors(problem: AttentionProblem, tiles: BitTiles) -> tuple[Any, ...] | None:
    """Stored results of a mask_mod that a kernel reads."""
    return fake_mask_bits(tiles, has_places=problem.varlen_q) if problem.reads_mask_bits else None


def _fake_arguments(problem: AttentionProblem, tiles: FwdTiles) -> list[Any]:
    """Stand-ins for the arguments of the kernel object's `__call__`, the stream included."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    dtype = problem.dtype
    rank_q, rank_k = ranks(problem)

    def fake_rows(is_there: bool) -> Any:
        if not is_there:
            return None
        strides: Any = (*(cute.sym_int64() for _ in range(rank_q - 2)), 1)
        extents = fake_tensors.extents(rank_q - 1)
        return make_fake_tensor(cutlass.Float32, extents, strides, assumed_align=4)

    lists = None
    if problem.has_lists:
        full = (strided(3), strided(4)) if problem.has_full_lists else (None, None)
        lists = (strided(3), strided(4), *full)
    return [
        operand(dtype, rank_q, problem.head_dim),
        operand(dtype, rank_k, problem.head_dim),
        operand(dtype, rank_k, problem.head_dim_v),
        operand(dtype, rank_q, problem.head_dim_v),
        fake_rows(problem.needs_lse),
        cutlass.Float32(1.0),
        fake_tensors.stream(),
        *lengths(problem),
        None if problem.page_box is None else strided(2),
        *fake_tensors.window(problem),
        fake_tensors.vector(problem.sink_dtype),
        lists,
        fake_tensors.aux_tensors(problem),
        cutlass.Float32(1.0) if problem.has_softcap else None,
        None if problem.split == BY_SLOTS else fake_tensors.counter(),
        columns(problem),
        int32_pair() if problem.has_lists else None,
        fake_tensors.block_bits(problem),
        mask_bit_tensors(problem, BitTiles.for_forward(tiles.tile_m, tiles.tile_n)),
        int32_pair() if problem.reads_mask_bits else None,
        fake_rows(problem.needs_lse_low),
        fake_rows(problem.needs_max_scores),
        fake_tensors.q_start(problem),
        _partials(problem),
        fake_tensors.int32_vector(problem.has_kv_batch_idx),
        fake_tensors.int32_vector(problem.has_leftpad_k),
    ]


def _partials(problem: AttentionProblem) -> tuple[Any, ...] | None:
    """Destination of the pieces of work tiles."""
    import cutlass

    if problem.split is None:
        return None
    by_slots = problem.split == BY_SLOTS
    return (
        operand("float32", 3 if by_slots else 5, problem.head_dim_v),
        strided(2 if by_slots else 4, "float32"),
        None if problem.score_mod is None else strided(2 if by_slots else 4, "float32"),
        strided(2) if by_slots else None,
        None if by_slots else cutlass.Int32(1),
    )
