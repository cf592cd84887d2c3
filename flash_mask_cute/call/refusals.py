"""Right calls that no kernel of a GPU computes: refused before anything is launched."""

from __future__ import annotations

from flash_mask_cute.call.batch_sums import why_unordered
from flash_mask_cute.call.check.validate import check_head_dims, refuse_order
from flash_mask_cute.call.facts import Backend, CallFacts
from flash_mask_cute.call.problem import AttentionProblem
from flash_mask_cute.limits import MAX_HEAD_DIM, MOST_BIT_BYTES
from flash_mask_cute.mask_prep.selected_bits import row_bytes
from flash_mask_cute.mods.traits import find_reads
from flash_mask_cute.runtime.checks import brief


def check_on_any_device(facts: CallFacts, problem: AttentionProblem) -> None:
    """Refuse calls that neither a kernel nor the CPU path computes, and heads without a kernel."""
    if problem.deterministic and problem.wants_aux and facts.masks.score_mod is not None:
        unordered = why_unordered(facts.target, problem.shared_kv)
        if unordered is not None:
            refuse_order("daux is given", unordered)
    backward, score_mod = facts.call.backward, facts.masks.score_mod
    if not facts.is_forward and score_mod is not None and backward.score_mod_bwd is None:
        refused = find_reads(score_mod, problem, problem.wants_aux).no_derivative
        if refused:
            raise NotImplementedError(refused)
    if facts.backend is Backend.KERNEL:
        check_head_dims(problem.head_dim, problem.head_dim_v, runs_kernels=True)
        _refuse_wide_heads(facts, problem)


def _refuse_wide_heads(facts: CallFacts, problem: AttentionProblem) -> None:
    """Refuse what kernels do not compute of heads above MAX_HEAD_DIM."""
    dims, reason = (problem.head_dim, problem.head_dim_v), None
    if not problem.is_wide:
        return
    if max(dims) > facts.spec.forward.most_head_dim:
        reason = f"not supported on {facts.spec.name}"
    elif dims[0] != dims[1]:
        reason = "supported only where both are equal"
    elif facts.call.options.is_recorded or not facts.is_forward:
        # of a score, one CTA has S and another dP
        name = problem.score_modifier or ("selected blocks" if problem.has_selected else None)
        if name is not None:
            instead = "call it under torch.no_grad(), or with tensors that are detached"
            reason = f"not supported with gradients and {name}: {instead}"
    if reason is not None:
        raise NotImplementedError(
            f"head_dim and head_dim_v above {MAX_HEAD_DIM} are {reason}; got {dims[0]} and "
            f"{dims[1]}"
        )


def refuse_on_gpu(facts: CallFacts, problem: AttentionProblem) -> None:
    """Refuse what no kernel of the architecture computes."""
    spec, given = facts.spec, facts.call
    kernel, split = spec.forward, given.options.seqlen_k_per_split
    if problem.causal_each and not kernel.causal_each:
        raise NotImplementedError(
            f"causal as a tensor is not supported on {spec.name}: give one bool, or a call for "
            f"each kind of sequences, got {brief(given.tensors.optional.causal_per_seq)}"
        )
    if split is not None and not kernel.orders_sums:
        raise NotImplementedError(
            f"seqlen_k_per_split is not supported on {spec.name}, got {split}"
        )


def refuse_large_selection(facts: CallFacts) -> None:
    """Refuse a selection of blocks whose bits take too much memory."""
    selected, seqlen_k = facts.masks.selected, facts.shapes.seqlen_k
    if selected is None:
        return
    num_bytes = row_bytes(selected.by_entry.shape, selected.num_blocks(seqlen_k))
    if num_bytes > MOST_BIT_BYTES:
        raise NotImplementedError(
            f"block_sparse_tensors would take {num_bytes} bytes as bits of blocks, and a "
            f"{facts.call.direction.value} takes up to {MOST_BIT_BYTES}: choose larger blocks, or "
            f"compute fewer queries in a call; got block_size {selected.block_size}, indices of "
            f"shape {tuple(selected.indices.shape)} and {seqlen_k} keys"
        )
