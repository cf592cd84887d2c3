"""Prepared calls that compute dense tensors as packed sequences (`call/packed.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import BwdExtras, BwdOperands, Extras, Masks
from flash_mask_cute.call.packed import by_documents, packed_operands, rows_of, with_gradients
from flash_mask_cute.call.prepared import Launch
from flash_mask_cute.call.prepared_bwd import BwdLaunch, Gradients


class PackedLaunch:
    """Runs the launch of a packed batch on tensors of a dense one.

    needs_lse: whether the launch makes LSE. by_mask: the documents of the mask are the sequences;
    otherwise the launch finds out itself where they begin.
    """

    __slots__ = ("_by_mask", "_needs_lse", "launch")

    def __init__(self, launch: Launch, needs_lse: bool, by_mask: bool) -> None:
        self.launch = launch
        self._needs_lse = needs_lse
        self._by_mask = by_mask

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        batch, seqlen, heads, _ = q.shape
        # results of their own: autograd refuses to have a view changed in place
        out, lse = extras.out, extras.lse
        if out is None:
            out = q.new_empty((batch, seqlen, heads, v.shape[-1]))
        if lse is None and self._needs_lse:
            lse = q.new_empty((batch, heads, seqlen), dtype=torch.float32)
        # rows of several sequences do not follow each other in lse
        by_head: Any = None if lse is None or batch > 1 else lse[0]
        packed = extras._replace(out=rows_of(out), lse=by_head)
        if self._by_mask:
            packed, masks = by_documents(packed, masks, batch)
        _, by_head = self.launch(rows_of(q), rows_of(k), rows_of(v), packed, masks)
        if lse is not None and batch > 1:
            # a kernel would not ask in which mode the caller made it
            with torch.inference_mode():
                lse.copy_(by_head.unflatten(1, (batch, -1)).transpose(0, 1))
        return out, lse


class PackedBwdLaunch:
    """As `PackedLaunch`, for a backward."""

    __slots__ = ("_by_mask", "launch")

    def __init__(self, launch: BwdLaunch, by_mask: bool) -> None:
        self.launch = launch
        self._by_mask = by_mask

    def __call__(
        self, operands: BwdOperands, extras: BwdExtras, masks: Masks | None = None
    ) -> Gradients:
        extras = with_gradients(operands, extras)
        gradients: Any = extras[6:9]
        if self._by_mask:
            extras, masks = by_documents(extras, masks, operands.q.shape[0])
        self.launch(*packed_operands(operands, extras), masks)
        return gradients
