"""Forward mode: the tangents of out and LSE of a forward, by one more walk over its tiles.

Few-step generators train by it (Lu and Song 2024, sCM; Geng et al. 2025, MeanFlow).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import NO_MASKS, AttentionCall, Masks, Tensors
from flash_mask_cute.call.copies import (
    common_conversion,
    convert,
    input_conversion,
    split_scale,
)
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.facts import Backend, CallFacts
from flash_mask_cute.call.plan import kernel_problem, with_tiles
from flash_mask_cute.call.second_walk import SecondWalk, prepared
from flash_mask_cute.cpu.tangent import Tangents, flash_attn_tangent_cpu
from flash_mask_cute.masks.selected_blocks import SelectedBlocks
from flash_mask_cute.runtime.checks import brief
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
    given: dict[str, Any] = {"score_mod": masks.score_mod, "out": x.out} | x.optional._asdict()
    given |= {"page_table": x.lengths.page_table, "softcap": softcap or None}
    of_q, of_k = (getattr(y, "dtype", None) for y in (x.q, x.k))
    given[f"k in {of_k} beside q in {of_q}"] = None if of_k == of_q else x.k
    given["SelectedBlocks"] = lists if isinstance(lists, SelectedBlocks) else None
    given["causal as a tensor"] = given.pop("causal_per_seq")
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{NO_FORWARD_MODE} with {name}, got {brief(value)}")


def plan_tangent(call: AttentionCall, target: Target | None = None) -> ExecutionPlan:
    """The plan of the walk that computes tangents. Raises TypeError, ValueError,
    NotImplementedError, as `plan` of the forward, and as `refuse_beside_tangents`."""
    refuse_beside_tangents(call)
    options = replaced(call.options, num_splits=1, seqlen_k_per_split=None, return_lse=True)
    options = replaced(options, pack_gqa=False, config=None)
    facts = CallFacts.of(replaced(call, options=options), target)
    # of keys that are expanded over the batch, tangents may differ
    shared_kv = call.tensors.have_shared_keys
    problem = replace(kernel_problem(facts), shared_kv=shared_kv, is_tangent=True)
    dims, kernel = (problem.head_dim, problem.head_dim_v), facts.spec.tangent
    if kernel is not None and dims[0] == dims[1] <= kernel.most_head_dim:
        facts = replace(facts, second_walk="tangent")
    elif facts.backend is Backend.KERNEL:
        raise NotImplementedError(
            f"{NO_FORWARD_MODE} on {facts.spec.name} with head_dim and head_dim_v {dims}: there "
            f"are {'no kernels' if kernel is None else 'kernels for equal ones up to 128'}"
        )
    return with_tiles(facts, problem)


class PreparedTangent(SecondWalk):
    """Runs calls of one plan."""

    @torch.no_grad()
    def __call__(self, x: Tensors, masks: Masks | None, given: Tangents) -> tuple[Tensor, Tensor]:
        """As `tangent`. Of no queries or keys, all is 0."""
        plan = self.plan
        if plan.backend is Backend.CPU:
            return flash_attn_tangent_cpu(self.cpu_call(x), given)
        if not self.is_kernel:
            return torch.zeros_like(given.out), torch.zeros_like(given.lse)
        factor, _ = split_scale(plan.softmax_scale)
        of_keys = common_conversion if plan.problem.shared_kv else input_conversion
        queries, keys = (x.q, given.q), (x.k, x.v, given.k, given.v)
        q, tq = convert(queries, tuple(input_conversion(y, factor) for y in queries))
        k, v, tk, tv = convert(keys, tuple(map(of_keys, keys)))
        rest, of_out = (given.out, x.learnable_sink), input_conversion(given.out)
        out, sink = convert(rest, (of_out, plan.conversions["learnable_sink"]))
        lse = given.lse.contiguous()
        # with rows of no sequence, which the kernel does not write
        tout, tlse = out.new_zeros(out.shape), torch.zeros_like(lse)
        partials = tq, tk, tv, out, lse
        self.launch(x, masks, q=q, k=k, v=v, out=tout, lse=tlse, sink=sink, partials=partials)
        return tout, tlse


def tangent(call: AttentionCall, given: Tangents) -> tuple[Tensor, Tensor]:
    """Tangents of the results of a forward: (tout, tlse), like its out and lse, new tensors.

    call: of the forward. given: the tangents of q, k and v, like these, and the results of the
    forward. Rows that see nothing, and rows that are not in use, have tangents of 0. Raises
    TypeError, ValueError, NotImplementedError, as `plan_tangent`."""
    walk = prepared(call, given, None, lambda: PreparedTangent(plan_tangent(call)))
    return walk(call.tensors, call.masks, given)
