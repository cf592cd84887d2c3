"""Compile a forward kernel from its problem, without ever seeing a real tensor."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import asdict
from typing import Any

from flash_mask_cute.host import stand_ins
from flash_mask_cute.host.cache import CompileCache, Compiled
from flash_mask_cute.host.config import BwdTiles, FwdTiles
from flash_mask_cute.host.packages import tells_what_to_install
from flash_mask_cute.host.problem import AttentionProblem, BitTiles, Mods
from flash_mask_cute.host.stand_ins import int32_pair, operand, strided
from flash_mask_cute.host.target import BLACKWELL, HOPPER, Target

CACHE = CompileCache()
KERNEL_NAMES = {HOPPER: "flash_fwd_sm90", BLACKWELL: "flash_fwd_sm100"}
NO_MODS = Mods()
_more_options: ContextVar[str] = ContextVar("_more_options", default="")


@tells_what_to_install()
def preload() -> None:
    """Import the compiler now, so that a first call does not wait for it."""
    import cutlass.cute.runtime  # noqa: F401
    import tvm_ffi  # noqa: F401


def compile_fwd(
    problem: AttentionProblem,
    tiles: FwdTiles,
    target: Target,
    mods: Mods = NO_MODS,
    cache: CompileCache = CACHE,
) -> Compiled:
    """The compiled kernel, from the cache or built now. mods: the callables of problem's keys.

    `function` takes, by position: q, k, v, out, lse, softmax_scale, cu_seqlens_q, cu_seqlens_k,
    seqused_q, seqused_k, None, window_left, window_right, learnable_sink, block lists (four
    tensors, the last two may be None), aux_tensors (a tuple), softcap, tile_counter, column tensors
    (indices, bounds), block size (a pair), block bits (visible, full, block_q, block_k), stored
    bits, what part of the call these are of (a pair), lse_low; None for what the problem does not
    have.
    """
    name = KERNEL_NAMES[target.family]
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
    from flash_mask_cute.masks.intervals import Intervals

    kernel = _kernel_class(target)(
        stand_ins.cutlass_dtype(problem.dtype),
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
        **asdict(tiles),
    )
    smem_bytes = kernel.plan.smem_bytes
    arguments = _fake_arguments(problem, tiles)
    return compile_object(kernel, arguments, options_of(target), smem_bytes=smem_bytes)


def _kernel_class(target: Target) -> Any:
    """What makes the kernel object of a target."""
    if target.family == HOPPER:
        from flash_mask_cute.sm90.flash_fwd import FlashAttentionForwardSm90

        return FlashAttentionForwardSm90
    from flash_mask_cute.sm100.flash_fwd import FlashAttentionForwardSm100

    return functools.partial(FlashAttentionForwardSm100, fast_exp=target.arch == "sm_103a")


def options_of(target: Target) -> str:
    """What the compiler is told for kernels of this target."""
    return options_for(target.arch)


def options_for(arch: str) -> str:
    """`options_of` a target of this architecture, such as "sm_90a"."""
    return f"--enable-tvm-ffi --gpu-arch {arch}"


def _fake_arguments(problem: AttentionProblem, tiles: FwdTiles) -> list[Any]:
    """Stand-ins for the arguments of the kernel object's `__call__`, the stream included."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    dtype = problem.dtype
    rank_q, rank_k = stand_ins.ranks(problem)

    def of_rows(is_there: bool) -> Any:
        if not is_there:
            return None
        strides: Any = (*(cute.sym_int64() for _ in range(rank_q - 2)), 1)
        extents = stand_ins.extents(rank_q - 1)
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
        of_rows(problem.needs_lse),
        cutlass.Float32(1.0),
        stand_ins.stream(),
        *stand_ins.lengths(problem),
        None,
        *stand_ins.window(problem),
        stand_ins.vector(problem.sink_dtype),
        lists,
        stand_ins.aux_tensors(problem),
        cutlass.Float32(1.0) if problem.has_softcap else None,
        stand_ins.counter(),
        stand_ins.columns(problem),
        int32_pair() if problem.has_lists else None,
        stand_ins.block_bits(problem),
        stand_ins.stored_bits(problem, BitTiles.of_queries(tiles.tile_m, tiles.tile_n)),
        int32_pair() if problem.reads_bits else None,
        of_rows(problem.needs_lse_low),
    ]


@contextlib.contextmanager
def compiler_keeps(options: str) -> Iterator[None]:
    """Give the compiler these options, too, in what this thread compiles meanwhile: what to keep of
    its output. They are no part of a kernel's identity, so they must not change its code."""
    token = _more_options.set(options)
    try:
        yield
    finally:
        _more_options.reset(token)


def compile_object(kernel: Any, arguments: list[Any], options: str, **meta: Any) -> Compiled:
    """Compile a kernel object now, for stand-ins of its arguments.

    The function is there to be exported: it can be called when a `CompileCache` has loaded it.
    `meta`, beside what is given: registers, spill_bytes (stores and loads; either is None when
    ptxas told nothing), and warnings, what ptxas said about lost performance.
    """
    import cutlass.cute as cute

    said = io.StringIO()
    with contextlib.redirect_stderr(said), _collector_paused():
        function = cute.compile(
            kernel,
            *arguments,
            options=f"{options} {_more_options.get()}".strip(),
            trace_finalize_hooks=_let_ptxas_report,
            no_jit_engine=True,
        )
    return Compiled(function, {**meta, **_read(said.getvalue())})


def _let_ptxas_report(dsl: Any, _module: Any, _name: str) -> None:
    """Ask for ptxas' remarks once the kernel is traced. An option that asks for them from the start
    makes tracing look up the source line of each operation, which takes as long as tracing."""
    dsl.compile_options._apply_opt_string("remarks{ptx}")


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection meanwhile: what tracing allocates makes it scan all that the process
    holds, and most of that is torch."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _read(remarks: str) -> dict[str, Any]:
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", remarks)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", remarks)
    warnings = re.findall(r"C75\d\d\)[^\n]*|[^\n]*\bserialized\b[^\n]*", remarks)
    return {
        "registers": max(registers, default=None),
        "spill_bytes": sum(int(n) for pair in spills for n in pair) if spills else None,
        "warnings": warnings,
    }
