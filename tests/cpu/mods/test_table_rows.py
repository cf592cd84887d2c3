"""Which reads of tables along the keys the forward loads many keys at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cutlass.cute as cute
import pytest
import torch
from compiled_code import B200, PLAIN, SWEEP, TARGET, shapes_of
from torch import Tensor

from flash_mask_cute.call.forward import build_fwd
from flash_mask_cute.call.problem import Mods
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.call.tiles.config import select_fwd_config
from flash_mask_cute.flex import lower_mod
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.compiler import compiler_keeps
from flash_mask_cute.runtime.dtypes import dtype_name
from flash_mask_cute.runtime.target import Target

N = 512


def table(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(shape or (N, N), dtype=dtype)


BF16, FP32, INT64, BYTES = (
    table(dtype) for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.uint8)
)
FLAGS = table(torch.bool)
BY_HEAD = table(torch.bfloat16, 2, 8, N, N)
BY_KEY = table(torch.bfloat16, 2, N)

# in a load of a thread: bytes of a bf16 row of a quad, or of two neighbours
LOADED: dict[str, tuple[Callable[..., Tensor], int]] = {
    "bf16": (lambda s, b, h, q, k: s + BF16[q, k], 16),
    "by head": (lambda s, b, h, q, k: s + BY_HEAD[b, h, q, k], 16),
    "a head": (lambda s, b, h, q, k: s + BY_HEAD[0][3][q][k], 16),
    "fp32": (lambda s, b, h, q, k: s + FP32[q, k], 8),
    "bytes": (lambda s, b, h, q, k: s + BYTES[q, k], 2),
}
SINGLE: dict[str, Callable[..., Tensor]] = {
    "exchanged": lambda s, b, h, q, k: s + BF16[k, q],
    "an index of 64 bits": lambda s, b, h, q, k: s + BF16[q, k.long()],
    "another key": lambda s, b, h, q, k: s + BF16[q, k // 2],
    "int64": lambda s, b, h, q, k: s + INT64[q, k],
    "bool": lambda s, b, h, q, k: torch.where(FLAGS[q, k], s, 0.0),
    "the same for all queries": lambda s, b, h, q, k: s + BY_KEY[b, k],
}


def loads(
    score_mod: Any, aux_tensors: list[Tensor], folder: Path, target: Target = TARGET
) -> set[int]:
    """Bytes of the loads of read-only memory in the forward's PTX."""
    aux = tuple((dtype_name(x.dtype), x.dim()) for x in aux_tensors)
    problem = replace(PLAIN, aux=aux, score_mod=callable_key(score_mod))
    tiles = select_fwd_config(problem, shapes_of(problem), spec=arch_spec(target)).tiles
    with compile_lock(), compiler_keeps(f"--keep-cubin --keep-ptx --dump-dir={folder}"):
        compiled = build_fwd(problem, tiles, target, Mods(score_mod=score_mod))
    function: Any = compiled.function
    found = re.findall(r"ld\.global\.nc(?:\.v(\d))?\.[bu](\d+)", function.__ptx__)
    return {int(count or 1) * int(bits) // 8 for count, bits in found}


def loads_of(mod: Callable[..., Tensor], folder: Path, target: Target = TARGET) -> set[int]:
    low = lower_mod(mod, "score_mod")
    return loads(low.mod, list(low.aux_tensors), folder, target)


# a thread of Blackwell has a row of its own
ON_BLACKWELL = "fp32 on Blackwell"


@SWEEP
@pytest.mark.parametrize("name", [*LOADED, ON_BLACKWELL])
def test_rows_of_keys_are_loaded_together(name: str, tmp_path: Path) -> None:
    if name == ON_BLACKWELL:
        assert 16 in loads_of(LOADED["fp32"][0], tmp_path, B200)
    else:
        mod, size = LOADED[name]
        assert size in loads_of(mod, tmp_path)


@cute.jit
def _reads_if_positive(score, b_idx, h_idx, q_idx, kv_idx, aux):
    found = score
    if q_idx[0] > 0:
        found = score + aux[0][q_idx[0], kv_idx[0]]
    return found


@SWEEP
@pytest.mark.parametrize("name", [*SINGLE, "under a condition"])
def test_other_reads_are_single(name: str, tmp_path: Path) -> None:
    if name in SINGLE:
        assert not loads_of(SINGLE[name], tmp_path)
    else:
        assert not loads(_reads_if_positive, [FP32], tmp_path)
