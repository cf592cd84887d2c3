"""Check that a mask has a row for each query of a call, and find that row.

Column intervals and block lists count rows of the mask. Row 0 need not be the first query of the
call. For example, a decode step has one query, which is the last row of the mask that a model was
trained with. So a call is refused unless its rows are known: the mask was made for the call's
number of queries, or nothing could come before the first query, or `q_start` gives its position.

Shapes alone decide. Contents of `cu_seqlens_*` and `seqused_*` are not read.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.call.check.lengths import check_batch_vector
from flash_mask_cute.call.problem import END
from flash_mask_cute.limits import MAX_POSITION
from flash_mask_cute.masks.column_mask import ANY, ColumnMask
from flash_mask_cute.runtime.checks import INTS

_COLUMNS, _LISTS = "startend_row_indices", "block_sparse_tensors"
_SAYS = (
    "q_start=0 says that its first query is row 0 of the mask, and q_start='end' that its last one "
    "is at the last key"
)
JOIN_MASKS = (
    "whose rows are counted from where each begins: join the intervals of a mask for each of them, "
    "ColumnMask(torch.cat([...], dim=2), causal, seqlen_q=...), with the queries of all together"
)
_STARTS = 'an int >= 0, "end", an int32 tensor (batch,) or None'


def check_q_start(q_start: object, batch: int, device: torch.device) -> None:
    """Check the position of a call's first query. A CUDA tensor is not read.

    Raises:
        TypeError: no int, None, "end" or int32 tensor.
        ValueError: a string other than "end", a position that is negative or too large, or a tensor
            that is not (batch,) or is on another device than q.
    """
    if q_start is None:
        return
    if not isinstance(q_start, Tensor):
        check_position(q_start)
        return
    check_batch_vector("q_start", q_start, batch, device)
    if q_start.device.type == "cpu":
        for position in q_start.tolist():
            _check_range(position, "in each element")


def check_position(q_start: object) -> None:
    """Check a q_start that is no tensor, and not None.

    Raises:
        TypeError, ValueError: as `check_q_start`.
    """
    if isinstance(q_start, str):
        if q_start != END:
            raise ValueError(f"q_start must be {_STARTS}, got {q_start!r}")
    elif isinstance(q_start, bool) or not isinstance(q_start, INTS):
        raise TypeError(f"q_start must be {_STARTS}, got {q_start!r} ({type(q_start).__name__})")
    else:
        _check_range(q_start, "as an int")


def _check_range(position: Any, where: str) -> None:
    if not 0 <= position < MAX_POSITION:
        raise ValueError(
            f"q_start must be at least 0 and below {MAX_POSITION} {where}, got {position}"
        )


class CallExtents(NamedTuple):
    """A call's lengths: the fields of `FwdShapes`, and `q_start`.

    packs_q, packs_k: whether sequences are packed (cu_seqlens).
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    total_q: int
    total_k: int
    packs_q: bool
    packs_k: bool
    q_start: Any

    def check_columns(self, value: Tensor | ColumnMask) -> None:
        """Refuse column intervals whose rows are not, or may not be, the call's queries.

        value: a mask with the call's number of keys.

        Raises:
            ValueError: names the extents of the mask and of the call.
        """
        rows = value.seqlen_q if isinstance(value, ColumnMask) else None
        if rows == ANY or not self.total_q:
            return
        if rows is None:
            if self.total_q < self.total_k and self.q_start is None:
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
        if self.packs_k and belongs_to_one(value, self.batch):
            raise ValueError(
                f"{made_for}, one sequence, and cu_seqlens_k packs {self.batch} of them ({self}), "
                f"{JOIN_MASKS}, here {self._rows_of_call}"
            )
        # of packed queries some sequences can have fewer than that, and others more
        all_rows = int(rows) if self.packs_k and self.packs_q else self.batch * int(rows)
        if self.total_q > all_rows or self._known_end(packed_end=None) > rows:
            raise ValueError(f"{made_for}, and does not cover this call ({self}{self._told_start})")
        if self.total_q < all_rows and self.q_start is None:
            self._refuse_part(made_for)

    @property
    def _rows_of_call(self) -> int:
        """What `ColumnMask.seqlen_q` is for a mask with a row for each query of this call."""
        return self.total_q if self.packs_q and self.packs_k else self.seqlen_q

    def check_lists(self, seqlens: Any) -> None:
        """Refuse block lists whose rows are not, or may not be, the call's queries.

        seqlens: the (queries, keys) that they were made for; None: given by the number of blocks.
        That number is checked elsewhere, so they differ by less than a block.

        Raises:
            TypeError, ValueError: seqlens is no pair of lengths; else as `check_columns`.
        """
        if seqlens is None:
            return
        rows, keys = _as_lengths(seqlens)
        made_for = f"{_LISTS} was made for {rows} queries x {keys} keys"
        if max(self.seqlen_q, self._known_end(packed_end=self.seqlen_q)) > rows or (
            keys < self.seqlen_k
        ):
            longest = ""
            if self.packs_q or self.packs_k:
                longest = f": sequences of up to {self.seqlen_q} queries and {self.seqlen_k} keys"
            given = f"{self}{self._told_start}"
            raise ValueError(f"{made_for}, and does not cover this call ({given}){longest}")
        varies = self.packs_q or self.packs_k
        if rows > self.seqlen_q < self.seqlen_k and self.q_start is None and not varies:
            self._refuse_part(made_for)

    def _refuse_part(self, made_for: str) -> None:
        raise ValueError(
            f"{made_for}, and this call has fewer queries ({self}): {_SAYS}; got q_start None"
        )

    def _known_end(self, packed_end: int | None) -> int:
        """One past the last mask row that a sequence certainly reaches, by shapes; 0 if shapes do
        not show it. packed_end: the queries of a packed sequence, if known."""
        if not isinstance(self.q_start, Integral):
            return 0
        seqlen_q = packed_end if self.packs_q else self.seqlen_q
        return 0 if seqlen_q is None else int(self.q_start) + seqlen_q

    @property
    def _told_start(self) -> str:
        at = isinstance(self.q_start, Integral) and int(self.q_start) > 0
        return f" from position {self.q_start} on" if at else ""

    def __str__(self) -> str:
        queries, keys = f"{self.seqlen_q} queries", f"{self.seqlen_k} keys"
        if self.packs_q:
            queries = f"{self.total_q} queries in {self.batch} sequences"
        if self.packs_k:
            keys = f"{self.total_k} keys in {self.batch} sequences"
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
