"""Forward mode: the tangents of out and LSE of a forward, by one more walk over its tiles.

The forward runs as ever. With dS = scale * (tQ K^T + Q tK^T) and P from the LSE, a second walk sums
(P dS) V + P tV, and mu = sum of P dS of each row. Then tO = that sum - mu O, and mu is the tangent
of the LSE. Few-step generators train by it (Lu and Song 2024, sCM; Geng et al. 2025, MeanFlow).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import NO_MASKS, AttentionCall, Masks, Tensors
from flash_mask_cute.call.copies import common_conversion, input_conversion, split_scale
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.facts import Backend, CallFacts
from flash_mask_cute.call.forward import compile_fwd, cpu_call, tile_counter
from flash_mask_cute.call.kernel_operands import FORWARD, STREAM
from flash_mask_cute.call.lookup import find_fwd, metadata_of
from flash_mask_cute.call.mask_arguments import MaskArguments
from flash_mask_cute.call.plan import kernel_problem, with_tiles
from flash_mask_cute.call.tiles.config import select_fwd_config
from flash_mask_cute.cpu.call import CpuTiles
from flash_mask_cute.cpu.tangent import Tangents, flash_attn_tangent_cpu
from flash_mask_cute.masks.q_start import EACH
from flash_mask_cute.masks.selected_blocks import SelectedBlocks
from flash_mask_cute.runtime.checks import brief
from flash_mask_cute.runtime.dtypes import FP8
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.recent import Recent
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
    given["k in float8_e4m3fn"] = x.k if getattr(x.k, "dtype", None) == FP8 else None
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
    found = with_tiles(facts, problem)
    if kernel is not None and dims[0] == dims[1] <= kernel.most_head_dim:
        spec = facts.spec.of(problem)
        return found.with_choice(select_fwd_config(problem, facts.shapes, False, spec=spec))
    if facts.backend is Backend.KERNEL:
        raise NotImplementedError(
            f"{NO_FORWARD_MODE} on {facts.spec.name} with head_dim and head_dim_v {dims}: there "
            f"are {'no kernels' if kernel is None else 'kernels for equal ones up to 128'}"
        )
    return found


class PreparedTangent:
    """Runs a compiled kernel on the current stream, or computes on CPU tensors over its tiles."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self._plan, self.is_kernel = plan, plan.backend is Backend.KERNEL
        if self.is_kernel:
            problem, tiles = plan.problem, plan.fwd_choice.tiles
            self._function = compile_fwd(problem, tiles, plan.target, plan.masks.mods).function
            self._mask_arguments = MaskArguments(plan)

    @torch.no_grad()
    def __call__(self, x: Tensors, masks: Masks | None, given: Tangents) -> tuple[Tensor, Tensor]:
        """As `tangent`. Of no queries or keys, all is 0."""
        plan = self._plan
        if self.is_kernel:
            with torch.cuda.device(x.q.device) if x.q.is_cuda else nullcontext():
                return self._launch(x, masks, given)
        if plan.backend is Backend.EMPTY:
            return torch.zeros_like(given.out), torch.zeros_like(given.lse)
        tiles = CpuTiles(*plan.walk_tile, skip_blocks=plan.fwd_choice.tiles.skip_blocks)
        return flash_attn_tangent_cpu(cpu_call(plan, x, tiles), given)

    def _launch(self, x: Tensors, masks: Masks | None, given: Tangents) -> tuple[Tensor, Tensor]:
        plan, of, start = self._plan, x.lengths, self._plan.q_start
        factor, scale = split_scale(plan.softmax_scale)
        of_keys: Any = common_conversion if plan.problem.shared_kv else input_conversion
        q, tq = (_converted(y, input_conversion(y, factor)) for y in (x.q, given.q))
        k, v, tk, tv = (_converted(y, of_keys(y)) for y in (x.k, x.v, given.k, given.v))
        out, lse = _converted(given.out, input_conversion(given.out)), given.lse.contiguous()
        # with rows of no sequence, which the kernel does not write
        tout, tlse = out.new_zeros(out.shape), torch.zeros_like(lse)
        arguments: dict[str, Any] = {
            **{"q": q, "k": k, "v": v, "out": tout, "lse": tlse, "scale": scale, **of._asdict()},
            "window_left": plan.window_left,
            "window_right": plan.window_right,
            "sink": _converted(x.learnable_sink, plan.conversions["learnable_sink"]),
            "counter": tile_counter(q, q.get_device()),
            "q_start": of.q_starts if start.kind == EACH else start.operand(),
            "partials": (tq, tk, tv, out, lse),
        }
        if masks is not None:
            of_masks = self._mask_arguments(masks, of.cu_seqlens_k, of.cu_seqlens_q)
            names = "lists", "aux_tensors", "columns", "block_size", "bits"
            arguments |= zip(names, of_masks, strict=True)
        self._function(*(arguments.get(y.argument) for y in FORWARD if y.argument != STREAM))
        return tout, tlse


def _converted(tensor: Any, conversion: Any) -> Any:
    return tensor if conversion is None else conversion(tensor)


_kept: dict[Any, PreparedTangent] = Recent(512)


def tangent(call: AttentionCall, given: Tangents) -> tuple[Tensor, Tensor]:
    """Tangents of the results of a forward: (tout, tlse), like its out and lse, new tensors.

    call: of the forward. given: the tangents of q, k and v, like these, and the results of the
    forward. Rows that see nothing, and rows that are not in use, have tangents of 0. Raises
    TypeError, ValueError, NotImplementedError, as `plan_tangent`."""
    _, key = find_fwd({}, call)
    key = None if key is None else (key, metadata_of(given))
    found = _kept.get(key)
    if found is None:
        found = PreparedTangent(plan_tangent(call))
        if found.is_kernel and key is not None:
            _kept[key] = found
    return found(call.tensors, call.masks, given)
