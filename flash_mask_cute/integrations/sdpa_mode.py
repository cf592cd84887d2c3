"""`F.scaled_dot_product_attention` by a mode of torch: any device, masks, nothing patched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ContextDecorator
from inspect import iscoroutinefunction, isgeneratorfunction
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from flash_mask_cute.functional import flash_attn_func
from flash_mask_cute.integrations.ran import REFUSALS, left_to_torch, ran_here
from flash_mask_cute.mods.signature import in_float64
from flash_mask_cute.runtime.constant_result import assume_constant_result
from flash_mask_cute.runtime.plain_tensors import are_plain

_NAME = "scaled_dot_product_attention"
_HEAD_DIM_STEP = 8
_AXES = "bhij"
"""Of a mask: batch entry, query head, query, key."""
_Function = TypeVar("_Function", bound=Callable[..., Any])
_BACKWARDS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class sdpa(TorchFunctionMode, ContextDecorator):
    """Within the context, `F.scaled_dot_product_attention` runs on the kernels of this package.

    It has torch's arguments, results, broadcasting and gradients: query (..., heads, L, E), key
    (..., heads_kv, S, E), value (..., heads_kv, S, Ev), attn_mask bool (True: visible) or floating
    (added to scores, with a gradient if it requires one), is_causal aligned top-left, `CausalBias`
    of either side, scale, enable_gqa. The output is stored as (batch, seqlen, heads, head_dim),
    whatever the strides of query.

    A call that this package does not take runs on torch, and a warning gives the reason once:
    dropout, fp32 on a GPU, nested tensors, transforms of torch.func, and the like. So does each
    call where torch's flash attention is disabled, as by `sdpa_kernel(SDPBackend.MATH)`. Second
    derivatives are refused in the backward.

    A backward that is called inside recomputes checkpoints here, too. `sdpa()` decorates functions,
    which then run inside wherever they are called: in another thread, or by a checkpoint that an
    outside backward recomputes.

    torch gives a mode the calls of Python code. `nn.MultiheadAttention` computes attention below
    them and stays on torch, with a warning.

    Example:
        >>> import torch
        >>> import torch.nn.functional as F
        >>> from flash_mask_cute.integrations.torch import sdpa
        >>> q, k, v = torch.randn(3, 2, 4, 16, 8)
        >>> with sdpa():
        ...     out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> out.shape
        torch.Size([2, 4, 16, 8])
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _ours_or_torchs(args, keywords)
        if func is F.multi_head_attention_forward and not torch.compiler.is_compiling():
            reason = "nn.MultiheadAttention calls attention where no mode of torch sees it"
            left_to_torch("multi_head_attention_forward", reason)
        if func in _BACKWARDS and not torch.compiler.is_compiling():
            return _backward(self, func, args, keywords)
        return func(*args, **keywords)

    def __call__(self, func: _Function) -> _Function:
        if isgeneratorfunction(func) or iscoroutinefunction(func):
            raise TypeError(
                f"{func.__qualname__} runs after its call returns: write `with sdpa():` in it"
            )
        return super().__call__(func)


def _backward(
    mode: sdpa, func: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]
) -> Any:
    """A call of `_BACKWARDS` with the mode on, so that a checkpoint computes again what it did.

    A mode is off while it handles a call. torch asks it again about tensors that are passed on, and
    not about gradient edges.
    """
    outputs = _as_list(args[0])
    inputs = _as_list(args[1] if len(args) > 1 else given.get("inputs"))
    if not all(map(_has_edge, (*outputs, *inputs))):
        # torch says what is wrong, or a subclass has a backward of its own
        return func(*args, **given)
    options = {name: x for name, x in given.items() if name != "inputs"}
    edges, of_inputs = ([_edge(x) for x in each] for each in (outputs, inputs))
    if func is not torch.autograd.grad:
        for x in inputs:
            if isinstance(x, Tensor) and not x.is_leaf:
                x.retain_grad()
        if "gradient" in options:
            options["grad_tensors"] = options.pop("gradient")
        with mode:
            return torch.autograd.backward(edges, inputs=of_inputs or None, **options)
    wants_zeros = options.pop("materialize_grads", False)
    with mode:
        grads = torch.autograd.grad(edges, of_inputs, **options)
    if wants_zeros:
        recorded = bool(options.get("create_graph"))
        pairs = zip(grads, inputs, strict=True)
        grads = tuple(
            torch.zeros_like(x, requires_grad=recorded) if grad is None else grad
            for grad, x in pairs
        )
    return grads


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return [given] if isinstance(given, Tensor | GradientEdge) else list(given)


