"""Which calls keep rows of tables in shared memory."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
import pytest
import torch
from compiled_code import SWEEP
from planned import forward_call, planned
from torch import Tensor

from flash_mask_cute import explain
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.forward import build_fwd
from flash_mask_cute.call.problem import Mods
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.target import Target

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

BATCH, HEADS, SEQLEN, HEAD_DIM = 48, 4, 320, 32


@cute.jit
def adds_pairs(score, b_idx, h_idx, q_idx, kv_idx, aux):
    return score + aux[0][h_idx[0], q_idx[0], kv_idx[0]]


@cute.jit
def adds_of_entries(score, b_idx, h_idx, q_idx, kv_idx, aux):
    return score + aux[0][b_idx[0], q_idx[0], kv_idx[0]]


@cute.jit
def adds_both(score, b_idx, h_idx, q_idx, kv_idx, aux):
    own = aux[0][b_idx[0], q_idx[0], kv_idx[0]]
    return score + aux[0][h_idx[0], q_idx[0], kv_idx[0]] + own


@cute.jit
def adds_neighbours(score, b_idx, h_idx, q_idx, kv_idx, aux):
    return score + aux[0][h_idx[0], q_idx[0], (kv_idx[0] + 1) % 8]


@cute.jit
def adds_sometimes(score, b_idx, h_idx, q_idx, kv_idx, aux):
    found = score
    if q_idx[0] > 3:
        found = score + aux[0][h_idx[0], q_idx[0], kv_idx[0]]
    return found


@cute.jit
def has_key(b_idx, h_idx, q_idx, kv_idx, aux):
    return aux[1][b_idx[0], kv_idx[0]] != 0


@cute.jit
def is_before(b_idx, h_idx, q_idx, kv_idx, aux):
    return kv_idx[0] <= q_idx[0]


def call_keywords(**more: Any) -> dict[str, Any]:
    tables = [torch.zeros(BATCH, SEQLEN, SEQLEN), torch.ones(BATCH, SEQLEN, dtype=torch.int32)]
    return {"score_mod": adds_pairs, "mask_mod": has_key, "aux_tensors": tables} | more


def operands(batch: int = BATCH, head_dim: int = HEAD_DIM, seqlen: int = SEQLEN) -> list[Tensor]:
    return [torch.zeros(batch, seqlen, HEADS, head_dim, dtype=torch.bfloat16) for _ in range(3)]


def plan_of(qkv: list[Tensor], arch: str = "sm_90a", **more: Any) -> ExecutionPlan:
    return planned(forward_call(*qkv, **call_keywords(**more)), Target(arch, num_sms=132))


def test_kept() -> None:
    """Which other calls keep rows, and which do not: plan rows of the shape `biased`."""
    found = plan_of(operands())
    assert found.problem.cached_bias_bits == 32
    tiles = found.fwd_choice.tiles
    assert (tiles.tile_m, tiles.tile_n) == (128, 128)
    assert "a bias that batch entries share" in found.fwd_choice.reason


NOT_KEPT: dict[str, dict[str, Any]] = {
    "entries have tables of their own": {"score_mod": adds_of_entries},
    "one of two tables": {"score_mod": adds_both},
    "another index": {"score_mod": adds_neighbours},
    "under a condition": {"score_mod": adds_sometimes},
    "walks of different lengths": {"mask_mod": is_before},
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_callables_whose_rows_are_not_kept(name: str) -> None:
    assert plan_of(operands(), **NOT_KEPT[name]).problem.cached_bias_bits == 0


def test_rows_are_not_kept_beside_pages() -> None:
    """Also where no used length says that a walk is short."""
    pages = torch.zeros(BATCH * (SEQLEN // 64), 64, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    table = torch.arange(len(pages), dtype=torch.int32).view(BATCH, -1)
    found = plan_of([operands()[0], pages, pages.clone()], page_table=table, mask_mod=None)
    assert found.problem.page_box is not None and found.problem.cached_bias_bits == 0


@SWEEP
def test_shared_memory_and_spills() -> None:
    found = plan_of(operands())
    with compile_lock():
        built = build_fwd(
            found.problem, found.fwd_choice.tiles, found.target, Mods(found.masks.score_mod)
        )
    assert built.meta["smem_bytes"] == found.choice.smem_bytes
    assert (built.meta["spill_bytes"], built.meta["warnings"]) == (0, [])


def test_explain_tells() -> None:
    text = str(explain(*operands(), **call_keywords(), target="sm_90a"))
    assert "cached bias rows stay in shared memory" in text
