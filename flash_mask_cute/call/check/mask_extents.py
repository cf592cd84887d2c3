"""Check that a mask has a row for each query of a call.

Column intervals and block lists count rows of the mask. Row 0 need not be the first query of the
call: a decode step has one query, which is the last row of the mask that a model was trained with.
So a call is refused unless its rows are known: the mask was made for the call's number of queries,
or nothing could come before the first query, or `q_start` gives its position. Shapes alone decide.
Errors are those of `validate.py`.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.call.check.lengths import check_batch_vector
from flash_mask_cute.call.problem import FwdShapes
from flash_mask_cute.masks.column_mask import ANY, ColumnMask
from flash_mask_cute.masks.q_start import QStart, check_position

_COLUMNS, _LISTS = "startend_row_indices", "block_sparse_tensors"
_SAYS = (
    "q_start=0 says that its first query is row 0 of the mask, and q_start='end' that its last one "
    "is at the last key"
)
JOIN_MASKS = (
    "whose rows are counted from where each begins: join the intervals of a mask for each of them, "
    "ColumnMask(torch.cat([...], dim=2), causal, seqlen_q=...), with the queries of all together"
)


def check_q_starts(q_starts: Tensor, batch: int, device: torch.device) -> None:
    """Check the argument q_start, if it is a tensor, and the positions of a CPU tensor."""
    check_batch_vector("q_start", q_starts, batch, device)
    if q_starts.device.type == "cpu":
        for position in q_starts.tolist():
            check_position(position, "in each element")


class CallExtents(NamedTuple):
    """A call's lengths, whether its sequences are packed (cu_seqlens), and where its queries
    begin."""

    shapes: FwdShapes
    packs_q: bool
    packs_k: bool
    q_start: QStart

    @property
    def total_k(self) -> int:
        """Keys that several sequences have in common count for each."""
        of = self.shapes
        return of.total_k if self.packs_k else of.batch * of.seqlen_k

    def check_columns(self, value: Tensor | ColumnMask) -> None:
        """Refuse column intervals whose rows are not, or may not be, the call's queries."""
        of = self.shapes
        rows = value.seqlen_q if isinstance(value, ColumnMask) else None
        if rows == ANY or not of.total_q:
            return
        if rows is None:
            if of.total_q < self.total_k and not self.q_start.is_given:
                made = ""
                if self.packs_k or not self.packs_q:
                    made = (
                        f", and ColumnMask(..., seqlen_q={self._rows_of_call}) that the mask was "
                        "made for these queries"
                    )
                raise ValueError(
                    f"{_COLUMNS} counts rows of a mask, and this call has fewer queries than keys "
                    f"({self}): {_SAYS}{made}; got q_start None"
                )
            return
        assert isinstance(value, ColumnMask)
        made_for = f"{_COLUMNS} was made for {value.extents}"
        if self.packs_k and belongs_to_one(value, of.batch):
            raise ValueError(
                f"{made_for}, one sequence, and cu_seqlens_k packs {of.batch} of them ({self}), "
                f"{JOIN_MASKS}, here {self._rows_of_call}"
            )
        # of packed queries some sequences can have fewer than that, and others more
        all_rows = int(rows) if self.packs_k and self.packs_q else of.batch * int(rows)
        # queries before row 0 need no row
        is_more = of.total_q > all_rows and not (self.q_start.number or 0) < 0
        if is_more or self._known_end(packed_end=None) > rows:
            raise ValueError(f"{made_for}, and does not cover this call ({self}{self._start_text})")
        if of.total_q < all_rows and not self.q_start.is_given:
            self._refuse_part(made_for)

    @property
    def _rows_of_call(self) -> int:
        """What `ColumnMask.seqlen_q` is for a mask with a row for each query of this call."""
        return self.shapes.total_q if self.packs_q and self.packs_k else self.shapes.seqlen_q

    def check_lists(self, seqlens: Any) -> None:
        """Refuse block lists whose rows are not, or may not be, the call's queries. seqlens: the
        (queries, keys) that they were made for; None: not known."""
        if seqlens is None:
            return
        of, (rows, keys) = self.shapes, _as_lengths(seqlens)
        made_for = f"{_LISTS} was made for {rows} queries x {keys} keys"
        varies = self.packs_q or self.packs_k
        end = max(of.seqlen_q, self._known_end(packed_end=of.seqlen_q))
        if end > rows or keys < of.seqlen_k:
            longest = f": sequences of up to {of.seqlen_q} queries and {of.seqlen_k} keys"
            given = f"{self}{self._start_text}"
            raise ValueError(
                f"{made_for}, and does not cover this call ({given}){longest if varies else ''}"
            )
        if rows > of.seqlen_q < of.seqlen_k and not self.q_start.is_given and not varies:
            self._refuse_part(made_for)

    def _refuse_part(self, made_for: str) -> None:
        raise ValueError(
            f"{made_for}, and this call has fewer queries ({self}): {_SAYS}; got q_start None"
        )

    def _known_end(self, packed_end: int | None) -> int:
        """One past the last mask row that a sequence certainly reaches, by shapes; 0 if shapes do
        not show it. packed_end: the queries of a packed sequence, if known."""
        number, seqlen_q = self.q_start.number, packed_end if self.packs_q else self.shapes.seqlen_q
        return 0 if number is None or seqlen_q is None else int(number) + seqlen_q

    @property
    def _start_text(self) -> str:
        return f" from position {self.q_start.number} on" if self.q_start.number else ""

    def __str__(self) -> str:
        of = self.shapes
        queries, keys = f"{of.seqlen_q} queries", f"{of.seqlen_k} keys"
        if self.packs_q:
            queries = f"{of.total_q} queries in {of.batch} sequences"
        if self.packs_k:
            keys = f"{self.total_k} keys in {of.batch} sequences"
        return f"{queries} x {keys}"


def belongs_to_one(mask: ColumnMask, num_sequences: int) -> bool:
    """Whether a mask counts the rows of one sequence, and is given for packed keys of several."""
    return mask.one_sequence and mask.seqlen_q != ANY and num_sequences > 1


def _as_lengths(seqlens: Any) -> tuple[int, int]:
    try:
        rows, keys = seqlens
    except (TypeError, ValueError):
        raise ValueError(f"seqlens must be (queries, keys), got {seqlens!r}") from None
    for length in (rows, keys):
        if isinstance(length, bool) or not isinstance(length, Integral):
            raise TypeError(f"seqlens must be two ints, got {seqlens!r}")
    return int(rows), int(keys)
