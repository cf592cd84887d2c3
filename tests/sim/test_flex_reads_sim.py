"""What each read of torch mods gives in compiled kernels, at negative and too large indices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import Case
from conftest import ACTIVE_ARCH
from inputs import make_inputs
from simulated_forward import run_sim
from torch import Tensor

from flash_mask_cute.flex import lower_mod
from flash_mask_cute.lowering.pair import join_mods

# as the software GPU is, so that these tests run on either
ARCH = ACTIVE_ARCH

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

IDS = torch.arange(200) // 45  # shorter than there are keys
BIAS = torch.randn(300, generator=torch.Generator().manual_seed(0))
GAIN = torch.tensor(0.75)
MANY = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (IDS[q] == IDS[k]) | ((q - k) % 7 == 0)


def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(q >= k, s * GAIN, s - MANY[h]) + BIAS[q - k] + torch.tanh(s * 0.1)


@dataclass(frozen=True)
class Dense:
    """In place of `DenseMasks`: kernels clamp indices past the end of IDS."""

    def visible(self, batch_idx: int, head_idx: int, seqlen_q: int, seqlen_k: int) -> Tensor:
        q, k = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
        last = IDS.numel() - 1
        return (IDS[q.clamp(max=last)] == IDS[k.clamp(max=last)]) | ((q - k) % 7 == 0)

    def modify(self, scores: Tensor, batch_idx: int, head_idx: int) -> Tensor:
        q, k = (torch.arange(n) for n in scores.shape)
        q = q[:, None]
        bias = BIAS[q - k].to(scores.dtype)
        either = torch.where(q >= k, scores * GAIN, scores - MANY[head_idx])
        return either.to(scores.dtype) + bias + torch.tanh(scores * 0.1)


def test_a_call_with_lowered_mods(simulator: ModuleType) -> None:
    case = Case("flex", 1, 200, 260, 4, 2, head_dim=64)
    mods = join_mods(lower_mod(score_mod, "score_mod"), lower_mod(mask_mod, "mask_mod"))
    dense: Any = Dense()
    inputs = replace(make_inputs(case), mask_keywords=mods._asdict(), dense=dense)
    run_sim(simulator, inputs, seeds=(1,))
