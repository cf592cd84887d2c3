"""Facts that determine the kernels of a backward, besides its problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.call.problem import AttentionProblem, Padding, sink_dtype
from flash_mask_cute.runtime.dtypes import dtype_name


class GradientFacts(NamedTuple):
    """sink_dtype: of a sink whose gradient is requested, or that identifies queries that see
    nothing, as kernels read it."""

    has_dlse: bool
    has_lse_low: bool
    sink_dtype: str | None
    score_mod_bwd: Callable[..., Any] | None
    padding: Padding

    @staticmethod
    def of(
        call: AttentionCall, problem: AttentionProblem, sink: torch.Tensor | None
    ) -> GradientFacts:
        x, of = call.tensors, call.tensors.gradients
        return GradientFacts(
            has_dlse=of.dlse is not None,
            has_lse_low=x.lse_low is not None,
            sink_dtype=None if sink is None else dtype_name(sink_dtype(sink)),
            score_mod_bwd=call.backward.score_mod_bwd,
            padding=Padding(
                problem.varlen_q and of.dq is None,
                problem.varlen_k and of.dk is None,
                problem.varlen_k and of.dv is None,
            ),
        )
