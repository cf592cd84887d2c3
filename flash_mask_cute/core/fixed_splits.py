"""Sums that are cut at fixed keys of a sequence, so that a row has one set of bits.

The keys of a sequence are cut at S, 2 S, ... into *fixed splits*. A row is attended over the keys
of each fixed split on its own, from the last block of the fixed split to its first one. The results
are reduced from the first fixed split on, one after the other (`core/ordered_sums.py`). Then the
bits of a row depend on its query, its keys and its mask alone. A fixed split that a row does not
see leaves it as it is, bit for bit.
"""

from __future__ import annotations

# How the fixed splits of a work tile are computed: there is only one; by a CTA, one after the
# other; by any CTAs, into rows of partial results that another kernel reduces.
ONE_FIXED_SPLIT = "one fixed split"
SEQUENTIAL_SPLITS = "fixed splits in sequence"
PARALLEL_SPLITS = "fixed splits"
ORDERED = (ONE_FIXED_SPLIT, SEQUENTIAL_SPLITS, PARALLEL_SPLITS)
# `Work.place` of fixed splits in sequence: whether it is its work tile's first one and last one
FIRST, LAST = 1, 2
