"""Column intervals against their definition, on ints, tensors and traced Int32."""

from __future__ import annotations

import itertools

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack
from hypothesis import given
from hypothesis import strategies as st

from flash_mask_cute.rules.intervals import Intervals

FORMS = ((1, True), (2, True), (2, False), (4, True), (4, False))
ids = [f"{n}-{'causal' if causal else 'full'}" for n, causal in FORMS]


def hides(n: int, causal: bool, c: tuple[int, ...], row: int) -> bool:
    if n == 1:
        return row >= c[0]
    if n == 2 and causal:
        return c[0] <= row < c[1]
    if n == 2:
        return row >= c[0] or row < c[1]
    return c[0] <= row < c[1] or c[2] <= row < c[3]


@pytest.mark.parametrize(("n", "causal"), FORMS, ids=ids)
def test_hidden_rows_on_ints_and_tensors(n: int, causal: bool) -> None:
    seqlen_q = 4
    intervals = Intervals(n, causal)
    values = list(itertools.product(range(seqlen_q + 2), repeat=n))
    expected = [[hides(n, causal, c, row) for c in values] for row in range(seqlen_q)]

    by_ints = [
        [any(s <= row < e for s, e in intervals.hidden_rows(c, seqlen_q)) for c in values]
        for row in range(seqlen_q)
    ]
    assert by_ints == expected

    row = torch.arange(seqlen_q)[:, None]
    hidden = torch.zeros((), dtype=torch.bool)
    for start, end in intervals.hidden_rows(torch.tensor(values).unbind(1), seqlen_q):
        hidden = hidden | ((row >= start) & (row < end))
    assert hidden.tolist() == expected


@pytest.mark.parametrize("edges", [(None, None), (1, 3)], ids=["open", "range"])
@pytest.mark.parametrize(("n", "causal"), FORMS, ids=ids)
def test_seen_rows_are_those_that_nothing_hides(
    n: int, causal: bool, edges: tuple[int | None, int | None]
) -> None:
    seqlen_q = 4
    first, last = (0, seqlen_q) if edges == (None, None) else edges
    for c in itertools.product(range(-1, seqlen_q + 2), repeat=n):
        (lo, hi), *holes = Intervals(n, causal).visible_rows(c, *edges)
        seen = [
            (lo is None or row >= lo)
            and (hi is None or row < hi)
            and not any(start <= row < end for start, end in holes)
            for row in range(seqlen_q)
        ]
        assert seen == [first <= row < last and not hides(n, causal, c, row) for row in range(4)]
        # what is told by the range needs no hole
        assert len(holes) == {1: 0, 2: int(causal), 4: 2}[n]


@st.composite
def blocks(draw: st.DrawFn) -> tuple[int, bool, list[tuple[int, ...]], int, int, int]:
    """(n, causal, the keys of a block, first_row, end_row, seqlen_q)."""
    n, causal = draw(st.sampled_from(FORMS))
    seqlen_q = draw(st.integers(1, 12))
    first = draw(st.integers(0, seqlen_q - 1))
    end = draw(st.integers(first + 1, seqlen_q))
    key = st.tuples(*[st.integers(0, seqlen_q + 1)] * n)
    return n, causal, draw(st.lists(key, min_size=1, max_size=3)), first, end, seqlen_q


def bounds_of(keys: list[tuple[int, ...]]) -> list[int]:
    return [edge(vector) for vector in zip(*keys, strict=True) for edge in (min, max)]


@given(blocks())
def test_verdicts_are_safe(block: tuple[int, bool, list[tuple[int, ...]], int, int, int]) -> None:
    n, causal, keys, first, end, seqlen_q = block
    hidden = [hides(n, causal, c, row) for c in keys for row in range(first, end)]
    all_hidden, cuts = Intervals(n, causal).classify(bounds_of(keys), first, end, seqlen_q)
    assert all(hidden) or not all_hidden
    assert cuts or not any(hidden)
    assert cuts or not all_hidden


