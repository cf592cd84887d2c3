"""Causal and window masks as one diagonal band, written as plain integer arithmetic.

The arithmetic has no branch on a value, so the same text runs on Python ints (host, tests), on
`cutlass.Int32` (traced into kernels) and elementwise on integer torch tensors (dense masks).
Importing this module imports neither cutlass nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flash_mask_cute.index_math import IntLike, imax, imin
from flash_mask_cute.limits import OPEN_WINDOW


def right_side(window_right: IntLike, is_causal: IntLike) -> IntLike:
    """The right side of a sequence's band, which causal masking closes at the diagonal.
    window_right: of the call. is_causal: 0 or 1, at run time."""
    return imin(window_right, window_right * (1 - is_causal))


def side_of_sequence(
    window_right: int | None, causal_per_seq: Sequence[Any] | None, batch_idx: int
) -> int | None:
    """`right_side` of one sequence on the host; None: that of the call, window_right.

    causal_per_seq: for each sequence a number that is not 0 if it is causal; None: all are alike.
    """
    if causal_per_seq is None:
        return None
    side: int = right_side(
        OPEN_WINDOW if window_right is None else window_right, int(causal_per_seq[batch_idx] != 0)
    )
    return side


class Band(NamedTuple):
    """The visible keys of each query and, equally, the visible queries of each key.

    Query q sees key k when 0 <= k < seqlen_k and

        q + shift - window_left <= k <= q + shift + window_right

    shift: the position of query 0 among the keys. None is `seqlen_k - seqlen_q` (bottom-right
    alignment: the last query sits at the last key).

    A side that is None is open. Causal is `window_right = 0`. A negative side is allowed and
    excludes the diagonal, but if both are given, `window_left + window_right >= 0` must hold. On
    Int32, lengths, index and windows must add up without overflow: pass None for an open side.
    """

    seqlen_q: IntLike
    seqlen_k: IntLike
    window_left: IntLike | None = None
    window_right: IntLike | None = None
    shift: IntLike | None = None

    def k_range(self, q_idx: IntLike) -> tuple[IntLike, IntLike]:
        """Keys [lo, hi) that query `q_idx` sees, with 0 <= lo <= hi <= seqlen_k.

        A query that sees nothing gets lo == hi. `q_idx` may lie outside [0, seqlen_q). The bound of
        an open side is the scalar 0 or `seqlen_k`, even if `q_idx` is a tensor.
        """
        shift = self.seqlen_k - self.seqlen_q if self.shift is None else self.shift
        diagonal = q_idx + shift
        lo: IntLike = 0
        hi = self.seqlen_k
        if self.window_left is not None:
            lo = imin(imax(diagonal - self.window_left, 0), self.seqlen_k)
        if self.window_right is not None:
            hi = imax(imin(diagonal + self.window_right + 1, self.seqlen_k), lo)
        return lo, hi

    def q_range(self, k_idx: IntLike) -> tuple[IntLike, IntLike]:
        """Queries [lo, hi) that see key `k_idx`, with 0 <= lo <= hi <= seqlen_q."""
        return self.transposed().k_range(k_idx)

    def transposed(self) -> Band:
        shift = None if self.shift is None else -self.shift
        return Band(self.seqlen_k, self.seqlen_q, self.window_right, self.window_left, shift)
