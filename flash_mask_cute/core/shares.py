"""How the key blocks of a launch are dealt out evenly to its CTAs.

All key blocks that a launch visits form a line: sequence by sequence, in each the heads, in each
the work tiles, in each the blocks of its walk. A work tile takes TILE_COST places before its
blocks, for its query and its output. The line is cut into shares of one length, one for each CTA,
so a work tile may lie in several: its *pieces*, whose results are merged afterwards. (Stream-K,
Osama et al. 2023, for attention as in Lean Attention, Sanovar et al. 2024; FlashMLA plans alike.)

A share has at most two pieces of work tiles that it does not hold as a whole: one of a tile that
began before it, and one of a tile that ends behind it. So results of pieces need two slots for each
share, however long sequences are.

Arithmetic without a branch on a value: on ints and, traced, on `cutlass.Int32`, in any mixture.
"""

from __future__ import annotations

from typing import NamedTuple

from flash_mask_cute.rules.band import IntLike, imax, imin

# places that a work tile takes besides its key blocks
TILE_COST = 1
SLOTS_PER_SHARE = 2
# places of a share at least
LEAST_PLACES = 2


def share_size(places: IntLike, num_shares: IntLike, least: IntLike = 1) -> IntLike:
    """Places of a share, at least `least`, of a line with so many; some shares may be empty."""
    return imax((places + (num_shares - 1)) // num_shares, least)


class TileOnLine(NamedTuple):
    """A work tile: the place where it begins, and its blocks, 1 at least."""

    start: IntLike
    num_blocks: IntLike

    @property
    def end(self) -> IntLike:
        return self.first_block + self.num_blocks

    @property
    def first_block(self) -> IntLike:
        """The place of its first block."""
        return self.start + TILE_COST

    def piece(self, share: IntLike, size: IntLike) -> tuple[IntLike, IntLike]:
        """The blocks [first, end) of this tile, counted from its first one, that lie in a share;
        first == end if none does. size: of a share."""
        begin = share * size - self.first_block
        first = imin(imax(begin, 0), self.num_blocks)
        return first, imax(imin(begin + size, self.num_blocks), first)

    def first_share(self, size: IntLike) -> IntLike:
        """The share that its first block lies in."""
        return self.first_block // size

    def num_pieces(self, size: IntLike) -> IntLike:
        """In how many shares its blocks lie: they follow each other from `first_share` on."""
        return (self.end - 1) // size - self.first_share(size) + 1


def slot_of_first(share: IntLike) -> IntLike:
    """The slot of the piece of a tile that begins in a share and ends behind it."""
    return share * SLOTS_PER_SHARE + 1


def slot_of_later(share: IntLike) -> IntLike:
    """The slot of the piece of a tile that began before a share."""
    return share * SLOTS_PER_SHARE