@given(blocks())
def test_verdicts_are_exact_for_equal_keys_with_one_interval(
    block: tuple[int, bool, list[tuple[int, ...]], int, int, int],
) -> None:
    n, causal, keys, first, end, seqlen_q = block
    c = keys[0] if n < 4 else (*keys[0][:2], seqlen_q, 0)
    if (n, causal) == (2, False):
        c = (c[0], 0)
    hidden = [hides(n, causal, c, row) for row in range(first, end)]
    all_hidden, cuts = Intervals(n, causal).classify(bounds_of([c]), first, end, seqlen_q)
    assert all_hidden == all(hidden)
    is_empty = n > 1 and causal and c[0] >= c[1]
    assert cuts == any(hidden) or is_empty or n == 4


@cute.jit
def _traced_verdicts(
    n: cutlass.Constexpr, causal: cutlass.Constexpr, blocks: cute.Tensor, out: cute.Tensor
):
    """out[i] = 2 * all_hidden + cuts of the row (first_row, end_row, seqlen_q, bounds...)."""
    intervals = Intervals(n, causal)
    for i in range(cute.size(out)):
        bounds = [blocks[i, 3 + j] for j in range(2 * n)]
        all_hidden, cuts = intervals.classify(bounds, blocks[i, 0], blocks[i, 1], blocks[i, 2])
        out[i] = Int32(all_hidden) * 2 + Int32(cuts)


@pytest.mark.parametrize(("n", "causal"), FORMS, ids=ids)
def test_verdicts_agree_on_ints_tensors_and_int32(n: int, causal: bool) -> None:
    generator = torch.Generator().manual_seed(n)
    seqlen_q = 40
    edges = torch.randint(0, seqlen_q + 2, (200, n, 2), generator=generator).sort(-1).values
    rows = torch.randint(0, seqlen_q + 1, (200, 2), generator=generator).sort(-1).values
    rows[:, 1] = torch.maximum(rows[:, 1], rows[:, 0] + 1).clamp(max=seqlen_q)
    rows[:, 0] = torch.minimum(rows[:, 0], rows[:, 1] - 1)
    blocks = torch.cat([rows, torch.full((200, 1), seqlen_q), edges.flatten(1)], 1).int()

    intervals = Intervals(n, causal)
    by_ints = [
        2 * hidden + cuts
        for first, end, length, *bounds in blocks.tolist()
        for hidden, cuts in [intervals.classify(bounds, first, end, length)]
    ]
    first, end, length, *bounds = blocks.unbind(1)
    hidden, cuts = intervals.classify(bounds, first, end, length)
    assert (2 * hidden.int() + cuts.int()).tolist() == by_ints
    out = torch.full((len(blocks),), -1, dtype=torch.int32)
    _traced_verdicts(n, causal, from_dlpack(blocks), from_dlpack(out))
    assert out.tolist() == by_ints
    assert set(by_ints) == {0, 1, 3}


@pytest.mark.parametrize("num_keys", [1, 2])
@pytest.mark.parametrize(("n", "causal"), FORMS, ids=ids)
def test_no_row_outside_of_a_span_sees_a_key(n: int, causal: bool, num_keys: int) -> None:
    """Of one key, and of two by the largest and smallest of their values."""
    seqlen_q, intervals = 3, Intervals(n, causal)
    values = list(itertools.product((-9, 0, 1, 2, 3, 7), repeat=n))
    groups = [values[i::num_keys] for i in range(num_keys)]
    exact = 0
    for keys in zip(*groups, strict=True):
        starts = [max(c[v] for c in keys) for v in range(n)]
        ends = [min(c[v] for c in keys) for v in range(n)]
        first, last = intervals.seen_span(starts, ends, seqlen_q)
        seen = [row for row in range(seqlen_q) if not all(hides(n, causal, c, row) for c in keys)]
        assert all(first <= row <= last for row in seen)
        exact += bool(seen) and (first, last) == (min(seen), max(seen))
        tensors = ([torch.tensor([x]) for x in side] for side in (starts, ends))
        assert [int(x) for x in intervals.seen_span(*tensors, seqlen_q)] == [first, last]
    # where intervals reach an end of the rows, the span says so
    assert exact > len(groups[0]) // 8


@pytest.mark.parametrize(("n", "causal"), [(1, False), (3, True), (0, True), (8, False)])
def test_unknown_forms_are_refused(n: int, causal: bool) -> None:
    with pytest.raises(ValueError, match=rf"got {n} with causal={causal}"):
        Intervals(n, causal)
