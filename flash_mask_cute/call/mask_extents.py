"""Whether a mask has a row for each query of a call, and which one.

Column intervals and block lists count rows: of the mask, whose row 0 need not be the first query of
the call. A decode step has one query, which is the last row of the mask that a model was trained
with. So a call is refused unless its rows are known: the mask was made for as many queries as the
call has, or nothing could come before the first query, or `q_start` says where it stands.

Shapes alone decide. Contents of `cu_seqlens_*` and `seqused_*` are not read.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

from torch import Tensor

from flash_mask_cute.masks.column_mask import ANY, ColumnMask

_COLUMNS, _LISTS = "startend_row_indices", "block_sparse_tensors"
_END = "end"


def check_q_start(q_start: object) -> None:
    """Refuse what is neither None nor 0.

    Raises:
        TypeError: no int, None, "end" or tensor.
        ValueError: another word than "end".
        NotImplementedError: what is known and not supported yet.
    """
    if q_start is None:
        return
    given = repr(q_start)
    if isinstance(q_start, Tensor):
        given = f"a {q_start.dtype} tensor of shape {tuple(q_start.shape)}"
    elif isinstance(q_start, str):
        if q_start != _END:
            raise ValueError(f"q_start must be 0 or None, got {given}")
    elif isinstance(q_start, bool) or not isinstance(q_start, Integral):
        raise TypeError(f"q_start must be 0 or None, got {given} ({type(q_start).__name__})")
    elif q_start == 0:
        return
    raise NotImplementedError(f"q_start other than 0 or None is not supported yet, got {given}")


class CallExtents(NamedTuple):
    """What a call says about its lengths: the fields of `FwdShapes`, and `q_start`.

    packs_q, packs_k: whether sequences lie one after the other (cu_seqlens).
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    total_q: int
    total_k: int
    packs_q: bool
    packs_k: bool
    q_start: int | None

    def check_columns(self, value: Tensor | ColumnMask) -> None:
        """Refuse column intervals whose rows are not, or may not be, the call's queries.

        value: with the call's number of keys.

        Raises:
            ValueError: naming the extents of the mask and those of the call.
        """
        rows = value.seqlen_q if isinstance(value, ColumnMask) else None
        if rows == ANY or not self.total_q:
            return
        if rows is None:
            if self.total_q < self.total_k and self.q_start is None:
                raise ValueError(
                    f"{_COLUMNS} counts rows of a mask, and this call has fewer queries than keys "
                    f"({self}): q_start=0 says that its first query is row 0 of the mask, and "
                    "ColumnMask(..., seqlen_q=...) how many queries a mask was made for; got "
                    "q_start None"
                )
            return
        assert isinstance(value, ColumnMask)
        made_for = f"{_COLUMNS} was made for {value.extents}"
        if self.packs_k and self.batch > 1:
            raise ValueError(
                f"{made_for}, one sequence, and cu_seqlens_k packs {self.batch} of them ({self}), "
                "whose rows are counted from where each begins: join the intervals of a mask for "
                "each sequence, ColumnMask(torch.cat([...], dim=2), causal)"
            )
        # of packed queries some sequences can have fewer than that, and others more
        all_rows = self.batch * int(rows)
        if self.total_q > all_rows:
            raise ValueError(f"{made_for}, and does not cover this call ({self})")
        if self.total_q < all_rows and self.q_start is None:
            self._refuse_part(made_for)

    def check_lists(self, seqlens: Any) -> None:
        """Refuse block lists whose rows are not, or may not be, the call's queries.

        seqlens: the (queries, keys) that they were made for; None: for the number of blocks to
        tell. That number is looked at elsewhere, so they differ by less than a block.

        Raises:
            TypeError, ValueError: seqlens is no pair of lengths; else as `check_columns`.
        """
        if seqlens is None:
            return
        rows, keys = _as_lengths(seqlens)
        made_for = f"{_LISTS} was made for {rows} queries x {keys} keys"
        if rows < self.seqlen_q or keys < self.seqlen_k:
            longest = ""
            if self.packs_q or self.packs_k:
                longest = f": sequences of up to {self.seqlen_q} queries and {self.seqlen_k} keys"
            raise ValueError(f"{made_for}, and does not cover this call ({self}){longest}")
        varies = self.packs_q or self.packs_k
        if rows > self.seqlen_q < self.seqlen_k and self.q_start is None and not varies:
            self._refuse_part(made_for)

    def _refuse_part(self, made_for: str) -> None:
        raise ValueError(
            f"{made_for}, and this call has fewer queries ({self}): q_start=0 says that its first "
            "query is row 0 of the mask; got q_start None"
        )

    def __str__(self) -> str:
        queries, keys = f"{self.seqlen_q} queries", f"{self.seqlen_k} keys"
        if self.packs_q:
            queries = f"{self.total_q} queries in {self.batch} sequences"
        if self.packs_k:
            keys = f"{self.total_k} keys in {self.batch} sequences"
        return f"{queries} x {keys}"


def _as_lengths(seqlens: Any) -> tuple[int, int]:
    try:
        rows, keys = seqlens
    except (TypeError, ValueError):
        raise ValueError(f"seqlens must be (queries, keys), got {seqlens!r}") from None
    for length in (rows, keys):
        if isinstance(length, bool) or not isinstance(length, Integral):
            raise TypeError(f"seqlens must be two ints, got {seqlens!r}")
    return int(rows), int(keys)
