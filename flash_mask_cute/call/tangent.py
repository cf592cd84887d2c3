"""Forward mode: the tangents of out and LSE of a forward, by one more walk over its tiles.

The forward runs as ever. With dS = scale * (tQ K^T + Q tK^T) and P from the LSE, a second walk sums
(P dS) V + P tV, and mu = sum of P dS of each row. Then tO = that sum - mu O, and mu is the tangent
of the LSE. Few-step generators train by it (Lu and Song 2024, sCM; Geng et al. 2025, MeanFlow).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import NO_MASKS, AttentionCall, Masks, Tensors
from flash_mask_cute.call.copies import (
    common_conversion,
    input_conversion,
    split_scale,
    with_conversions,
)
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.facts import Backend, CallFacts
from flash_mask_cute.call.forward import cached_attention, cpu_call, current_device, tile_counter
from flash_mask_cute.call.kernel_operands import FORWARD, STREAM, fakes
from flash_mask_cute.call.lookup import find_fwd, metadata_of
from flash_mask_cute.call.mask_arguments import MaskArguments
from flash_mask_cute.call.plan import kernel_problem, with_tiles
from flash_mask_cute.call.problem import AttentionProblem, Mods
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.call.tiles.config import FwdTiles, select_fwd_config
from flash_mask_cute.cpu.call import CpuTiles
from flash_mask_cute.cpu.tangent import Tangents, flash_attn_tangent_cpu
from flash_mask_cute.masks.q_start import EACH
from flash_mask_cute.masks.selected_blocks import SelectedBlocks
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import Compiled
from flash_mask_cute.runtime.checks import brief
from flash_mask_cute.runtime.compiler import CACHE, compile_object, options_of
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


# -- plan ------------------------------------------------------------------------------------------


def plan_tangent(call: AttentionCall, target: Target | None = None) -> ExecutionPlan:
    """The plan of the walk that computes tangents. Raises TypeError, ValueError,
    NotImplementedError, as `plan` of the forward, and as `refuse_beside_tangents`."""
    refuse_beside_tangents(call)
    options = replaced(
        call.options,
        num_splits=1,
        seqlen_k_per_split=None,
        pack_gqa=False,
        config=None,
        return_lse=True,
    )
    facts = CallFacts.of(replaced(call, options=options), target)
    # of keys that are expanded over the batch, tangents may differ
    problem = replace(kernel_problem(facts), shared_kv=call.tensors.have_shared_keys)
    found, kernel = with_tiles(facts, problem), facts.spec.tangent
    has_kernel = kernel is not None and max(head_dims(problem)) <= kernel.most_head_dim
    has_kernel = has_kernel and problem.head_dim == problem.head_dim_v
    if facts.backend is Backend.KERNEL and not has_kernel:
        most = 0 if kernel is None else kernel.most_head_dim
        raise NotImplementedError(
            f"{NO_FORWARD_MODE} on {facts.spec.name} with head_dim {problem.head_dim} and "
            f"head_dim_v {problem.head_dim_v}: "
            + (f"both must be equal, up to {most}" if most else "there is no kernel")
        )
    if kernel is None or not has_kernel:
        return found
    spec = replace(facts.spec, forward=kernel)
    tiles = select_fwd_config(
        problem, facts.shapes, pack_gqa=False, spec=spec, num_sms=facts.target.num_sms
    )
    return with_conversions(found.with_choice(tiles), call.tensors)


def head_dims(problem: AttentionProblem) -> tuple[int, int]:
    return problem.head_dim, problem.head_dim_v


# -- compile ---------------------------------------------------------------------------------------

# The kernel's operands, by its parameters: those of the forward of this name, mT* like m*.
PARAMETERS = (
    *("mQ", "mK", "mV", "mO", "mLSE", "mTQ", "mTK", "mTV", "mTO", "mTLSE", "softmax_scale", STREAM),
    *("mCuSeqlensQ", "mCuSeqlensK", "mSeqUsedQ", "mSeqUsedK"),
    *("window_size_left", "window_size_right", "blocksparse_tensors", "aux_tensors"),
    *("tile_counter", "column_tensors", "block_size", "block_bits", "mQStart"),
)
_OF_FORWARD = {row.parameter: row for row in FORWARD}
_OPERANDS = tuple(_OF_FORWARD[name.replace("mT", "m", 1)] for name in PARAMETERS)


def compile_tangent(plan: ExecutionPlan) -> Compiled:
    """The compiled kernel, from the cache or built now."""
    problem, tiles, target = plan.problem, plan.fwd_choice.tiles, plan.target

    def build() -> Compiled:
        return build_tangent(problem, tiles, target, plan.masks.mods)

    return cached_attention("flash_tangent_sm90", problem, tiles, target, build, CACHE)


def build_tangent(
    problem: AttentionProblem, tiles: FwdTiles, target: Target, mods: Mods
) -> Compiled:
    """Compile now; see `build_fwd`."""
    from flash_mask_cute.rules.intervals import Intervals

    kernel = arch_spec(target).tangent
    assert kernel is not None
    made = kernel.load_class()(
        fake_tensors.cutlass_dtype(problem.dtype),
        problem.head_dim,
        is_causal=problem.is_causal,
        is_local=problem.is_local,
        mask_mod=mods.mask_mod,
        has_aux_tensors=bool(problem.aux),
        intervals=None if problem.intervals is None else Intervals(*problem.intervals),
        num_sms=target.num_sms,
        shared_kv=problem.shared_kv,
        **tiles.arguments(kernel),
    )
    arguments = fakes(_OPERANDS, problem, tiles)
    return compile_object(made, arguments, options_of(target), smem_bytes=made.traits.smem_bytes)


# -- run -------------------------------------------------------------------------------------------

PreparedTangent: TypeAlias = Callable[[Tensors, Masks | None, Tangents], tuple[Tensor, Tensor]]
# by key, as forwards are
_prepared: dict[Any, PreparedTangent] = Recent(512)


class KernelTangent:
    """Runs a compiled kernel on the current stream."""

    def __init__(self, plan: ExecutionPlan, function: Callable[..., None]) -> None:
        self._plan, self._function = plan, function
        self._factor, self._scale = split_scale(plan.softmax_scale)
        self._mask_arguments = MaskArguments(
            plan.problem, plan.shapes, plan.masks.block_size, plan.walk_tile, plan.reads_lists
        )

    def __call__(
        self, tensors: Tensors, masks: Masks | None, given: Tangents
    ) -> tuple[Tensor, Tensor]:
        plan, x = self._plan, tensors
        index = -1 if plan.device.index is None else plan.device.index
        if index >= 0 and index != current_device():
            with torch.cuda.device(index):
                return self(tensors, masks, given)
        of_keys = common_conversion if plan.problem.shared_kv else input_conversion
        q, tq = (_converted(y, input_conversion(y, self._factor)) for y in (x.q, given.q))
        k, v, tk, tv = (_converted(y, of_keys(y)) for y in (x.k, x.v, given.k, given.v))
        out, lse = _converted(given.out, input_conversion(given.out)), given.lse.contiguous()
        # rows of no sequence, which the kernel does not write
        tout, tlse = out.new_zeros(out.shape), torch.zeros_like(lse)
        of = x.lengths
        lists = aux_tensors = columns = block_size = bits = None
        if masks is not None:
            lists, aux_tensors, columns, block_size, bits = self._mask_arguments(
                masks, of.cu_seqlens_k, of.cu_seqlens_q
            )
        start = plan.q_start
        self._function(
            *(q, k, v, out, lse, tq, tk, tv, tout, tlse, self._scale),
            *(of.cu_seqlens_q, of.cu_seqlens_k, of.seqused_q, of.seqused_k),
            *(plan.window_left, plan.window_right, lists, aux_tensors, tile_counter(q, index)),
            *(columns, block_size, bits, of.q_starts if start.kind == EACH else start.operand()),
        )
        return tout, tlse


def _converted(tensor: Tensor, conversion: Any) -> Tensor:
    """A tensor as the kernel can read it."""
    return tensor if conversion is None else conversion(tensor)


class CpuTangent:
    """Computes on CPU tensors, walking the tiles of the kernel's configuration."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self._plan = plan

    @torch.no_grad()
    def __call__(
        self, tensors: Tensors, masks: Masks | None, given: Tangents
    ) -> tuple[Tensor, Tensor]:
        plan = self._plan
        tiles = CpuTiles(*plan.walk_tile, skip_blocks=plan.fwd_choice.tiles.skip_blocks)
        return flash_attn_tangent_cpu(cpu_call(plan, tensors, tiles), given)


