"""Compile a forward kernel from its problem, without real tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from flash_mask_cute.call.build.kernel_operands import FORWARD, fakes
from flash_mask_cute.call.choose.arch import arch_spec
from flash_mask_cute.call.choose.config import BwdTiles, FwdTiles
from flash_mask_cute.call.problem import AttentionProblem, Mods
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.compiler import CACHE, compile_object, options_of
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

    `function` takes the operands of the table `FORWARD` but the stream, by position; None for what
    the problem does not have. q_start: a tensor, or a number, where -1 is the end.
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
        common_kv=problem.common_kv,
        **({"in_fp8": True, "few_rows": problem.few_rows} if problem.in_fp8 else {}),
        **({"own_lists": True} if problem.own_lists else {}),
        **({"shares_mask": True} if problem.shares_mask else {}),
        **({"kept_bits": problem.kept_bits} if problem.kept_bits else {}),
        **tiles.arguments(arch_spec(target).forward),
    )
    smem_bytes = kernel.traits.smem_bytes
    arguments = fakes(FORWARD, problem, tiles)
    return compile_object(kernel, arguments, options_of(target), smem_bytes=smem_bytes)
