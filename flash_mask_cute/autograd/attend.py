"""A differentiable call, eager or by operators."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_mask_cute.autograd.arguments import Call
from flash_mask_cute.autograd.eager import Attention
from flash_mask_cute.autograd.mods_in_graph import mods_in_graph
from flash_mask_cute.autograd.passes import new_max_scores, refuse_dual_level, run_forward
from flash_mask_cute.autograd.torch_ops import IMPLEMENTATIONS, to_operator
from flash_mask_cute.call.arguments import Masks, Tensors
from flash_mask_cute.call.check.validate import (
    check_gradient_settings,
    refuse_transforms,
    settle_order,
)
from flash_mask_cute.call.choose.packed import holds_documents, start_that_counts
from flash_mask_cute.call.lookup import in_transform, mask_key
from flash_mask_cute.interface import run_bundles
from flash_mask_cute.lowering.pair import as_cute_mods
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.mods.signature import check_mod
from flash_mask_cute.runtime.checks import check_bool, number_of
from flash_mask_cute.runtime.plain_tensors import NotPlainError


class KnownCall:
    """A call without lengths whose masks are known, all but the scale and the aux tensors.

    aux_tensors: those of the first call; later ones have the same metadata.
    """

    __slots__ = ("_key", "_options", "call")

    def __init__(self, call: Call, aux_tensors: list[Tensor] | None) -> None:
        self.call = call
        self._options = (
            call.causal, call.window_size_left, call.window_size_right, call.softcap, None, None,
            None, call.num_splits, call.pack_gqa,
        )  # fmt: skip
        masks = self._masks(aux_tensors)
        self._key = None
        # what no valid call has is refused, by its name, when it is called
        with suppress(AttributeError, RuntimeError, TypeError, ValueError):
            self._key = None if masks is None else mask_key(masks)

    def _masks(self, aux_tensors: list[Tensor] | None) -> Masks | None:
        call = self.call
        lists, columns = call.block_sparse_tensors_torch, call.startend_row_indices
        if call.score_mod is call.mask_mod is aux_tensors is lists is columns is None:
            return None
        fields = call.score_mod, call.mask_mod, aux_tensors, lists, columns
        return tuple.__new__(Masks, fields)

    def results(
        self, q: Tensor, k: Tensor, v: Tensor, aux_tensors: list[Tensor] | None,
        scale: float | None, return_lse: bool, return_max: bool,
    ) -> Results:  # fmt: skip
        """As `attend`, of which a forward of plain tensors without a graph needs little."""
        if return_max or not _is_forward_alone(q, k, v, aux_tensors):
            call = self.call._replace(softmax_scale=scale, aux_tensors=aux_tensors)
            return attend(q, k, v, None, call, return_lse, return_max)
        check_bool("return_lse", return_lse)
        options = (scale, *self._options, return_lse, None, False, None)
        tensors = tuple.__new__(Tensors, (q, k, v, *_NO_OTHERS))
        out, lse = run_bundles(tensors, self._masks(aux_tensors), options, self._key)
        return tuple.__new__(Results, (out, lse, None))


_NO_OTHERS = (None,) * (len(Tensors._fields) - 3)


def _is_forward_alone(q: Any, k: Any, v: Any, aux_tensors: Sequence[Tensor] | None) -> bool:
    """Whether there is nothing to record, to cast or to hand to anyone else."""
    if not type(q) is type(k) is type(v) is Tensor:
        return False
    if torch.is_grad_enabled():
        if q.requires_grad or k.requires_grad or v.requires_grad:
            return False
        for x in aux_tensors or ():
            if x.requires_grad:
                return False
    return not (
        forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.are_deterministic_algorithms_enabled()
        or in_transform()
    )


def _aux_that_require_grad(call: Call) -> tuple[int, ...]:
    """Indices of the aux tensors that require grad; empty where autograd records nothing."""
    aux_tensors = call.aux_tensors
    if not isinstance(aux_tensors, (list, tuple)) or not torch.is_grad_enabled():
        return ()
    return tuple(i for i, x in enumerate(aux_tensors) if isinstance(x, Tensor) and x.requires_grad)


def scale_number(softmax_scale: Any) -> Any:
    """The scale as a Python number. It is read once and serves the backward too."""
    if (
        isinstance(softmax_scale, Tensor)
        and softmax_scale.requires_grad
        and torch.is_grad_enabled()
    ):
        raise NotImplementedError(
            "softmax_scale requires grad, and attention has no gradient by it: multiply q by the "
            f"tensor instead, or detach it; got {softmax_scale}"
        )
    return number_of("softmax_scale", softmax_scale)


class Results(NamedTuple):
    """The results of a call. lse and max_scores have a value for each row; None unless
    requested."""

    out: Tensor
    lse: Any
    max_scores: Tensor | None

    def chosen(self, q: Tensor, return_lse: bool, return_max_logit: bool) -> Any:
        """The results that the caller of a public function asked for."""
        if not return_max_logit:
            return (self.out, self.lse) if return_lse else self.out
        scores: Any = self.max_scores
        # without rows there is nothing to look for
        largest = scores.new_full((q.shape[-2],), -torch.inf)
        if scores.numel():
            largest = scores.amax((0, 2) if scores.dim() == 3 else 1)
        return (self.out, self.lse, largest) if return_lse else (self.out, largest)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    call: Call,
    return_lse: bool,
    return_max: bool,
) -> Results:
    """Differentiable attention. return_max: also return the largest score of each row."""
    check_bool("return_lse", return_lse)
    check_bool("return_max_logit", return_max)
    if not (call.score_mod is call.mask_mod is None):
        call = _with_cute_mods(call, q)
    check_gradient_settings(call.deterministic, call.score_mod_bwd, call.score_mod)
    if torch._C._is_any_autocast_enabled():
        q, k, v = _as_autocast_casts(q, k, v)
    wants_aux = _aux_that_require_grad(call)
    reason = None
    if wants_aux and call.score_mod is not None:
        reason = f"aux_tensors[{wants_aux[0]}] requires grad"
    if reason is not None or torch.are_deterministic_algorithms_enabled():
        in_order = settle_order(reason, call.score_mod_bwd, call.deterministic)
        call = call._replace(deterministic=in_order)
    refused = None
    if not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0):
        refuse_transforms()
        try:
            return _attend_eagerly(q, k, v, sink, call, wants_aux, return_lse, return_max)
        except NotPlainError as error:
            refused = error
    if refused is None:
        return _attend_by_operators(q, k, v, sink, call, wants_aux, return_max)
    with refused.named_unless_from(IMPLEMENTATIONS):
        return _attend_by_operators(q, k, v, sink, call, wants_aux, return_max)


def _with_cute_mods(call: Call, q: Any) -> Call:
    """The same call with torch mods lowered to CuTe and their captured tensors as aux tensors."""
    given = call.score_mod, call.mask_mod, call.aux_tensors
    if torch.compiler.is_compiling():
        if isinstance(call.score_mod, str) or isinstance(call.mask_mod, str):
            return call
        score_mod, mask_mod, aux_tensors = mods_in_graph(*given, q.device.type, False)
    else:
        score_mod, mask_mod, aux_tensors = as_cute_mods(*given, getattr(q, "device", None))
    if score_mod is call.score_mod and mask_mod is call.mask_mod:
        return call
    return call._replace(score_mod=score_mod, mask_mod=mask_mod, aux_tensors=aux_tensors)


def _as_autocast_casts(q: Any, k: Any, v: Any) -> list[Any]:
    """q, k and v, cast as autocast casts them for torch's scaled_dot_product_attention."""
    if not isinstance(q, Tensor) or not torch.is_autocast_enabled(q.device.type):
        return [q, k, v]
    dtype = torch.get_autocast_dtype(q.device.type)
    return [
        x.to(dtype)
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in (q, k, v)
    ]


