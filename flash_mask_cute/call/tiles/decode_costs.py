"""An estimate of the time of decoding: one pass, splits of each work tile, or stream-K chunks.

A CTA reads key blocks at a rate of its own, and all CTAs together at the rate of the memory. Work
tiles that fill a wave of CTAs take the longer of the two times. So a grid of half as many CTAs as
SMs may already saturate the memory, and then splits gain nothing.

The estimate is for sequences of equal lengths. Of lengths that differ, chunks are often better: 8
sequences of 1K to 8K keys took 56.0 us by chunks and 62.9 in one pass (H200, 29 November 2026).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

KEYS = 128
"""Keys of a block, the unit of costs."""
NUMBERS = 1, 2, 3, 4, 6, 8, 12, 16
"""Of splits: those that were timed."""


class DecodingWork(NamedTuple):
    """tiles: work tiles. keys: of a tile. head_dim: the mean of those of q and of v. rows: of
    queries, over all heads. itemsize: bytes of a key's column."""

    tiles: int
    keys: int
    head_dim: float
    rows: int
    itemsize: int = 2

    @property
    def block_mb(self) -> float:
        return 2e-6 * KEYS * self.head_dim * self.itemsize


class DecodeCosts(NamedTuple):
    """Times are in microseconds.

    stream: megabytes a microsecond that all CTAs read together. block, block_of_column: a CTA takes
    `block + block_of_column * head_dim` for a key block, and at least `column * head_dim`.
    uneven: CTAs on more than half of the SMs take as long as if this part of the idle SMs read, too
    (perhaps two SMs share a port). walk: the begin of a walk. last_wave: part of a walk that a last
    wave costs beside its own time.
    launch: of the kernel. combine, combine_of_number: of the second kernel, and a part of it for
    each number it reads. chunks, chunks_factor: what equal chunks cost beside their blocks.
    """

    stream: float
    block: float
    block_of_column: float
    column: float
    walk: float
    last_wave: float
    launch: float
    combine: float
    combine_of_number: float
    chunks: float
    chunks_factor: float
    uneven: float

    def _block(self, work: DecodingWork) -> float:
        block = self.block + self.block_of_column * work.head_dim
        return max(block, self.column * work.head_dim)

    def of_splits(self, work: DecodingWork, number: int, num_sms: int) -> float:
        """number: splits of each work tile, 1 for one pass."""
        block, blocks = self._block(work), work.keys / KEYS / number
        walk = blocks * block + self.walk
        stream = (blocks + self.walk / block) * work.block_mb / self.stream
        waves, rest = divmod(work.tiles * number, num_sms)
        cost = self.launch + waves * max(walk, num_sms * stream)
        if rest:
            uneven = self.uneven * (num_sms - rest) if 2 * rest > num_sms else 0.0
            cost += max(walk, (rest + uneven) * stream) + (self.last_wave * walk if waves else 0)
        if number > 1:
            cost += self.combine + self.combine_of_number * number * work.rows * work.head_dim
        return cost

    def of_chunks(self, work: DecodingWork, num_sms: int) -> float:
        blocks = work.tiles * work.keys / KEYS
        time = max(blocks / num_sms * self._block(work), blocks * work.block_mb / self.stream)
        return self.launch + self.chunks + self.chunks_factor * time

    def cheapest(self, work: DecodingWork, num_sms: int, may_differ: bool) -> int:
        """Splits of each work tile, 1 for one pass, and 0 for equal stream-K chunks. may_differ:
        sequences have at most `keys` keys; their mean is assumed to be half of that."""
        mean = work._replace(keys=work.keys // 2) if may_differ else work

        def costs() -> Iterator[tuple[float, int]]:
            yield self.of_chunks(mean, num_sms), 0
            for number in NUMBERS:
                if number * KEYS <= work.keys:
                    yield self.of_splits(work, number, num_sms), number

        return min(costs())[1]


# Fitted to 1,234 times of 142 shapes, H200, 28 and 29 November 2026 (docs/inside_serving.md).
HOPPER_COSTS = DecodeCosts(
    stream=4.575,
    block=0.538,
    block_of_column=0.00309,
    column=0.00568,
    walk=0.248,
    last_wave=0.224,
    launch=3.89,
    combine=2.74,
    combine_of_number=2.91e-6,
    chunks=4.99,
    chunks_factor=1.044,
    uneven=0.495,
)
