"""Argument checks of the public calls, except those of lengths (`lengths`) and of block lists
(`block_sparsity`).

The checks look at metadata only.

TypeError means a wrong type or dtype, ValueError a wrong shape, value, device or memory layout,
NotImplementedError an argument that the library knows and does not support yet. Every message names
the argument and quotes the value.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch

from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch, ComputedLists, from_block_mask
from flash_mask_cute.call.arguments import (
    BY_POSITION,
    NO_MASKS,
    AttentionCall,
    BackwardOptions,
    Direction,
    Masks,
    Options,
    Tensors,
    window_sides,
)
from flash_mask_cute.call.check import axis_order
from flash_mask_cute.call.check.fp8 import check_fp8, check_places
from flash_mask_cute.call.check.inputs import inputs_of
from flash_mask_cute.call.check.lengths import SideArguments, check_batch_vector, check_lengths
from flash_mask_cute.call.check.mask_extents import CallExtents, check_q_starts
from flash_mask_cute.call.check.pages import check_pages, paged_shape, refuse_without_pages
from flash_mask_cute.call.problem import FwdShapes
from flash_mask_cute.limits import LEAST_FIXED_SPLIT, MAX_WIDE_HEAD_DIM, MOST_SPLITS
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.masks.selected_blocks import SelectedBlocks, check_form, check_rows
from flash_mask_cute.mods.aux_tensors import check_aux_tensor
from flash_mask_cute.mods.signature import as_callable, check_mod
from flash_mask_cute.runtime.checks import (
    brief,
    check_bool,
    check_device,
    check_finite,
    check_fp32,
    check_int,
    check_like,
    check_list,
    check_memory_layout,
    check_outputs_apart,
    check_own_memory,
    check_scale,
    check_shaped,
    check_tensor,
    dtype_names,
    refuse_jit_trace,
)
from flash_mask_cute.runtime.constant_result import assume_constant_result
from flash_mask_cute.runtime.dtypes import FP8
from flash_mask_cute.runtime.warn_once import warn_once

_DTYPES = {
    "cuda": (torch.bfloat16, torch.float16),
    "cpu": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
}
_SINK_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_MIN_HEAD_DIM = 8
_HEAD_DIM_STEP = 8
CAUSALS_HAVE_NO_GRADIENTS = "there are no gradients beside causal as a tensor"
NO_GRADIENTS_BY_COMMON_KEYS = (
    "there are no gradients beside seqused_k if k and v are one batch entry for several sequences"
)


def check_dense(
    *operands: torch.Tensor, window_size: Any, **keywords: Any
) -> tuple[int | None, int | None]:
    """Check a forward that nothing computes as a whole, and return the sides of its window.
    operands: q, k, v. keywords: of `_flash_attn_fwd`.

    Raises:
        TypeError, ValueError, NotImplementedError: as the call would.
    """
    left, right = sides = window_sides(window_size)
    sides_given = {"window_size_left": left, "window_size_right": right}
    call = AttentionCall.from_arguments(Direction.FORWARD, *operands, **sides_given, **keywords)
    check_inputs(call)
    return sides


def check_inputs(call: AttentionCall) -> FwdShapes:
    """Check the arguments of a call of either direction, and return the extents of the problem.
    Shapes are those of `_flash_attn_fwd` and `_flash_attn_bwd`; with page_table, seqlen_k is
    max_pages * page_size."""
    refuse_jit_trace()
    x, options, masks = call.tensors, call.options, call.masks or NO_MASKS
    of, optional = x.lengths, x.optional
    check_num_splits(options.num_splits)
    _refuse_positions(seqused_q=of.seqused_q, seqused_k=of.seqused_k, page_table=of.page_table)
    for name, tensor in (("q", x.q), ("k", x.k), ("v", x.v)):
        check_tensor(name, tensor)
    in_fp8 = check_fp8(call)
    _check_operands(x, in_fp8)
    axis_order.warn_if_transposed(tuple(x.q.shape), tuple(x.k.shape), of.page_table is not None)
    device = x.q.device
    queries = SideArguments(
        "q", tuple(x.q.shape), device, of.cu_seqlens_q, of.seqused_q, options.max_seqlen_q
    )
    shape_k = tuple(x.k.shape)
    if of.page_table is not None:
        check_pages(x.k, of, optional)
        shape_k = paged_shape(x.k, of.page_table, optional.kv_batch_idx)
    else:
        refuse_without_pages(kv_batch_idx=optional.kv_batch_idx, leftpad_k=optional.leftpad_k)
    keys = SideArguments(
        "k", shape_k, x.k.device, of.cu_seqlens_k, of.seqused_k, options.max_seqlen_k
    )
    in_pages = of.page_table is not None
    shapes = check_lengths(queries, keys, x.v.shape[-1], in_pages)
    if in_fp8:
        check_places(call, shapes.batch)
    if of.q_starts is not None:
        check_q_starts(of.q_starts, shapes.batch, device)
    if optional.causal_per_seq is not None:
        check_batch_vector("causal", optional.causal_per_seq, shapes.batch, device)
        _check_beside_causal_per_seq(call)
    _check_options(options)
    if options.seqlen_k_per_split is not None:
        _check_fixed_splits(call, options.seqlen_k_per_split, shapes.seqlen_k)
    if x.learnable_sink is not None:
        _check_learnable_sink(x.learnable_sink, shapes.heads_q, device)
    packs = queries.is_packed, keys.is_packed
    _check_masks(call, keys, CallExtents(shapes, *packs, options.q_start))
    if call.direction is Direction.FORWARD:
        _check_outputs(call, shapes, masks.score_mod)
    else:
        if of.seqused_k is not None and x.have_shared_keys:
            raise NotImplementedError(f"{NO_GRADIENTS_BY_COMMON_KEYS}, got {brief(of.seqused_k)}")
        _check_gradients(x, shapes, masks, call.backward)
    return shapes


def _check_beside_causal_per_seq(call: AttentionCall) -> None:
    """Refuse arguments that do not combine with `causal` as a tensor."""
    left = call.options.window_size_left
    if call.direction is Direction.BACKWARD:
        given = brief(call.tensors.optional.causal_per_seq)
        raise NotImplementedError(f"{CAUSALS_HAVE_NO_GRADIENTS}, got {given}")
    if left is not None and left < 0:
        # kernels do not find out which of the sequences then see nothing
        raise NotImplementedError(
            f"window_size_left must be at least 0 beside causal as a tensor, got {left}"
        )


def _check_options(options: Options) -> None:
    _check_softmax_scale(options.softmax_scale)
    check_bool("causal", options.causal)
    check_bool("return_lse", options.return_lse)
    if options.pack_gqa is not None:
        check_bool("pack_gqa", options.pack_gqa, "True, False or None (choose for me)")
    if options.window_size_left is not None:
        _check_window("window_size_left", options.window_size_left)
    if options.window_size_right is not None:
        _check_window("window_size_right", options.window_size_right)
    _check_softcap(options.softcap)


def _check_masks(call: AttentionCall, keys: SideArguments, extents: CallExtents) -> None:
    masks, device, shapes = call.masks or NO_MASKS, call.tensors.q.device, extents.shapes
    check_mod("score_mod", masks.score_mod)
    check_mod("mask_mod", masks.mask_mod)
    if masks.aux_tensors is not None:
        _check_aux_tensors(masks.aux_tensors, device, masks.score_mod, masks.mask_mod)
    lists, columns = masks.block_sparse_tensors_torch, masks.startend_row_indices
    if isinstance(lists, SelectedBlocks):
        check_form(lists, device)
        check_rows(lists, shapes, extents.packs_q)
    elif lists is not None:
        _check_block_lists(lists, masks.mask_mod)
        extents.check_lists(from_block_mask(lists).seqlens)
    if columns is not None:
        _check_columns(columns, call.options.causal, keys, shapes)
        extents.check_columns(columns)


def _check_gradients(
    tensors: Tensors, shapes: FwdShapes, masks: Masks, backward: BackwardOptions
) -> None:
    """Check what only a backward has."""
    x, of, q = tensors, tensors.gradients, tensors.q
    out, dout, lse = cast(Any, (x.out, of.dout, x.lse))
    score_mod_bwd, deterministic, _ = backward
    check_gradient_settings(deterministic, score_mod_bwd, masks.score_mod)
    check_mod("score_mod_bwd", score_mod_bwd)
    out_shape = (*q.shape[:-1], shapes.head_dim_v)
    for name, tensor in (("out", out), ("dout", dout)):
        check_shaped(name, tensor, out_shape, "the shape of q with head_dim_v", q)
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    if x.lse_low is not None:
        _check_wants_low(x.lse_low, masks.score_mod)
    for name, of_rows in (("lse", lse), ("dlse", of.dlse), ("lse_low", x.lse_low)):
        if of_rows is not None or name == "lse":
            check_fp32(name, of_rows, lse_shape, q.device, or_wide=q.dtype == torch.float64)
    outputs: dict[str, torch.Tensor | None] = {}
    for name, gradient, like in (("dq", of.dq, q), ("dk", of.dk, x.k), ("dv", of.dv, x.v)):
        outputs[name] = gradient
        if gradient is not None:
            _check_output(name, gradient, tuple(like.shape), f"the shape of {name[1:]}", q)
    if of.dsink is not None:
        _check_dsink(of.dsink, x.learnable_sink)
        outputs["dsink"] = of.dsink
    if of.daux is not None:
        _check_daux(of.daux, masks.aux_tensors)
        outputs |= {f"daux[{i}]": y for i, y in enumerate(of.daux)}
        if masks.score_mod is not None and any(y is not None for y in of.daux):
            check_differentiable_by_aux("daux is given", score_mod_bwd)
    check_outputs_apart(outputs, {"q": q, "k": x.k, "v": x.v, "out": out, "dout": dout})


def refuse_transforms(but_functionalize: bool = False) -> None:
    """Raise NotImplementedError within a transform of torch.func, which would not see a kernel's
    work. but_functionalize: except functionalize, which works with operators."""
    if not torch._C._are_functorch_transforms_active():
        return
    if but_functionalize and not torch.compiler.is_compiling():
        stack = torch._C._functorch.get_interpreter_stack() or []
        if all(x.key() == torch._C._functorch.TransformType.Functionalize for x in stack):
            return
    raise NotImplementedError("transforms of torch.func (grad, vmap, jvp) are not supported")


def check_num_splits(num_splits: int) -> None:
    if type(num_splits) is int and 0 <= num_splits <= 1:
        return  # isinstance of an abstract class takes three times as long
    if not 0 <= check_int("num_splits", num_splits, "an int") <= MOST_SPLITS:
        raise ValueError(
            f"num_splits must be 0 (the library decides), or from 1 to {MOST_SPLITS}, got "
            f"{num_splits}"
        )


def check_split_keys(seqlen_k_per_split: int) -> None:
    given = check_int("seqlen_k_per_split", seqlen_k_per_split, "an int or None")
    if given < LEAST_FIXED_SPLIT:
        raise ValueError(f"seqlen_k_per_split must be at least {LEAST_FIXED_SPLIT}, got {given}")


def _check_fixed_splits(call: AttentionCall, seqlen_k_per_split: int, seqlen_k: int) -> None:
    """Refuse what contradicts the cut of sums at fixed keys. seqlen_k: keys of a sequence, or
    more."""
    check_split_keys(seqlen_k_per_split)
    if call.masks is not None and isinstance(call.masks.block_sparse_tensors_torch, SelectedBlocks):
        # the order of a row's sums would depend on the blocks that its neighbours chose
        raise NotImplementedError(
            f"seqlen_k_per_split={seqlen_k_per_split} is not supported together with "
            "block_sparse_tensors as SelectedBlocks"
        )
    num_splits, least = call.options.num_splits, -(-seqlen_k // seqlen_k_per_split)
    if 0 < num_splits < least:
        raise ValueError(
            f"num_splits must be 0 or at least {least} beside seqlen_k_per_split="
            f"{seqlen_k_per_split}, which cuts up to {seqlen_k} keys so often, got {num_splits}"
        )
    tile_n = getattr(call.config, "tile_n", None)
    if tile_n is not None:
        raise ValueError(
            "config must not set tile_n beside seqlen_k_per_split, by which head dimensions alone "
            f"decide about it, got tile_n={tile_n}"
        )


def check_gradient_settings(
    deterministic: bool, score_mod_bwd: Callable[..., Any] | None, score_mod: object
) -> None:
    """Refuse invalid settings of a backward. It is cheap, because every call of a public function
    runs it."""
    check_bool("deterministic", deterministic)
    if score_mod_bwd is None:
        return
    as_callable("score_mod_bwd", score_mod_bwd)
    if score_mod is None:
        raise ValueError(
            f"score_mod_bwd is the derivative of score_mod, which is None, got "
            f"{brief(score_mod_bwd)}"
        )


def check_differentiable_by_aux(reason: str, score_mod_bwd: Callable[..., Any] | None) -> None:
    """Refuse a score_mod_bwd where gradients of aux tensors are wanted, by `reason`."""
    if score_mod_bwd is not None:
        raise NotImplementedError(
            f"{reason}, but score_mod_bwd gives no gradients of aux tensors: leave it out, so that "
            f"score_mod is differentiated, or detach the tensor; got {brief(score_mod_bwd)}"
        )


def refuse_order(reason: str, unordered: str) -> NoReturn:
    """Refuse a fixed order of sums. reason, unordered: as in `settle_order`."""
    raise NotImplementedError(
        f"{reason}, but {unordered}: they are not supported with deterministic=True or "
        "torch.use_deterministic_algorithms(True); detach the tensor"
    )


def settle_order(reason: str | None, unordered: str | None, deterministic: bool) -> bool:
    """Whether sums have a fixed order: if `deterministic` or torch's setting asks for it.

    reason: why gradients of aux tensors are wanted, None if they are not. unordered: why these have
    no fixed order, None if they have one. If they have none, torch's setting acts as for torch's
    own functions: an error, or with warn_only a warning and any order. `deterministic` is always an
    error."""
    by_torch = torch.are_deterministic_algorithms_enabled()
    if reason is None or unordered is None:
        return deterministic or by_torch
    if deterministic or (by_torch and not _only_warns(reason, unordered)):
        refuse_order(reason, unordered)
    return False


@assume_constant_result
def _only_warns(reason: str, unordered: str) -> bool:
    """Whether torch's setting is warn_only; if so, warn, in a way that Dynamo can trace."""
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    warnings.warn(
        f"{reason}, and {unordered}: the last bits of all gradients of this call may differ from "
        "run to run, although "
        "torch.use_deterministic_algorithms(True, warn_only=True) asks for one",
        stacklevel=5,  # the caller of the public function
    )
    return True


