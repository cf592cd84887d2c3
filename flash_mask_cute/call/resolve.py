"""A call after validation: its problem, its tiles, and what else metadata decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import (
    BwdExtras,
    BwdOperands,
    BwdSettings,
    Extras,
    FwdOperands,
    Masks,
    Settings,
)
from flash_mask_cute.call.config import (
    BwdChoice,
    FwdChoice,
    select_bwd_config,
    select_fwd_config,
)
from flash_mask_cute.call.copies import (
    Conversion,
    input_conversion,
    sink_conversion,
    split_scale,
)
from flash_mask_cute.call.kernels_bwd import (
    Tails,
)
from flash_mask_cute.call.masks import ResolvedMasks
from flash_mask_cute.call.packed import (
    by_documents,
    holds_documents,
    rows_follow,
    rows_of,
)
from flash_mask_cute.call.problem import (
    AttentionProblem,
    FwdShapes,
    fold_window,
    may_empty_rows,
    sink_dtype,
)
from flash_mask_cute.call.validate import check_bwd_inputs, check_fwd_inputs
from flash_mask_cute.mods.traits import computes_functions
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.dtypes import dtype_name
from flash_mask_cute.runtime.target import Target


@dataclass(frozen=True)
class ResolvedFwd:
    """A call after validation and all decisions, before anything is compiled.

    problem includes the packing; softmax_scale may have any sign; window sides are None where they
    are open. choose: the tiles of another problem with the same arguments. block_size: that of
    block lists, (queries, keys). sink_conversion: from the caller's sink to the kernel's.
    """

    shapes: FwdShapes
    problem: AttentionProblem
    choice: FwdChoice
    softmax_scale: float
    window_left: int | None
    window_right: int | None
    softcap: float
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    choose: Callable[[AttentionProblem], FwdChoice]
    block_size: tuple[int, int] | None = None
    sink_conversion: Conversion | None = None

    def input_conversions(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Conversion | None]:
        """By name, of the tensors that a kernel reads and that may have to be copied for it."""
        return {
            "q": input_conversion(q, split_scale(self.softmax_scale)[0]),
            "k": input_conversion(k),
            "v": input_conversion(v),
            "learnable_sink": self.sink_conversion,
        }

    def with_choice(self, choice: FwdChoice) -> ResolvedFwd:
        """The call with these tiles, which decide on packing and on how it takes block lists."""
        are_bits = self.block_size is not None and not choice.tiles.nest_in(self.block_size)
        problem = replace(self.problem, packed_heads=choice.packed_heads, has_bits=are_bits)
        return replace(self, problem=problem, choice=choice)

    def outputs(self, q: Tensor, extras: Extras) -> tuple[Tensor, Tensor | None]:
        """The caller's out and lse, or new ones that hold anything."""
        out, lse = extras.out, extras.lse
        if out is None:
            out = q.new_empty(self.out_shape)
        if lse is None and self.problem.needs_lse:
            lse = q.new_empty(self.lse_shape, dtype=torch.float32)
        return out, lse


@dataclass(frozen=True)
class ResolvedBwd:
    """A call after validation and all decisions, before anything is compiled.

    softmax_scale may have any sign; window sides are None where they are open. sink_dtype: of a
    sink whose gradient is asked for, or by which queries that see nothing are told, as kernels read
    it, a name of a torch dtype; sink_conversion: to that. choose: the tiles of another `mask_kind`
    with the same arguments. tails: see `Tails`. block_size: that of block lists, (queries, keys).
    """

    shapes: FwdShapes
    problem: AttentionProblem
    choice: BwdChoice
    softmax_scale: float
    window_left: int | None
    window_right: int | None
    softcap: float
    has_dlse: bool
    has_lse_low: bool
    sink_dtype: str | None
    score_mod_bwd: Callable[..., Any] | None
    choose: Callable[[str], BwdChoice]
    tails: Tails
    block_size: tuple[int, int] | None = None
    sink_conversion: Conversion | None = None


def target_of(q: Tensor) -> Target:
    """Whose kernel a call runs, or, on the CPU, whose tiles it walks."""
    return Target.of(q.device) if q.is_cuda else Target.default()


def resolve_fwd(
    operands: FwdOperands,
    extras: Extras,
    masks: Masks,
    settings: Settings,
    target: Target | None = None,
) -> tuple[ResolvedFwd, ResolvedMasks]:
    """Validate, and decide everything that comes before compilation, for a target or for q's."""
    q, _, v = operands
    arguments = extras._asdict() | masks._asdict() | settings._asdict()
    config = arguments.pop("config")
    shapes = check_fwd_inputs(*operands, **arguments)
    resolved_masks = ResolvedMasks.of(masks, settings.causal, shapes, q.device)
    problem, window_left, window_right = _problem(
        q,
        v,
        extras,
        settings,
        resolved_masks,
        learnable_sink=extras.learnable_sink,
        needs_lse=settings.return_lse or not (extras.lse is extras.lse_low is None),
    )
    score_mod, is_causal = resolved_masks.score_mod, problem.is_causal
    if score_mod is not None:
        problem = replace(
            problem,
            score_functions=computes_functions(score_mod, problem),
            needs_lse_low=extras.lse_low is not None,
        )
    window = None
    if window_left is not None and (is_causal or window_right is not None):
        window = window_left + (window_right or 0) + 1
    block_size = resolved_masks.block_size
    choose = partial(
        select_fwd_config,
        shapes=shapes,
        pack_gqa=settings.pack_gqa,
        override=config,
        window=window,
        block_size=block_size,
        unpackable=resolved_masks.unpackable(shapes),
        family=(target or target_of(q)).family,
    )
    choice = choose(problem)
    rows = tuple(q.shape[:-1])
    resolved = ResolvedFwd(
        shapes,
        problem,
        choice,
        _scale(settings, shapes),
        window_left,
        window_right,
        float(settings.softcap),
        out_shape=(*rows, shapes.head_dim_v),
        lse_shape=(*rows[:-2], rows[-1], rows[-2]),
        choose=choose,
        block_size=block_size,
        sink_conversion=sink_conversion(extras.learnable_sink),
    )
    return resolved.with_choice(choice), resolved_masks


