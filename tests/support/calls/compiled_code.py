"""Attention kernels compiled for their architectures, and what their code must be like."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest

from bench.codegen import count_sass
from flash_mask_cute.call.forward import NO_MODS, build_fwd
from flash_mask_cute.call.problem import AttentionProblem, FwdShapes, Mods
from flash_mask_cute.call.settings import FwdConfig
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.call.tiles.config import WalkFacts, select_fwd_config
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.compiler import compiler_keeps
from flash_mask_cute.runtime.machine_code import disassemblers, disassembly
from flash_mask_cute.runtime.target import Target

TARGET = Target.default()
# Of tests whose cases compile a kernel each, for seconds, `make test` runs every 48th one a day.
SWEEP = pytest.mark.shares(48)
NEEDS_DISASSEMBLER = pytest.mark.skipif(
    next(disassemblers(), None) is None, reason="nothing here can read machine code"
)
B200, B300 = Target.named("sm_100a"), Target.named("sm_103a")


# What `build_text` returned: tests of one process share what they compile.
_built: dict[Hashable, tuple[dict[str, Any], str]] = {}


def shapes_of(problem: AttentionProblem) -> FwdShapes:
    return FwdShapes(1, 1000, 1000, 1000, 1000, 8, 8, problem.head_dim, problem.head_dim_v)


def build(
    problem: AttentionProblem,
    folder: Path,
    mods: Mods = NO_MODS,
    target: Target = TARGET,
    override: FwdConfig | None = None,
) -> tuple[dict[str, Any], dict[str, int]]:
    """(meta, counts of machine instructions, empty where there is no disassembler)."""
    meta, text = build_text(problem, folder, mods, target, override)
    return meta, count_sass(text)


def build_text(
    problem: AttentionProblem,
    folder: Path,
    mods: Mods = NO_MODS,
    target: Target = TARGET,
    override: FwdConfig | None = None,
) -> tuple[dict[str, Any], str]:
    """(meta, machine code as text, empty where there is no disassembler)."""
    block_size = (128, 128) if problem.has_lists and not problem.has_bits else None
    choice = select_fwd_config(
        problem,
        shapes_of(problem),
        override=override,
        walk=WalkFacts(block_size=block_size),
        spec=arch_spec(target),
    )
    key = problem, choice.tiles, target, mods
    if key not in _built:
        options = f"--keep-cubin --dump-dir={folder}"
        with compile_lock(), compiler_keeps(options):
            compiled = build_fwd(problem, choice.tiles, target, mods)
        function: Any = compiled.function
        _built[key] = dict(compiled.meta), disassembly(function.__cubin__, folder)
    meta, text = _built[key]
    return dict(meta), text


PLAIN = AttentionProblem("bfloat16", 128, 128)


def check_code(
    facts: str, meta: dict[str, Any], counts: dict[str, int], most_spilled: int = 0
) -> None:
    """Nothing spilled, nothing that ptxas warns of, and shared memory that there is."""
    assert meta["spill_bytes"] <= most_spilled, facts
    assert not meta["warnings"], facts
    assert meta["smem_bytes"] <= 232448, facts
    if counts and not most_spilled:
        assert "LDL" not in counts and "STL" not in counts, facts