def _attend_eagerly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    call: Call,
    wants_aux: tuple[int, ...],
    return_lse: bool,
    return_max: bool,
) -> Results:
    """Attention on plain tensors. Raises NotPlainError for others, before anything is computed."""
    # now, and not when the backward runs
    check_mod("score_mod_bwd", call.score_mod_bwd)
    if call.config is not None:
        call = call._replace(config=call.configs)
    if isinstance(call.startend_row_indices, Tensor):
        # forward and backward then share the bounds
        mask = ColumnMask(call.startend_row_indices, call.causal)
        call = call._replace(startend_row_indices=mask)
    if wants_aux or _needs_graph(q, k, v, sink):
        _refuse_pages(call)
        aux_tensors: Any = call.aux_tensors
        wanted = [aux_tensors[i] for i in wants_aux]
        out, lse, *more = Attention.apply(q, k, v, sink, call, wants_aux, return_max, *wanted)
        return Results(out, lse, more[0] if more else None)
    max_scores = new_max_scores(q) if return_max else None
    out, lse = run_forward(q, k, v, sink, call, return_lse, max_scores=max_scores)
    return Results(out, lse, max_scores)


def _attend_by_operators(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    call: Call,
    wants_aux: tuple[int, ...],
    return_max: bool,
) -> Results:
    """Attention by operators, for a trace, a dispatch mode or a tensor subclass."""
    refuse_transforms(but_functionalize=True)
    refuse_dual_level()
    others = (
        call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k, call.max_seqlen_q,
        call.max_seqlen_k, call.score_mod, call.mask_mod, call.block_sparse_tensors_torch,
        start_that_counts(call.q_start),
    )  # fmt: skip
    if wants_aux or _needs_graph(q, k, v, sink):
        _refuse_pages(call)
        call = call._replace(num_splits=call.num_splits_recorded)
    # a limit on lengths would be a guard of the trace, so none decides about undeclared documents
    mask = call.startend_row_indices
    is_declared = isinstance(mask, ColumnMask) and mask.documents is True
    packs = is_declared and holds_documents(q, k, v, mask, call.causal, others)
    arguments = to_operator(call, q.shape[0] if packs else None, return_max)
    out, lse, _, largest = torch.ops.flash_mask_cute.attention_fwd(q, k, v, sink, *arguments)
    return Results(out, lse, largest.detach() if return_max else None)


def _refuse_pages(call: Call) -> None:
    """Refuse pages where autograd records a graph: they have no gradients."""
    if call.page_table is not None:
        raise NotImplementedError(
            "there are no gradients by keys and values in pages, or of queries beside page_table: "
            "use torch.no_grad(), or detach what requires grad"
        )


def _needs_graph(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> bool:
    # forward-mode differentiation does not ask for requires_grad
    if forward_ad._current_level >= 0:
        return True
    if not torch.is_grad_enabled():
        return False
    try:
        return (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (sink is not None and sink.requires_grad)
        )
    except AttributeError:
        return False  # what is no tensor is refused by the host path, by name
