"""Argument checks independent of attention. Each error names the argument and quotes the value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, NoReturn

import torch

from flash_mask_cute.limits import STRIDE_STEP
from flash_mask_cute.runtime.overlap import overlaps_itself, share_elements, span_of
from flash_mask_cute.runtime.plain_tensors import are_plain, check_plain

_BASE_ALIGNMENT = 16  # bytes
# kernels multiply it by log2(e) in float32
_LARGEST_SCALE = 1e38
# for isinstance: in a trace, a length may be a symbol; no union, which Dynamo of torch 2.9 lacks
INTS: tuple[Any, ...] = (Integral, torch.SymInt)


def refuse_jit_trace() -> None:
    """Raise NotImplementedError within torch.jit.trace, whose shapes are tensors."""
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError(
            "torch.jit.trace of attention is not supported: use torch.export.export, or "
            "torch.compile"
        )


def check_memory_layout(name: str, tensor: torch.Tensor, *, aligned: bool) -> None:
    """Check that rows are contiguous and, when `aligned`, that they start on 16-byte boundaries.

    Strides of extents of size 1, and of tensors without elements, do not matter. Raises ValueError:
    the last stride is not 1; or, when `aligned`, another stride is not a multiple of 8 elements or
    the base address is not a multiple of 16 bytes."""
    strides = tensor.stride()
    if strides[-1] != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got strides {strides} for shape "
            f"{tuple(tensor.shape)}"
        )
    if not aligned:
        return
    for position, stride in enumerate(strides[:-1]):
        if stride % STRIDE_STEP and tensor.shape[position] > 1 and tensor.numel():
            raise ValueError(
                f"{name} must have strides that are multiples of {STRIDE_STEP} elements (apart "
                f"from the last), got strides {strides} for shape {tuple(tensor.shape)}"
            )
    address = tensor.data_ptr()
    if address % _BASE_ALIGNMENT:
        raise ValueError(
            f"{name} must start at a multiple of {_BASE_ALIGNMENT} bytes, got an address that is "
            f"{address % _BASE_ALIGNMENT} bytes past one (storage offset "
            f"{tensor.storage_offset()} elements)"
        )


def brief(value: object) -> str:
    """Describe a value in one short phrase, without reading a tensor's elements."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    if value is None or isinstance(value, bool | int | float | str):
        return f"{value!r} ({type(value).__name__})"
    kind = type(value)
    if kind.__name__ in ("bool", "bool_") and kind.__module__ == "numpy":
        # bool to numpy 2, which would look like Python's
        return f"numpy.bool_({bool(value)})"
    return f"a {kind.__name__}"


def check_tensor(name: str, value: object) -> None:
    """Check that a value is a dense tensor in memory that a kernel can read."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {brief(value)}")
    check_plain(name, value)
    if value.is_nested or value.layout != torch.strided:
        _refuse_layout(name, value)


def check_dense(name: str, value: object) -> None:
    """As `check_tensor`, but it may be of a subclass, which operators take apart."""
    is_plain = type(value) is torch.Tensor or are_plain(value)
    if is_plain or not isinstance(value, torch.Tensor):
        check_tensor(name, value)
    elif value.is_nested or value.layout != torch.strided:
        _refuse_layout(name, value)


def _refuse_layout(name: str, value: torch.Tensor) -> NoReturn:
    if value.is_nested:
        raise TypeError(f"{name} must be one tensor, got a nested one; pack it, with cu_seqlens_*")
    raise TypeError(f"{name} must be a dense (strided) tensor, got layout {value.layout}")


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} must be on the device of q ({device}), got {tensor.device}")


def dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_list(name: str, value: object) -> None:
    # no union, which Dynamo of torch 2.9 lacks
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be a list or a tuple of tensors, got {brief(value)}")


def check_bool(name: str, value: object, expected: str = "True or False") -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be {expected}, got {brief(value)}")


def check_int(name: str, value: object, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be {expected}, got {brief(value)}")
    return int(value)


def check_real(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a real number, got {brief(value)}")


def check_finite(name: str, value: Any) -> None:
    check_real(name, value)
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


def check_scale(name: str, scale: Any) -> None:
    """Refuse a scale of scores that is no number, or too large for float32."""
    check_real(name, scale)
    if not abs(scale) <= _LARGEST_SCALE:
        raise ValueError(
            f"{name} must be finite, and at most {_LARGEST_SCALE} in magnitude, got {scale}"
        )


def number_of(name: str, value: Any) -> Any:
    """The given value, or the number in a 0-dim CPU tensor, which is read now.

    Other checks decide whether the call can use it. Raises ValueError: a tensor has dimensions, or
    is on a device that reading it would wait for."""
    check_number(name, value)
    return value.item() if isinstance(value, torch.Tensor) else value


def check_number(name: str, value: Any) -> None:
    """Refuse tensors that `number_of` does not read."""
    if isinstance(value, torch.Tensor) and (value.dim() != 0 or value.device.type != "cpu"):
        raise ValueError(
            f"{name} must be a number or a 0-dim CPU tensor, got {brief(value)}; reading one of "
            "another device would wait for it: multiply q by the tensor instead"
        )


def check_own_memory(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor to be written if two of its elements lie in the same memory."""
    found = overlaps_itself(tensor)
    if found is False:
        return
    where = f"got strides {tensor.stride()} for shape {tuple(tensor.shape)}"
    if found is None:
        where = f"and whether it does is too hard to decide, {where}"
    raise ValueError(f"{name} must not overlap itself (an expanded tensor does), {where}")


