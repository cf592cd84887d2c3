"""Sums that are cut at fixed keys of a sequence, so that a row has one set of bits.

The keys of a sequence are cut at S, 2 S, ... into *segments*. A row is attended over the keys of
each segment on its own, from the last block of the segment to its first one. The results are folded
from the first segment on, one after the other (`core/ordered_sums.py`). Then the bits of a row
depend on its query, its keys and its mask, but not on the other rows of its tile, its place in it,
the number of sequences, or who computes which segment. A segment that a row does not see leaves it
as it is, bit for bit.
"""

from __future__ import annotations

# How the segments of a work tile are computed: there is only one; by a CTA, one after the other; by
# any CTAs, into rows of partial results that another kernel folds.
ONE_SEGMENT, IN_TURN, BY_SEGMENTS = "one segment", "segments in turn", "segments"
ORDERED = (ONE_SEGMENT, IN_TURN, BY_SEGMENTS)
# `Work.place` of segments in turn: whether it is the first one and the last one of its work tile
FIRST, LAST = 1, 2
