"""Argument checks of the public calls, but for those of block lists (`block_sparsity`).

The checks look at metadata only. Contents of `cu_seqlens_*` and `seqused_*` are checked when they
are CPU tensors; a CUDA tensor is never read, so no check waits for the device.

TypeError means a wrong type or dtype, ValueError a wrong shape, value, device or memory layout,
NotImplementedError an argument that the library knows and does not support yet. Every message names
the argument and quotes the value.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, cast

import torch

from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch, ComputedLists, from_block_mask
from flash_mask_cute.call import axis_order
from flash_mask_cute.call.mask_extents import CallExtents, check_q_start
from flash_mask_cute.call.problem import FwdShapes
from flash_mask_cute.limits import MAX_PACKED_SEQLEN
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.mods.aux_tensors import check_aux_tensor
from flash_mask_cute.mods.signature import as_callable, check_mod
from flash_mask_cute.runtime.checks import (
    brief,
    check_apart,
    check_bool,
    check_device,
    check_finite,
    check_fp32,
    check_int,
    check_like,
    check_memory_layout,
    check_own_memory,
    check_real,
    check_shaped,
    check_tensor,
    dtype_names,
)

_DTYPES = {
    "cuda": (torch.bfloat16, torch.float16),
    "cpu": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
}
_SINK_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# kernels multiply it by log2(e) in float32
_LARGEST_SCALE = 1e38
_MIN_HEAD_DIM = 8
_MAX_HEAD_DIM = 256
_HEAD_DIM_STEP = 8


def check_fwd_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    softcap: float = 0.0,
    learnable_sink: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: Any = None,
    block_sparse_tensors_torch: Any = None,
    startend_row_indices: torch.Tensor | ColumnMask | None = None,
    q_start: int | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    lse_low: torch.Tensor | None = None,
    return_lse: bool = True,
) -> FwdShapes:
    """Check the arguments of `_flash_attn_fwd` and return the extents of the problem.

    Shapes: q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim),
    v (batch, seqlen_k, heads_kv, head_dim_v); with cu_seqlens_q, q is (total_q, heads_q, head_dim);
    with cu_seqlens_k, k and v are (total_k, heads_kv, ...). cu_seqlens_* are int32 (batch + 1,),
    seqused_* int32 (batch,), learnable_sink (heads_q,), out like q with head_dim_v, lse and lse_low
    fp32 (batch, heads_q, seqlen_q) or, with cu_seqlens_q, (heads_q, total_q). startend_row_indices
    (batch or 1, heads, seqlen_k, n), with cu_seqlens_k (1, heads, total_k, n), heads 1, heads_kv or
    heads_q.

    Raises:
        TypeError, ValueError, NotImplementedError: see the module docstring.
    """
    check_unsupported(num_splits, page_table)
    check_q_start(q_start)
    check_tensor("q", q)
    check_tensor("k", k)
    check_tensor("v", v)
    device = q.device
    _check_dtype_of_q(q.dtype, device)
    _check_like_q("k", k, q.dtype, device)
    _check_like_q("v", v, q.dtype, device)
    shape_q, shape_k, shape_v = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    _check_rank("q", shape_q, cu_seqlens_q, "cu_seqlens_q")
    _check_rank("k", shape_k, cu_seqlens_k, "cu_seqlens_k")
    _check_rank("v", shape_v, cu_seqlens_k, "cu_seqlens_k")
    heads_q, head_dim = shape_q[-2:]
    heads_kv, head_dim_v = shape_v[-2:]
    _check_k_and_v(head_dim, shape_k, shape_v)
    _check_heads(heads_q, heads_kv, shape_k)
    _check_head_dim("head_dim", "q", head_dim)
    _check_head_dim("head_dim_v", "v", head_dim_v)
    axis_order.warn_once(q=shape_q, k=shape_k)

    if cu_seqlens_q is not None:
        _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, device)
    if cu_seqlens_k is not None:
        _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, device)
    batch = shape_q[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    batch_k = shape_k[0] if cu_seqlens_k is None else len(cu_seqlens_k) - 1
    if batch != batch_k:
        source_q = "the shape of q" if cu_seqlens_q is None else "cu_seqlens_q"
        source_k = "the shape of k" if cu_seqlens_k is None else "cu_seqlens_k"
        raise ValueError(
            f"batch of q and k must be equal, got {batch} from {source_q} and {batch_k} from "
            f"{source_k}"
        )

    if max_seqlen_q is not None:
        _check_max_seqlen("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None:
        _check_max_seqlen("max_seqlen_k", max_seqlen_k)
    if seqused_q is not None:
        _check_seqused("seqused_q", seqused_q, batch, device)
    if seqused_k is not None:
        _check_seqused("seqused_k", seqused_k, batch, device)
    seqlen_q, total_q = _extents(shape_q, cu_seqlens_q, max_seqlen_q)
    seqlen_k, total_k = _extents(shape_k, cu_seqlens_k, max_seqlen_k)
    if device.type == "cuda":
        _check_packed_seqlen("q", cu_seqlens_q, seqlen_q)
        _check_packed_seqlen("k", cu_seqlens_k, seqlen_k)
    else:
        _check_lengths("q", shape_q, cu_seqlens_q, seqused_q, max_seqlen_q)
        _check_lengths("k", shape_k, cu_seqlens_k, seqused_k, max_seqlen_k)

    if softmax_scale is not None:
        check_real("softmax_scale", softmax_scale)
        if not abs(softmax_scale) <= _LARGEST_SCALE:
            raise ValueError(
                f"softmax_scale must be finite, and at most {_LARGEST_SCALE} in magnitude, got "
                f"{softmax_scale}"
            )
    check_bool("causal", causal)
    check_bool("return_lse", return_lse)
    if pack_gqa is not None:
        check_bool("pack_gqa", pack_gqa, "True, False or None (choose for me)")
    if window_size_left is not None:
        _check_window("window_size_left", window_size_left)
    if window_size_right is not None:
        _check_window("window_size_right", window_size_right)
    check_finite("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"softcap must be 0 (off) or positive, got {softcap}")
    if learnable_sink is not None:
        _check_learnable_sink(learnable_sink, heads_q, device)
    check_mod("score_mod", score_mod)
    check_mod("mask_mod", mask_mod)
    if aux_tensors is not None:
        _check_aux_tensors(aux_tensors, device, score_mod, mask_mod)
    extents = CallExtents(
        batch, seqlen_q, seqlen_k, total_q, total_k, cu_seqlens_q is not None,
        cu_seqlens_k is not None, q_start,
    )  # fmt: skip
    if block_sparse_tensors_torch is not None:
        _check_block_lists(block_sparse_tensors_torch, mask_mod)
        extents.check_lists(from_block_mask(block_sparse_tensors_torch).seqlens)
    if startend_row_indices is not None:
        keys = (batch, shape_k[1]) if cu_seqlens_k is None else (1, total_k)
        _check_columns(startend_row_indices, causal, keys, heads_kv, heads_q, device)
        extents.check_columns(startend_row_indices)
    if out is not None:
        _check_output("out", out, (*shape_q[:-1], head_dim_v), "the shape of q with head_dim_v", q)
        check_apart("out", out, {"q": q, "k": k, "v": v})
    lse_shape = (batch, heads_q, seqlen_q) if cu_seqlens_q is None else (heads_q, total_q)
    others = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
    if lse is not None:
        _check_lse("lse", lse, lse_shape, device)
        check_apart("lse", lse, others)
    if lse_low is not None:
        _check_wants_low(lse_low, score_mod)
        _check_lse("lse_low", lse_low, lse_shape, device)
        check_apart("lse_low", lse_low, others | ({} if lse is None else {"lse": lse}))
    return FwdShapes(
        batch, seqlen_q, seqlen_k, total_q, total_k, heads_q, heads_kv, head_dim, head_dim_v
    )


def check_bwd_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    *,
    score_mod_bwd: Callable[..., Any] | None = None,
    dlse: torch.Tensor | None = None,
    deterministic: bool = False,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    dsink: torch.Tensor | None = None,
    lse_low: torch.Tensor | None = None,
    daux: Any = None,
    **forward: Any,
) -> FwdShapes:
    """Check the arguments of `_flash_attn_bwd` and return the extents of the problem.

    forward: those that `check_fwd_inputs` knows. Shapes: out and dout like q with head_dim_v; lse,
    lse_low and dlse fp32 (batch, heads_q, seqlen_q) or, with cu_seqlens_q, (heads_q, total_q), any
    strides; dq, dk, dv like q, k, v; dsink like learnable_sink; daux an entry for each aux tensor,
    None or a tensor like it.

    Raises:
        TypeError, ValueError, NotImplementedError: see the module docstring.
    """
    shapes = check_fwd_inputs(q, k, v, **forward)
    device = q.device
    check_gradient_settings(deterministic, score_mod_bwd, forward.get("score_mod"))
    check_mod("score_mod_bwd", score_mod_bwd)
    out_shape = (*q.shape[:-1], shapes.head_dim_v)
    for name, tensor in (("out", out), ("dout", dout)):
        check_shaped(name, tensor, out_shape, "the shape of q with head_dim_v", q)
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    check_fp32("lse", lse, lse_shape, device)
    if dlse is not None:
        check_fp32("dlse", dlse, lse_shape, device)
    if lse_low is not None:
        _check_wants_low(lse_low, forward.get("score_mod"))
        check_fp32("lse_low", lse_low, lse_shape, device)
    more: dict[str, torch.Tensor] = {}
    if dsink is not None:
        _check_dsink(dsink, forward.get("learnable_sink"))
        more["dsink"] = dsink
    if daux is not None:
        _check_daux(daux, forward.get("aux_tensors"))
        more |= {f"daux[{i}]": x for i, x in enumerate(daux) if x is not None}
        if forward.get("score_mod") is not None and any(x is not None for x in daux):
            check_differentiable_by_aux("daux is given", score_mod_bwd, deterministic)
    inputs = {"q": q, "k": k, "v": v, "out": out, "dout": dout}
    for name, gradient, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        if gradient is not None:
            _check_output(name, gradient, tuple(like.shape), f"the shape of {name[1:]}", q)
            check_apart(name, gradient, inputs)
    for name, gradient in more.items():
        check_apart(name, gradient, inputs)
    _check_gradients_apart({"dq": dq, "dk": dk, "dv": dv, **more})
    return shapes


def refuse_transforms(but_functionalize: bool = False) -> None:
    """Raises NotImplementedError within a transform of torch.func, which would see nothing of what
    a kernel does. but_functionalize: that one is fine with operators."""
    if not torch._C._are_functorch_transforms_active():
        return
    if but_functionalize and not torch.compiler.is_compiling():
        stack = torch._C._functorch.get_interpreter_stack() or []
        if all(x.key() == torch._C._functorch.TransformType.Functionalize for x in stack):
            return
    raise NotImplementedError("transforms of torch.func (grad, vmap, jvp) are not supported")


def check_unsupported(num_splits: int, page_table: object) -> None:
    """Refuse arguments that are known, and not supported yet.

    Raises:
        TypeError: num_splits is no int.
        NotImplementedError: num_splits is not 1, or page_table not None.
    """
    if page_table is None and type(num_splits) is int and num_splits == 1:
        return  # isinstance of an abstract class takes three times as long
    if page_table is not None:
        raise NotImplementedError(
            f"page_table is not supported yet, got {brief(page_table)}; it must be None"
        )
    if check_int("num_splits", num_splits, "an int") != 1:
        raise NotImplementedError(f"num_splits other than 1 is not supported yet, got {num_splits}")


def check_gradient_settings(
    deterministic: bool, score_mod_bwd: Callable[..., Any] | None, score_mod: object
) -> None:
    """Refuse what a backward cannot be told. Cheap, because every call of a public function asks;
    whether a kernel can be made of score_mod_bwd is for `check_mod`.

    Raises:
        TypeError: deterministic is no bool, or score_mod_bwd neither None nor callable.
        ValueError: score_mod_bwd without score_mod.
    """
    check_bool("deterministic", deterministic)
    if score_mod_bwd is None:
        return
    as_callable("score_mod_bwd", score_mod_bwd)
    if score_mod is None:
        raise ValueError(
            f"score_mod_bwd is the derivative of score_mod, which is None, got "
            f"{brief(score_mod_bwd)}"
        )


def check_differentiable_by_aux(
    reason: str, score_mod_bwd: Callable[..., Any] | None, deterministic: bool
) -> None:
    """Refuse what has no gradients of aux tensors. reason: why these are wanted.

    Raises:
        NotImplementedError: a score_mod_bwd, or a fixed order of sums.
    """
    if score_mod_bwd is not None:
        raise NotImplementedError(
            f"{reason}, but score_mod_bwd gives no gradients of aux tensors: leave it out, so that "
            f"score_mod is differentiated, or detach the tensor; got {brief(score_mod_bwd)}"
        )
    if deterministic:
        raise NotImplementedError(
            f"{reason}, but gradients of aux tensors are summed in no fixed order: they are not "
            "supported with deterministic=True or torch.use_deterministic_algorithms(True); detach "
            "the tensor"
        )


def settle_order(
    reason: str | None, score_mod_bwd: Callable[..., Any] | None, deterministic: bool
) -> bool:
    """Whether sums have a fixed order: where `deterministic` or the setting of torch asks for it.

    reason: why gradients of aux tensors are wanted, which have none; None if they are not. Then the
    setting means what it means for torch's own functions: an error, or with warn_only a warning and
    any order. `deterministic` is always an error.

    Raises:
        NotImplementedError: as `check_differentiable_by_aux`.
    """
    by_torch = torch.are_deterministic_algorithms_enabled()
    if reason is None:
        return deterministic or by_torch
    check_differentiable_by_aux(reason, score_mod_bwd, deterministic)
    if by_torch and not _only_warns(reason):
        check_differentiable_by_aux(reason, score_mod_bwd, True)
    return False


@torch.compiler.assume_constant_result
def _only_warns(reason: str) -> bool:
    """Whether torch's setting is warn_only; if so, warns. Dynamo can trace neither: it warns once,
    and guards the answer together with the setting."""
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    warnings.warn(
        f"{reason}, and gradients of aux tensors are summed in no fixed order: the last bits of "
        "all gradients of this call may differ from run to run, although "
        "torch.use_deterministic_algorithms(True, warn_only=True) asks for one",
        stacklevel=5,  # the caller of the public function
    )
    return True


def _check_dtype_of_q(dtype: torch.dtype, device: torch.device) -> None:
    supported = _DTYPES.get(device.type)
    if supported is None:
        raise ValueError(f"q must be on a cuda or cpu device, got {device}")
    if dtype not in supported:
        raise TypeError(
            f"q must have one of the dtypes {dtype_names(supported)} on {device.type}, got {dtype}"
        )


def _check_like_q(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must have the dtype of q ({dtype}), got {tensor.dtype}")
    check_device(name, tensor, device)


def _check_rank(
    name: str, shape: tuple[int, ...], cu_seqlens: torch.Tensor | None, cu_seqlens_name: str
) -> None:
    if len(shape) == (4 if cu_seqlens is None else 3):
        return
    heads = "heads_q" if name == "q" else "heads_kv"
    dim = "head_dim_v" if name == "v" else "head_dim"
    if cu_seqlens is None:
        expected, condition = f"(batch, seqlen, {heads}, {dim})", f"{cu_seqlens_name} is None"
    else:
        expected, condition = f"(total, {heads}, {dim})", f"{cu_seqlens_name} is given"
    raise ValueError(f"{name} must have shape {expected} when {condition}, got {shape}")


def _check_k_and_v(head_dim: int, shape_k: tuple[int, ...], shape_v: tuple[int, ...]) -> None:
    if shape_k[-1] != head_dim:
        raise ValueError(f"k must have the head_dim of q ({head_dim}), got shape {shape_k}")
    if shape_v[:-1] != shape_k[:-1]:
        raise ValueError(
            f"v must agree with k {shape_k} in all but the last dimension, got {shape_v}"
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


def _check_head_dim(name: str, tensor_name: str, value: int) -> None:
    if not _MIN_HEAD_DIM <= value <= _MAX_HEAD_DIM or value % _HEAD_DIM_STEP:
        raise ValueError(
            f"{name} (last dimension of {tensor_name}) must be a multiple of {_HEAD_DIM_STEP} from "
            f"{_MIN_HEAD_DIM} to {_MAX_HEAD_DIM}, got {value}"
        )


def _check_index_vector(name: str, value: object, device: torch.device) -> None:
    """Check what cu_seqlens and seqused have in common: int32, 1-D, contiguous, on `device`."""
    check_tensor(name, value)
    assert isinstance(value, torch.Tensor)
    if value.dtype != torch.int32:
        raise TypeError(f"{name} must have dtype int32, got {value.dtype}")
    if value.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(value.shape)}")
    check_device(name, value, device)
    if not value.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {value.stride(0)}")


def _check_cu_seqlens(name: str, value: torch.Tensor, device: torch.device) -> None:
    _check_index_vector(name, value, device)
    if len(value) == 0:
        raise ValueError(f"{name} must have shape (batch + 1,), got (0,)")


def _check_seqused(name: str, value: torch.Tensor, batch: int, device: torch.device) -> None:
    _check_index_vector(name, value, device)
    if len(value) != batch:
        raise ValueError(f"{name} must have shape (batch,) = ({batch},), got ({len(value)},)")


def _extents(
    shape: tuple[int, ...], cu_seqlens: torch.Tensor | None, max_seqlen: int | None
) -> tuple[int, int]:
    """Return the bound on one sequence's length, and the rows of all sequences together."""
    if cu_seqlens is None:
        return shape[1], shape[0] * shape[1]
    total = shape[0]
    return (total if max_seqlen is None else int(max_seqlen)), total


