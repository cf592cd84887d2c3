"""Prepared calls that compute dense tensors as packed sequences (`call/choose/packed.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import Masks, PreparedBwd, PreparedFwd, Tensors
from flash_mask_cute.call.choose.packed import (
    as_rows,
    as_rows_bwd,
    by_documents,
    with_gradients,
)


class PackedForward:
    """Runs the prepared call of a packed batch on dense tensors.

    needs_lse: whether the packed call computes LSE. mask_causal: how intervals in a plain tensor
    are meant, if the documents of the mask are the sequences; None: the packed call itself finds
    where they begin.
    """

    __slots__ = ("_mask_causal", "_needs_lse", "inner")

    def __init__(self, inner: PreparedFwd, needs_lse: bool, mask_causal: bool | None) -> None:
        self.inner = inner
        self._needs_lse = needs_lse
        self._mask_causal = mask_causal

    def __call__(
        self, tensors: Tensors, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        q = tensors.q
        batch, seqlen, heads, _ = q.shape
        # results of their own: autograd refuses to have a view changed in place
        out, lse = tensors.out, tensors.lse
        if out is None:
            out = q.new_empty((batch, seqlen, heads, tensors.v.shape[-1]))
        if lse is None and self._needs_lse:
            lse = q.new_empty((batch, heads, seqlen), dtype=torch.float32)
        packed = as_rows(tensors._replace(out=out, lse=lse))
        if self._mask_causal is not None:
            packed, masks = by_documents(packed, masks, self._mask_causal, batch)
        self.inner(packed, masks)
        if batch > 1:
            # a kernel would not ask in which mode the caller made them
            with torch.inference_mode():
                for given, by_head in zip(
                    (lse, tensors.max_scores), (packed.lse, packed.max_scores), strict=True
                ):
                    if given is not None and by_head is not None:
                        given.copy_(by_head.unflatten(1, (batch, -1)).transpose(0, 1))
        return out, lse


class PackedBackward:
    """As `PackedForward`, for a backward."""

    __slots__ = ("_mask_causal", "inner")

    def __init__(self, inner: PreparedBwd, mask_causal: bool | None) -> None:
        self.inner = inner
        self._mask_causal = mask_causal

    def __call__(
        self, tensors: Tensors, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = with_gradients(tensors)
        given: Any = tensors.gradients
        if self._mask_causal is not None:
            batch = tensors.q.shape[0]
            tensors, masks = by_documents(tensors, masks, self._mask_causal, batch)
        self.inner(as_rows_bwd(tensors), masks)
        return given.dq, given.dk, given.dv
