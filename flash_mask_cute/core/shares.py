"""Even distribution of a launch's key blocks over its CTAs.

All key blocks that a launch visits form a line, ordered by sequence, head, work tile, and the
blocks of its walk. A work tile takes TILE_COST places before its blocks, for its query and its
output. The line is cut into *segments* of one length, one for each CTA, and a segment into
*shares*. A CTA computes the first share of its segment. It is most of the segment, or all of it if
segments are short. The rest of a long segment is a few shares of falling lengths. They belong to
nobody: a CTA that is done claims the next one, first the long ones of all segments, then the
shorter ones. SMs do not get memory at the same speed, and equal work would end when the slowest one
is done.

So a work tile may lie in several shares; its parts are its *pieces*, and their results are merged
afterwards. Where pieces begin does not depend on who computes them, and so neither do the bits of a
result. (Stream-K, Osama et al. 2023, for attention as in Lean Attention, Sanovar et al. 2024;
FlashMLA plans alike. Chunks of falling length: guided self-scheduling, Polychronopoulos and Kuck
1987.)

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
# places of a segment at least
LEAST_PLACES = 2
# Shares of a segment that are claimed. Their lengths are falling powers of two, in units: 4, 2, 1.
# A unit is one place for each PLACES_PER_UNIT of a segment, so all are at most 7/48 of it.
CLAIMED = 3
PLACES_PER_UNIT = 48
SHARES_PER_SEGMENT = 1 + CLAIMED


class Shares(NamedTuple):
    """How a line is cut.

    num_ctas: segments, of `segment` places each; some at the end may be empty. unit: places of the
    shortest share that is claimed; 0: a segment is one share.
    """

    num_ctas: IntLike
    segment: IntLike
    unit: IntLike

    @classmethod
    def create(
        cls, places: IntLike, num_ctas: IntLike, most: IntLike, least: IntLike = LEAST_PLACES
    ) -> Shares:
        """places: of the line. most: shares that there is room for, at least num_ctas. least:
        places of a segment at least."""
        segment = imax((places + (num_ctas - 1)) // num_ctas, least)
        has_room = imin(most // (num_ctas * SHARES_PER_SEGMENT), 1)
        return cls(num_ctas, segment, segment // PLACES_PER_UNIT * has_room)

    @property
    def per_segment(self) -> IntLike:
        """Shares of a segment."""
        return imin(self.unit, 1) * CLAIMED + 1

    @property
    def number(self) -> IntLike:
        return self.per_segment * self.num_ctas

    def of_turn(self, turn: IntLike) -> IntLike:
        """The share of a turn. Turns are numbered in the order in which they are taken: first those
        of CTAs, which need no claim, then claims."""
        return turn % self.num_ctas * self.per_segment + turn // self.num_ctas

    def begin(self, share: IntLike) -> IntLike:
        """The first place of a share; the shares of a segment have neighbouring numbers."""
        in_segment = share % self.per_segment
        base = self.segment - self._left(in_segment)
        return share // self.per_segment * self.segment + base * imin(in_segment, 1)

    def end(self, share: IntLike) -> IntLike:
        """The place behind a share."""
        return self.begin(share + 1)

    def at(self, place: IntLike) -> IntLike:
        """The share that contains a place."""
        segment = place // self.segment
        left = (segment + 1) * self.segment - place
        share = segment * self.per_segment
        for in_segment in range(1, SHARES_PER_SEGMENT):
            # one more for each that begins at or before the place
            share = share + imin(imax(self._left(in_segment) - left + 1, 0), 1)
        return share

    def _left(self, in_segment: IntLike) -> IntLike:
        """Places from the beginning of a claimed share, 1 or more, to the end of its segment."""
        return ((1 << SHARES_PER_SEGMENT >> in_segment) - 1) * self.unit


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

    def piece(self, shares: Shares, share: IntLike) -> tuple[IntLike, IntLike]:
        """The blocks [first, end) of this tile, counted from its first one, that lie in a share;
        first == end if there are none."""
        first = imin(imax(shares.begin(share) - self.first_block, 0), self.num_blocks)
        end = imin(shares.end(share) - self.first_block, self.num_blocks)
        return first, imax(end, first)

    def first_share(self, shares: Shares) -> IntLike:
        """The share that contains its first block."""
        return shares.at(self.first_block)

    def num_pieces(self, shares: Shares) -> IntLike:
        """Number of shares that contain its blocks: consecutive shares from `first_share` on."""
        return shares.at(self.end - 1) - self.first_share(shares) + 1


def slot_of_first(share: IntLike) -> IntLike:
    """The slot of the piece of a tile that begins in a share and ends behind it."""
    return share * SLOTS_PER_SHARE + 1


def slot_of_later(share: IntLike) -> IntLike:
    """The slot of the piece of a tile that began before a share."""
    return share * SLOTS_PER_SHARE
