"""Dense calls whose mask holds documents, as calls of packed sequences, in both directions.

Tiles of a packed batch begin where documents begin. Under the mask of a whole sequence they begin
anywhere, and a tile that two documents share visits the keys of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.masks.documents import SLOT


def holds_documents(
    q: Any, k: Any, v: Any, mask: Any, causal: bool, others: Iterable[object]
) -> bool:
    """Whether a mask is said to hold documents, and this call can be packed by them.

    Other operands, wrong ones among them, are for the call with the mask as it is. causal: of the
    call, which must not hide more than the mask does. others: lengths, mods and block lists of the
    call, which packed sequences do not have as they are.
    """
    if any(x is not None for x in others):
        return False
    if not isinstance(mask, ColumnMask) or not mask.documents:
        return False
    if causal is not False and causal is not mask.causal:
        return False
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v)):
        return False
    batch, seqlen = q.shape[:2]
    of_mask, heads, num_keys, _ = mask.startend_row_indices.shape
    return (
        k.shape[:2] == v.shape[:2] == (batch, seqlen)
        and batch > 0
        and seqlen > SLOT
        and of_mask in (1, batch)
        and heads == 1
        and num_keys == seqlen
        and mask.device == q.device
        # the rows of the batch follow each other
        and all(batch == 1 or x.stride(0) == seqlen * x.stride(1) for x in (q, k, v))
    )


def by_documents(
    q: Tensor, k: Tensor, v: Tensor, mask: ColumnMask
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Packed views of operands for which `holds_documents`, and the keywords of their call."""
    documents = mask.split(q.shape[0])
    keywords = {
        "startend_row_indices": documents.mask,
        "causal": mask.causal,
        "cu_seqlens_q": documents.cu_seqlens,
        "cu_seqlens_k": documents.cu_seqlens,
        "max_seqlen_q": q.shape[1],
        "max_seqlen_k": q.shape[1],
    }
    rows = q.shape[0] * q.shape[1]
    q, k, v = (x.view(rows, *x.shape[2:]) for x in (q, k, v))
    return (q, k, v), keywords


def lse_by_sequences(lse: Tensor, batch: int) -> Tensor:
    """A copy of what a packed forward returned, as a dense one returns it."""
    by_head = lse.view(lse.shape[0], batch, -1)
    return by_head.transpose(0, 1).clone(memory_format=torch.contiguous_format)


def outputs_by_documents(
    out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What a dense forward returned, and the gradients by it, as a packed backward takes them.

    Copied: lse and dlse of several sequences, and dout if its rows do not follow each other.
    """
    if dlse is not None:
        dlse = _by_head(dlse)
    return out.flatten(0, 1), _by_head(lse), dout.flatten(0, 1), dlse


def _by_head(of_rows: Tensor) -> Tensor:
    """(heads, batch * seqlen) of (batch, heads, seqlen)."""
    return of_rows.transpose(0, 1).flatten(1)
