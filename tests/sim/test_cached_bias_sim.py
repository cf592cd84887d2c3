"""Rows of tables that stay in shared memory between batch entries, on the software GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cases import Case
from conftest import ACTIVE_ARCH
from cutlass import Float32
from inputs import Inputs, make_inputs
from planned import call_of, planned
from simulated_forward import run_sim
from test_difference_tables_sim import tables_always
from torch import Tensor

from flash_mask_cute.runtime.target import Target

pytestmark = [
    pytest.mark.usefixtures("poisoned_allocations"),
    pytest.mark.skipif(ACTIVE_ARCH != "sm_90a", reason="no rows stay on Blackwell"),
]

BATCH = 16


@cute.jit
def adds_pairs(score, b_idx, h_idx, q_idx, kv_idx, aux):
    return score + aux[0][h_idx[0], q_idx[0], kv_idx[0]]


@cute.jit
def adds_two(score, b_idx, h_idx, q_idx, kv_idx, aux):
    factor = Float32(aux[1][q_idx[0], kv_idx[0]])
    return score + Float32(aux[0][h_idx[0], q_idx[0], kv_idx[0]]) * factor


@cute.jit
def has_key(b_idx, h_idx, q_idx, kv_idx, aux):
    return aux[1][b_idx[0], kv_idx[0]] != 0


@dataclass(frozen=True)
class Pairs:
    """In place of `DenseMasks`."""

    table: Tensor
    valid: Tensor | None = None

    def visible(self, batch_idx: int, head_idx: int, seqlen_q: int, seqlen_k: int) -> Tensor:
        if self.valid is None:
            return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
        return (self.valid[batch_idx] != 0).expand(seqlen_q, seqlen_k)

    def modify(self, scores: Tensor, batch_idx: int, head_idx: int) -> Tensor:
        return scores + self.table[head_idx].to(scores.dtype)


def _table(heads: int, seqlen_q: int, seqlen_k: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(heads, seqlen_q, seqlen_k, generator=generator).to(dtype)


def make_cached_bias(
    seqlen_q: int = 130, seqlen_k: int = 300, heads: int = 4, dtype: torch.dtype = torch.float32
) -> Inputs:
    """Two query blocks, three key blocks of which two stay, and a key mask by entry."""
    case = Case("kept", BATCH, seqlen_q, seqlen_k, heads, heads, head_dim=32)
    table = _table(heads, seqlen_q, seqlen_k, dtype)
    valid = (torch.rand(BATCH, seqlen_k, generator=torch.Generator().manual_seed(2)) > 0.2).int()
    valid[::3, 128:256], valid[1::5, :200], valid[7] = 0, 0, 0
    keywords = {"score_mod": adds_pairs, "mask_mod": has_key, "aux_tensors": [table, valid]}
    return replace(make_inputs(case), mask_keywords=keywords, dense=Pairs(table, valid))


def _cached_bias_bits(inputs: Inputs, **more: Any) -> int:
    return planned(call_of(inputs, **more), Target(ACTIVE_ARCH, num_sms=2)).problem.cached_bias_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_key_masks(simulator: ModuleType, dtype: torch.dtype) -> None:
    inputs = make_cached_bias(dtype=dtype)
    assert _cached_bias_bits(inputs) == 8 * dtype.itemsize
    run_sim(simulator, inputs, seeds=(None, 1))


def test_without_a_mask(simulator: ModuleType) -> None:
    """Rows of 301 elements, which are loaded one by one; groups of heads; LSE."""
    case = Case("whole", BATCH, 140, 301, 2, 1, head_dim=40)
    table = _table(2, 140, 301, torch.float32)
    keywords = {"score_mod": adds_pairs, "aux_tensors": [table]}
    inputs = replace(make_inputs(case), mask_keywords=keywords, dense=Pairs(table))
    assert _cached_bias_bits(inputs) == 32
    run_sim(simulator, inputs, seeds=(2,))


@cute.jit
def adds_distances(score, b_idx, h_idx, q_idx, kv_idx, aux):
    distance = cutlass.max(cutlass.min(q_idx[0] - kv_idx[0], 40), -40) + 40
    return score + aux[0][h_idx[0], q_idx[0], kv_idx[0]] + aux[1][h_idx[0], distance]


def test_beside_a_table_of_differences(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables_always(monkeypatch, True)
    case = Case("distances", BATCH, 140, 200, 2, 2, head_dim=32)
    pairs, distances = _table(2, 140, 200, torch.float32), _table(2, 81, 1, torch.float32)[..., 0]
    keywords = {"score_mod": adds_distances, "aux_tensors": [pairs, distances]}
    place = torch.arange(140)[:, None] - torch.arange(200)
    bias = Pairs(pairs + distances[:, place.clamp(-40, 40) + 40])
    inputs = replace(make_inputs(case), mask_keywords=keywords, dense=bias)
    plan = planned(call_of(inputs), Target(ACTIVE_ARCH, num_sms=2))
    assert plan.problem.cached_bias_bits == 32 and plan.tables is not None
    run_sim(simulator, inputs, seeds=(4,))


def test_two_tables(simulator: ModuleType) -> None:
    case = Case("two", BATCH, 70, 110, 2, 2, head_dim=32)
    tables = _table(2, 70, 110, torch.float16), _table(1, 70, 110, torch.bfloat16)[0]
    keywords = {"score_mod": adds_two, "aux_tensors": list(tables)}
    bias = Pairs(tables[0].float() * tables[1].float())
    inputs = replace(make_inputs(case), mask_keywords=keywords, dense=bias)
    assert _cached_bias_bits(inputs) == 32
    run_sim(simulator, inputs, seeds=(3,))