def _check_operands(tensors: Tensors, in_fp8: bool) -> None:
    """Check shapes, heads and dtypes of q, k and v. in_fp8: k and v may be in fp8, and are."""
    q, k, v, of = tensors.q, tensors.k, tensors.v, tensors.lengths
    _check_dtype_of_q(q.dtype, q.device)
    dtype = FP8 if in_fp8 else q.dtype
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must have the dtype of q ({dtype}), got {tensor.dtype}")
        check_device(name, tensor, q.device)
    shape_q, shape_k, shape_v = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    _check_rank("q", shape_q, of.cu_seqlens_q)
    _check_rank("k", shape_k, of.cu_seqlens_k)
    _check_rank("v", shape_v, of.cu_seqlens_k)
    if shape_k[-1] != shape_q[-1]:
        raise ValueError(f"k must have the head_dim of q ({shape_q[-1]}), got shape {shape_k}")
    if shape_v[:-1] != shape_k[:-1]:
        raise ValueError(
            f"v must agree with k {shape_k} in all but the last dimension, got {shape_v}"
        )
    _check_heads(shape_q[-2], shape_v[-2], shape_k)
    check_head_dims(shape_q[-1], shape_v[-1], runs_kernels=q.is_cuda)


def _check_outputs(call: AttentionCall, shapes: FwdShapes, score_mod: object) -> None:
    """Check the caller's output tensors, and that none overlaps an input."""
    x, q = call.tensors, call.tensors.q
    if x.out is not None:
        out_shape = (*q.shape[:-1], shapes.head_dim_v)
        shape_name = "the shape of q with head_dim_v"
        _check_output("out", x.out, out_shape, shape_name, q, may_be_wide=True)
    if x.lse_low is not None:
        _check_wants_low(x.lse_low, score_mod)
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    rows = {"lse": x.lse, "lse_low": x.lse_low, "max_scores": x.max_scores}
    for name, of_rows in rows.items():
        if of_rows is not None:
            or_wide = q.dtype == torch.float64 and name != "max_scores"
            check_fp32(name, of_rows, lse_shape, q.device, or_wide)
            if not of_rows.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {of_rows.stride()}")
    outputs = {"out": x.out, **rows}
    if any(y is not None for y in outputs.values()):
        check_outputs_apart(outputs, inputs_of(call))


