"""Lengths and offsets per batch entry against slices of the packed query list."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_mask_cute.seqlen_info import SeqlenInfoQK, SeqlenInfoQKNewK

containers = st.sampled_from(
    [
        lambda values: list(values),
        lambda values: torch.tensor(values, dtype=torch.int32),
        lambda values: np.array(values, dtype=np.int32),
    ]
)


def cumulative(lengths):
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def test_dense_takes_the_static_lengths():
    assert SeqlenInfoQK.create(3, 256, 512) == SeqlenInfoQK(0, 0, 256, 512)


@settings(max_examples=300, deadline=None)
@given(st.data(), containers)
def test_create_selects_the_tokens_of_the_entry(data, make):
    batch = data.draw(st.integers(1, 5))
    static = {"q": 30, "k": 40}
    arguments, expected, flags = {}, {}, {}
    for side in "qk":
        lengths = data.draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
        used = [data.draw(st.integers(0, length)) for length in lengths]
        packed, shortened = data.draw(st.booleans()), data.draw(st.booleans())
        if packed:
            arguments[f"mCuSeqlens{side.upper()}"] = make(cumulative(lengths))
        if shortened:
            arguments[f"mSeqUsed{side.upper()}"] = make(used)
        flags[side] = packed
        # Token labels (entry, position) in storage order; a dense entry starts its own slice.
        storage = [(b, i) for b in range(batch) for i in range(lengths[b])]
        expected[side] = [
            (
                [token for token in storage if token[0] == b] if packed else range(static[side]),
                used[b] if shortened else None,
                storage,
            )
            for b in range(batch)
        ]
    for b in range(batch):
        info = SeqlenInfoQK.create(b, static["q"], static["k"], **arguments)
        for side, offset, length in (
            ("q", info.offset_q, info.seqlen_q),
            ("k", info.offset_k, info.seqlen_k),
        ):
            assert type(offset) is int and type(length) is int
            tokens, used_length, storage = expected[side][b]
            count = len(tokens) if used_length is None else used_length
            assert length == count
            if flags[side]:
                assert storage[offset : offset + length] == list(tokens)[:count]
            else:
                assert offset == 0
        assert info.has_cu_seqlens_k == flags["k"]


@settings(max_examples=300, deadline=None)
@given(st.data(), containers)
def test_new_keys_follow_the_cached_ones(data, make):
    """Write the cache slot token by token, append, and read the logical keys back."""
    batch = data.draw(st.integers(1, 4))
    slots = data.draw(st.lists(st.integers(0, 8), min_size=batch, max_size=batch))
    leftpad = [data.draw(st.integers(0, slot)) for slot in slots]
    used = [data.draw(st.integers(pad, n)) for pad, n in zip(leftpad, slots, strict=True)]
    new = data.draw(st.lists(st.integers(0, 5), min_size=batch, max_size=batch))
    packed_slots = data.draw(st.booleans())
    padded = data.draw(st.booleans())
    packed_new = data.draw(st.booleans())
    new_static = 3
    capacity = 20
    # With packed slots the cache is one list, else one list per entry.
    starts = [b * capacity for b in range(batch + 1)] if packed_slots else [0] * (batch + 1)

    for b in range(batch):
        cache_info = SeqlenInfoQK.create(
            b, 1, 99, mCuSeqlensK=make(starts) if packed_slots else None, mSeqUsedK=make(used)
        )
        info = SeqlenInfoQKNewK.create(
            b,
            cache_info,
            seqlen_k_new_static=new_static,
            mCuSeqlensKNew=make(cumulative(new)) if packed_new else None,
            mLeftpadK=make(leftpad) if padded else None,
        )
        pad = leftpad[b] if padded else 0
        count_new = new[b] if packed_new else new_static
        new_storage = (
            [("new", e, i) for e in range(batch) for i in range(new[e])]
            if packed_new
            else [("new", b, i) for i in range(new_static)]
        )
        cache = {starts[b] + i: ("pad" if i < pad else "old", b, i) for i in range(used[b])}
        for j in range(info.seqlen_k_new):
            cache[info.offset_k + info.seqlen_k_og + j] = new_storage[info.offset_k_new + j]
        keys = [cache[info.offset_k + j] for j in range(info.seqlen_k)]
        old = [("old", b, i) for i in range(pad, used[b])]
        assert keys == old + [("new", b, i) for i in range(count_new)]
        assert info.seqlen_k_og == len(old) and info.leftpad_k == pad
        assert info.seqlen_q == 1 and info.offset_q == 0
        assert info.has_cu_seqlens_k is packed_slots


def test_without_new_keys_the_cache_is_the_sequence():
    info = SeqlenInfoQKNewK.create(0, SeqlenInfoQK.create(0, 4, 100))
    assert (info.seqlen_k, info.seqlen_k_og, info.seqlen_k_new) == (100, 100, 0)


def test_article_append_example():
    info = SeqlenInfoQKNewK.create(0, SeqlenInfoQK.create(0, 1, 1000), seqlen_k_new_static=10)
    assert (info.seqlen_q, info.seqlen_k) == (1, 1010)
    assert (info.seqlen_k_og, info.seqlen_k_new) == (1000, 10)


def test_frozen():
    with pytest.raises(AttributeError):
        SeqlenInfoQK.create(0, 1, 2).seqlen_q = 5  # type: ignore[misc]