def _check_packed_seqlen(side: str, cu_seqlens: torch.Tensor | None, seqlen: int) -> None:
    """Refuse packed sequences that may be longer than TMA's view of one (`tma.ragged_rows`)."""
    if cu_seqlens is not None and seqlen > MAX_PACKED_SEQLEN:
        raise NotImplementedError(
            f"packed sequences of more than {MAX_PACKED_SEQLEN} rows are not supported, got "
            f"{seqlen} rows in {side}; if every sequence is shorter, give max_seqlen_{side}"
        )


def _check_lengths(
    side: str,
    shape: tuple[int, ...],
    cu_seqlens: torch.Tensor | None,
    seqused: torch.Tensor | None,
    max_seqlen: int | None,
) -> None:
    """Check the contents of CPU length vectors of one side (q or k) against each other."""
    if cu_seqlens is None and seqused is None:
        return
    if cu_seqlens is None:
        slots = [shape[1]] * shape[0]
    else:
        slots = _slot_lengths(f"cu_seqlens_{side}", cu_seqlens.tolist(), shape[0])
    used = slots
    if seqused is not None:
        used = seqused.tolist()
        for index, (length, slot) in enumerate(zip(used, slots, strict=True)):
            if not 0 <= length <= slot:
                raise ValueError(
                    f"seqused_{side} must lie between 0 and the length of its slot, got {length} "
                    f"for sequence {index} of length {slot}"
                )
    if cu_seqlens is not None and max_seqlen is not None and max_seqlen < max(used, default=0):
        raise ValueError(
            f"max_seqlen_{side} must not be smaller than the longest sequence ({max(used)}), got "
            f"{max_seqlen}"
        )