def _refuse_positions(**lengths: object) -> None:
    """Refuse numbers in the positions where flash-attn 2 and 3 have other arguments."""
    for name, value in lengths.items():
        if isinstance(value, bool | int | float):
            raise TypeError(f"{name} must be a torch.Tensor, got {brief(value)}; {BY_POSITION}")


def _check_softmax_scale(softmax_scale: float | None) -> None:
    if softmax_scale is None:
        return
    if isinstance(softmax_scale, bool):
        raise TypeError(
            f"softmax_scale must be a real number, got {brief(softmax_scale)}; {BY_POSITION}"
        )
    check_scale("softmax_scale", softmax_scale)
    if softmax_scale == 0:
        warn_once(
            "softmax_scale=0",
            "softmax_scale is 0, so all visible keys have the same weight. If this is the "
            f"dropout_p=0.0 of flash-attn 2: {BY_POSITION}",
        )


def _check_softcap(softcap: float) -> None:
    check_finite("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"softcap must be 0 (off) or positive, got {softcap}")


def _check_dtype_of_q(dtype: torch.dtype, device: torch.device) -> None:
    supported = _DTYPES.get(device.type)
    if supported is None:
        raise ValueError(f"q must be on a cuda or cpu device, got {device}")
    if dtype not in supported:
        raise TypeError(
            f"q must have one of the dtypes {dtype_names(supported)} on {device.type}, got {dtype}"
        )


def _check_rank(name: str, shape: tuple[int, ...], cu_seqlens: torch.Tensor | None) -> None:
    if len(shape) == (4 if cu_seqlens is None else 3):
        return
    heads, side = ("heads_q", "q") if name == "q" else ("heads_kv", "k")
    dim = "head_dim_v" if name == "v" else "head_dim"
    rows, state = ("batch, seqlen", "None") if cu_seqlens is None else ("total", "given")
    raise ValueError(
        f"{name} must have shape ({rows}, {heads}, {dim}) when cu_seqlens_{side} is {state}, got "
        f"{shape}"
    )


def _check_heads(heads_q: int, heads_kv: int, shape_k: tuple[int, ...]) -> None:
    if heads_q < 1 or heads_kv < 1:
        raise ValueError(
            f"q and k must have at least one head, got heads_q={heads_q} and heads_kv={heads_kv}"
        )
    if heads_q % heads_kv:
        wrong = (
            f"heads_q must be a multiple of heads_kv, got heads_q={heads_q} and heads_kv={heads_kv}"
        )
        raise ValueError("; ".join(filter(None, (wrong, axis_order.hint("k", shape_k)))))


def check_head_dims(head_dim: int, head_dim_v: int, *, runs_kernels: bool) -> None:
    """Only kernels have a largest head dimension; the CPU path has none."""
    for name, tensor_name, value in (("head_dim", "q", head_dim), ("head_dim_v", "v", head_dim_v)):
        is_too_large = runs_kernels and value > MAX_WIDE_HEAD_DIM
        if value < _MIN_HEAD_DIM or is_too_large or value % _HEAD_DIM_STEP:
            most = f"from {_MIN_HEAD_DIM} to {MAX_WIDE_HEAD_DIM}"
            raise ValueError(
                f"{name} (last dimension of {tensor_name}) must be a multiple of {_HEAD_DIM_STEP} "
                f"{most if runs_kernels else f'from {_MIN_HEAD_DIM} on'}, got {value}"
            )


def _check_window(name: str, value: object) -> None:
    if check_int(name, value, "an int or None (no limit on that side)") == -1:
        raise ValueError(
            f"{name} must not be -1: None leaves that side open, and less than -1 shifts the band; "
            "got -1"
        )


def _check_learnable_sink(sink: torch.Tensor, heads_q: int, device: torch.device) -> None:
    name = "learnable_sink"
    check_tensor(name, sink)
    if sink.dtype not in _SINK_DTYPES:
        raise TypeError(f"{name} must have dtype {dtype_names(_SINK_DTYPES)}, got {sink.dtype}")
    if tuple(sink.shape) != (heads_q,):
        raise ValueError(
            f"{name} must have shape (heads_q,) = ({heads_q},), got {tuple(sink.shape)}"
        )
    check_device(name, sink, device)


def _check_aux_tensors(
    value: Any, device: torch.device, score_mod: object, mask_mod: object
) -> None:
    check_list("aux_tensors", value)
    if score_mod is None and mask_mod is None:
        raise ValueError(
            f"aux_tensors are read by score_mod and mask_mod, which are both None, got {len(value)}"
        )
    for position, tensor in enumerate(value):
        name = f"aux_tensors[{position}]"
        check_tensor(name, tensor)
        check_aux_tensor(name, tensor, device)


def _check_block_lists(value: object, mask_mod: object) -> None:
    """Checks that need no extents of the problem; `check_block_lists` does the rest."""
    from_block_mask(value)
    if mask_mod is None and not isinstance(value, BlockSparseTensorsTorch | ComputedLists):
        raise ValueError(
            "block_sparse_tensors or block_sparse_tensors_torch is a torch BlockMask, whose own "
            "mask_mod no kernel can call: pass the same mask as a CuTe callable, mask_mod, too, or "
            "its partial blocks would be visible as a whole; got mask_mod None"
        )


def _check_columns(value: object, causal: bool, keys: SideArguments, shapes: FwdShapes) -> None:
    name = "startend_row_indices"
    if not isinstance(value, ColumnMask):
        # refuses what is no tensor
        value = ColumnMask(cast(Any, value), causal)
    tensor = value.startend_row_indices
    check_tensor(name, tensor)
    shape = tuple(tensor.shape)
    batch, num_keys = 1 if keys.is_packed else shapes.batch, keys.rows[1]
    if shape[0] not in (1, batch) or shape[2] != num_keys:
        raise ValueError(
            f"{name} must have {batch if batch == 1 else f'1 or {batch}'} batch entries and "
            f"{num_keys} keys, got shape {shape}"
        )
    if shape[1] not in (1, shapes.heads_kv, shapes.heads_q):
        raise ValueError(
            f"{name} must have 1, heads_kv ({shapes.heads_kv}) or heads_q ({shapes.heads_q}) "
            f"heads, got shape {shape}"
        )
    check_device(name, tensor, keys.device)


def _check_output(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    shape_name: str,
    q: torch.Tensor,
    *,
    may_be_wide: bool = False,
) -> None:
    """A tensor like q, k, v or out that the call writes."""
    check_shaped(name, tensor, shape, shape_name, q, may_be_wide=may_be_wide)
    check_memory_layout(name, tensor, aligned=q.device.type == "cuda")
    check_own_memory(name, tensor)


def _check_wants_low(lse_low: object, score_mod: object) -> None:
    if score_mod is None:
        raise ValueError(
            f"lse_low is for scores that a score_mod makes, which is None, got {brief(lse_low)}"
        )


def _check_dsink(dsink: torch.Tensor, sink: torch.Tensor | None) -> None:
    if sink is None:
        raise ValueError(
            f"dsink is the gradient of learnable_sink, which is None, got {brief(dsink)}"
        )
    check_tensor("dsink", dsink)
    check_like("dsink", dsink, "learnable_sink", sink)


def _check_daux(daux: object, aux_tensors: Sequence[torch.Tensor] | None) -> None:
    if not isinstance(daux, list | tuple):
        raise TypeError(f"daux must be a list or a tuple, got {brief(daux)}")
    count = 0 if aux_tensors is None else len(aux_tensors)
    if len(daux) != count:
        raise ValueError(
            f"daux must have an entry for each of the {count} aux_tensors, got {len(daux)}"
        )
    for position, (gradient, tensor) in enumerate(zip(daux, aux_tensors or (), strict=True)):
        if gradient is None:
            continue
        name, of = f"daux[{position}]", f"aux_tensors[{position}]"
        check_tensor(name, gradient)
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"{name} must be None: {of} holds {tensor.dtype}, got a tensor")
        check_like(name, gradient, of, tensor)
