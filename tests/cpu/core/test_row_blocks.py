"""The split of a tile's columns between warpgroups, and of dQ's between CTAs."""

from __future__ import annotations

import pytest

from flash_mask_cute.core.row_blocks import (
    alternating_sums,
    are_uneven,
    column_parts,
    dq_columns,
    dq_parts,
    shared_parts,
    uneven_parts,
)

WIDTHS = range(32, 257, 32)
SHARED = [(cols, 1) for cols in (80, *WIDTHS)] + [(cols, 2) for cols in (160, 192, 256)]


def may_begin(first: int, width: int, cols: int) -> bool:
    """A product begins with a block of swizzled memory, or lies in one."""
    block = next(block for block in (64, 32, 16) if cols % block == 0)
    return first % block == 0 or first % block + width <= block


@pytest.mark.parametrize(("cols", "num_ctas"), SHARED)
def test_each_column_of_dq_is_sent_once(cols: int, num_ctas: int) -> None:
    parts = dq_parts(cols, num_ctas)
    assert sorted(x for part in parts for x in range(part.first, part.end)) == list(range(cols))
    assert all(part.width % 16 == 0 for part in parts)
    for part in parts:
        for i in range(part.sharers):
            assert may_begin(part.first + i * part.width, part.width, cols)
    # the first CTA sends all of its columns, the first ones
    own, end = dq_columns(cols, num_ctas), 0
    for part in parts:
        assert part.end <= own or end >= own
        end += part.num_cols


@pytest.mark.parametrize("cols", WIDTHS)
def test_uneven_parts_are_nearly_halves(cols: int) -> None:
    wider, narrower = uneven_parts(cols)
    assert (wider.first, wider.end, narrower.end) == (0, narrower.first, cols)
    assert 0 <= wider.width - narrower.width <= 64
    for part in (wider, narrower):
        assert part.sharers == 1 and may_begin(part.first, part.width, cols)


def test_a_warpgroup_of_two_ctas_has_one_product_of_dq() -> None:
    """As wide as possible: 64 and 32 columns read dS once each, where 32 and 16 read it twice."""
    for cols in (160, 192):
        assert are_uneven(cols, 2)
        assert [part.width for part in dq_parts(cols, 2)[:2]] == [64, 32]
    assert not are_uneven(256, 2) and not any(are_uneven(cols, 1) for cols in WIDTHS)
    assert dq_parts(256, 2)[0] == shared_parts(128)[0] and column_parts(128) == (64,)


def test_halves_of_the_columns_are_a_product_each() -> None:
    """Where blocks of swizzled memory divide the halves."""
    for cols in (160, 192):
        (part,) = dq_parts(cols, 1, in_halves=True)
        assert part == (0, cols // 2, 2) and (part.num_cols, part.end) == (cols, cols)


def test_a_warpgroup_sums_blocks_in_turn_where_halves_are_several_products() -> None:
    for cols in (80, 96):
        assert alternating_sums(cols, 1) and dq_parts(cols, 1) == ((0, cols, 1),)
    assert not any(alternating_sums(cols, 1) for cols in WIDTHS if cols != 96)
    assert not any(alternating_sums(cols, 2) for cols in WIDTHS)
