"""Dense calls that are computed as packed sequences: their tensors seen so, and back."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from flash_mask_cute.host.bwd_launch import (
    BwdExtras,
    BwdKernelLaunch,
    BwdOperands,
    Gradients,
)
from flash_mask_cute.host.launch import Extras, KernelLaunch
from flash_mask_cute.host.mask_args import Masks


class PackedLaunch:
    """Runs the launch of a packed batch, which finds out itself where sequences begin."""

    __slots__ = ("_launch",)

    def __init__(self, launch: KernelLaunch) -> None:
        self._launch = launch

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        out = extras.out
        if out is None:
            # autograd refuses to have a result changed in place that is a view
            out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        packed = extras._replace(out=rows_of(out), lse=None)
        _, lse = self._launch(rows_of(q), rows_of(k), rows_of(v), packed, masks)
        if lse is not None:
            batch, given = q.shape[0], extras.lse
            lse = lse_by_sequences(lse, batch) if given is None else _copy_lse(given, lse, batch)
        return out, lse


class PackedBwdLaunch:
    """As `PackedLaunch`, for a backward."""

    __slots__ = ("_launch",)

    def __init__(self, launch: BwdKernelLaunch) -> None:
        self._launch = launch

    def __call__(
        self, operands: BwdOperands, extras: BwdExtras, masks: Masks | None = None
    ) -> Gradients:
        batch, given = operands.q.shape[0], (extras.dq, extras.dk, extras.dv)
        packed = self._launch(*packed_operands(operands, extras), masks)
        dq, dk, dv = (
            new.unflatten(0, (batch, -1)) if old is None else old
            for new, old in zip(packed, given, strict=True)
        )
        return dq, dk, dv


def packed_operands(operands: BwdOperands, extras: BwdExtras) -> tuple[BwdOperands, BwdExtras]:
    """The tensors of a backward, as one of a packed batch takes them.

    Copied: lse and dlse of several sequences, and dout if its rows do not follow each other.
    """
    q, k, v, out, dout, lse = operands
    rows = rows_of(q), rows_of(k), rows_of(v), rows_of(out), rows_of(dout)
    dlse = None if extras.dlse is None else lse_by_heads(extras.dlse)
    dq, dk, dv = rows_of(extras.dq), rows_of(extras.dk), rows_of(extras.dv)
    return BwdOperands(*rows, lse_by_heads(lse)), extras._replace(dlse=dlse, dq=dq, dk=dk, dv=dv)


@overload
def rows_of(tensor: Tensor) -> Tensor: ...


@overload
def rows_of(tensor: None) -> None: ...


def rows_of(tensor: Tensor | None) -> Tensor | None:
    """(batch * rows, ...) of (batch, rows, ...), a copy if they do not follow each other."""
    return None if tensor is None else tensor.flatten(0, 1)


def rows_follow(*tensors: Tensor | None) -> bool:
    """Whether the rows of all batch entries of a tensor (batch, row, ...) follow each other."""
    return all(
        x is None or x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in tensors
    )


def lse_by_sequences(lse: Tensor, batch: int) -> Tensor:
    """A copy of what a packed forward returned, as a dense one returns it."""
    by_head = lse.unflatten(1, (batch, -1))
    return by_head.transpose(0, 1).clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def _copy_lse(given: Tensor, lse: Tensor, batch: int) -> Tensor:
    """As `lse_by_sequences`, into the caller's."""
    return given.copy_(lse.unflatten(1, (batch, -1)).transpose(0, 1))


def lse_by_heads(lse: Tensor) -> Tensor:
    """(heads, batch * seqlen) of (batch, heads, seqlen): a copy for several sequences."""
    return lse.transpose(0, 1).flatten(1)
