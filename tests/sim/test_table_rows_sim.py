"""Tables along the keys: rows loaded many keys at once, or elements where they cannot be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import cutlass.cute as cute
import pytest
import torch
from cases import Case
from conftest import ACTIVE_ARCH
from inputs import make_inputs
from simulated_forward import run_sim
from torch import Tensor

from flash_mask_cute.flex import lower_mod

# as the software GPU is, so that these tests run on either
ARCH = ACTIVE_ARCH

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

SEQLEN_Q, SEQLEN_K = 200, 300


def _numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, low: int = -8) -> Tensor:
    """Multiples of 1/4 where the dtype has them: equal in every dtype that holds them."""
    whole = torch.randint(low, 8, shape, generator=torch.Generator().manual_seed(0))
    return whole.to(dtype) if not dtype.is_floating_point else (whole / 4).to(dtype)


@dataclass(frozen=True)
class Dense:
    """In place of `DenseMasks`."""

    bias: Callable[[int, int, Tensor, Tensor], Tensor]
    mask_mod: Callable[..., Tensor] | None = None

    def visible(self, batch_idx: int, head_idx: int, seqlen_q: int, seqlen_k: int) -> Tensor:
        q, k = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
        if self.mask_mod is None:
            return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
        return self.mask_mod(batch_idx, head_idx, q, k)

    def modify(self, scores: Tensor, batch_idx: int, head_idx: int) -> Tensor:
        q, k = (torch.arange(n) for n in scores.shape)
        return scores + self.bias(batch_idx, head_idx, q[:, None], k).to(scores.dtype)


def _by_head(dtype: torch.dtype) -> Callable[..., Tensor]:
    table = _numbers(2, 4, SEQLEN_Q, 512, dtype=dtype, low=-8 if dtype.is_signed else 0)
    return lambda b, h, q, k: table[b, h, q, k] / 2


BROADCAST = _numbers(1, 1, SEQLEN_Q, 512)
NARROW = _numbers(SEQLEN_Q, 512, dtype=torch.uint8, low=0)
BUCKETS = _numbers(SEQLEN_Q, 304, dtype=torch.int32, low=0)
WEIGHTS = _numbers(8, 4, dtype=torch.float32)
ODD_ROWS = _numbers(SEQLEN_Q, 301)
OFF_BY_ONE = _numbers(SEQLEN_Q, 520)[:, 1:]
BY_COLUMNS = _numbers(512, SEQLEN_Q).mT
SHORT = _numbers(SEQLEN_Q // 2, 200)

BIASES: dict[str, Callable[..., Tensor]] = {
    "bf16": _by_head(torch.bfloat16),
    "fp16": _by_head(torch.float16),
    "fp32": _by_head(torch.float32),
    "int8": _by_head(torch.int8),
    "uint8": _by_head(torch.uint8),
    "two": lambda b, h, q, k: (BROADCAST[0, 0, q, k] + NARROW[q, k]) * 0.5,
    "index": lambda b, h, q, k: WEIGHTS[BUCKETS[q, k], h],
    "odd rows": lambda b, h, q, k: ODD_ROWS[q, k],
    "off by one": lambda b, h, q, k: OFF_BY_ONE[q, k],
    "columns": lambda b, h, q, k: BY_COLUMNS[q, k],
}


def _run(
    simulator: ModuleType, case: Case, bias: Callable[..., Tensor], dense: Dense | None = None
) -> None:
    low = lower_mod(lambda s, b, h, q, k: s + bias(b, h, q, k), "score_mod")
    _run_mod(simulator, case, low.mod, low.aux_tensors, dense or Dense(bias))


def _run_mod(
    simulator: ModuleType, case: Case, score_mod: Any, aux_tensors: Sequence[Tensor], dense: Any
) -> None:
    keywords = {"score_mod": score_mod, "aux_tensors": list(aux_tensors)}
    inputs = replace(make_inputs(case), mask_keywords=keywords, dense=dense)
    run_sim(simulator, inputs, seeds=(1,))


# a thread of Blackwell has a row, so its loads differ by the size of elements only
TABLES = list(BIASES) if ARCH == "sm_90a" else ["fp16", "fp32", "uint8", "two", "odd rows"]


@pytest.mark.parametrize("name", TABLES)
def test_tables(simulator: ModuleType, name: str) -> None:
    case = Case(name, 2, SEQLEN_Q, SEQLEN_K, 4, 4, head_dim=64)
    _run(simulator, case, BIASES[name])


def test_a_table_shorter_than_the_keys(simulator: ModuleType) -> None:
    """Past its end the last row and the last key are read, as everywhere in kernels."""

    def bias(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
        return SHORT[q.clamp(max=SHORT.shape[0] - 1), k.clamp(max=SHORT.shape[1] - 1)]

    case = Case("short", 1, SEQLEN_Q, SEQLEN_K, 2, 2, head_dim=64)
    _run(simulator, case, lambda b, h, q, k: SHORT[q, k], Dense(bias))


EMPTY = torch.zeros(SEQLEN_Q, 0)


@cute.jit
def _never_reads(score, b_idx, h_idx, q_idx, kv_idx, aux):
    found = score
    if q_idx[0] < 0:
        found = score + aux[0][q_idx[0], kv_idx[0]]
    return found


def test_reads_under_a_condition_are_left_to_the_callable(simulator: ModuleType) -> None:
    case = Case("empty", 1, SEQLEN_Q, SEQLEN_K, 2, 2, head_dim=64)
    dense = Dense(lambda b, h, q, k: torch.zeros(1))
    _run_mod(simulator, case, _never_reads, [EMPTY], dense)


SHAPES = (
    Case("grouped", 1, 70, SEQLEN_K, 4, 1, head_dim=64, pack_gqa=True),
    Case("causal", 1, SEQLEN_Q, SEQLEN_K, 4, 4, head_dim=128, causal=True),
    Case("window", 1, SEQLEN_Q, SEQLEN_K, 4, 4, head_dim=128, window_left=40, window_right=9),
    Case("varlen", lengths_q=(130, 1, 69), lengths_k=(150, 40, 20), heads_q=4, heads_kv=4),
)


@pytest.mark.parametrize("case", SHAPES)
def test_shapes(simulator: ModuleType, case: Case) -> None:
    _run(simulator, case, lambda b, h, q, k: BROADCAST[0, 0, q, k])
