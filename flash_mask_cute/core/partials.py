"""Results of work tiles whose keys a launch computes in pieces, until they are merged.

`kernels/combine.py` merges them. It describes the pieces and their two layouts: by rows, or by
slots of the shares into which key blocks were divided (`core/shares.py`).
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_mask_cute.core.shares import BY_SLOTS
from flash_mask_cute.core.work_ring import Work

# words of a `Merge` in memory
MERGE_WORDS = 8
# `Work.place` of a work tile that is computed as a whole
WHOLE = -1


class Merge(NamedTuple):
    """A work tile that begins in a CTA's share and ends behind it.

    num_pieces: 0 if there is no such tile. stride: from the CTA of a piece to that of the next one.
    batch_idx: 0 if queries are packed. offset_q: the output
    row at which its sequence begins; slot: the number of rows of that sequence. head_idx, block: as
    in `Work`.
    """

    num_pieces: Int32
    stride: Int32
    batch_idx: Int32
    head_idx: Int32
    block: Int32
    offset_q: Int32
    slot: Int32

    @staticmethod
    def create(work: Work, num_pieces: Int32, stride: Int32, queries_are_packed: bool) -> "Merge":
        batch_idx = Int32(0) if queries_are_packed else work.batch_idx
        place = batch_idx, work.head_idx, work.block, work.offset_q, work.slot
        return Merge(num_pieces, stride, *place)

    @staticmethod
    def none() -> "Merge":
        """No such tile."""
        return Merge(*[Int32(0)] * len(Merge._fields))

    @staticmethod
    def read(merges: cute.Tensor, cta: Int32) -> "Merge":
        return Merge(*(merges[cta, i] for i in range(len(Merge._fields))))

    @cute.jit
    def write(self, merges: cute.Tensor, cta: Int32) -> None:
        """Run by a whole warp."""
        if cute.arch.lane_idx() == 0:
            for i, word in enumerate(self):
                merges[cta, i] = word


class Partials(NamedTuple):
    """Destination of pieces: fp32 outputs and LSE and, by slots, the merges.

    By rows: o (pieces, batch, row, head, d), lse (pieces, batch, row, head), with one batch entry
    for packed queries, and the number of pieces of each work tile. By slots: o (slots, rows, d),
    lse (slots, rows), merges (CTAs, MERGE_WORDS) int32; rows: those of a work tile that may
    exist. low: like lse, its rounding error; of scores of any size, lse alone is too coarse for
    the weights of pieces.
    """

    o: cute.Tensor
    lse: cute.Tensor
    low: cute.Tensor | None
    merges: cute.Tensor | None
    num_splits: Int32 | None

    @staticmethod
    def create(given: tuple | None, split: str | None, has_low: bool) -> "Partials | None":
        """Made from the argument of a launch of a kernel with this `split`, whose scores may have
        any size (has_low).

        :raises ValueError: such a kernel does not take this argument
        """
        if (given is not None) != (split is not None):
            raise ValueError(f"mPartials must fit the kernel's split, {split!r}")
        if given is None:
            return None
        partials = Partials(*given)
        is_of_slots = partials.merges is not None and partials.num_splits is None
        is_of_rows = partials.merges is None and partials.num_splits is not None
        if not (is_of_slots if split == BY_SLOTS else is_of_rows):
            raise ValueError(f"mPartials must be for split={split!r}")
        if (partials.low is not None) != has_low:
            raise ValueError("mPartials must have low with a score_mod, and only then")
        return partials

    def grid(self, by_tiles: Int32) -> Int32:
        """CTAs to launch: one for each share, or the number that work tiles need."""
        return by_tiles if self.merges is None else Int32(self.merges.shape[0])

    @property
    def by_slots(self) -> bool:
        return self.merges is not None

    def is_piece(self, work: Work) -> Boolean:
        """Whether a work tile is only a piece."""
        return work.place != WHOLE if self.by_slots else Boolean(True)

    def is_first(self, work: Work) -> Boolean:
        """Whether this piece, or whole tile, is the first one, which adds the sink.

        By slots the first piece has an odd number, or WHOLE (`slot_of_first`).
        """
        return (work.place & 1) == 1 if self.by_slots else work.place == 0

    @cute.jit
    def store_lse(self, place: tuple, lse: Float32, low: Float32 | None) -> None:
        """Write a row; place: of `row`."""
        self.lse[place] = lse
        if const_expr(self.low is not None):
            self.low[place] = low

    def row(
        self, work: Work, queries_are_packed: bool, head_idx: Int32, q_idx: Int32, tile_row: Int32
    ) -> tuple:
        """The place of a row's result, without the column; q_idx: in its sequence."""
        if self.by_slots:
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
        """As `Partials.row`."""
        if queries_are_packed:
            return work.offset_q + q_idx, head_idx
        return work.batch_idx, q_idx, head_idx
