"""Rows that others need: by ranges or by numbers, the same rows and the same sums."""

from __future__ import annotations

import pytest
import torch

from flash_mask_cute.parallel.key_rows import KeyRows

ROWS = 200
CHOICES = {
    "none": [],
    "all": [(0, ROWS)],
    "one": [(7, 8)],
    "first and last": [(0, 3), (190, ROWS)],
    "touching": [(5, 6), (6, 20), (21, 22)],
    "sixteen": [(12 * i, 12 * i + 5) for i in range(16)],
    "seventeen": [(11 * i, 11 * i + 5) for i in range(17)],
    "every second": [(i, i + 1) for i in range(1, ROWS, 2)],
}


@pytest.mark.parametrize("name", CHOICES)
def test_rows_and_sums(name: str) -> None:
    is_chosen = torch.zeros(ROWS, dtype=torch.bool)
    for begin, end in CHOICES[name]:
        is_chosen[begin:end] = True
    rows = KeyRows.where(is_chosen)
    index = is_chosen.nonzero()[:, 0]
    assert torch.equal(rows.index, index)
    assert (rows.ranges is None) == (name in ("seventeen", "every second"))
    x = torch.randn(2, ROWS, 3, 4)
    assert torch.equal(rows.of(x), x[:, index])
    part, total = torch.randn(2, len(index), 3, 4).bfloat16(), torch.randn(2, ROWS, 3, 4)
    wanted = total.clone()
    wanted[:, index] += part.float()
    rows.add(total, part)
    assert torch.equal(total, wanted)


def test_all_rows_are_not_copied() -> None:
    x = torch.randn(1, ROWS, 2, 4)
    assert KeyRows.where(torch.ones(ROWS, dtype=torch.bool)).of(x) is x
