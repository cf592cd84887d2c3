"""Even distribution of a launch's key blocks over its CTAs.

All key blocks that a launch visits form a line, ordered by sequence, head, work tile, and the
blocks of its walk. A work tile takes TILE_COST places before its blocks, for its query and its
output. The line is cut into shares of one length, one for each CTA. So a work tile may lie in
several shares; its parts are its *pieces*, and their results are merged afterwards. (Stream-K,
Osama et al. 2023, for attention as in Lean Attention, Sanovar et al. 2024; FlashMLA plans alike.)

A share has at most two pieces of incomplete work tiles: one of a tile that began before it, and one
of a tile that ends behind it. So results of pieces need two slots for each share, for sequences of
any length.

Everything is arithmetic without a branch on a value, on ints and, traced, on `cutlass.Int32`, in
any mixture.
"""

from __future__ import annotations

from typing import NamedTuple

from flash_mask_cute.rules.band import IntLike, imax, imin

# How work tiles are computed in pieces, and where their results lie: by rows of the output, as many
# pieces of each work tile, or by slots of shares.
BY_ROWS, BY_SLOTS = "rows", "slots"
# places that a work tile takes besides its key blocks
TILE_COST = 1
SLOTS_PER_SHARE = 2
# places of a share at least
LEAST_PLACES = 2


def share_size(places: IntLike, num_shares: IntLike, least: IntLike = 1) -> IntLike:
    """Places of a share of a line with `places` places, at least `least`; some shares may be
    empty."""
    return imax((places + (num_shares - 1)) // num_shares, least)


class TileOnLine(NamedTuple):
    """A work tile: its first place on the line, and its number of blocks, at least 1."""

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
        first == end if there are none. size: places of a share."""
        begin = share * size - self.first_block
        first = imin(imax(begin, 0), self.num_blocks)
        return first, imax(imin(begin + size, self.num_blocks), first)

    def first_share(self, size: IntLike) -> IntLike:
        """The share that contains its first block."""
        return self.first_block // size

    def num_pieces(self, size: IntLike) -> IntLike:
        """Number of shares that contain its blocks: consecutive shares from `first_share` on."""
        return (self.end - 1) // size - self.first_share(size) + 1


def slot_of_first(share: IntLike) -> IntLike:
    """The slot of the piece of a tile that begins in a share and ends behind it."""
    return share * SLOTS_PER_SHARE + 1


def slot_of_later(share: IntLike) -> IntLike:
    """The slot of the piece of a tile that began before a share."""
    return share * SLOTS_PER_SHARE