def _problem(
    q: Tensor,
    v: Tensor,
    extras: Extras | BwdExtras,
    settings: Settings | BwdSettings,
    masks: ResolvedMasks,
    learnable_sink: Tensor | None,
    needs_lse: bool,
) -> tuple[AttentionProblem, int | None, int | None]:
    """The problem, not packed, and the window sides that say something."""
    is_causal, window_left, window_right = fold_window(
        settings.causal or masks.is_causal, settings.window_size_left, settings.window_size_right
    )
    problem = AttentionProblem.of(
        q,
        v,
        is_causal=is_causal,
        window_left=window_left,
        window_right=window_right,
        softcap=settings.softcap,
        learnable_sink=learnable_sink,
        cu_seqlens_q=extras.cu_seqlens_q,
        cu_seqlens_k=extras.cu_seqlens_k,
        seqused_q=extras.seqused_q,
        seqused_k=extras.seqused_k,
        needs_lse=needs_lse,
    )
    return replace(problem, **masks.problem_fields()), window_left, window_right


def _scale(settings: Settings | BwdSettings, shapes: FwdShapes) -> float:
    scale = settings.softmax_scale
    return shapes.head_dim**-0.5 if scale is None else float(scale)


def resolve_bwd(
    operands: BwdOperands,
    extras: BwdExtras,
    masks: Masks,
    settings: BwdSettings,
    target: Target | None = None,
) -> tuple[ResolvedBwd, ResolvedMasks]:
    """Validate, and decide everything that comes before compilation, for a target or for q's."""
    arguments = extras._asdict() | masks._asdict() | settings._asdict()
    config = arguments.pop("config")
    shapes = check_bwd_inputs(*operands, **arguments)
    q, _, v, *_ = operands
    resolved_masks = ResolvedMasks.of(masks, settings.causal, shapes, q.device)
    problem, window_left, window_right = _problem(
        q, v, extras, settings, resolved_masks, learnable_sink=None, needs_lse=False
    )
    mod_bwd = settings.score_mod_bwd
    wants_aux: tuple[int, ...] = ()
    if extras.daux is not None and masks.score_mod is not None:
        wants_aux = tuple(i for i, x in enumerate(extras.daux) if x is not None)
    problem = replace(
        problem,
        score_mod_bwd=None if mod_bwd is None else callable_key(mod_bwd),
        has_lists=False,
        has_full_lists=False,
        has_bits=problem.has_lists,
        wants_aux=wants_aux,
        deterministic=settings.deterministic,
    )
    seqlens = shapes.seqlen_q, shapes.seqlen_k
    empties = may_empty_rows(problem, seqlens, (window_left, window_right))
    problem = replace(problem, may_empty_rows=empties)
    sink = extras.learnable_sink if empties or extras.dsink is not None else None
    choose = partial(
        select_bwd_config,
        shapes.head_dim,
        shapes.head_dim_v,
        override=config,
        seqlen_k=shapes.seqlen_k,
        deterministic=settings.deterministic,
        modifier=problem.score_modifier,
        num_sms=(target or target_of(q)).num_sms,
        family=(target or target_of(q)).family,
    )
    resolved = ResolvedBwd(
        shapes,
        problem,
        choose(problem.mask_kind),
        _scale(settings, shapes),
        window_left,
        window_right,
        float(settings.softcap),
        has_dlse=extras.dlse is not None,
        has_lse_low=extras.lse_low is not None,
        sink_dtype=None if sink is None else dtype_name(sink_dtype(sink)),
        sink_conversion=sink_conversion(sink),
        tails=Tails(
            problem.varlen_q and extras.dq is None,
            problem.varlen_k and extras.dk is None,
            problem.varlen_k and extras.dv is None,
        ),
        score_mod_bwd=mod_bwd,
        choose=choose,
        block_size=resolved_masks.block_size,
    )
    return resolved, resolved_masks


def packs_documents(
    operands: FwdOperands | BwdOperands,
    of_rows: Iterable[Tensor | None],
    extras: Extras | BwdExtras,
    masks: Masks,
    settings: Settings | BwdSettings,
) -> bool:
    """Whether the documents of the mask are to be packed sequences. of_rows: the other tensors of
    the call that have rows and are not copied."""
    lengths = *extras[1:5], settings.max_seqlen_q, settings.max_seqlen_k
    others = *lengths, masks.score_mod, masks.mask_mod, masks.block_sparse_tensors_torch
    mask, causal = masks.startend_row_indices, settings.causal
    return holds_documents(*operands[:3], mask, causal, others) and rows_follow(*of_rows)


def call_by_documents(
    operands: FwdOperands, extras: Extras, masks: Masks, settings: Settings, needs_lse: bool
) -> tuple[FwdOperands, Extras, Masks, Settings]:
    """The call with the documents of its mask as packed sequences."""
    batch, seqlen = operands.q.shape[:2]
    extras = extras._replace(out=rows_of(extras.out), lse=None)
    settings = settings._replace(max_seqlen_q=seqlen, max_seqlen_k=seqlen, return_lse=needs_lse)
    rows = FwdOperands._make(map(rows_of, operands))
    return rows, *by_documents(extras, masks, batch), settings
