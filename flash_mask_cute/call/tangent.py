"""Forward mode: the tangents of out and LSE of a forward, by one more walk over its tiles.

The forward runs as ever. With dS = scale * (tQ K^T + Q tK^T) and P from the LSE, a second walk sums
(P dS) V + P tV, and mu = sum of P dS of each row. Then tO = that sum - mu O, and mu is the tangent
of the LSE. Few-step generators train by it (Lu and Song 2024, sCM; Geng et al. 2025, MeanFlow).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import NO_MASKS, AttentionCall
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.facts import Backend, CallFacts
from flash_mask_cute.call.forward import cpu_call
from flash_mask_cute.call.plan import kernel_problem, with_tiles
from flash_mask_cute.cpu.call import CpuTiles
from flash_mask_cute.cpu.tangent import Tangents, flash_attn_tangent_cpu
from flash_mask_cute.masks.selected_blocks import SelectedBlocks
from flash_mask_cute.runtime.checks import brief
from flash_mask_cute.runtime.dtypes import FP8
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.target import Target

NO_FORWARD_MODE = "forward mode (torch.func.jvp, torch.autograd.forward_ad) is not supported"


def refuse_beside_tangents(call: AttentionCall, others: Iterable[str] = ()) -> None:
    """Refuse what has no tangents, before anything runs. others: arguments beside q, k and v that
    have tangents. Raises NotImplementedError, naming argument and value."""
    for name in others:
        raise NotImplementedError(f"{NO_FORWARD_MODE} by {name}, which has a tangent: detach it")
    x, masks, softcap = call.tensors, call.masks or NO_MASKS, call.options.softcap
    lists: Any = masks.block_sparse_tensors_torch
    given = {
        "score_mod": masks.score_mod,
        "softcap": None if softcap == 0 else softcap,
        "page_table": x.lengths.page_table,
        "k in float8_e4m3fn": x.k if getattr(x.k, "dtype", None) == FP8 else None,
        "block_sparse_tensors as SelectedBlocks": lists
        if isinstance(lists, SelectedBlocks)
        else None,
        "out": x.out,
        **x.optional._asdict(),
    }
    given["causal as a tensor"] = given.pop("causal_per_seq")
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{NO_FORWARD_MODE} with {name}, got {brief(value)}")
    if getattr(x.q, "is_cuda", False):
        raise NotImplementedError(f"{NO_FORWARD_MODE} for CUDA tensors, got q on {x.q.device}")


def plan_tangent(call: AttentionCall, target: Target | None = None) -> ExecutionPlan:
    """The plan of the walk that computes tangents. Raises TypeError, ValueError,
    NotImplementedError, as `plan` of the forward, and as `refuse_beside_tangents`."""
    refuse_beside_tangents(call)
    options = replaced(
        call.options, num_splits=1, seqlen_k_per_split=None, pack_gqa=False, config=None
    )
    facts = CallFacts.of(replaced(call, options=options), target)
    return with_tiles(facts, kernel_problem(facts))


def tangent(call: AttentionCall, given: Tangents) -> tuple[Tensor, Tensor]:
    """Tangents of the results of a forward: (tout, tlse), like its out and lse, new tensors.

    call: of the forward. given: the tangents of q, k and v, like these, and the results of the
    forward. Rows that see nothing, and rows that are not in use, have tangents of 0. Raises
    TypeError, ValueError, NotImplementedError, as `plan_tangent`."""
    planned = plan_tangent(call)
    if planned.backend is Backend.EMPTY:
        return torch.zeros_like(given.out), torch.zeros_like(given.lse)
    with torch.no_grad():
        tiles = CpuTiles(*planned.walk_tile, skip_blocks=planned.fwd_choice.tiles.skip_blocks)
        return flash_attn_tangent_cpu(cpu_call(planned, call.tensors, tiles), given)