def _slot_lengths(name: str, offsets: list[int], total: int) -> list[int]:
    if offsets[0] != 0:
        raise ValueError(f"{name} must start at 0, got {offsets[0]}")
    lengths = [end - start for start, end in zip(offsets, offsets[1:], strict=False)]
    for index, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"{name} must not decrease, got {offsets[index]} followed by {offsets[index + 1]} "
                f"at position {index + 1}"
            )
    if offsets[-1] > total:
        raise ValueError(
            f"{name} must not end beyond the packed tensor of {total} rows, got {offsets[-1]}"
        )
    return lengths


def _check_max_seqlen(name: str, value: object) -> None:
    if isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name} must be a Python int, got {brief(value)}; compute it on the host when the "
            f"batch is built, because reading it here would wait for the device"
        )
    if check_int(name, value, "an int >= 0 or None") < 0:
        raise ValueError(f"{name} must be an int >= 0 or None, got {value}")


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
    value: object, device: torch.device, score_mod: object, mask_mod: object
) -> None:
    if not isinstance(value, list | tuple):
        raise TypeError(f"aux_tensors must be a list or a tuple of tensors, got {brief(value)}")
    if score_mod is None and mask_mod is None:
        raise ValueError(
            f"aux_tensors are read by score_mod and mask_mod, which are both None, got {len(value)}"
        )
    for position, tensor in enumerate(value):
        name = f"aux_tensors[{position}]"
        check_tensor(name, tensor)
        check_aux_tensor(name, tensor, device)