def _has_edge(given: Any) -> bool:
    return isinstance(given, GradientEdge) or (are_plain(given) and given.requires_grad)


def _edge(given: Tensor | GradientEdge) -> GradientEdge:
    return given if isinstance(given, GradientEdge) else get_gradient_edge(given)


class _Call(NamedTuple):
    """The arguments of `F.scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def _ours_or_torchs(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    try:
        call = _Call(*args, **keywords)
        _check(call)
        result = _attend(call)
    except REFUSALS as error:
        reason = str(error)
    except Exception:
        # so a checkpoint ends what it computes again, when this call saves the last that is missing
        ran_here(_NAME)
        raise
    else:
        if not torch.compiler.is_compiling():
            ran_here(_NAME)
        return result
    if not torch.compiler.is_compiling():
        left_to_torch(_NAME, reason)
    return F.scaled_dot_product_attention(*args, **keywords)


def _check(call: _Call) -> None:
    """Refuse what is torch's to compute, or to complain of."""
    tensors = call.query, call.key, call.value
    if not all(isinstance(x, Tensor) for x in tensors):
        raise TypeError("query, key and value must be tensors")
    if any(x.is_nested for x in tensors):
        raise NotImplementedError("nested tensors are not supported")
    if min(x.dim() for x in tensors) < 2:
        raise ValueError("query, key and value must have 2 dimensions or more")
    if call.dropout_p != 0:
        raise NotImplementedError(f"dropout_p={call.dropout_p} is not supported: only 0")
    if call.attn_mask is not None and call.is_causal:
        raise ValueError("attn_mask is given together with is_causal=True")
    if not _flash_is_enabled():
        raise NotImplementedError("torch's flash attention is disabled, as by sdpa_kernel")


@assume_constant_result
def _flash_is_enabled() -> bool:
    return torch.backends.cuda.flash_sdp_enabled()


def _attend(call: _Call) -> Tensor:
    tensors = call.query, call.key, call.value
    query, key, value = (x.unsqueeze(0) if x.dim() == 2 else x for x in tensors)
    heads, heads_kv = query.shape[-3], key.shape[-3]
    if heads_kv != value.shape[-3]:
        raise ValueError(f"key has {heads_kv} heads, and value {value.shape[-3]}")
    if heads != heads_kv and not call.enable_gqa:
        if heads_kv != 1 and heads != 1:
            raise ValueError(
                f"query has {heads} heads and key {heads_kv}, which needs enable_gqa=True"
            )
        # one head of key and value broadcasts as a group does
        heads = max(heads, heads_kv)
        query = query.expand(*query.shape[:-3], heads, *query.shape[-2:])
    batch = _common_shape("batches", *(x.shape[:-3] for x in (query, key, value)))
    q, k, v = (_as_bshd(x, batch) for x in (query, key, value))
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    band = _band(call, seqlen_q, seqlen_k)
    mods: dict[str, Any] = {}
    if call.attn_mask is not None and band is None:
        mods = _mods_of(call.attn_mask, (*batch, heads, seqlen_q, seqlen_k), query)
    scale, head_dim_v = call.scale, v.shape[-1]
    if scale is None and q.shape[-1] % _HEAD_DIM_STEP:
        scale = q.shape[-1] ** -0.5
    q, k, v = (_padded(x) for x in (q, k, v))
    out = flash_attn_func(q, k, v, softmax_scale=scale, **(band or {}), **mods)
    out = out[..., :head_dim_v].transpose(1, 2)
    if len(batch) != 1:
        out = out.reshape(*batch, *out.shape[1:])
    # with one tensor of three dimensions there are heads
    return out if max(x.dim() for x in tensors) > 2 else out[0]


