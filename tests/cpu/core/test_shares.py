"""Shares of a line of key blocks, against the blocks written out one by one."""

from __future__ import annotations

import random

import pytest

from flash_mask_cute.core.shares import (
    SHARES_PER_SEGMENT,
    SLOTS_PER_SHARE,
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
    num_ctas, least = draw.randint(1, 150), draw.choice((1, 1, 2, 5, 60, 200))
    most = num_ctas * draw.choice((1, SHARES_PER_SEGMENT))
    line = Shares.create(tiles[-1].end, num_ctas, most, least)
    assert line.segment >= least
    assert num_ctas * line.segment >= tiles[-1].end
    assert line.number <= most
    # the shares follow each other, and turns take each of them once
    begins = [line.begin(share) for share in range(line.number + 1)]
    assert begins[0] == 0 and begins[-1] == num_ctas * line.segment
    assert begins == sorted(begins)
    assert sorted(line.of_turn(turn) for turn in range(line.number)) == [*range(line.number)]
    assert [line.begin(line.of_turn(cta)) for cta in range(num_ctas)] == [
        cta * line.segment for cta in range(num_ctas)
    ]
    slots: dict[int, tuple[int, int]] = {}
    for number, tile in enumerate(tiles):
        pieces = [(c, *tile.piece(line, c)) for c in range(line.number)]
        pieces = [(c, first, end) for c, first, end in pieces if first < end]
        # they follow each other, and make the whole tile
        shares = [c for c, _, _ in pieces]
        first_share, count = tile.first_share(line), tile.num_pieces(line)
        assert shares == list(range(first_share, first_share + count))
        assert [first for _, first, _ in pieces] == [0] + [end for _, _, end in pieces[:-1]]
        assert pieces[-1][2] == tile.num_blocks
        assert all(end - first <= line.end(c) - line.begin(c) for c, first, end in pieces)
        if count == 1:
            continue
        # no slot is used twice
        for c, first, _ in pieces:
            slot = slot_of_first(c) if first == 0 else slot_of_later(c)
            assert slot not in slots
            assert 0 <= slot < SLOTS_PER_SHARE * line.number
            slots[slot] = (number, c)


def test_claimed_shares_get_shorter() -> None:
    """Of 100 places a CTA has all but 14, and 8, 4 and 2 of them are claimed."""
    line = Shares.create(300, 3, 3 * SHARES_PER_SEGMENT)
    lengths = [line.end(share) - line.begin(share) for share in range(line.number)]
    assert lengths == [86, 8, 4, 2] * 3
    assert [line.of_turn(turn) for turn in range(6)] == [0, 4, 8, 1, 5, 9]


def test_short_segments_are_one_share() -> None:
    for line in (Shares.create(141, 3, 12), Shares.create(300, 3, 3)):
        assert line.number == 3
        assert [line.of_turn(turn) for turn in range(3)] == [0, 1, 2]


def test_a_tile_costs_more_than_its_blocks() -> None:
    tile = TileOnLine(7, 3)
    assert (tile.first_block, tile.end) == (7 + TILE_COST, 10 + TILE_COST)
    # the place before its blocks may be the last one of a share, which then has none of them
    line = Shares(2, tile.first_block, 0)
    assert tile.piece(line, 0) == (0, 0)
    assert tile.piece(line, 1) == (0, 3)
