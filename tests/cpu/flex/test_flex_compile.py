"""Lowered mods, compiled for Hopper without a GPU: no more registers and spills than by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import pytest
import torch
from compiled_code import SWEEP
from torch import Tensor

from flash_mask_cute.call.forward import build_fwd
from flash_mask_cute.call.problem import AttentionProblem, FwdShapes, Mods
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.call.tiles.config import select_fwd_config
from flash_mask_cute.flex import lower_mod
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.dtypes import dtype_name
from flash_mask_cute.runtime.target import Target

IDS = torch.zeros(2, 64, dtype=torch.int32)
SLOPES = torch.zeros(8)


def documents_by_hand(b_idx: Any, h_idx: Any, q_idx: Any, kv_idx: Any, aux: Any) -> Any:
    ids, b, q, k = aux[0], b_idx[0], q_idx[0], kv_idx[0]
    return (ids[b, q] == ids[b, k]) & (q >= k)


def alibi_by_hand(score: Any, b_idx: Any, h_idx: Any, q_idx: Any, kv_idx: Any, aux: Any) -> Any:
    distance = abs(q_idx[0] - kv_idx[0])
    return score[0] - aux[0][h_idx[0]] * cutlass.Float32(distance)


def code_facts(kind: str, mod: Callable[..., Any], aux: tuple[Tensor, ...]) -> tuple[int, int]:
    """Registers and bytes spilled of a forward kernel."""
    fields: dict[str, Any] = {kind: callable_key(mod)}
    fields["aux"] = tuple((dtype_name(x.dtype), x.dim()) for x in aux)
    problem = AttentionProblem("bfloat16", 128, 128, **fields)
    shapes = FwdShapes(1, 1000, 1000, 1000, 1000, 8, 8, 128, 128)
    target = Target.named("sm_90a")
    tiles = select_fwd_config(problem, shapes, spec=arch_spec(target)).tiles
    mods = Mods(**{kind: mod, "mask_mod" if kind == "score_mod" else "score_mod": None})
    with compile_lock():
        meta = build_fwd(problem, tiles, target, mods).meta
    return meta["registers"], meta["spill_bytes"]


@SWEEP
@pytest.mark.parametrize(
    ("kind", "mod", "by_hand"),
    [
        ("mask_mod", lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) & (q >= k), documents_by_hand),
        ("score_mod", lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(), alibi_by_hand),
    ],
)
def test_lowered_code_is_no_larger_than_by_hand(
    kind: str, mod: Callable[..., Tensor], by_hand: Callable[..., Any]
) -> None:
    lowered = lower_mod(mod, kind)
    wanted = code_facts(kind, by_hand, lowered.aux_tensors)
    registers, spilled = code_facts(kind, lowered.mod, lowered.aux_tensors)
    assert registers <= wanted[0] and spilled <= wanted[1], (registers, spilled, wanted)