def _check_block_lists(value: object, mask_mod: object) -> None:
    """What can be said without the extents of the problem; `check_block_lists` says the rest."""
    from_block_mask(value)
    if mask_mod is None and not isinstance(value, BlockSparseTensorsTorch | ComputedLists):
        raise ValueError(
            "block_sparse_tensors or block_sparse_tensors_torch is a torch BlockMask, whose own "
            "mask_mod no kernel can call: pass the same mask as a CuTe callable, mask_mod, too, or "
            "its partial blocks would be visible as a whole; got mask_mod None"
        )


def _check_columns(
    value: object,
    causal: bool,
    keys: tuple[int, int],
    heads_kv: int,
    heads_q: int,
    device: torch.device,
) -> None:
    """keys: batch entries and keys that the tensor must have."""
    name = "startend_row_indices"
    if not isinstance(value, ColumnMask):
        # refuses what is no tensor
        value = ColumnMask(cast(Any, value), causal)
    tensor = value.startend_row_indices
    check_tensor(name, tensor)
    shape = tuple(tensor.shape)
    batch, num_keys = keys
    if shape[0] not in (1, batch) or shape[2] != num_keys:
        raise ValueError(
            f"{name} must have {batch if batch == 1 else f'1 or {batch}'} batch entries and "
            f"{num_keys} keys, got shape {shape}"
        )
    if shape[1] not in (1, heads_kv, heads_q):
        raise ValueError(
            f"{name} must have 1, heads_kv ({heads_kv}) or heads_q ({heads_q}) heads, got shape "
            f"{shape}"
        )
    check_device(name, tensor, device)


def _check_output(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], shape_name: str, q: torch.Tensor
) -> None:
    """A tensor like q, k, v or out that the call writes."""
    check_shaped(name, tensor, shape, shape_name, q)
    check_memory_layout(name, tensor, aligned=q.device.type == "cuda")
    check_own_memory(name, tensor)


def _check_gradients_apart(gradients: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse gradients that surely overlap; slices of one tensor lie between each other."""
    given = [(name, x) for name, x in gradients.items() if x is not None and x.numel()]
    for (name, tensor), (later, other) in combinations(given, 2):
        is_same = tensor.data_ptr() == other.data_ptr()
        if is_same or (tensor.is_contiguous() and other.is_contiguous()):
            check_apart(later, other, {name: tensor})


def _check_lse(
    name: str, value: torch.Tensor, shape: tuple[int, ...], device: torch.device
) -> None:
    check_fp32(name, value, shape, device)
    if not value.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {value.stride()}")


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
    """aux_tensors: checked."""
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
