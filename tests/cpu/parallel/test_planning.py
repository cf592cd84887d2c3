"""Plans: rows of every rank, counted work and keys by brute force, swaps, refusals."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn_builders import DRAW, draw_lengths

from flash_mask_cute import builders
from flash_mask_cute.parallel import Plan, plan
from flash_mask_cute.parallel.planning import BLOCK
from flash_mask_cute.parallel.visibility import Visibility


@pytest.mark.parametrize("name", DRAW)
def test_work_and_keys_by_brute_force(name: str) -> None:
    """Tiles that are visited have a visible score, but for those that a kernel visits in vain."""
    rng = random.Random(f"plan {name}")
    for world in (2, 3):
        seqlen = 2 * BLOCK * world
        mask = DRAW[name](rng, seqlen).mask
        dense = mask.dense(seqlen)[0, 0]
        tiles = dense.unflatten(1, (-1, BLOCK)).any(2).unflatten(0, (-1, BLOCK)).any(1)
        found = plan(mask, world, seqlen=seqlen)
        assert sorted(x for r in range(world) for x in found.index(r).tolist()) == [*range(seqlen)]
        assert {len(found.index(r)) for r in range(world)} == {found.rows_per_rank}
        load = found.load(mask)
        for rank in range(world):
            rows = found.index(rank)
            seen = dense[rows].any(0)
            seen[rows] = False
            assert load.keys[rank] == int(seen.sum())
            assert load.tiles[rank] >= int(tiles[rows[::BLOCK] // BLOCK].sum())
        assert sum(load.tiles) <= int(tiles.sum()) + 2 * world


@pytest.mark.parametrize("ranges", [1, 2, 3, 5])
def test_keys_that_overlapping_ranges_hide(ranges: int) -> None:
    """From all rows, or not from all: ranges may be empty, nested and in any order."""
    g = torch.Generator().manual_seed(ranges)
    ends = torch.randint(0, 9, (1, 1, 4000, ranges, 2), generator=g).sort(-1).values.unbind(-1)
    rows = torch.arange(8)[:, None]
    hidden = ((ends[0][..., None, :] <= rows) & (rows < ends[1][..., None, :])).any(-1).all(-1)
    assert torch.equal(Visibility(*ends).is_seen(8), ~hidden[0, 0]) and hidden.any()


def test_it_is_even_where_contiguous_rows_are_not() -> None:
    """Documents as batches have them: 10 of them, and lengths of 0.4 to 1.6 of the mean."""
    rng = random.Random(0)
    seqlen, world, draws = 32768, 4, 10
    imbalance, share = [0.0, 0.0], [0.0, 0.0]
    contiguous = Plan([[(r * seqlen // world, (r + 1) * seqlen // world)] for r in range(world)])
    for _ in range(draws):
        parts = [rng.uniform(0.4, 1.6) for _ in range(10)]
        lengths = [int(seqlen * x / sum(parts)) for x in parts]
        mask = builders.causal_document(lengths, seqlen)
        found = plan(mask, world, seqlen=seqlen)
        assert max(map(len, found.rows)) <= 16
        for i, x in enumerate((contiguous, found)):
            imbalance[i] += x.load(mask).imbalance / draws
            share[i] += x.load(mask).foreign_share / draws
    assert imbalance[0] > 1.15 and imbalance[1] < 1.03
    # far from all keys, as scattered blocks would need
    assert share[0] < 0.12 and share[1] < 0.25


def test_contiguous_rows_stay_where_they_are_even() -> None:
    mask = builders.sliding_window(4096, 128)
    assert plan(mask, 4, seqlen=4096).rows == (
        ((0, 1024),), ((1024, 2048),), ((2048, 3072),), ((3072, 4096),),
    )  # fmt: skip
    assert plan(None, 2, seqlen=512).rows == (((0, 256),), ((256, 512),))


def test_the_work_of_several_masks_is_added() -> None:
    causal, window = builders.causal(2048), builders.sliding_window(2048, 100)
    found = plan([causal, window, None], 2, seqlen=2048)
    assert found.load(causal).imbalance < 1.1
    # work of a window alone is even with contiguous rows
    assert plan([window], 2, seqlen=2048).rows == (((0, 1024),), ((1024, 2048),))


def test_ranges_are_as_many_as_asked_for() -> None:
    rng = random.Random(1)
    mask = builders.causal_document(draw_lengths(rng, 8192), 8192)
    for most in (1, 2, 3, 5, 16):
        assert max(map(len, plan(mask, 4, seqlen=8192, max_ranges=most).rows)) <= most
    assert plan(mask, 4, seqlen=8192, max_ranges=1).rows[1] == ((2048, 4096),)


def test_a_band_beside_the_mask_counts() -> None:
    rows = Plan([[(0, 512)], [(512, 1024)]])
    assert rows.load(None).tiles == (32.0, 32.0) and rows.load(None).keys == (512, 512)
    assert rows.load(None, causal=True).tiles == (10.0, 26.0)
    assert rows.load(None, causal=True).keys == (0, 512)
    near = rows.load(None, causal=True, window_size=(64, None))
    assert near.tiles == (7.0, 8.0) and near.keys == (0, 64)
    assert rows.load(builders.causal(1024)).tiles == (10.0, 26.0)


def test_shards_are_joined_again() -> None:
    rows = Plan([[(0, 3), (9, 12)], [(3, 9)]])
    x = torch.randn(2, 12, 3)
    parts = [rows.shard(x, rank) for rank in range(2)]
    assert torch.equal(parts[0], x[:, [0, 1, 2, 9, 10, 11]])
    assert torch.equal(rows.unshard(parts), x)
    assert torch.equal(rows.unshard([rows.shard(x.mT, r, 2) for r in range(2)], 2), x.mT)
    assert rows.order().tolist() == [0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8]
    assert rows.order()[rows.places()].tolist() == list(range(12))


def test_a_rank_without_keys_of_others_needs_none() -> None:
    """Documents that end where ranks do."""
    mask = builders.causal_document([512, 512])
    load = plan(mask, 2, seqlen=1024).load(mask)
    assert load.keys == (0, 0) and load.foreign_share == 0 and load.imbalance == 1


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: plan(None, 4, seqlen=1000), ValueError,
         r"seqlen=1000 is no multiple of 128 \* world = 512: pad the sequence to 1024 tokens"),
        (lambda: plan(None, 0, seqlen=1000), ValueError, "world=0 is less than 1"),
        (lambda: plan(None, 2.0, seqlen=1024), TypeError, "world=2.0 is not an int"),
        (lambda: plan(None, 2, seqlen=1024, max_ranges=0), ValueError, "max_ranges=0"),
        (lambda: plan([], 2, seqlen=1024), ValueError, "masks is empty"),
        (lambda: plan(builders.causal(512), 2, seqlen=1024), ValueError, "masks was made for 512"),
        (lambda: plan(lambda b, h, q, k: q >= k, 2, seqlen=1024), NotImplementedError, "mask_mod"),
        (lambda: plan(torch.zeros(3), 2, seqlen=1024), TypeError, "masks is a Tensor"),
        (lambda: Plan([[(0, 4)], [(4, 7)]]), ValueError, r"ranks hold \[4, 3\] rows"),
        (lambda: Plan([[(0, 4)], [(3, 7)]]), ValueError, "row 3 is in two ranges"),
        (lambda: Plan([[(0, 4)], [(5, 9)]]), ValueError, "row 4 is in no range"),
        (lambda: Plan([[(4, 6), (0, 2)], [(2, 4)]]), ValueError, r"rows\[0\] has \(0, 2\), which"),
        (lambda: Plan([[(4, 4)]]), ValueError, r"\(4, 4\), which is empty"),
        (lambda: Plan([[(0, 4.0)]]), TypeError, r"\(0, 4.0\), which is not \(begin, end\)"),
        (lambda: Plan(3), TypeError, "rows=3 is not a list of ranges"),
        (lambda: Plan([]), ValueError, "rows has no ranks"),
        (lambda: Plan([[(0, 4)]]).index(1), ValueError, "rank=1 of a plan for 1 ranks"),
        (lambda: Plan([[(0, 4)]]).shard(torch.zeros(1, 5), 0), ValueError, "not 4 rows in dim=1"),
        (lambda: Plan([[(0, 4)]]).shard(torch.zeros(1, 4), 0, 2), ValueError, "4 rows in dim=2"),
        (lambda: Plan([[(0, 4)]]).shard([1], 0), TypeError, "x is a list, not a tensor"),
        (lambda: Plan([[(0, 4)]]).unshard([]), ValueError, "0 parts of a plan for 1 ranks"),
        (lambda: Plan([[(0, 4)], [(4, 8)]]).unshard([torch.zeros(1, 5), torch.zeros(1, 3)]),
         ValueError, r"parts\[0\] has shape \(1, 5\), not 4 rows in dim=1"),
        (lambda: Plan([[(0, 4)]]).load(None), ValueError, "not of whole blocks of 128 rows"),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
