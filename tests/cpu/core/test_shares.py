"""Shares of a line of key blocks, against the blocks written out one by one."""

from __future__ import annotations

import random

import pytest

from flash_mask_cute.core.shares import (
    DECODE_ROWS,
    LEAST_PLACES,
    LEAST_PLACES_OF_CHOICE,
    TILE_COST,
    Shares,
    TileOnLine,
    slot_of_first,
    slot_of_later,
)


def tiles_of(lengths: list[int]) -> list[TileOnLine]:
    tiles, start = [], 0
    for length in lengths:
        tiles.append(TileOnLine(start, length))
        start = tiles[-1].end
    return tiles


@pytest.mark.parametrize("seed", range(300))
def test_every_block_is_in_one_share(seed: int) -> None:
    draw = random.Random(seed)
    longest = draw.choice((1, 3, 20, 400))
    tiles = tiles_of([draw.randint(1, longest) for _ in range(draw.randint(1, 40))])
    num_shares = draw.randint(1, 150)
    least = draw.choice((LEAST_PLACES, LEAST_PLACES_OF_CHOICE))
    shares_of_line = Shares.create(tiles[-1].end, 1, num_shares, DECODE_ROWS, least)
    assert shares_of_line.num_lines == 1
    size = shares_of_line.size
    assert size >= least
    assert num_shares * size >= tiles[-1].end
    slots: dict[int, tuple[int, int]] = {}
    for number, tile in enumerate(tiles):
        splits = [(c, *tile.split(c, size)) for c in range(num_shares)]
        splits = [(c, first, end) for c, first, end in splits if first < end]
        # they follow each other, and make the whole tile
        shares = [c for c, _, _ in splits]
        first_share, count = tile.first_share(size), tile.num_splits(size)
        assert shares == list(range(first_share, first_share + count))
        assert [first for _, first, _ in splits] == [0] + [end for _, _, end in splits[:-1]]
        assert splits[-1][2] == tile.num_blocks
        assert all(end - first <= size for _, first, end in splits)
        if count == 1:
            continue
        # no slot is used twice
        for c, first, _ in splits:
            slot = slot_of_first(c) if first == 0 else slot_of_later(c)
            assert slot not in slots
            assert 0 <= slot < 2 * num_shares
            slots[slot] = (number, c)


@pytest.mark.parametrize("seed", range(100))
def test_every_place_of_every_head_has_a_cta(seed: int) -> None:
    draw = random.Random(seed)
    of_head, num_heads = draw.randint(1, 3000), draw.randint(1, 140)
    num_ctas, tile_m = draw.randint(1, 150), draw.choice((DECODE_ROWS, 2 * DECODE_ROWS))
    shares = Shares.create(of_head, num_heads, num_ctas, tile_m)
    assert num_heads % shares.num_lines == 0
    of_line = of_head * (num_heads // shares.num_lines)
    covered = set()
    for cta in range(num_ctas):
        line, share = shares.of_cta(cta)
        assert cta == line + share * shares.num_lines
        covered |= {(line, share)}
    needed = range(-(-of_line // shares.size))
    assert {(line, share) for line in range(shares.num_lines) for share in needed} <= covered
    if shares.num_lines > 1:
        assert tile_m == DECODE_ROWS
        assert shares.size >= 8 and shares.num_lines * (num_ctas // num_heads) >= 0.95 * num_ctas


def test_when_heads_have_lines_of_their_own() -> None:
    # 8 heads on 132 SMs: 16 CTAs each, and 128 are busy
    assert Shares.create(1025, 8, 132, DECODE_ROWS) == (8, 65)
    # queries that wait for products; shares of few blocks; 120 busy SMs
    assert Shares.create(1025, 8, 132, 2 * DECODE_ROWS) == (1, 63)
    assert Shares.create(33, 8, 132, DECODE_ROWS) == (1, 2)
    assert Shares.create(1025, 40, 132, DECODE_ROWS).num_lines == 1


def test_a_tile_costs_more_than_its_blocks() -> None:
    tile = TileOnLine(7, 3)
    assert (tile.first_block, tile.end) == (7 + TILE_COST, 10 + TILE_COST)
    # the place before its blocks may be the last one of a share, which then has none of them
    assert tile.split(0, tile.first_block) == (0, 0)
    assert tile.split(1, tile.first_block) == (0, 3)
