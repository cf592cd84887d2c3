"""BlockInfo against dense masks, and the same arithmetic traced by the DSL against Python ints."""

from dataclasses import dataclass, replace

import cutlass
import numpy as np
import pytest
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_mask_cute.block_info import BlockInfo
from flash_mask_cute.limits import OPEN_WINDOW
from flash_mask_cute.seqlen_info import SeqlenInfoQK, SeqlenInfoQKNewK


def dense_mask(info, seqlen_q, seqlen_k, *, left=True, right=True):
    """Visibility (packed rows, seqlen_k) by the rule itself; `left`/`right` switch an edge off."""
    q = np.arange(seqlen_q)[:, None]
    k = np.arange(seqlen_k)[None, :]
    shift = seqlen_k - seqlen_q
    visible = np.ones((seqlen_q, seqlen_k), dtype=bool)
    if right and info.is_causal:
        visible &= k <= q + shift
    if right and info.is_local and info.window_size_right is not None:
        visible &= k <= q + shift + info.window_size_right
    if left and info.is_local and info.window_size_left is not None:
        visible &= k >= q + shift - info.window_size_left
    return np.repeat(visible, info.qhead_per_kvhead_packgqa, axis=0)


def rows_of(mask, m_block, tile_m):
    return mask[m_block * tile_m : (m_block + 1) * tile_m]


