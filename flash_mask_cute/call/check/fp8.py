"""Checks of keys and values in float8_e4m3fn beside queries in 16 bits, and of their scales.

Errors are those of `validate.py`. The checks look at metadata only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import AttentionCall, Direction
from flash_mask_cute.limits import ADDRESS_MASK
from flash_mask_cute.runtime.checks import brief, check_device, check_tensor
from flash_mask_cute.runtime.dtypes import FP8

# of queries beside them
_DTYPES = (torch.bfloat16, torch.float16)
_OTHER_BYTES = (torch.uint8, torch.int8)
_STEP = ADDRESS_MASK + 1  # bytes
NO_GRADIENTS = "there are no gradients over keys and values in float8_e4m3fn"


def check_fp8(call: AttentionCall) -> bool:
    """Whether k and v of a call are in fp8. If they are, or look so, check their dtypes and the
    arguments beside them."""
    x, of, scales = call.tensors, call.tensors.lengths, call.tensors.optional
    given = {"k": x.k, "v": x.v}
    for name, tensor in given.items():
        refuse_other_format(name, tensor, x.q.dtype)
    if x.k.dtype != FP8 and x.v.dtype != FP8:
        for name, descale in (("k", scales.k_descale), ("v", scales.v_descale)):
            refuse_scale(descale, name, given[name])
        return False
    if call.direction is Direction.BACKWARD:
        raise NotImplementedError(f"{NO_GRADIENTS}, got k in {x.k.dtype} and v in {x.v.dtype}")
    if x.k.dtype != x.v.dtype:
        raise TypeError(
            f"k and v must both be in float8_e4m3fn, or both in the dtype of q ({x.q.dtype}), got "
            f"{x.k.dtype} and {x.v.dtype}"
        )
    if x.q.dtype not in _DTYPES:
        raise TypeError(
            f"q must be in bfloat16 or float16 beside k and v in float8_e4m3fn, got {x.q.dtype}"
        )
    if of.cu_seqlens_k is not None:
        raise NotImplementedError(
            "cu_seqlens_k is not supported with k and v in float8_e4m3fn, which lie in a cache, "
            f"with seqused_k or page_table, got {brief(of.cu_seqlens_k)}"
        )
    if of.seqused_k is None and of.page_table is None:
        raise NotImplementedError(
            "k and v in float8_e4m3fn need seqused_k or page_table, as a cache has, got None and "
            "None"
        )
    return True


def refuse_scale(descale: object, of: str, tensor: Tensor) -> None:
    """Refuse a scale of a tensor in another format. of: the tensor's name, k or v first."""
    if descale is not None and tensor.dtype != FP8:
        raise ValueError(
            f"{of[0]}_descale is a scale of {of} in float8_e4m3fn, and must be None beside {of} in "
            f"{tensor.dtype}, got {brief(descale)}"
        )


def refuse_other_format(name: str, tensor: Tensor, dtype_of_q: torch.dtype) -> None:
    """Refuse keys or values in what somebody may take for float8_e4m3fn."""
    dtype = tensor.dtype
    is_other_fp8 = dtype.itemsize == 1 and dtype.is_floating_point and dtype != FP8
    if dtype == dtype_of_q or not (is_other_fp8 or dtype in _OTHER_BYTES):
        return
    advice = ", which is another format"
    if dtype in _OTHER_BYTES:
        advice = ": if these are its codes, pass tensor.view(torch.float8_e4m3fn)"
    raise TypeError(
        f"{name} must be in float8_e4m3fn, or have the dtype of q ({dtype_of_q}), got "
        f"{dtype}{advice}"
    )


def check_rows(name: str, tensor: Tensor) -> None:
    """Check that each row of a tensor in fp8 begins at a multiple of 16 bytes."""
    *extents, dim = tensor.shape
    *strides, last = tensor.stride()
    rule = f"{name} in float8_e4m3fn must have"
    if dim % _STEP:
        raise ValueError(
            f"{rule} a last dimension that is a multiple of {_STEP}, got shape "
            f"{tuple(tensor.shape)}"
        )
    are_steps = all(
        n == 1 or (s > 0 and s % _STEP == 0) for n, s in zip(extents, strides, strict=True)
    )
    if tensor.numel() and (last != 1 or not are_steps):
        raise ValueError(
            f"{rule} contiguous rows that begin at multiples of {_STEP} bytes, got strides "
            f"{tensor.stride()} for shape {tuple(tensor.shape)}"
        )
    past = tensor.data_ptr() % _STEP
    if past:
        raise ValueError(
            f"{rule} an address that is a multiple of {_STEP} bytes, got one that is {past} bytes "
            "past it"
        )


def check_places(call: AttentionCall, batch: int) -> None:
    """Check the rows of keys and values in fp8, whose shapes are right, and their scales."""
    x, of = call.tensors, call.tensors.optional
    if x.have_shared_keys:
        raise NotImplementedError(
            f"k in {x.k.dtype} of one batch entry for {batch} sequences is not supported, got "
            f"shape {tuple(x.k.shape)}"
        )
    for name, descale, cache in (("k", of.k_descale, x.k), ("v", of.v_descale, x.v)):
        check_rows(name, cache)
        if descale is not None:
            check_descale(descale, name, cache, batch)


def ranks(k: Tensor | None, v: Tensor | None) -> tuple[int | None, int | None]:
    """The dimensions of both scales, on which code depends."""
    return None if k is None else k.dim(), None if v is None else v.dim()


def check_descale(descale: object, of: str, cache: Tensor, batch: int) -> None:
    """Check a scale of a cache of 4 dimensions. of: the cache's name, k or v first."""
    name = f"{of[0]}_descale"
    check_tensor(name, descale)
    assert isinstance(descale, Tensor)
    if descale.dtype != torch.float32:
        raise TypeError(f"{name} must have dtype float32, got {descale.dtype}")
    by_head, by_token = (batch, cache.shape[2]), tuple(cache.shape[:3])
    if tuple(descale.shape) not in (by_head, by_token):
        raise ValueError(
            f"{name} must have shape (batch, heads_kv) = {by_head}, or that of {of} without its "
            f"last dimension, {by_token}, got {tuple(descale.shape)}"
        )
    check_device(name, descale, cache.device)
