"""Some rows of a tensor, ascending: taken from it, or summed into it.

Rows that others need are mostly a few ranges, whose sums run at the speed of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Ranges are a launch each.
_MOST_RANGES = 16


@dataclass(frozen=True)
class KeyRows:
    """Rows of dimension 1. index: int64, ascending. ranges: the same as (begin, end), None if there
    are many."""

    index: Tensor
    ranges: tuple[tuple[int, int], ...] | None
    is_all: bool

    @staticmethod
    def where(is_chosen: Tensor) -> KeyRows:
        """bool (rows,). Waits for the device."""
        index = is_chosen.nonzero()[:, 0]
        steps = (index.diff() != 1).nonzero()[:, 0] + 1
        ranges = None
        if len(steps) < _MOST_RANGES and len(index):
            ends = [0, *steps.tolist(), len(index)]
            first = index[torch.tensor(ends[:-1], device=index.device)].tolist()
            counts = [b - a for a, b in zip(ends, ends[1:], strict=False)]
            ranges = tuple((a, a + count) for a, count in zip(first, counts, strict=True))
        elif not len(index):
            ranges = ()
        return KeyRows(index, ranges, len(index) == len(is_chosen))

    def of(self, x: Tensor) -> Tensor:
        """These rows of x; x itself if these are all of its rows."""
        return x if self.is_all else x.index_select(1, self.index)

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add to these rows of total."""
        if self.ranges is None:
            total.index_add_(1, self.index, part.to(total.dtype))
            return
        begin = 0
        for first, end in self.ranges:
            total[:, first:end] += part[:, begin : begin + end - first]
            begin += end - first
