"""Results of work tiles whose keys a launch computes in splits, until they are combined.

`kernels/combine.py` combines them, and describes their two layouts.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_mask_cute.core.fixed_splits import PARALLEL_SPLITS
from flash_mask_cute.core.stream_k import BY_STREAM_K
from flash_mask_cute.core.work_ring import Work

# `Work.place` of a work tile that is computed as a whole
WHOLE = -1


class PendingCombine(NamedTuple):
    """A work tile that begins in a CTA's chunk and ends after it; num_splits is 0 if there is none.

    stride: from the CTA of a split to that of the next one. batch_idx: 0 if queries are packed. The
    others are as in `Work`.
    """

    num_splits: Int32
    stride: Int32
    batch_idx: Int32
    head_idx: Int32
    block: Int32
    offset_q: Int32
    slot: Int32

    @staticmethod
    def create(
        work: Work, num_splits: Int32, stride: Int32, queries_are_packed: bool
    ) -> "PendingCombine":
        batch_idx = Int32(0) if queries_are_packed else work.batch_idx
        place = batch_idx, work.head_idx, work.block, work.offset_q, work.slot
        return PendingCombine(num_splits, stride, *place)

    @staticmethod
    def none() -> "PendingCombine":
        return PendingCombine(*[Int32(0)] * len(PendingCombine._fields))

    @staticmethod
    def read(pending: cute.Tensor, cta: Int32) -> "PendingCombine":
        return PendingCombine(*(pending[cta, i] for i in range(len(PendingCombine._fields))))

    @cute.jit
    def write(self, pending: cute.Tensor, cta: Int32) -> None:
        """Run by a whole warp."""
        if cute.arch.lane_idx() == 0:
            for i, word in enumerate(self):
                pending[cta, i] = word


class Partials(NamedTuple):
    """Destination of splits: fp32 outputs and LSE and, in stream-K, the pending combines.

    By rows: o (splits, batch, row, head, d), lse (splits, batch, row, head), with one batch entry
    for packed queries, and the number of splits of each work tile. In stream-K: o (partial tiles,
    rows, d), lse (partial tiles, rows), pending (CTAs, PENDING_WORDS) int32; rows: those of a work
    tile that may exist. low: like lse, its rounding error. split_blocks: key blocks of a fixed
    split (`core/fixed_splits.py`); these lie by rows.
    """

    o: cute.Tensor
    lse: cute.Tensor
    low: cute.Tensor | None
    pending: cute.Tensor | None
    num_splits: Int32 | None
    split_blocks: Int32 | None = None

    @staticmethod
    def create(given: tuple | None, split: str | None, has_low: bool) -> "Partials | None":
        """Made from the argument of a launch of a kernel with this `split`, whose scores may have
        any size (has_low). Raises ValueError: such a kernel does not take this argument."""
        if (given is not None) != (split is not None):
            raise ValueError(f"mPartials must fit the kernel's split, {split!r}")
        if given is None:
            return None
        partials = Partials(*given)
        is_of_stream_k = partials.pending is not None and partials.num_splits is None
        is_of_rows = partials.pending is None and partials.num_splits is not None
        if not (is_of_stream_k if split == BY_STREAM_K else is_of_rows):
            raise ValueError(f"mPartials must be for split={split!r}")
        if (partials.split_blocks is not None) != (split == PARALLEL_SPLITS):
            raise ValueError(
                f"mPartials must have split_blocks only for fixed splits, not {split!r}"
            )
        if (partials.low is not None) != has_low:
            raise ValueError("mPartials must have low with a score_mod, and only then")
        return partials

    def grid(self, by_tiles: Int32) -> Int32:
        """CTAs to launch: one for each chunk, or the number that work tiles need."""
        return by_tiles if self.pending is None else Int32(self.pending.shape[0])

    @property
    def by_stream_k(self) -> bool:
        return self.pending is not None

    def is_split(self, work: Work) -> Boolean:
        return work.place != WHOLE if self.by_stream_k else Boolean(True)

    def is_first(self, work: Work) -> Boolean:
        """Whether this split, or whole tile, is the first one, which adds the sink. In stream-K the
        first split has an odd number, or WHOLE (`partial_tile_of_first`)."""
        return (work.place & 1) == 1 if self.by_stream_k else work.place == 0

    @cute.jit
    def store_lse(self, place: tuple, lse: Float32, low: Float32 | None) -> None:
        self.lse[place] = lse
        if const_expr(self.low is not None):
            self.low[place] = low

    def row(
        self, work: Work, queries_are_packed: bool, head_idx: Int32, q_idx: Int32, tile_row: Int32
    ) -> tuple:
        """The place of a row's result, without the column; q_idx: in its sequence."""
        if self.by_stream_k:
            return work.place, tile_row
        if queries_are_packed:
            return work.place, 0, work.offset_q + q_idx, head_idx
        return work.place, work.batch_idx, q_idx, head_idx


class OutputRows(NamedTuple):
    """The output (batch, row, head, d), or (row, head, d) of packed queries, written row by row."""

    o: cute.Tensor

    def row(
        self, work: Work, queries_are_packed: bool, head_idx: Int32, q_idx: Int32, tile_row: Int32
    ) -> tuple:
        if queries_are_packed:
            return work.offset_q + q_idx, head_idx
        return work.batch_idx, q_idx, head_idx
