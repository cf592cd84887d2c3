"""The public call on a GPU for `inputs.Inputs`, and what every such call must keep to."""

from __future__ import annotations

from typing import Any

import torch
from eager import assert_close_to_oracle
from guarded_outputs import GuardedOutputs
from inputs import Inputs
from torch import Tensor

from flash_mask_cute.interface import _flash_attn_fwd


def forward(inputs: Inputs, **more: Any) -> tuple[Tensor, Tensor]:
    return _flash_attn_fwd(inputs.q, inputs.k, inputs.v, **(inputs.keywords | more))


def check(inputs: Inputs) -> None:
    """Outputs of the library and of the caller, NaN before: close, equal in every bit, guarded."""
    out, lse = forward(inputs)
    assert_close_to_oracle(out, lse, inputs)
    given = GuardedOutputs(inputs)
    forward(inputs, out=given.out, lse=given.lse)
    given.assert_guards_intact()
    rows = inputs.rows_in_use("q")
    assert torch.equal(given.out[rows], out[rows]), inputs.case.id
    assert torch.equal(given.lse.mT[rows], lse.mT[rows]), inputs.case.id


def check_replay(
    graph: torch.cuda.CUDAGraph, captured: Inputs, results: tuple[Tensor, Tensor], fresh: Inputs
) -> None:
    """The graph that wrote `results` from q, k, v of `captured`, replayed on those of `fresh`."""
    pairs = ((captured.q, fresh.q), (captured.k, fresh.k), (captured.v, fresh.v))
    for x, new in pairs:
        x.copy_(new)
    for result in results:
        result.fill_(float("nan"))
    graph.replay()
    assert_close_to_oracle(*results, fresh)