def check_shaped(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    shape_name: str,
    q: torch.Tensor,
    *,
    may_be_wide: bool = False,
) -> None:
    """may_be_wide: float32 in place of the 16 bits of q is allowed."""
    check_tensor(name, tensor)
    is_wide = may_be_wide and q.dtype.itemsize == 2 and tensor.dtype == torch.float32
    if tensor.dtype != q.dtype and not is_wide:
        allowed = " or float32" if may_be_wide and q.dtype.itemsize == 2 else ""
        raise TypeError(f"{name} must have the dtype of q ({q.dtype}){allowed}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have {shape_name}, {shape}, got {tuple(tensor.shape)}")
    check_device(name, tensor, q.device)


def check_outputs_apart(
    outputs: Mapping[str, torch.Tensor | None], inputs: Mapping[str, torch.Tensor | None]
) -> None:
    """Check that no element of an output is in memory of an input, or of an output before it:
    writing it would change the result. Slices of one buffer may alternate. None: not given."""
    others = {x: (given, *span_of(given)) for x, given in inputs.items() if given is not None}
    for name, tensor in outputs.items():
        if tensor is None:
            continue
        start, end = span_of(tensor)
        for other, (given, first, last) in others.items():
            if start < last and first < end:
                _check_elements_apart(name, tensor, other, given)
        others[name] = tensor, start, end


def _check_elements_apart(name: str, tensor: torch.Tensor, other: str, given: torch.Tensor) -> None:
    found = share_elements(tensor, given)
    if found is False:
        return
    (start, end), (first, last) = span_of(tensor), span_of(given)
    where = f"got bytes {start} to {end} and {first} to {last}"
    if found is None:
        where = (
            f"and whether it does is too hard to decide for strides {tensor.stride()} and "
            f"{given.stride()}, {where}"
        )
    raise ValueError(f"{name} must not share memory with {other}, {where}")


def check_fp32(
    name: str, value: Any, shape: tuple[int, ...], device: torch.device, or_wide: bool = False
) -> None:
    """or_wide: float64 is good, too."""
    check_tensor(name, value)
    if value.dtype != torch.float32 and not (or_wide and value.dtype == torch.float64):
        raise TypeError(f"{name} must have dtype float32, got {value.dtype}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(value.shape)}")
    check_device(name, value, device)


def check_like(name: str, gradient: torch.Tensor, of: str, tensor: torch.Tensor) -> None:
    """Refuse a gradient that differs in form from `tensor`, whose name is `of`."""
    if gradient.dtype != tensor.dtype:
        raise TypeError(
            f"{name} must have the dtype of {of} ({tensor.dtype}), got {gradient.dtype}"
        )
    if gradient.shape != tensor.shape:
        raise ValueError(
            f"{name} must have the shape of {of}, {tuple(tensor.shape)}, got "
            f"{tuple(gradient.shape)}"
        )
    check_device(name, gradient, tensor.device)
    check_own_memory(name, gradient)
