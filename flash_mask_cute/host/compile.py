"""Compile a forward kernel from its problem, without ever seeing a real tensor."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import asdict
from typing import Any

from flash_mask_cute.host.cache import CompileCache, Compiled
from flash_mask_cute.host.config import FwdTiles
from flash_mask_cute.host.problem import CUTLASS_NAMES, AttentionProblem, Mods
from flash_mask_cute.host.target import Target

CACHE = CompileCache()
KERNEL_NAME = "flash_fwd_sm90"
_STRIDE_STEP = 8  # elements of 16 bits, as TMA wants
_BASE_ALIGNMENT = 16  # bytes
NO_MODS = Mods()


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
    (indices, bounds), block size (a pair), block bits (visible, full, block_q, block_k); None for
    what the problem does not have.
    """
    return cache.get(
        KERNEL_NAME,
        lambda: {"problem": asdict(problem), "tiles": asdict(tiles), "num_sms": target.num_sms},
        lambda: build_fwd(problem, tiles, target, mods),
        arch=target.arch,
        options=_options(target),
        token=(problem, tiles, target),
    )


def build_fwd(
    problem: AttentionProblem,
    tiles: FwdTiles,
    target: Target,
    mods: Mods = NO_MODS,
    more_options: str = "",
) -> Compiled:
    """Compile now. `meta`: registers, spill_bytes (stores and loads; either is None when ptxas told
    nothing), smem_bytes, and warnings, what ptxas said about lost performance."""
    import cutlass
    import cutlass.cute as cute

    from flash_mask_cute.masks.intervals import Intervals
    from flash_mask_cute.sm90.flash_fwd import FlashAttentionForwardSm90

    kernel = FlashAttentionForwardSm90(
        getattr(cutlass, CUTLASS_NAMES[problem.dtype]),
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
    options = f"{_options(target)} {more_options}".strip()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        function = cute.compile(kernel, *_fake_arguments(problem), options=options)
    return Compiled(function, {"smem_bytes": kernel.plan.smem_bytes, **_read(said.getvalue())})


def _options(target: Target) -> str:
    return f"--enable-tvm-ffi --gpu-arch {target.arch} remarks{{ptx}}"


def _fake_arguments(problem: AttentionProblem) -> list[Any]:
    """Stand-ins for the arguments of the kernel object's `__call__`, the stream included."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    def extents(rank: int) -> tuple[Any, ...]:
        return tuple(cute.sym_int() for _ in range(rank))

    def operand(rank: int, dim: int) -> Any:
        dtype = getattr(cutlass, CUTLASS_NAMES[problem.dtype])
        strides = tuple(cute.sym_int64(divisibility=_STRIDE_STEP) for _ in range(rank - 1))
        return make_fake_tensor(
            dtype, (*extents(rank - 1), dim), (*strides, 1), assumed_align=_BASE_ALIGNMENT
        )

    def vector(name: str | None) -> Any:
        if name is None:
            return None
        dtype = getattr(cutlass, CUTLASS_NAMES[name])
        return make_fake_tensor(dtype, extents(1), (1,), assumed_align=dtype.width // 8)

    def int32_vector(present: bool) -> Any:
        return vector("int32" if present else None)

    def strided(rank: int, name: str = "int32") -> Any:
        # Also the last stride is free: where the extent is 1, torch leaves it to chance.
        dtype = getattr(cutlass, CUTLASS_NAMES[name])
        strides = tuple(cute.sym_int64() for _ in range(rank))
        return make_fake_tensor(dtype, extents(rank), strides, assumed_align=dtype.width // 8)

    def int32_pair() -> Any:
        return cutlass.Int32(0), cutlass.Int32(0)

    rank_q, rank_k = (3 if varlen else 4 for varlen in (problem.varlen_q, problem.varlen_k))
    lse = None
    if problem.needs_lse:
        strides: Any = (*(cute.sym_int64() for _ in range(rank_q - 2)), 1)
        lse = make_fake_tensor(cutlass.Float32, extents(rank_q - 1), strides, assumed_align=4)
    lists = None
    if problem.has_lists:
        full = (strided(3), strided(4)) if problem.has_full_lists else (None, None)
        lists = (strided(3), strided(4), *full)
    return [
        operand(rank_q, problem.head_dim),
        operand(rank_k, problem.head_dim),
        operand(rank_k, problem.head_dim_v),
        operand(rank_q, problem.head_dim_v),
        lse,
        cutlass.Float32(1.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        int32_vector(problem.varlen_q),
        int32_vector(problem.varlen_k),
        int32_vector(problem.has_seqused_q),
        int32_vector(problem.has_seqused_k),
        None,
        cutlass.Int32(0) if problem.has_window_left else None,
        cutlass.Int32(0) if problem.has_window_right else None,
        vector(problem.sink_dtype),
        lists,
        tuple(strided(rank, dtype) for dtype, rank in problem.aux) or None,
        cutlass.Float32(1.0) if problem.has_softcap else None,
        make_fake_tensor(cutlass.Int32, (2,), (1,), assumed_align=4),
        (strided(4), strided(4)) if problem.intervals is not None else None,
        int32_pair() if problem.has_lists else None,
        (strided(4), strided(4), *int32_pair()) if problem.has_bits else None,
    ]


def _read(remarks: str) -> dict[str, Any]:
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", remarks)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", remarks)
    warnings = re.findall(r"C75\d\d\)[^\n]*|[^\n]*\bserialized\b[^\n]*", remarks)
    return {
        "registers": max(registers, default=None),
        "spill_bytes": sum(int(n) for pair in spills for n in pair) if spills else None,
        "warnings": warnings,
    }
