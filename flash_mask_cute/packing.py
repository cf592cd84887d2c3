"""Dense calls whose mask holds documents, as calls of packed sequences, in both directions.

Tiles of a packed batch begin where documents begin. Under the mask of a whole sequence they begin
anywhere, and a tile that two documents share visits the keys of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from flash_mask_cute.host.packed_launch import lse_by_heads, rows_follow, rows_of
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
        and rows_follow(q, k, v)
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
    return (rows_of(q), rows_of(k), rows_of(v)), keywords


def outputs_by_documents(
    out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What a dense forward returned, and the gradients by it, as a packed backward takes them.

    Copied: lse and dlse of several sequences, and dout if its rows do not follow each other.
    """
    dlse = None if dlse is None else lse_by_heads(dlse)
    return rows_of(out), lse_by_heads(lse), rows_of(dout), dlse
