"""FlashMask's column intervals as plain integer arithmetic: the query rows that a key hides.

A key carries n in {1, 2, 4} row numbers ("vectors", one value per key) that bound one or two
intervals of hidden rows, after FlashMask (Wang et al., 2024). Like `Band`, the arithmetic has no
branch on a value: the same text runs on Python ints, elementwise on integer torch tensors and,
traced into kernels, on `cutlass.Int32`. Importing this module imports neither cutlass nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, TypeAlias

from flash_mask_cute.index_math import IntLike, imax, imin

BoolLike: TypeAlias = Any
"""A bool, a `cutlass.Boolean`, or a bool torch tensor; results follow the operands."""


def rows_of_call(
    values: Sequence[IntLike], q_start: IntLike | None, seqlen_q: IntLike
) -> tuple[IntLike, ...]:
    """Convert row numbers of a mask, or bounds of them, to rows of a call whose first row is at
    `q_start`; None: at row 0.

    A row outside the call becomes its beginning or its end, which hides the same of its rows.
    """
    if q_start is None:
        return tuple(values)
    end = q_start + seqlen_q
    return tuple(imin(imax(value, q_start), end) - q_start for value in values)


@dataclass(frozen=True)
class Intervals:
    """The meaning of the n row numbers of a key.

    =====  ==========  =============================================
    n      causal      a key hides the rows
    =====  ==========  =============================================
    1      yes         [c0, seqlen_q)
    2      yes         [c0, c1)
    2      no          [c0, seqlen_q) and [0, c1)
    4      either      [c0, c1) and [c2, c3)
    =====  ==========  =============================================

    An interval with start >= end hides nothing. Rows are query positions inside the sequence. Make
    this object inside the kernel: as a kernel argument its fields would become run-time values.

    Raises ValueError for any other combination of num_vectors and causal.
    """

    num_vectors: int
    causal: bool

    def __post_init__(self) -> None:
        if self.num_vectors not in ((1, 2, 4) if self.causal else (2, 4)):
            raise ValueError(
                f"column intervals have 1 (causal only), 2 or 4 vectors, got {self.num_vectors} "
                f"with causal={self.causal}"
            )

    def hidden_rows(
        self, c: Sequence[IntLike], seqlen_q: IntLike
    ) -> tuple[tuple[IntLike, IntLike], ...]:
        """The one or two intervals (start, end) of rows hidden by a key with the values `c`."""
        return tuple(
            (0 if start is None else c[start], seqlen_q if end is None else c[end])
            for start, end in self._edges()
        )

    def visible_rows(
        self, c: Sequence[IntLike], lo: IntLike | None = None, hi: IntLike | None = None
    ) -> tuple[tuple[IntLike | None, IntLike | None], ...]:
        """The rows of [lo, hi) that see a key with the values `c`; None is an open side.

        They are the rows of a range (start, end), the first result, except the holes in it, the
        other results. If rows from seqlen_q on are in the range, they may get either answer. Rows
        may be counted from any origin.
        """
        holes = []
        for start, end in self._edges():
            if start is not None and end is not None:
                holes.append((c[start], c[end]))
            elif start is not None:
                hi = c[start] if hi is None else imin(hi, c[start])
            elif end is not None:
                lo = c[end] if lo is None else imax(lo, c[end])
        return (lo, hi), *holes

    def seen_span(
        self, starts: Sequence[IntLike], ends: Sequence[IntLike], seqlen_q: IntLike
    ) -> tuple[IntLike, IntLike]:
        """Rows (first, last): no row outside sees a key; last < first if no row does.

        starts, ends: the values of the key that start and that end an interval; for several keys,
        the largest starts and the smallest ends. The span may be wider than necessary.
        """
        first: IntLike = 0
        last = seqlen_q - 1
        for start_vector, end_vector in self._edges():
            start: IntLike = 0
            end = seqlen_q
            if start_vector is not None:
                start = imin(imax(starts[start_vector], 0), seqlen_q)
            if end_vector is not None:
                end = imin(imax(ends[end_vector], 0), seqlen_q)
            # 0 where the interval begins with the first row, or ends with the last one, else 1
            is_late, is_early = imin(start, 1), imin(seqlen_q - end, 1)
            first = imax(first, (1 - is_late) * end)
            last = imin(last, imax(start, is_early * seqlen_q) - 1)
        return first, last

    def classify(
        self, bounds: Sequence[IntLike], first_row: IntLike, end_row: IntLike, seqlen_q: IntLike
    ) -> tuple[BoolLike, BoolLike]:
        """(all_hidden, cuts) of the rows [first_row, end_row) against a block of keys.

        `bounds` has 2n values: entry 2v is the smallest and 2v + 1 the largest value of vector v
        over the keys of the block. all_hidden is true only if every key hides every row; cuts is
        false only if no key hides any row. Both err on the side of more work. The range holds at
        least one row. If it runs past seqlen_q, it only loses all_hidden.
        """
        all_hidden, cuts = [], []
        for start, end in self._edges():
            min_start, max_start = (0, 0) if start is None else bounds[2 * start : 2 * start + 2]
            min_end, max_end = (seqlen_q,) * 2 if end is None else bounds[2 * end : 2 * end + 2]
            all_hidden.append((max_start <= first_row) & (min_end >= end_row))
            cuts.append((min_start < end_row) & (max_end > first_row))
        return reduce(or_, all_hidden), reduce(or_, cuts)

    def _edges(self) -> tuple[tuple[int | None, int | None], ...]:
        """The vectors of the start and the end of each interval; None: the sequence's own end."""
        if self.num_vectors == 1:
            return ((0, None),)
        if self.num_vectors == 2:
            return ((0, 1),) if self.causal else ((0, None), (None, 1))
        return ((0, 1), (2, 3))
