"""The columns of dQ, dK and dV that the MMA warpgroups of the Hopper backward sum."""

from dataclasses import dataclass
from typing import TypeVar

from flash_mask_cute.core.row_blocks import (
    ColumnPart,
    alternating_sums,
    are_uneven,
    dq_columns,
    dq_parts,
    shared_parts,
    uneven_parts,
)
from flash_mask_cute.sm90.wgmma import ROWS_PER_WARPGROUP

NUM_MMA_WARPGROUPS = 2
# what leaves together of dQ: columns of a warpgroup at most
MAX_DQ_COLS = 64
# what a warpgroup computes of dK before dQ, or behind it: columns at most
MAX_DK_COLS = 64

Share = TypeVar("Share")


@dataclass(frozen=True)
class GradientColumns:
    """Columns of a CTA's products. tile_d, tile_dv, num_ctas, shares_keys: see `BwdTraits`.

    own_warpgroup: the MMA warpgroup whose code these columns are for, if the two have code of their
    own (`is_uneven`). in_halves: a warpgroup sums half of the columns of dQ in one product
    (`dq_parts`). used_d, used_dv: the columns of dK and dV that are not zeros, where a warpgroup
    sums no others; None: it sums all of a tile.
    """

    tile_m: int
    tile_d: int
    tile_dv: int
    num_ctas: int
    shares_keys: bool
    own_warpgroup: int | None
    in_halves: bool = False
    used_d: int | None = None
    used_dv: int | None = None

    @property
    def is_uneven(self) -> bool:
        """Whether the warpgroups have different numbers of columns, and so code of their own."""
        return are_uneven(self.tile_d, self.num_ctas)

    @property
    def alternating(self) -> bool:
        """Whether a warpgroup sums dQ of every second block, and the other one does not."""
        return self.tile_m == ROWS_PER_WARPGROUP and alternating_sums(self.tile_d, self.num_ctas)

    def _own(self, shares: tuple[Share, ...]) -> tuple[Share, ...]:
        """What this MMA warpgroup has of a share for each; of shares for both, all."""
        return shares if self.own_warpgroup is None else (shares[self.own_warpgroup],)

    @property
    def dk(self) -> tuple[ColumnPart, ...]:
        """If columns are uneven, the first warpgroup has the wider part of dQ, and the narrower of
        dK. The last product is computed behind dQ."""
        if not self.shares_keys:
            return (ColumnPart(0, self.used_d or self.tile_d, 1),)
        if not self.is_uneven:
            return shared_parts(self.tile_d)
        (part,) = self._own(uneven_parts(self.tile_d)[::-1])
        starts = range(part.first, part.end, MAX_DK_COLS)
        return tuple(ColumnPart(x, min(MAX_DK_COLS, part.end - x), 1) for x in starts)

    @property
    def dv(self) -> tuple[ColumnPart, ...]:
        if not self.shares_keys:
            return (ColumnPart(0, self.used_dv or self.tile_dv, 1),)
        if not self.is_uneven:
            return shared_parts(self.tile_dv)
        return self._own(uneven_parts(self.tile_dv))

    @property
    def parts_dq(self) -> tuple[tuple[ColumnPart, ...], ...]:
        """The parts of dQ, which leave in turn, by the columns of their products in the first CTA.
        If a block has 64 rows, the warpgroups share its columns."""
        if self.tile_m > ROWS_PER_WARPGROUP:
            return ((ColumnPart(0, self.tile_d, 1),),)
        # the columns of the first CTA are the first ones
        all_columns = dq_parts(self.tile_d, self.num_ctas, self.in_halves)
        if self.in_halves:
            return (all_columns,)
        columns = [x for x in all_columns if x.end <= self.cols_dq]
        parts: list[tuple[ColumnPart, ...]] = [()]
        for part in columns:
            if sum(x.num_cols for x in (*parts[-1], part)) > NUM_MMA_WARPGROUPS * MAX_DQ_COLS:
                parts.append(())
            parts[-1] += (part,)
        return tuple(parts)

    def products_dq(self, part: int) -> tuple[tuple[ColumnPart, int], ...]:
        """Products of a part of dQ: their columns in the first CTA, and where their sums begin."""
        products, first = [], 0
        for columns in self.parts_dq[part]:
            products.append((columns, first))
            first += columns.num_cols * self.tile_m
        return self._own(tuple(products))

    @property
    def sizes_dq(self) -> tuple[int, ...]:
        """Sums of dQ in each part."""
        return tuple(
            sum(columns.num_cols for columns in part) * self.tile_m for part in self.parts_dq
        )

    @property
    def cols_dq(self) -> int:
        """Columns of dQ that a CTA sums."""
        return dq_columns(self.tile_d, self.num_ctas)

    @property
    def second_dq(self) -> int:
        """The first column that the second CTA sums. It does not send those that the first has."""
        return self.tile_d - self.cols_dq


def shared_width(dim: int) -> int:
    """The shared columns of a tile (`column_parts`), for heads of a dimension."""
    return -(-dim // 32) * 32
