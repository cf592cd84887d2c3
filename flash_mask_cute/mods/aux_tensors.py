"""Tensors that user callables read: what is allowed, in kernels and on the CPU path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flash_mask_cute.runtime.dtypes import CUTLASS_NAMES, dtype_name
from flash_mask_cute.runtime.plain_tensors import check_plain

AUX_DTYPES = tuple(getattr(torch, name) for name in CUTLASS_NAMES if name != "float64")
MAX_AUX_RANK = 4


def is_read_on(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether callables of attention can read aux tensors of a dtype. Kernels have no float64."""
    return dtype in AUX_DTYPES or (dtype == torch.float64 and device.type == "cpu")


def check_aux_tensor(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse an aux tensor that callables cannot read. device: of q. Raises TypeError: its dtype,
    or it is a tensor subclass; NotImplementedError: it belongs to a transform, such as vmap;
    ValueError: its rank, its device, or it is negative lazily."""
    check_plain(name, tensor)
    if not is_read_on(tensor.dtype, device):
        allowed = ", ".join(map(dtype_name, AUX_DTYPES))
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
            f"{name} must be in memory as it is, got the negative of its memory (is_neg(), as "
            "x.conj().imag is); pass x.resolve_neg()"
        )


class OutsideError(IndexError):
    """A callable has read outside an aux tensor.

    kind: as for `check_record`. reader: the callable, in words. tensor: number of the aux tensor;
    -1: a branch or a loop has chosen it. index, extent: of `where`, a dimension in words. place: of
    the score, in words.
    """

    def __init__(
        self, kind: str, reader: str, tensor: int, index: int, extent: int, where: str, place: str
    ) -> None:
        super().__init__(kind, reader, tensor, index, extent, where, place)
        self.kind, self.reader, self.tensor = kind, reader, tensor
        self.index, self.extent, self.where, self.place = index, extent, where, place

    def __str__(self) -> str:
        name = "one of its aux_tensors" if self.tensor < 0 else f"aux_tensors[{self.tensor}]"
        hint = "; no index is negative in CuTe" if self.index < 0 else ""
        return (
            f"{self.reader} reads {name} at index {self.index} of {self.where}, whose extent is "
            f"{self.extent}{hint} ({self.place})"
        )


def new_record() -> torch.Tensor:
    """An int64 record of zeros, into which CPU code writes the first index outside an aux tensor
    (`aux_reads.RECORD_SIZE`)."""
    return torch.zeros(9, dtype=torch.int64, device="cpu")


def check_record(record: torch.Tensor, kind: str, mod: Callable[..., Any]) -> None:
    """Raise OutsideError if a callable read outside an aux tensor. kind: "mask_mod", "score_mod" or
    "score_mod_bwd"."""
    if not record[0]:
        return
    from flash_mask_cute.mods.errors import describe

    number, dimension, index, extent, batch_idx, head_idx, q_idx, kv_idx = record.tolist()[1:]
    where = "all dimensions" if dimension < 0 else f"dimension {dimension}"
    place = f"b_idx {batch_idx}, h_idx {head_idx}, q_idx {q_idx}, kv_idx {kv_idx}"
    raise OutsideError(kind, describe(kind, mod), number, index, extent, where, place)
