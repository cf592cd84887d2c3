"""Tensors that callables of the user read: what is allowed, in kernels and on the CPU path."""

from __future__ import annotations

import torch

from flash_mask_cute.plain_tensors import check_plain

AUX_DTYPES = (torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16)
MAX_AUX_RANK = 4


def check_aux_tensor(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse what a callable of attention cannot read.

    Raises:
        TypeError: the dtype, or a tensor subclass.
        NotImplementedError: a tensor of a transform, such as vmap.
        ValueError: no dimension, or more than four; a device other than q's; negated lazily.
    """
    check_plain(name, tensor)
    if tensor.dtype not in AUX_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in AUX_DTYPES)
        raise TypeError(f"{name} must have dtype {allowed}, got {tensor.dtype}")
    if not 1 <= tensor.dim() <= MAX_AUX_RANK:
        shape = tuple(tensor.shape)
        hint = "" if shape else "; pass a number as x.view(1), and read it by [0]"
        raise ValueError(
            f"{name} must have 1 to {MAX_AUX_RANK} dimensions, got shape {shape}{hint}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} must be on the device of q ({device}), got {tensor.device}")
    if tensor.is_neg():
        raise ValueError(
            f"{name} must be in memory as it is, got the negative of what is there (is_neg(), as "
            "x.conj().imag is); pass x.resolve_neg()"
        )
