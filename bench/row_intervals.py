"""A mask by rows: the ranges of keys that each query sees, as `cudnn.flex_attention` is told them.

Its mask is int32 (heads, endpoints, queries), an odd number of endpoints: a query sees the keys
[0, F0), [F1, F2), [F3, F4) and so on. The ranges are made exactly from the intervals of
`bench.masks.Mask`: where a key is seen and the one before it is not, a range begins. numpy only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from bench.cases import BenchCase
from bench.masks import IntArray, Mask, gaps

# No more ranges a query on average. What needs more has about as many as there are keys.
MOST_RANGES = 32


class Rows(NamedTuple):
    """Of each key the rows [begin, end) of its intervals: (keys, intervals) each, disjoint."""

    begins: IntArray
    ends: IntArray

    def shifted(self, row: tuple[int, int], *, down: bool) -> Rows:
        """With one key more, of the interval `row`: before the first if down, else the last."""
        edges = [np.pad([[edge]], ((0, 0), (0, self.begins.shape[1] - 1))) for edge in row]
        pairs = zip(edges, self, strict=True)
        return Rows(
            *(np.concatenate((edge, side) if down else (side, edge)) for edge, side in pairs)
        )


class Events(NamedTuple):
    """Rows, and the keys at which something changes for them (events,), sorted by both."""

    rows: IntArray
    keys: IntArray

    @classmethod
    def where(cls, seen: Rows, hidden: Rows, n: int) -> Events:
        """The rows in intervals of both. ValueError where they are more than MOST_RANGES * n."""
        begins = np.maximum(seen.begins[:, :, None], hidden.begins[:, None, :])
        ends = np.minimum(seen.ends[:, :, None], hidden.ends[:, None, :])
        key = np.nonzero(begins < ends)[0]
        begins, ends = begins[begins < ends], ends[begins < ends]
        lengths = ends - begins
        total = int(lengths.sum())
        if total > MOST_RANGES * n:
            raise ValueError(f"{total / n:.0f} ranges of keys a query, more than {MOST_RANGES}")
        rows = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths - begins, lengths)
        keys = np.repeat(key, lengths)
        order = np.lexsort((keys, rows))
        return cls(rows[order], keys[order])

    def place(self, n: int) -> IntArray:
        """The how manyth of its row each event is."""
        counts = np.bincount(self.rows, minlength=n)
        firsts: IntArray = np.cumsum(counts) - counts
        places: IntArray = np.arange(len(self.rows)) - firsts[self.rows]
        return places


@lru_cache(maxsize=64)
def endpoints(mask: Mask) -> IntArray:
    """(endpoints, n), the last repeated where a query has fewer. ValueError for too many."""
    n = mask.n
    seen = Rows(*mask.visible_rows())
    hidden = Rows(*gaps(*seen, n))
    # before the first key and after the last nothing is seen
    hidden_before = hidden.shifted((0, n), down=True)
    begins = Events.where(seen, Rows(*(side[:n] for side in hidden_before)), n)
    seen_before = seen.shifted((0, 0), down=True)
    ends = Events.where(seen_before, hidden.shifted((0, n), down=False), n)
    most = int(np.bincount(begins.rows, minlength=n).max())
    last = np.zeros(n, dtype=np.int64)
    np.maximum.at(last, ends.rows, ends.keys)
    table = np.repeat(last[None], 2 * most, axis=0)
    for offset, events in enumerate((begins, ends)):
        table[2 * events.place(n) + offset, events.rows] = events.keys
    # F0 ends a range that begins with key 0, if need be one without keys
    return table[1:] if not table[0].any() else np.concatenate((0 * table[:1], table))


def case_endpoints(case: BenchCase) -> IntArray:
    """(endpoints, tokens) of all sequences, int32; keys are counted from their sequence's first."""
    by_length = {length: endpoints(case.mask_of(length)) for length in set(case.lengths)}
    most = max(len(table) for table in by_length.values())
    padded = {
        length: np.pad(table, ((0, most - len(table)), (0, 0)), mode="edge")
        for length, table in by_length.items()
    }
    return np.concatenate([padded[length] for length in case.lengths], axis=1).astype(np.int32)
