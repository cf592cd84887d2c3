"""Even distribution of a launch's key blocks over its CTAs.

All key blocks that a launch visits form a line, ordered by sequence, head, work tile, and the
blocks of its walk. A work tile takes `tile_cost` places before its blocks, for its query and its
output. The line is cut into chunks of one length, one for each CTA. In decoding each head has a
line of its own if that leaves few CTAs idle. All these lines are cut at the same places. Then
neighbouring CTAs read the same keys of all heads at the same time, which saves bandwidth.

So a work tile may lie in several chunks; its parts are its *splits*, and their results are combined
afterwards. (Stream-K, Osama et al. 2023, for attention as in Lean Attention, Sanovar et al. 2024;
FlashMLA schedules alike.)

A chunk has at most two splits of incomplete work tiles: one of a tile that began before it, and one
of a tile that ends after it. So results of splits need two partial tiles for each chunk, for
sequences of any length.

Everything is arithmetic without a branch on a value, on ints and, traced, on `cutlass.Int32`, in
any mixture.
"""

from __future__ import annotations

from typing import NamedTuple

from flash_mask_cute.index_math import IntLike, imax, imin

# How work tiles are computed in splits, and where their results lie: by rows of the output, as many
# splits of each work tile, or in partial tiles of chunks.
BY_ROWS, BY_STREAM_K = "rows", "stream_k"
PARTIAL_TILES_PER_CHUNK = 2
# words of a `PendingCombine` in memory
PENDING_WORDS = 8
# of results that are combined: a lane holds several splits of its columns in registers
MAX_COLUMNS = 512
# Heads have lines of their own if chunks then have at least so many places, and if at least 19 of
# 20 CTAs have a chunk.
_LEAST_PLACES_OF_HEAD = 8
_BUSY, _OF = 19, 20
# rows of a work tile of decoding, which waits for memory
DECODE_ROWS = 64
# Query rows that share keys, up to which each thread of a tile on Hopper has only one of its two
FEW_ROWS = DECODE_ROWS // 2


def tile_cost(tile_m: int) -> int:
    """Places that a work tile takes besides its key blocks. Those of decoding take none: chunks of
    equal tiles are then cut at the same blocks, and have as many."""
    return 0 if tile_m <= DECODE_ROWS else 1


class StreamKChunks(NamedTuple):
    """num_lines: 1, or the number of heads. size: places of a chunk; the last ones may be empty. A
    CTA has a chunk of one of the lines, and CTAs with the same chunk are neighbours."""

    num_lines: IntLike
    size: IntLike

    @classmethod
    def create(
        cls,
        places_of_head: IntLike,
        num_heads: IntLike,
        num_ctas: IntLike,
        tile_m: int,
        least_places: int = 0,
    ) -> StreamKChunks:
        """places_of_head: all work tiles'. tile_m: rows of one. least_places: of a chunk; 0: a tile
        with one block."""
        lines: IntLike = 1
        if tile_m <= DECODE_ROWS:
            ctas_of_head = num_ctas // num_heads
            busy = are_busy(ctas_of_head * num_heads, num_ctas)
            are_long = imin(places_of_head // imax(ctas_of_head * _LEAST_PLACES_OF_HEAD, 1), 1)
            lines = busy * are_long * (num_heads - 1) + 1
        places, chunks = places_of_head * (num_heads // lines), num_ctas // lines
        least_places = least_places or 1 + tile_cost(tile_m)
        return cls(lines, imax((places + (chunks - 1)) // chunks, least_places))

    def of_cta(self, cta: IntLike) -> tuple[IntLike, IntLike]:
        """The line and the chunk of a CTA. Chunks of the last CTAs may lie after the end."""
        return cta % self.num_lines, cta // self.num_lines


def are_busy(num_chunks: IntLike, num_ctas: IntLike) -> IntLike:
    """1 if so many chunks leave few of the CTAs idle, else 0."""
    return imin(num_chunks * _OF // (num_ctas * _BUSY), 1)


class TileOnLine(NamedTuple):
    """A work tile: its first place on the line, its number of blocks, at least 1, and its
    `tile_cost`."""

    start: IntLike
    num_blocks: IntLike
    cost: int

    @property
    def end(self) -> IntLike:
        return self.first_block + self.num_blocks

    @property
    def first_block(self) -> IntLike:
        return self.start + self.cost

    def split(self, chunk: IntLike, size: IntLike) -> tuple[IntLike, IntLike]:
        """The blocks [first, end) of this tile, counted from its first one, that lie in a chunk;
        first == end if there are none. size: places of a chunk."""
        begin = chunk * size - self.first_block
        first = imin(imax(begin, 0), self.num_blocks)
        return first, imax(imin(begin + size, self.num_blocks), first)

    def first_chunk(self, size: IntLike) -> IntLike:
        return self.first_block // size

    def num_splits(self, size: IntLike) -> IntLike:
        """Number of chunks that contain its blocks: consecutive chunks from `first_chunk` on."""
        return (self.end - 1) // size - self.first_chunk(size) + 1


def partial_tile_of_first(cta: IntLike) -> IntLike:
    """The partial tile of the split of a tile that begins in a CTA's chunk and ends after it."""
    return cta * PARTIAL_TILES_PER_CHUNK + 1


def partial_tile_of_later(cta: IntLike) -> IntLike:
    """The partial tile of the split of a tile that began before a CTA's chunk."""
    return cta * PARTIAL_TILES_PER_CHUNK
