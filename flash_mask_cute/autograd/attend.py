"""A differentiable call, eager or by operators."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from flash_mask_cute import interface
from flash_mask_cute.autograd.eager import Attention
from flash_mask_cute.autograd.forward_mode import at_dual_level, attend_with_tangents
from flash_mask_cute.autograd.mods_in_graph import mods_in_graph
from flash_mask_cute.autograd.passes import recorded, refuse_dual_level, with_outputs
from flash_mask_cute.autograd.torch_ops import IMPLEMENTATIONS, to_operator
from flash_mask_cute.call.arguments import (
    NO_BACKWARD_OPTIONS,
    NO_LENGTHS,
    NO_MASKS,
    NO_OPTIONAL,
    NO_OPTIONS,
    AttentionCall,
    Masks,
    Tensors,
)
from flash_mask_cute.call.batch_sums import why_unordered_on
from flash_mask_cute.call.check.fp8 import NO_GRADIENTS
from flash_mask_cute.call.check.validate import (
    CAUSALS_HAVE_NO_GRADIENTS,
    NO_GRADIENTS_BY_COMMON_KEYS,
    check_differentiable_by_aux,
    check_gradient_settings,
    refuse_transforms,
    settle_order,
)
from flash_mask_cute.call.documents import packs_declared_documents
from flash_mask_cute.call.lookup import in_transform, mask_key
from flash_mask_cute.call.settings import BwdConfig, FwdConfig
from flash_mask_cute.lowering.pair import named_by_mods, resolve_mods
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.mods.aux_tensors import OutsideError
from flash_mask_cute.mods.signature import check_mod
from flash_mask_cute.runtime.checks import check_bool, check_number, number_of
from flash_mask_cute.runtime.constant_result import assume_constant_result
from flash_mask_cute.runtime.dtypes import FP8
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.plain_tensors import NotPlainError


class Results(NamedTuple):
    """The results of a call. lse and max_scores have a value for each row, or are None."""

    out: Tensor
    lse: Any
    max_scores: Tensor | None

    def chosen(self, q: Tensor, return_lse: bool, return_max_logit: bool) -> Any:
        """The results that the caller of a public function asked for."""
        out, lse, max_scores = self
        if not return_max_logit:
            return (out, lse) if return_lse else out
        scores: Any = max_scores
        # without rows there is nothing to look for
        largest = scores.new_full((q.shape[-2],), -torch.inf)
        if scores.numel():
            largest = scores.amax((0, 2) if scores.dim() == 3 else 1)
        return (out, lse, largest) if return_lse else (out, largest)


def attend(call: AttentionCall, return_max: bool = False) -> Results:
    """Differentiable attention. return_max: also return the largest score of each row."""
    check_bool("return_lse", call.options.return_lse)
    check_bool("return_max_logit", return_max)
    score_mod, given = None, call.masks
    score_mod_bwd, deterministic, _ = call.backward
    if given is None and not return_max and _is_plain_forward(call):
        out, lse = interface.forward(call)
        return Results(out, lse, None)
    if call.masks is not None:
        masks = call.masks.with_own_mod()
        if masks is not call.masks:
            call = replaced(call, masks=masks)
        # not a chain of `is`: Dynamo of torch 2.9 does not know two functions from inside
        if masks.score_mod is not None or masks.mask_mod is not None:
            call = with_cute_mods(call, masks)
        score_mod = (call.masks or NO_MASKS).score_mod
    check_gradient_settings(deterministic, score_mod_bwd, score_mod)
    if torch._C._is_any_autocast_enabled():
        call = replaced(call, tensors=_as_autocast_casts(call.tensors))
    wants_aux = _aux_that_require_grad(call.masks)
    reason = None
    if wants_aux and score_mod is not None:
        reason = f"aux_tensors[{wants_aux[0]}] requires grad"
        check_differentiable_by_aux(reason, score_mod_bwd)
    if torch.are_deterministic_algorithms_enabled() or (reason is not None and deterministic):
        x, unordered = call.tensors, None
        if reason is not None:
            # Dynamo takes no device as a constant
            unordered = _why_unordered(x.q.device.type, x.q.device.index, x.have_shared_keys)
        in_order = settle_order(reason, unordered, deterministic)
        call = replaced(call, backward=replaced(call.backward, deterministic=in_order))
    if at_dual_level() and (found := attend_with_tangents(call, return_max)) is not None:
        out, lse, largest = found
        return Results(out, lse, largest if return_max else None)
    refused = None
    if not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0):
        refuse_transforms()
        try:
            return _attend_eagerly(call, wants_aux, return_max)
        except NotPlainError as error:
            refused = error
        except OutsideError as error:
            mods = given or NO_MASKS
            raise named_by_mods(
                error, mods.score_mod, mods.mask_mod, mods.aux_tensors, call.tensors.q.device
            ) from error
    if refused is None:
        return _attend_by_operators(call, wants_aux, return_max)
    with refused.named_unless_from(IMPLEMENTATIONS):
        return _attend_by_operators(call, wants_aux, return_max)


@assume_constant_result
def _why_unordered(device: str, index: int | None, have_shared_keys: bool) -> str | None:
    """Why gradients of aux tensors have no fixed order of sums on a device, or None."""
    name = device if index is None else f"{device}:{index}"
    return why_unordered_on(torch.device(name), have_shared_keys)


def _is_plain_forward(call: AttentionCall) -> bool:
    """Whether a call is a forward of plain q, k and v alone; `attend` would change nothing."""
    if torch.compiler.is_compiling():
        return False
    x = call.tensors
    return (
        x.lengths is NO_LENGTHS
        and x.optional is NO_OPTIONAL
        and x.learnable_sink is x.out is None
        and call.options.config is None
        and call.backward is NO_BACKWARD_OPTIONS
        and _is_forward_alone(x, None)
    )


def scale_number(softmax_scale: Any) -> Any:
    """The scale as a Python number, read once for both directions. In a traced region it stays a
    tensor, which an operator reads when it runs."""
    if (
        isinstance(softmax_scale, Tensor)
        and softmax_scale.requires_grad
        and torch.is_grad_enabled()
    ):
        raise NotImplementedError(
            "softmax_scale requires grad, and attention has no gradient by it: multiply q by the "
            f"tensor instead, or detach it; got {softmax_scale}"
        )
    if torch.compiler.is_compiling():
        check_number("softmax_scale", softmax_scale)
        return softmax_scale
    return number_of("softmax_scale", softmax_scale)


def with_cute_mods(call: AttentionCall, masks: Masks) -> AttentionCall:
    """The call with CuTe mods in place of torch mods, and their captured tensors as aux tensors, or
    with a window or intervals in place of a mask_mod."""
    q: Any = call.tensors.q
    given = masks.score_mod, masks.mask_mod, masks.aux_tensors
    if torch.compiler.is_compiling():
        if isinstance(masks.score_mod, str) or isinstance(masks.mask_mod, str):
            return call
        mods = mods_in_graph(*given, q.device.type, False)
    elif in_transform():
        # which would have a part in the trace of a mod
        with temporarily_clear_interpreter_stack():
            return with_cute_mods(call, masks)
    else:
        device = getattr(q, "device", None)
        mods = resolve_mods(*given, device)
        if mods.mask_mod is not masks.mask_mod:
            formed = interface.with_form_of_mod(call, masks)
            if formed is not call:
                call, masks = formed, formed.masks or NO_MASKS
                mods = resolve_mods(masks.score_mod, None, None, device)
    if mods.score_mod is masks.score_mod and mods.mask_mod is masks.mask_mod:
        return call
    return replaced(call, masks=replaced(masks, **mods._asdict()))


def _as_autocast_casts(tensors: Tensors) -> Tensors:
    """The tensors with q, k and v cast as autocast does for scaled_dot_product_attention."""
    q = tensors.q
    if not isinstance(q, Tensor) or not torch.is_autocast_enabled(q.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (
        x.to(dtype)
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype not in (torch.float64, FP8)
        else x
        for x in (q, tensors.k, tensors.v)
    )
    return replaced(tensors, q=q, k=k, v=v)


def _aux_that_require_grad(masks: Masks | None) -> tuple[int, ...]:
    """Indices of the aux tensors that require grad; empty where autograd records nothing."""
    if masks is None or not torch.is_grad_enabled():
        return ()
    aux_tensors = masks.aux_tensors
    if not isinstance(aux_tensors, (list, tuple)):
        return ()
    return tuple(i for i, x in enumerate(aux_tensors) if isinstance(x, Tensor) and x.requires_grad)


def _needs_graph(tensors: Tensors) -> bool:
    # forward-mode differentiation does not ask for requires_grad
    if forward_ad._current_level >= 0:
        return True
    if not torch.is_grad_enabled():
        return False
    x, sink = tensors, tensors.learnable_sink
    try:
        return (
            x.q.requires_grad
            or x.k.requires_grad
            or x.v.requires_grad
            or (sink is not None and sink.requires_grad)
            or (x.out is not None and x.out.requires_grad)
            or (x.optional.k_descale is not None and x.optional.k_descale.requires_grad)
            or (x.optional.v_descale is not None and x.optional.v_descale.requires_grad)
        )
    except AttributeError:
        return False  # what is no tensor is refused by the host path, by name


def _refuse_without_gradients(call: AttentionCall) -> None:
    """Refuse what has no gradients where autograd records a graph."""
    # what is no tensor is refused by the host path, by name
    x, instead = call.tensors, "use torch.no_grad(), or detach what requires grad"
    has_optional = x.optional is not NO_OPTIONAL
    if has_optional and x.optional.causal_per_seq is not None:
        raise NotImplementedError(f"{CAUSALS_HAVE_NO_GRADIENTS}: {instead}")
    if getattr(x.k, "dtype", None) == FP8:
        raise NotImplementedError(f"{NO_GRADIENTS}: {instead}")
    if isinstance(x.out, Tensor):
        raise ValueError(
            "out must be None where gradients are recorded, for which the result is new memory: "
            f"{instead}"
        )
    if isinstance(x.lengths.seqused_k, Tensor) and x.have_shared_keys:
        raise NotImplementedError(
            f"{NO_GRADIENTS_BY_COMMON_KEYS}: give k[:, :n] and a q_start of each sequence instead, "
            f"{instead}"
        )
    if isinstance(x.lengths.page_table, Tensor):
        raise NotImplementedError(
            "there are no gradients by keys and values in pages, or of queries beside page_table: "
            f"{instead}"
        )
    for name, tensor in x.optional._asdict().items() if has_optional else ():
        if tensor is not None:
            raise NotImplementedError(f"there are no gradients beside {name}: {instead}")


# -- eager ---------------------------------------------------------------------------------------


def _attend_eagerly(call: AttentionCall, wants_aux: tuple[int, ...], return_max: bool) -> Results:
    """Attention on plain tensors. Raises NotPlainError for others, before anything is computed."""
    # now, and not when the backward runs
    check_mod("score_mod_bwd", call.backward.score_mod_bwd)
    if not (call.options.config is call.backward.config is None):
        call = with_configs(call)
    masks = call.masks
    if masks is not None and isinstance(masks.startend_row_indices, Tensor):
        # forward and backward then share the bounds
        mask = ColumnMask(masks.startend_row_indices, call.options.causal)
        call = replaced(call, masks=replaced(masks, startend_row_indices=mask))
    if wants_aux or _needs_graph(call.tensors):
        _refuse_without_gradients(call)
        x, aux_tensors = call.tensors, (call.masks or NO_MASKS).aux_tensors
        wanted = [aux_tensors[i] for i in wants_aux] if aux_tensors is not None else []
        out, lse, *more = Attention.apply(
            x.q, x.k, x.v, x.learnable_sink, call, wants_aux, return_max, *wanted
        )
        return Results(out, lse, more[0] if more else None)
    if return_max:
        call = with_outputs(call, return_max, wants_low=False)
    out, lse = interface.forward(call)
    return Results(out, lse, call.tensors.max_scores)


def with_configs(call: AttentionCall) -> AttentionCall:
    """The call with FwdConfig and BwdConfig in place of mappings. Raises TypeError, ValueError as
    `FwdConfig.from_value`."""
    config = FwdConfig.from_value(call.options.config)
    config_bwd = BwdConfig.from_value(call.backward.config)
    return replaced(
        call,
        options=replaced(call.options, config=config),
        backward=replaced(call.backward, config=config_bwd),
    )


class PlannedMasks:
    """Calls without lengths that share masks, all but the aux tensors and maybe the block lists.

    `results` does what `attend` does, with less host time for a plain forward without a graph.
    """

    __slots__ = ("_key", "_masks", "_options")

    def __init__(
        self, masks: Masks | None, causal: bool, window: tuple[Any, Any], keeps_lists: bool
    ) -> None:
        """masks: of the first call; aux tensors and lists of later calls have the same metadata.
        keeps_lists: all calls have these lists."""
        self._masks = None if masks is None else replaced(masks, aux_tensors=None)
        if self._masks is not None and not keeps_lists:
            self._masks = replaced(self._masks, block_sparse_tensors_torch=None)
        left, right = window
        self._options = replaced(
            NO_OPTIONS, causal=causal, window_size_left=left, window_size_right=right
        )
        self._key = None
        # a call refuses by name what no valid call has
        with suppress(AttributeError, RuntimeError, TypeError, ValueError):
            self._key = None if masks is None else mask_key(masks)

    def results(
        self,
        tensors: Tensors,
        aux_tensors: list[Tensor] | None,
        scale: float | None,
        return_lse: bool,
        return_max: bool,
        lists: Any = None,
    ) -> Results:
        """lists: block lists of this call, if it has its own."""
        masks = self._masks
        if masks is not None:
            if lists is None:
                lists = masks.block_sparse_tensors_torch
            columns = masks.startend_row_indices
            masks = Masks(masks.score_mod, masks.mask_mod, aux_tensors, lists, columns)
        options = replaced(self._options, softmax_scale=scale, return_lse=return_lse)
        call = AttentionCall(tensors, masks, options)
        if return_max or not _is_forward_alone(tensors, aux_tensors):
            return attend(call, return_max)
        check_bool("return_lse", return_lse)
        out, lse = interface.forward(call, self._key)
        return Results(out, lse, None)


def _is_forward_alone(tensors: Tensors, aux_tensors: Sequence[Tensor] | None) -> bool:
    """Whether autograd records nothing, autocast casts nothing, and no mode intercepts the call."""
    q, k, v = tensors.q, tensors.k, tensors.v
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


# -- by operators --------------------------------------------------------------------------------


def _attend_by_operators(
    call: AttentionCall, wants_aux: tuple[int, ...], return_max: bool
) -> Results:
    """Attention by operators, for a trace, a dispatch mode or a tensor subclass."""
    refuse_transforms(but_functionalize=True)
    refuse_dual_level()
    x = call.tensors
    if wants_aux or _needs_graph(x):
        _refuse_without_gradients(call)
        call = recorded(call)
    batch = x.q.shape[0] if packs_declared_documents(call) else None
    arguments = to_operator(call, batch, return_max)
    if x.out is not None:
        lse, largest = torch.ops.flash_mask_cute.attention_fwd_into(
            x.q, x.k, x.v, x.learnable_sink, x.out, *arguments
        )
        return Results(x.out, lse, largest if return_max else None)
    out, lse, _, largest = torch.ops.flash_mask_cute.attention_fwd(
        x.q, x.k, x.v, x.learnable_sink, *arguments
    )
    if lse.dtype == torch.float64:
        lse = lse.float()
    return Results(out, lse, largest.detach() if return_max else None)
