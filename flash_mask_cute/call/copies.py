"""Conversions of the caller's tensors before kernels see them: usually none.

Kernels read q, k, v, out and dout by TMA. It needs contiguous rows, other strides that are positive
multiples of 16 bytes, and data aligned to 16 bytes. Each launch copies tensors that do not comply.
Kernels multiply scores by a positive scale: if softmax_scale is not positive, q is copied and takes
the sign. A sink is read as a contiguous vector of 16 or 32 bits.

The tensors to copy are determined when a launch is made, by metadata and by the addresses of data
modulo 16 bytes; both are in its key. Autograd keeps the caller's tensors, and the backward copies
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import AttentionCall, Direction, Tensors
from flash_mask_cute.call.execution_plan import Conversion, ExecutionPlan
from flash_mask_cute.call.problem import sink_dtype
from flash_mask_cute.limits import ADDRESS_MASK, STRIDE_STEP

# Below this a scale counts as 0 in kernels: their fp32 reciprocal of it would overflow. Scores are
# then equal anyway, unless products of q and k come near the largest floats.
LEAST_SCALE = 2.0**-100
_SIGNS = {-1.0: "times -1 for a negative softmax_scale", 0.0: "times 0 for a softmax_scale of 0"}


class Copy(NamedTuple):
    """A contiguous copy of a tensor, times a factor, in its dtype or another. why: in words."""

    why: str
    factor: float = 1.0
    dtype: torch.dtype | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        # launches record no graph
        tensor = tensor.detach()
        new = torch.empty_like(tensor, dtype=self.dtype, memory_format=torch.contiguous_format)
        if self.factor == 1.0:
            return new.copy_(tensor)
        return torch.mul(tensor, self.factor, out=new)


class Restrided(NamedTuple):
    """A view with these strides."""

    strides: tuple[int, ...]

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(tensor.shape, self.strides)


class FirstEntry(NamedTuple):
    """The first batch entry of a tensor, with another conversion."""

    conversion: Copy | Restrided | None

    def __call__(self, tensor: Tensor) -> Tensor:
        entry = tensor[:1]
        return entry if self.conversion is None else self.conversion(entry)


class AsBytes(NamedTuple):
    """A view of the codes of fp8 as bytes. strides: of the view, if they differ."""

    strides: tuple[int, ...] | None

    def __call__(self, tensor: Tensor) -> Tensor:
        codes = tensor.view(torch.uint8)
        return codes if self.strides is None else codes.as_strided(codes.shape, self.strides)


def split_scale(softmax_scale: float) -> tuple[float, float]:
    """(factor, scale): scores are those of q * factor, times scale > 0. factor: 1, -1 or 0."""
    if abs(softmax_scale) < LEAST_SCALE:
        return 0.0, 1.0
    return (1.0, softmax_scale) if softmax_scale > 0 else (-1.0, -softmax_scale)


def has_shared_kv(call: AttentionCall) -> bool:
    """Whether a kernel reads the keys of one batch entry for all sequences of a checked call: those
    of batch 1 beside packed queries and, in a forward, those with a stride of 0 over the batch. (A
    backward of the latter writes gradients of each batch entry, and copies keys and values.)"""
    x, of = call.tensors, call.tensors.lengths
    if x.have_shared_keys:
        return True
    is_forward = call.direction is not Direction.BACKWARD and x.k.dtype == x.q.dtype
    if not is_forward or not (of.cu_seqlens_k is of.page_table is None):
        return False
    return x.k.shape[0] > 1 and x.k.stride(0) == x.v.stride(0) == 0


def input_conversion(tensor: Tensor, factor: float = 1.0) -> Copy | Restrided | None:
    """The conversion of a 16-bit tensor for TMA, times a factor of `split_scale`."""
    why = ", ".join(filter(None, (_unreadable(tensor), _SIGNS.get(factor))))
    return Copy(why, factor) if why else output_conversion(tensor)


def byte_conversion(tensor: Tensor) -> Conversion:
    """The conversion of a checked tensor in fp8."""
    return AsBytes(tma_strides(tensor, step=ADDRESS_MASK + 1))


def _unreadable(tensor: Tensor) -> str | None:
    """The reason why TMA cannot read a tensor, ignoring strides of extents of 1; None if it can."""
    *strides, last = tensor.stride()
    if last != 1:
        return f"its last stride is {last}"
    for size, stride in zip(tensor.shape, strides, strict=False):
        if size != 1 and (stride <= 0 or stride % STRIDE_STEP):
            return f"it has a stride of {stride} elements"
    past = tensor.data_ptr() & ADDRESS_MASK
    return f"it starts {past} bytes past a multiple of {ADDRESS_MASK + 1}" if past else None


def common_conversion(tensor: Tensor) -> Conversion | None:
    """The conversion of keys or values that all sequences have in common, to their only entry."""
    if tensor.shape[0] == 1:
        return input_conversion(tensor)
    return FirstEntry(input_conversion(tensor[:1]))


def output_conversion(tensor: Tensor | None) -> Restrided | None:
    """The conversion of a tensor that TMA can read or write, except for strides of extents of 1."""
    strides = None if tensor is None else tma_strides(tensor)
    return None if strides is None else Restrided(strides)


def tma_strides(tensor: Tensor, step: int = STRIDE_STEP) -> tuple[int, ...] | None:
    """Strides that TMA accepts, if an extent of 1 has one that it refuses; None: unchanged. PyTorch
    does not define the stride of such an extent. step: elements in 16 bytes."""
    strides = tuple(
        stride if size != 1 or (stride and stride % step == 0) else tensor.shape[-1]
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )
    return None if strides == tensor.stride()[:-1] else (*strides, 1)


def sink_conversion(sink: Tensor | None) -> Conversion | None:
    """The conversion of a learnable_sink, which kernels read with the dtype of `sink_dtype`."""
    if sink is None:
        return None
    reasons, dtype = [], sink_dtype(sink)
    if dtype != sink.dtype:
        reasons.append("from float64 to float32")
    if not sink.is_contiguous():
        reasons.append(f"its stride is {sink.stride(0)}")
    return Copy(", ".join(reasons), dtype=dtype) if reasons else None


def with_conversions(plan: ExecutionPlan, tensors: Tensors) -> ExecutionPlan:
    """The plan with the conversions of the caller's tensors before the kernel sees them."""
    x, (factor, _) = tensors, split_scale(plan.softmax_scale)
    of_keys: Callable[[Tensor], Conversion | None] = input_conversion
    if plan.problem.in_fp8:
        of_keys = byte_conversion
    elif plan.problem.shared_kv:
        of_keys = common_conversion
    conversions = {
        "q": input_conversion(x.q, factor),
        "k": of_keys(x.k),
        "v": of_keys(x.v),
        **plan.conversions,
    }
    if plan.direction is Direction.FORWARD:
        conversions["out"] = output_conversion(x.out)
    else:
        of = x.gradients
        assert x.out is not None and of.dout is not None
        conversions |= {"out": input_conversion(x.out), "dout": input_conversion(of.dout)}
        outputs = ("dq", of.dq), ("dk", of.dk), ("dv", of.dv)
        conversions |= {name: output_conversion(y) for name, y in outputs}
    is_out_like_q = x.q.is_contiguous() and x.q.shape == plan.out_shape and tma_strides(x.q) is None
    return replace(plan, conversions=conversions, is_out_like_q=is_out_like_q)


def any_or_none(*conversions: Conversion | None) -> tuple[Conversion | None, ...] | None:
    """The conversions, or None if no tensor needs one."""
    return conversions if any(x is not None for x in conversions) else None


def convert(
    tensors: tuple[Any, ...], conversions: tuple[Conversion | None, ...]
) -> tuple[Any, ...]:
    return tuple(x if to is None else to(x) for x, to in zip(tensors, conversions, strict=True))


def misplaced(*tensors: Tensor) -> tuple[bool, ...]:
    """For each tensor, whether its data are not aligned to 16 bytes."""
    return tuple(x.data_ptr() & ADDRESS_MASK != 0 for x in tensors)


def describe_copies(**conversions: Conversion | None) -> str:
    """The copied tensors by name, with reasons; empty if none is."""
    found = {
        name: to.conversion if isinstance(to, FirstEntry) else to
        for name, to in conversions.items()
    }
    copies = {name: to for name, to in found.items() if isinstance(to, Copy)}
    return "; ".join(f"{name} ({copy.why})" for name, copy in copies.items())


def new_gradient(like: Tensor) -> Tensor:
    # `new_empty` takes twice as long
    return torch.empty_like(like, memory_format=torch.contiguous_format)
