"""How many kernels a layer has whose sequences have any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planned import forward_call, planned

from flash_mask_cute import explain
from flash_mask_cute.runtime.target import Target

HOPPER = Target("sm_90a", num_sms=132)
TABLE = torch.zeros(1024, 1024)


def reads_table(s: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return s + aux[0][q[0], k[0]]


def operand(seqlen: int, dim: int) -> torch.Tensor:
    return torch.empty(1, dtype=torch.bfloat16).expand(2, seqlen, 8, dim)


@pytest.mark.parametrize(
    ("dim", "has_table", "limits"),
    [
        # of docs/host.md
        (64, True, [1, 65, 129, 161]),
        (64, False, [1, 65]),
        (128, True, [1, 65]),
        (128, False, [1, 65]),
    ],
)
def test_lengths_that_change_the_forward(dim: int, has_table: bool, limits: list[int]) -> None:
    masks = {"score_mod": reads_table, "aux_tensors": [TABLE]} if has_table else {}
    found, last = [], None
    for seqlen in range(1, 400):
        x = operand(seqlen, dim)
        plan = planned(forward_call(x, x, x, **masks), HOPPER)
        kernel = plan.problem, plan.fwd_choice.tiles
        if kernel != last:
            found.append(seqlen)
        last = kernel
    assert found == limits


@pytest.mark.usefixtures("explained_without_compiling")
def test_explain_names_the_limits() -> None:
    x = operand(150, 64)
    said = str(explain(x, x, x, score_mod=reads_table, aux_tensors=[TABLE], target="sm_90a"))
    assert "seqlen_k >= 129, seqlen_k <= 160" in said
