"""The tiles of a kernel: those of its problem, with what the facts of the call add."""

from __future__ import annotations

from dataclasses import replace

from flash_mask_cute.call.facts import Backend, CallFacts
from flash_mask_cute.call.problem import AttentionProblem
from flash_mask_cute.call.tiles.config import (
    BwdChoice,
    FwdChoice,
    WalkFacts,
    select_bwd_config,
    select_fwd_config,
)
from flash_mask_cute.call.tiles.group_splits import split_group
from flash_mask_cute.limits import MAX_HEAD_DIM


def choose_tiles(facts: CallFacts, problem: AttentionProblem) -> FwdChoice | BwdChoice:
    """The tiles of a problem with the arguments of a call."""
    runs_kernels = facts.is_forward or facts.backend is Backend.KERNEL
    most = facts.spec.forward.most_head_dim if runs_kernels else MAX_HEAD_DIM
    problem = _within_tables(problem, most)
    return _fwd_tiles(facts, problem) if facts.is_forward else _bwd_tiles(facts, problem)


def _fwd_tiles(facts: CallFacts, problem: AttentionProblem) -> FwdChoice:
    call, shapes, masks = facts.call, facts.shapes, facts.masks
    is_paged = call.tensors.lengths.page_table is not None
    decodes = problem.split is not None or is_paged or facts.decodes_whole
    return select_fwd_config(
        problem,
        shapes=shapes,
        pack_gqa=call.options.pack_gqa,
        override=call.config,
        walk=WalkFacts(
            facts.window.visible,
            masks.block_size,
            facts.decode_rows if decodes else None,
            0 if masks.selected is None else masks.selected.block_size,
        ),
        unpackable=masks.unpackable(shapes),
        spec=facts.spec,
        num_sms=facts.target.num_sms,
    )


def _bwd_tiles(facts: CallFacts, problem: AttentionProblem) -> BwdChoice:
    call, shapes, masks = facts.call, facts.shapes, facts.masks
    kernel, override, num_sms = facts.spec.backward, call.config, facts.target.num_sms
    splits = getattr(override, "group_splits", None)
    splits_groups = kernel.splits_groups and not problem.is_wide
    if not (splits_groups or splits in (None, 1)):
        of_what = "heads above 256 columns" if problem.is_wide else kernel.class_name
        raise ValueError(f"config group_splits={splits} is not for {of_what}")
    choice = select_bwd_config(
        *(problem.head_dim, problem.head_dim_v, problem.tuning_class),
        override=override,
        seqlen_k=shapes.seqlen_k,
        deterministic=call.backward.deterministic,
        modifier=problem.score_modifier,
        num_sms=num_sms,
        kernel=kernel,
        walk=WalkFacts(
            facts.window.visible,
            has_lists=problem.has_lists or problem.has_bits or problem.has_selected,
            lists_per_warpgroup=masks.own_keys_of(problem, kernel),
        ),
        listed_rows=problem.listed_rows,
        query_lists=problem.query_lists,
    )
    if not splits_groups or problem.query_lists:
        return choice
    return split_group(choice, problem, shapes, facts.window.sides, num_sms, splits)


def _within_tables(problem: AttentionProblem, most: int) -> AttentionProblem:
    """The problem with kernels' head dimensions, up to `most`: the CPU path takes their tiles."""
    head_dims = (problem.head_dim, problem.head_dim_v)
    if max(head_dims) <= most:
        return problem
    head_dim, head_dim_v = (min(x, most) for x in head_dims)
    return replace(problem, head_dim=head_dim, head_dim_v=head_dim_v)
