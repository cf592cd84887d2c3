"""Chunks of a line of key blocks, against the blocks written out one by one."""

from __future__ import annotations

import random

import pytest

from flash_mask_cute.core.stream_k import (
    DECODE_ROWS,
    StreamKChunks,
    TileOnLine,
    partial_tile_of_first,
    partial_tile_of_later,
    tile_cost,
)


def tiles_of(lengths: list[int], tile_m: int) -> list[TileOnLine]:
    tiles, start = [], 0
    for length in lengths:
        tiles.append(TileOnLine(start, length, tile_cost(tile_m)))
        start = tiles[-1].end
    return tiles


@pytest.mark.parametrize("seed", range(300))
def test_every_block_is_in_one_share(seed: int) -> None:
    draw = random.Random(seed)
    longest, tile_m = draw.choice((1, 3, 20, 400)), draw.choice((DECODE_ROWS, 2 * DECODE_ROWS))
    tiles = tiles_of([draw.randint(1, longest) for _ in range(draw.randint(1, 40))], tile_m)
    num_chunks = draw.randint(1, 150)
    least = draw.choice((0, 1))
    chunks_of_line = StreamKChunks.create(tiles[-1].end, 1, num_chunks, tile_m, least)
    assert chunks_of_line.num_lines == 1
    size = chunks_of_line.size
    assert size >= (least or 1 + tile_cost(tile_m))
    assert num_chunks * size >= tiles[-1].end
    partial_tiles: dict[int, tuple[int, int]] = {}
    for number, tile in enumerate(tiles):
        splits = [(c, *tile.split(c, size)) for c in range(num_chunks)]
        splits = [(c, first, end) for c, first, end in splits if first < end]
        # they follow each other, and make the whole tile
        chunks = [c for c, _, _ in splits]
        first_chunk, count = tile.first_chunk(size), tile.num_splits(size)
        assert chunks == list(range(first_chunk, first_chunk + count))
        assert [first for _, first, _ in splits] == [0] + [end for _, _, end in splits[:-1]]
        assert splits[-1][2] == tile.num_blocks
        assert all(end - first <= size for _, first, end in splits)
        if count == 1:
            continue
        # no partial tile is used twice
        for c, first, _ in splits:
            partial_tile = partial_tile_of_first(c) if first == 0 else partial_tile_of_later(c)
            assert partial_tile not in partial_tiles
            assert 0 <= partial_tile < 2 * num_chunks
            partial_tiles[partial_tile] = (number, c)


@pytest.mark.parametrize("seed", range(100))
def test_every_place_of_every_head_has_a_cta(seed: int) -> None:
    draw = random.Random(seed)
    of_head, num_heads = draw.randint(1, 3000), draw.randint(1, 140)
    num_ctas, tile_m = draw.randint(1, 150), draw.choice((DECODE_ROWS, 2 * DECODE_ROWS))
    chunks = StreamKChunks.create(of_head, num_heads, num_ctas, tile_m)
    assert num_heads % chunks.num_lines == 0
    of_line = of_head * (num_heads // chunks.num_lines)
    covered = set()
    for cta in range(num_ctas):
        line, chunk = chunks.of_cta(cta)
        assert cta == line + chunk * chunks.num_lines
        covered |= {(line, chunk)}
    needed = range(-(-of_line // chunks.size))
    assert {(line, chunk) for line in range(chunks.num_lines) for chunk in needed} <= covered
    if chunks.num_lines > 1:
        assert tile_m == DECODE_ROWS
        assert chunks.size >= 8 and chunks.num_lines * (num_ctas // num_heads) >= 0.95 * num_ctas


def test_when_heads_have_lines_of_their_own() -> None:
    # 8 heads on 132 SMs: 16 CTAs each, and 128 are busy
    assert StreamKChunks.create(1024, 8, 132, DECODE_ROWS) == (8, 64)
    # queries that wait for products; chunks of few blocks; 120 busy SMs
    assert StreamKChunks.create(1025, 8, 132, 2 * DECODE_ROWS) == (1, 63)
    assert StreamKChunks.create(33, 8, 132, DECODE_ROWS) == (1, 2)
    assert StreamKChunks.create(1025, 40, 132, DECODE_ROWS).num_lines == 1


def test_a_tile_costs_more_than_its_blocks() -> None:
    """Not in decoding: there chunks that divide equal tiles have as many blocks each."""
    tile = TileOnLine(7, 3, tile_cost(2 * DECODE_ROWS))
    assert (tile.first_block, tile.end) == (8, 11)
    tiles = tiles_of([32] * 8, DECODE_ROWS)
    size = StreamKChunks.create(tiles[-1].end, 1, 16, DECODE_ROWS).size
    assert size == 16 and all(tile.num_splits(size) == 2 for tile in tiles)
    # the place before its blocks may be the last one of a chunk, which then has none of them
    assert tile.split(0, tile.first_block) == (0, 0)
    assert tile.split(1, tile.first_block) == (0, 3)
