"""Shares of a line of key blocks, against the blocks written out one by one."""

from __future__ import annotations

import random

import pytest

from flash_mask_cute.core.shares import (
    TILE_COST,
    TileOnLine,
    share_size,
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
    num_shares, least = draw.randint(1, 150), draw.choice((1, 1, 2, 5))
    size = share_size(tiles[-1].end, num_shares, least)
    assert size >= least
    assert num_shares * size >= tiles[-1].end
    slots: dict[int, tuple[int, int]] = {}
    for number, tile in enumerate(tiles):
        pieces = [(c, *tile.piece(c, size)) for c in range(num_shares)]
        pieces = [(c, first, end) for c, first, end in pieces if first < end]
        # they follow each other, and make the whole tile
        shares = [c for c, _, _ in pieces]
        first_share, count = tile.first_share(size), tile.num_pieces(size)
        assert shares == list(range(first_share, first_share + count))
        assert [first for _, first, _ in pieces] == [0] + [end for _, _, end in pieces[:-1]]
        assert pieces[-1][2] == tile.num_blocks
        assert all(end - first <= size for _, first, end in pieces)
        if count == 1:
            continue
        # no slot is used twice
        for c, first, _ in pieces:
            slot = slot_of_first(c) if first == 0 else slot_of_later(c)
            assert slot not in slots
            assert 0 <= slot < 2 * num_shares
            slots[slot] = (number, c)


def test_a_tile_costs_more_than_its_blocks() -> None:
    tile = TileOnLine(7, 3)
    assert (tile.first_block, tile.end) == (7 + TILE_COST, 10 + TILE_COST)
    # the place before its blocks may be the last one of a share, which then has none of them
    assert tile.piece(0, tile.first_block) == (0, 0)
    assert tile.piece(1, tile.first_block) == (0, 3)