def empty_tangent(_: Tensors, __: Masks | None, given: Tangents) -> tuple[Tensor, Tensor]:
    """Of a call without queries or keys."""
    return torch.zeros_like(given.out), torch.zeros_like(given.lse)


def prepare_tangent(call: AttentionCall, target: Target | None = None) -> PreparedTangent:
    """As `prepare_fwd`, for tangents."""
    plan = plan_tangent(call, target)
    if plan.backend is Backend.EMPTY:
        return empty_tangent
    if plan.backend is Backend.CPU:
        return CpuTangent(plan)
    return KernelTangent(plan, compile_tangent(plan).function)


def tangent(call: AttentionCall, given: Tangents) -> tuple[Tensor, Tensor]:
    """Tangents of the results of a forward: (tout, tlse), like its out and lse, new tensors.

    call: of the forward. given: the tangents of q, k and v, like these, and the results of the
    forward. Rows that see nothing, and rows that are not in use, have tangents of 0. Raises
    TypeError, ValueError, NotImplementedError, as `plan_tangent`."""
    _, key = find_fwd({}, call)
    key = None if key is None else (*key, metadata_of(given))
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = prepare_tangent(call)
        if key is not None and call.tensors.q.is_cuda:
            # on the CPU, contents of lengths and masks are checked in every call
            _prepared[key] = prepared
    return prepared(call.tensors, call.masks, given)