def _band(call: _Call, seqlen_q: int, seqlen_k: int) -> dict[str, Any] | None:
    """causal and q_start, else None. Only a CausalBias puts the last query at the last key."""
    mask = call.attn_mask
    if isinstance(mask, CausalBias):
        if (mask.seq_len_q, mask.seq_len_kv) != (seqlen_q, seqlen_k):
            raise ValueError(
                f"attn_mask is a CausalBias of lengths {mask.seq_len_q} and {mask.seq_len_kv}, "
                f"got {seqlen_q} queries and {seqlen_k} keys"
            )
        is_at_end = mask.variant == CausalVariant.LOWER_RIGHT
    elif call.is_causal:
        is_at_end = False
    else:
        return None
    # both are the same where lengths are equal, and the end is the default of our functions
    return {"causal": True, "q_start": None if is_at_end or seqlen_q == seqlen_k else 0}


def _common_shape(what: str, *shapes: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        given = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{what} do not broadcast, got {given}") from error


def _as_bshd(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """A tensor (..., heads, seqlen, head_dim) as (batch, seqlen, heads, head_dim)."""
    if x.dim() != 4 or x.shape[:-3] != batch:
        x = x.expand(*batch, *x.shape[-3:]).reshape(prod(batch), *x.shape[-3:])
    return x.transpose(1, 2)


def _padded(x: Tensor) -> Tensor:
    """With zeros up to a head dimension that kernels take."""
    missing = -x.shape[-1] % _HEAD_DIM_STEP
    return F.pad(x, (0, missing)) if missing else x


def _mods_of(mask: Tensor, shape: tuple[int, ...], query: Tensor) -> dict[str, Any]:
    """An attn_mask that broadcasts to shape (..., heads, L, S) as a mod of attention."""
    if not isinstance(mask, Tensor):
        raise TypeError("attn_mask must be a tensor")
    is_cast = mask.is_floating_point() and torch.is_autocast_enabled(query.device.type)
    if mask.dtype not in (torch.bool, torch.float32, query.dtype) and not is_cast:
        raise TypeError(f"attn_mask must be bool or of query's dtype, got {mask.dtype}")
    if mask.device != query.device:
        raise ValueError(f"attn_mask must be on {query.device}, got {mask.device}")
    if _common_shape("attn_mask and scores", mask.shape, shape) != shape:
        raise ValueError(f"attn_mask must broadcast to {shape}, got {tuple(mask.shape)}")
    if 0 in shape:
        # it hides nothing and adds to nothing, and kernels read no empty tensor
        return {}
    *batch, heads, rows, keys = (1,) * (len(shape) - mask.dim()) + tuple(mask.shape)
    if query.dtype == torch.float64 and mask.dtype != torch.bool:
        table = mask.expand(shape).reshape(-1, *shape[-3:])
        return {"score_mod": _added_in_float64, "aux_tensors": [table]}
    table = mask.reshape(*batch, heads, rows, keys)
    if any(size != 1 for size in batch):
        table = table.expand(*shape[:-3], heads, rows, keys)
    table = table.reshape(-1, heads, rows, keys)
    axes = "".join(x for x, size in zip(_AXES, table.shape, strict=True) if size != 1) or "j"
    # a mod that does not use its head is evaluated once for all heads
    table = table.reshape([size for size in table.shape if size != 1] or [1])
    if axes == "j":
        table = table.expand(shape[-1])
    if mask.dtype == torch.bool:
        return {"mask_mod": _visible(table, axes)}
    return {"score_mod": _added(table, axes)}


def _visible(table: Tensor, axes: str) -> Callable[..., Tensor]:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table[_places(axes, b, h, q_idx, kv_idx)]

    return mask_mod


def _added(table: Tensor, axes: str) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[_places(axes, b, h, q_idx, kv_idx)]

    return score_mod


@in_float64
def _added_in_float64(score: Any, b: Any, h: Any, q: Any, k: Any, aux_tensors: Any) -> Any:
    """A CuTe mod, because lowered ones round scores to Float32."""
    return score[0] + aux_tensors[0][b[0], h[0], q[0], k[0]]


def _places(axes: str, *indices: Tensor) -> tuple[Tensor, ...]:
    return tuple(x for name, x in zip(_AXES, indices, strict=True) if name in axes)
