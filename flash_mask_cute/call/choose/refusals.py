"""Right calls that no kernel of a GPU computes: refused before anything is launched."""

from __future__ import annotations

import torch

from flash_mask_cute.call.arguments import Direction
from flash_mask_cute.call.check.validate import refuse_order
from flash_mask_cute.call.choose.arch import arch_spec
from flash_mask_cute.call.choose.aux_order import why_unordered
from flash_mask_cute.call.choose.masks import ResolvedMasks
from flash_mask_cute.call.problem import AttentionProblem
from flash_mask_cute.limits import MAX_HEAD_DIM, MOST_BIT_BYTES
from flash_mask_cute.mask_prep.selected_bits import row_bytes
from flash_mask_cute.runtime.checks import brief
from flash_mask_cute.runtime.target import Target


def refuse_causal_sequences(
    problem: AttentionProblem, target: Target, causals: torch.Tensor | None
) -> None:
    """Refuse `causal` as a tensor."""
    spec = arch_spec(target)
    if problem.causal_each and not spec.forward.causal_each:
        raise NotImplementedError(
            f"causal as a tensor is not supported on {spec.name}: give one bool, or a call for "
            f"each kind of sequences, got {brief(causals)}"
        )


def refuse_large_choice(masks: ResolvedMasks, seqlen_k: int, direction: Direction) -> None:
    """Refuse a choice of blocks whose bits take too much memory."""
    selected = masks.selected
    if selected is None:
        return
    num_bytes = row_bytes(selected.by_entry.shape, selected.num_blocks(seqlen_k))
    if num_bytes > MOST_BIT_BYTES:
        raise NotImplementedError(
            f"block_sparse_tensors would take {num_bytes} bytes as bits of blocks, of which a "
            f"{direction.value} takes up to {MOST_BIT_BYTES}: choose larger blocks, or "
            f"compute fewer queries in a call; got block_size {selected.block_size}, indices of "
            f"shape {tuple(selected.indices.shape)} and {seqlen_k} keys"
        )


def refuse_fp8(problem: AttentionProblem, target: Target) -> None:
    """Refuse keys and values in float8_e4m3fn."""
    spec = arch_spec(target)
    if problem.in_fp8 and not spec.forward.reads_fp8:
        raise NotImplementedError(
            f"k and v in float8_e4m3fn are not supported on {spec.name}: convert them to the dtype "
            f"of q ({problem.dtype})"
        )


def refuse_wide_heads(problem: AttentionProblem, has_backward: bool, target: Target) -> None:
    """Refuse what kernels do not compute of heads above MAX_HEAD_DIM. has_backward: this is a
    backward, or a forward that autograd records."""
    dims = problem.head_dim, problem.head_dim_v
    if max(dims) <= MAX_HEAD_DIM:
        return
    spec, reason = arch_spec(target), None
    if max(dims) > spec.forward.most_head_dim:
        reason = f"not supported on {spec.name}"
    elif has_backward:
        reason = "a forward only: call it under torch.no_grad(), or with tensors that are detached"
    elif dims[0] != dims[1]:
        reason = "supported only where both are equal"
    elif problem.in_fp8:
        reason = "not supported with k and v in float8_e4m3fn"
    if reason is not None:
        raise NotImplementedError(
            f"head_dim and head_dim_v above {MAX_HEAD_DIM} are {reason}; got {dims[0]} and "
            f"{dims[1]}"
        )


def refuse_segments(target: Target, seqlen_k_per_split: int | None) -> None:
    """Refuse sums that are cut at fixed keys."""
    spec = arch_spec(target)
    if seqlen_k_per_split is not None and not spec.forward.orders_sums:
        raise NotImplementedError(
            f"seqlen_k_per_split is not supported on {spec.name}, got {seqlen_k_per_split}"
        )


def check_order(problem: AttentionProblem, masks: ResolvedMasks, target: Target) -> None:
    """Refuse gradients of aux tensors whose sums have no order, if there is to be one."""
    if problem.deterministic and problem.wants_aux and masks.score_mod is not None:
        unordered = why_unordered(target)
        if unordered is not None:
            refuse_order("daux is given", unordered)


def check_common_kv(problem: AttentionProblem) -> None:
    """Refuse gradients that walks over the queries of several sequences do not sum."""
    if problem.common_kv and problem.deterministic and problem.wants_aux:
        raise NotImplementedError(
            "daux is not supported with deterministic=True where k and v are one batch entry for "
            f"several sequences, got the gradients of aux_tensors {list(problem.wants_aux)}"
        )
