"""Band against the visibility rule spelled out element by element."""

import subprocess
import sys

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_mask_cute.index_math import imax, imin
from flash_mask_cute.rules.band import Band


@st.composite
def bands(draw):
    side = st.one_of(st.none(), st.integers(-4, 24), st.just(10_000))
    left, right = draw(side), draw(side)
    if left is not None and right is not None and left + right < 0:
        right = -left
    return Band(draw(st.integers(0, 20)), draw(st.integers(0, 20)), left, right)


def sees(band, q, k):
    shift = band.seqlen_k - band.seqlen_q
    left_ok = band.window_left is None or k >= q + shift - band.window_left
    right_ok = band.window_right is None or k <= q + shift + band.window_right
    return left_ok and right_ok


@settings(max_examples=1000, deadline=None)
@given(bands())
def test_ranges_are_the_visible_elements(band):
    for q in range(band.seqlen_q):
        lo, hi = band.k_range(q)
        assert 0 <= lo <= hi <= band.seqlen_k
        assert list(range(lo, hi)) == [k for k in range(band.seqlen_k) if sees(band, q, k)]
    for k in range(band.seqlen_k):
        lo, hi = band.q_range(k)
        assert 0 <= lo <= hi <= band.seqlen_q
        assert list(range(lo, hi)) == [q for q in range(band.seqlen_q) if sees(band, q, k)]


@settings(max_examples=300, deadline=None)
@given(bands())
def test_tensors_give_the_dense_mask_both_ways(band):
    q_idx = torch.arange(band.seqlen_q, dtype=torch.int32)[:, None]
    k_idx = torch.arange(band.seqlen_k, dtype=torch.int32)[None, :]
    expected = torch.tensor(
        [[sees(band, q, k) for k in range(band.seqlen_k)] for q in range(band.seqlen_q)],
        dtype=torch.bool,
    ).reshape(band.seqlen_q, band.seqlen_k)
    lo, hi = band.k_range(q_idx)
    assert torch.equal(((k_idx >= lo) & (k_idx < hi)).expand_as(expected), expected)
    lo, hi = band.q_range(k_idx)
    assert torch.equal(((q_idx >= lo) & (q_idx < hi)).expand_as(expected), expected)


def test_tensors_keep_their_dtype():
    lo, hi = Band(4, 4, 1, 1).k_range(torch.arange(4, dtype=torch.int32))
    assert lo.dtype == hi.dtype == torch.int32


def test_min_max_of_mixed_operands():
    a = torch.tensor([1, 5], dtype=torch.int32)
    assert imin(a, 3).tolist() == [1, 3] and imin(3, a).tolist() == [1, 3]
    assert imax(a, 3).tolist() == [3, 5] and imax(3, a).tolist() == [3, 5]
    assert imin(a, a.flip(0)).tolist() == [1, 1] and imax(2, 7) == 7 and imin(2, 7) == 2


def test_import_needs_neither_cutlass_nor_torch():
    code = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("band", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["band"] = module
spec.loader.exec_module(module)
assert module.Band(4, 6, 1, 0).k_range(2) == (3, 5)
assert not {"torch", "cutlass"} & set(sys.modules)
"""
    path = sys.modules[Band.__module__].__file__
    subprocess.run([sys.executable, "-c", code, path], check=True)