def blocks_with(mask_1d, tile):
    """Sorted blocks of `tile` entries that hold a True."""
    return sorted({int(i) // tile for i in np.flatnonzero(mask_1d)})


def num_blocks(length, tile):
    return -(-length // tile)


@st.composite
def block_infos(draw, **fixed):
    is_causal = draw(st.booleans())
    is_local = draw(st.booleans())
    left = right = None
    if is_local:
        side = st.one_of(st.none(), st.integers(0, 6), st.integers(-5, 45), st.just(10_000))
        left, right = draw(side), draw(side)
        edge = min([x for x in (right, 0 if is_causal else None) if x is not None], default=None)
        if left is not None and edge is not None and left + edge < 0:
            left = -edge
    return BlockInfo(
        tile_m=draw(st.integers(1, 9)),
        tile_n=draw(st.integers(1, 9)),
        is_causal=is_causal,
        is_local=is_local,
        window_size_left=left,
        window_size_right=right,
        qhead_per_kvhead_packgqa=draw(st.sampled_from([1, 1, 2, 3, 5, 8])),
        **fixed,
    )


lengths = st.integers(0, 40)


@settings(max_examples=400, deadline=None)
@given(block_infos(), lengths, lengths)
def test_n_range_is_exactly_the_visible_tiles(info, seqlen_q, seqlen_k):
    seqlen_info = SeqlenInfoQK.create(0, seqlen_q, seqlen_k)
    mask = dense_mask(info, seqlen_q, seqlen_k)
    for m_block in range(num_blocks(len(mask), info.tile_m) + 2):
        n_min, n_max = info.get_n_block_min_max(seqlen_info, m_block)
        assert 0 <= n_min <= n_max
        seen = rows_of(mask, m_block, info.tile_m).any(axis=0)
        assert list(range(n_min, n_max)) == blocks_with(seen, info.tile_n)


@settings(max_examples=400, deadline=None)
@given(block_infos(), lengths, lengths)
def test_m_range_is_exactly_the_visible_tiles(info, seqlen_q, seqlen_k):
    seqlen_info = SeqlenInfoQK.create(0, seqlen_q, seqlen_k)
    mask = dense_mask(info, seqlen_q, seqlen_k)
    for n_block in range(num_blocks(seqlen_k, info.tile_n) + 2):
        m_min, m_max = info.get_m_block_min_max(seqlen_info, n_block)
        assert 0 <= m_min <= m_max
        seen = rows_of(mask.T, n_block, info.tile_n).any(axis=0)
        assert list(range(m_min, m_max)) == blocks_with(seen, info.tile_m)


@settings(max_examples=400, deadline=None)
@given(block_infos(), lengths, lengths)
def test_edge_methods_separate_masked_from_unmasked_blocks(info, seqlen_q, seqlen_k):
    seqlen_info = SeqlenInfoQK.create(0, seqlen_q, seqlen_k)
    mask = dense_mask(info, seqlen_q, seqlen_k)
    pad = ((0, 0), (0, -seqlen_k % info.tile_n))
    right_only = np.pad(dense_mask(info, seqlen_q, seqlen_k, left=False), pad)
    left_only = np.pad(dense_mask(info, seqlen_q, seqlen_k, right=False), pad, constant_values=True)
    for m_block in range(num_blocks(len(mask), info.tile_m)):
        n_min, n_max = info.get_n_block_min_max(seqlen_info, m_block)
        right = info.get_n_block_min_causal_local_mask(seqlen_info, m_block, n_min)
        left = info.get_n_block_min_before_local_mask(seqlen_info, m_block, n_min)
        if n_min < n_max:
            assert n_min <= right <= n_max
            assert n_min <= left <= n_max
        for n_block in range(n_min, n_max):
            keys = slice(n_block * info.tile_n, (n_block + 1) * info.tile_n)
            clear_of_right = rows_of(right_only, m_block, info.tile_m)[:, keys].all()
            clear_of_left = rows_of(left_only, m_block, info.tile_m)[:, keys].all()
            assert (n_block < right) == clear_of_right
            assert (n_block >= left) == clear_of_left
        # From a later start, as in a split, the answer is only clamped.
        start = n_min + 1
        assert info.get_n_block_min_causal_local_mask(seqlen_info, m_block, start) == max(
            start, right
        )
        assert info.get_n_block_min_before_local_mask(seqlen_info, m_block, start) == max(
            start, left
        )


@settings(max_examples=300, deadline=None)
@given(block_infos(is_split_kv=True), lengths, lengths, st.integers(1, 9))
def test_splits_partition_the_range(info, seqlen_q, seqlen_k, num_splits):
    seqlen_info = SeqlenInfoQK.create(0, seqlen_q, seqlen_k)
    whole_info = replace(info, is_split_kv=False)
    rows = seqlen_q * info.qhead_per_kvhead_packgqa
    for m_block in range(num_blocks(rows, info.tile_m) + 1):
        n_min, n_max = whole_info.get_n_block_min_max(seqlen_info, m_block, 1, num_splits)
        splits = [
            info.get_n_block_min_max(seqlen_info, m_block, split, num_splits)
            for split in range(num_splits)
        ]
        assert all(lo <= hi for lo, hi in splits)
        assert [n for lo, hi in splits for n in range(lo, hi)] == list(range(n_min, n_max))
        assert max(hi - lo for lo, hi in splits) == num_blocks(n_max - n_min, num_splits)


@settings(max_examples=400, deadline=None)
@given(st.data(), st.booleans(), lengths, lengths, st.integers(0, 20))
def test_new_k_range_is_the_new_keys_of_the_visited_tiles(data, split_kv, seqlen_q, cached, new):
    info = data.draw(block_infos(is_split_kv=split_kv))
    num_splits = data.draw(st.integers(1, 4)) if split_kv else 1
    seqlen_info = SeqlenInfoQKNewK.create(
        0, SeqlenInfoQK.create(0, seqlen_q, cached), seqlen_k_new_static=new
    )
    mask = dense_mask(info, seqlen_q, cached + new)
    for m_block in range(num_blocks(len(mask), info.tile_m) + 1):
        seen = rows_of(mask, m_block, info.tile_m).any(axis=0)
        read_by_any_split = set()
        for split in range(num_splits):
            n_min, n_max = info.get_n_block_min_max(seqlen_info, m_block, split, num_splits)
            tile_keys = range(n_min * info.tile_n, n_max * info.tile_n)
            expected = {(k - cached) // info.tile_n for k in tile_keys if 0 <= k - cached < new}
            lo, hi = info.get_n_block_k_new_min_max(seqlen_info, m_block, split, num_splits)
            assert 0 <= lo <= hi
            assert set(range(lo, hi)) == expected
            read_by_any_split |= expected
        assert read_by_any_split >= {
            (int(k) - cached) // info.tile_n for k in np.flatnonzero(seen) if k >= cached
        }


def causal(**options):
    return BlockInfo(tile_m=128, tile_n=128, is_causal=True, **options)


def test_article_examples():
    info, seqlen_info = causal(), SeqlenInfoQK.create(0, 256, 256)
    assert [info.get_n_block_min_max(seqlen_info, m) for m in range(2)] == [(0, 1), (0, 2)]
    assert [info.get_m_block_min_max(seqlen_info, n) for n in range(2)] == [(0, 2), (1, 2)]
    assert info.get_n_block_min_max(SeqlenInfoQK.create(0, 1, 1000), 0) == (0, 8)


def test_article_packed_gqa_example():
    """128 packed rows are 16 query positions: `seqlen_q` counts positions, not rows."""
    info = causal(qhead_per_kvhead_packgqa=8)
    assert info.get_n_block_min_max(SeqlenInfoQK.create(0, 16, 16), 0) == (0, 1)
    small = replace(info, tile_n=8)
    assert small.get_n_block_min_max(SeqlenInfoQK.create(0, 32, 32), 0) == (0, 2)
    assert small.get_n_block_min_max(SeqlenInfoQK.create(0, 32, 32), 1) == (0, 4)
    assert small.get_m_block_min_max(SeqlenInfoQK.create(0, 32, 32), 2) == (1, 2)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (2560, [(0, 5), (5, 10), (10, 15), (15, 20)]),
        # 2560 keys each and 2320 in the last, not 2500 each
        (10000, [(0, 20), (20, 40), (40, 60), (60, 79)]),
        # more splits than pieces
        (5 * 128, [(0, 2), (2, 4), (4, 5), (5, 5)]),
    ],
)
def test_splits_are_cut_at_block_boundaries(keys, expected):
    info, seqlen_info = causal(is_split_kv=True), SeqlenInfoQK.create(0, 1, keys)
    ranges = [info.get_n_block_min_max(seqlen_info, 0, split, 4) for split in range(4)]
    assert ranges == expected


def test_article_append_example():
    cache = SeqlenInfoQK.create(0, 1, 1000)
    seqlen_info = SeqlenInfoQKNewK.create(0, cache, seqlen_k_new_static=10)
    assert causal().get_n_block_min_max(seqlen_info, 0) == (0, 8)
    assert causal().get_n_block_k_new_min_max(seqlen_info, 0) == (0, 1)


def test_split_that_ends_before_the_new_keys_reads_none():
    cache = SeqlenInfoQK.create(0, 1, 1000)
    seqlen_info = SeqlenInfoQKNewK.create(0, cache, seqlen_k_new_static=10)
    info = causal(is_split_kv=True)
    counts = [
        hi - lo
        for lo, hi in (info.get_n_block_k_new_min_max(seqlen_info, 0, s, 4) for s in range(4))
    ]
    assert counts == [0, 0, 0, 1]


def test_more_queries_than_keys_leaves_empty_blocks():
    """Bottom-right alignment: the first 384 of 512 queries see none of 128 keys."""
    info, seqlen_info = causal(), SeqlenInfoQK.create(0, 512, 128)
    ranges = [info.get_n_block_min_max(seqlen_info, m) for m in range(4)]
    assert ranges == [(0, 0), (0, 0), (0, 0), (0, 1)]
    assert info.get_m_block_min_max(seqlen_info, 0) == (3, 4)


def test_causal_and_right_window_apply_together():
    seqlen_info = SeqlenInfoQK.create(0, 8, 8)
    info = BlockInfo(tile_m=1, tile_n=1, is_causal=True, is_local=True, window_size_right=3)
    assert [info.get_n_block_min_max(seqlen_info, m) for m in (0, 5)] == [(0, 1), (0, 6)]
    strict = replace(info, window_size_right=-1)
    assert [strict.get_n_block_min_max(seqlen_info, m) for m in (0, 5)] == [(0, 0), (0, 5)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_size_left": 4}, "window_size_left=4.*is_local=False"),
        ({"window_size_right": 4, "is_causal": True}, "window_size_right=4.*is_local=False"),
        ({"is_local": True, "window_size_left": 2, "window_size_right": -3}, "window is empty"),
        ({"is_local": True, "window_size_left": -1, "is_causal": True}, "window is empty"),
        ({"qhead_per_kvhead_packgqa": 0}, "qhead_per_kvhead_packgqa must be positive, got 0"),
    ],
)
def test_contradictory_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BlockInfo(tile_m=8, tile_n=8, **options)


@dataclass(frozen=True)
class Variant:
    """What is static in one traced function; the rest comes from a row of numbers."""

    is_causal: bool = False
    has_left: bool = False
    has_right: bool = False
    is_split_kv: bool = False
    heads: int = 1
    static_lengths: tuple[int, int, int] | None = None


COLUMNS = ("seqlen_q", "cached", "new", "left", "right", "block", "split_idx", "num_splits")


def all_methods(variant, row):
    """Every number BlockInfo computes for one row; `row` holds ints or Int32."""
    seqlen_q, cached, new, left, right, block, split_idx, num_splits = row
    if variant.static_lengths is not None:
        seqlen_q, cached, new = variant.static_lengths
    info = BlockInfo(
        tile_m=8,
        tile_n=4,
        is_causal=variant.is_causal,
        is_local=variant.has_left or variant.has_right,
        is_split_kv=variant.is_split_kv,
        window_size_left=left if variant.has_left else None,
        window_size_right=right if variant.has_right else None,
        qhead_per_kvhead_packgqa=variant.heads,
    )
    seqlen_info = SeqlenInfoQKNewK.create(
        0, SeqlenInfoQK.create(0, seqlen_q, cached), seqlen_k_new_static=new
    )
    n_min, n_max = info.get_n_block_min_max(seqlen_info, block, split_idx, num_splits)
    m_min, m_max = info.get_m_block_min_max(seqlen_info, block)
    new_min, new_max = info.get_n_block_k_new_min_max(seqlen_info, block, split_idx, num_splits)
    right_edge = info.get_n_block_min_causal_local_mask(seqlen_info, block, n_min)
    left_edge = info.get_n_block_min_before_local_mask(seqlen_info, block, n_min)
    return n_min, n_max, m_min, m_max, new_min, new_max, right_edge, left_edge


NUM_RESULTS = 8


@cute.jit
def traced_methods(rows: cute.Tensor, out: cute.Tensor, num_rows: int, variant: cutlass.Constexpr):
    """out[i, :8] = all_methods(row i), out[i, 8] = blocks counted by a loop over the n range."""
    for i in range(num_rows):
        results = all_methods(variant, [rows[i, c] for c in range(len(COLUMNS))])
        for r in cutlass.range_constexpr(NUM_RESULTS):
            out[i, r] = results[r]
        visited = cutlass.Int32(0)
        for _ in range(results[0], results[1]):
            visited += 1
        out[i, NUM_RESULTS] = visited


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(Variant(), id="full"),
        pytest.param(Variant(is_causal=True), id="causal"),
        pytest.param(Variant(is_causal=True, heads=3), id="causal-packed"),
        pytest.param(Variant(has_left=True), id="left"),
        pytest.param(Variant(has_right=True, heads=16), id="right-packed-wide"),
        pytest.param(Variant(has_left=True, has_right=True, heads=4), id="window-packed"),
        pytest.param(Variant(True, True, True, is_split_kv=True), id="causal-window-split"),
        pytest.param(
            Variant(True, is_split_kv=True, heads=2, static_lengths=(21, 15, 6)),
            id="causal-split-packed-static",
        ),
    ],
)
def test_traced_arithmetic_equals_python(variant):
    rng = np.random.default_rng(0)
    grid = [
        (seqlen_q, cached, new, left, right, block, split_idx, 3)
        for seqlen_q in (0, 1, 7, 21)
        for cached in (0, 5, 24)
        for new in (0, 6)
        for left, right in ((0, 0), (3, 1), (100, 100), (9, -2), (-2, 9), (0, -OPEN_WINDOW))
        for block in range(7)
        for split_idx in range(3)
        if left >= 0 or not variant.is_causal
        if left + right >= 0 or not variant.has_left
    ]
    grid = [grid[i] for i in rng.permutation(len(grid))[:900]]
    expected = []
    for row in grid:
        results = all_methods(variant, row)
        expected.append([*results, results[1] - results[0]])

    rows = torch.tensor(grid, dtype=torch.int32)
    out = torch.full((len(grid), NUM_RESULTS + 1), -12345, dtype=torch.int32)
    traced_methods(from_dlpack(rows), from_dlpack(out), len(grid), variant)
    assert out.tolist() == expected
