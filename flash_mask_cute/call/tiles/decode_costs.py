"""An estimate of the time of decoding: one pass, splits of each work tile, or stream-K chunks.

A CTA reads key blocks at a rate of its own, two on neighboring SMs at a rate of both, and all CTAs
at the rate of the memory. Work tiles that fill a wave of CTAs take the longest of these times. So a
grid of half as many CTAs as SMs may already saturate the memory, and then splits gain nothing. One
of 96 CTAs has neighbors, and takes longer than one of 64 with as many keys for each.

The estimate is for sequences of equal lengths. Of lengths that differ, chunks are better: 8
sequences of 1K to 8K keys took 38.6 us by chunks and 56.8 in one pass (H200, 28 November 2026).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

KEYS = 128
"""Keys of a block, the unit of costs."""
COMBINED_AT_ONCE = 8
"""Splits that a warp reads at once (`kernels/combine.py`)."""
NUMBERS = 1, 2, 3, 4, 6, 8, 12, 16
"""Of splits: those that were timed."""


class DecodingWork(NamedTuple):
    """tiles: work tiles. keys: of a tile. head_dim: the mean of those of q and of v. rows: of
    queries, over all heads."""

    tiles: int
    keys: int
    head_dim: float
    rows: int

    @property
    def block_mb(self) -> float:
        return 4e-6 * KEYS * self.head_dim


class DecodeCosts(NamedTuple):
    """Times are in microseconds.

    stream, pair: megabytes a microsecond that all CTAs read together, and that two neighbors do.
    block, block_of_column: a CTA takes `block + block_of_column * head_dim` for a key block, and at
    least `column * head_dim`. walk: the begin of a walk. last_wave: part of a walk that a last wave
    takes longer than its own time, if others came before. launch: of the kernel. combine,
    combine_batch, combine_of_number: of the second kernel, and a part of it for each
    COMBINED_AT_ONCE further splits, and for each number it reads. chunks: what equal chunks cost
    beside their blocks.
    """

    stream: float
    pair: float
    block: float
    block_of_column: float
    column: float
    walk: float
    last_wave: float
    launch: float
    combine: float
    combine_batch: float
    combine_of_number: float
    chunks: float

    def _block(self, work: DecodingWork) -> float:
        block = self.block + self.block_of_column * work.head_dim
        return max(block, self.column * work.head_dim)

    def _wave(self, work: DecodingWork, keys: float, ctas: int, num_sms: int) -> float:
        """The time of so many CTAs with so many keys each."""
        blocks, has_neighbors = keys / KEYS, 2 * ctas > num_sms
        shared = max(ctas / self.stream, 2 / self.pair if has_neighbors else 0.0)
        return max(blocks * self._block(work) + self.walk, blocks * work.block_mb * shared)

    def of_splits(self, work: DecodingWork, number: int, num_sms: int) -> float:
        """number: splits of each work tile, 1 for one pass."""
        keys = work.keys / number
        waves, rest = divmod(work.tiles * number, num_sms)
        cost = self.launch + waves * self._wave(work, keys, num_sms, num_sms)
        if waves and rest:
            # its CTAs begin one after the other
            alone = self._wave(work, keys, 1, num_sms) * (1 + self.last_wave)
            cost += max(alone, keys / KEYS * work.block_mb * rest / self.stream)
        elif rest:
            cost += self._wave(work, keys, rest, num_sms)
        if number > 1:
            batches = math.ceil(number / COMBINED_AT_ONCE) - 1
            cost += self.combine + self.combine_batch * batches
            cost += self.combine_of_number * number * work.rows * work.head_dim
        return cost

    def of_chunks(self, work: DecodingWork, num_sms: int) -> float:
        blocks = work.tiles * math.ceil(work.keys / KEYS)
        time = self._wave(work, KEYS * math.ceil(blocks / num_sms), num_sms // 2, num_sms)
        time = max(time, blocks * work.block_mb / self.stream)
        numbers = num_sms * work.rows * work.head_dim / work.tiles
        return self.launch + self.chunks + self.combine_of_number * numbers + time

    def cheapest(self, work: DecodingWork, num_sms: int) -> int:
        """Splits of each work tile, 1 for one pass, and 0 for equal stream-K chunks."""

        def costs() -> Iterator[tuple[float, int]]:
            yield self.of_chunks(work, num_sms), 0
            for number in NUMBERS:
                if number * KEYS <= work.keys:
                    yield self.of_splits(work, number, num_sms), number

        return min(costs())[1]


# Fitted to times of 143 shapes, H200, 28 and 29 November 2026 (docs/inside_serving.md).
HOPPER_COSTS = DecodeCosts(
    stream=4.58,
    pair=0.0856,
    block=0.412,
    block_of_column=0.0029,
    column=0.006,
    walk=0.09,
    last_wave=0.48,
    launch=3.95,
    combine=2.16,
    combine_batch=0.66,
    combine_of_number=6.5e-6,
    chunks=3.62,
)
