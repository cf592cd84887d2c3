"""Dense calls whose mask holds documents, computed as packed sequences.

`mask_prep/documents.py` says why. Eligibility is decided here where a `ColumnMask` has the
documents, and in `plan.py` where they are found in a mask_mod.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, overload

from torch import Tensor

from flash_mask_cute.call.arguments import BwdExtras, BwdOperands, Extras, Masks
from flash_mask_cute.call.copies import new_gradient
from flash_mask_cute.limits import MAX_PACKED_ROWS, MAX_PACKED_SEQLEN
from flash_mask_cute.mask_prep.documents import SLOT
from flash_mask_cute.masks.column_mask import ColumnMask

_AnyExtras = TypeVar("_AnyExtras", Extras, BwdExtras)


# -- which --------------------------------------------------------------------------------------


def holds_documents(
    q: Any, k: Any, v: Any, mask: Any, causal: bool, others: Iterable[object]
) -> bool:
    """Whether a mask is said to hold documents, and this call can be packed by them.

    Other operands, wrong ones among them, are for the call with the mask as it is. causal: of the
    call, which must not hide more than the mask does. others: lengths, mods and block lists of the
    call, which packed sequences do not have as they are.
    """
    if not isinstance(mask, ColumnMask) or not mask.documents:
        return False
    if any(x is not None for x in others):
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
        and SLOT < seqlen <= MAX_PACKED_SEQLEN
        and batch * seqlen < MAX_PACKED_ROWS
        and of_mask in (1, batch)
        and heads == 1
        and num_keys == seqlen
        and mask.device == q.device
        and rows_follow(q, k, v)
    )


def rows_follow(*tensors: Tensor | None) -> bool:
    """Whether the rows of all batch entries of a tensor (batch, row, ...) follow each other."""
    return all(
        x is None or x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in tensors
    )


# -- how ----------------------------------------------------------------------------------------


def by_documents(extras: _AnyExtras, masks: Masks | None, batch: int) -> tuple[_AnyExtras, Masks]:
    """With the documents of the mask, which has some, as sequences."""
    assert masks is not None and isinstance(masks.startend_row_indices, ColumnMask)
    mask = masks.startend_row_indices
    starts, of_rows = mask.split(batch)
    extras = extras._replace(cu_seqlens_q=starts, cu_seqlens_k=starts)
    return extras, masks._replace(startend_row_indices=of_rows)


def with_gradients(operands: BwdOperands, extras: BwdExtras) -> BwdExtras:
    """With new tensors for the gradients that are not given.

    Of a launch's own, the rows behind the last sequence would be cleared, and here there are none.
    """
    dq, dk, dv = (
        new_gradient(x) if given is None else given
        for x, given in zip(operands[:3], extras[6:9], strict=True)
    )
    return extras._replace(dq=dq, dk=dk, dv=dv)


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


def lse_by_heads(lse: Tensor) -> Tensor:
    """(heads, batch * seqlen) of (batch, heads, seqlen): a copy for several sequences."""
    return lse.transpose(0, 1).flatten(1)
