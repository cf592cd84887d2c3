"""Plans of a grid of calls are the kept ones (`tests/plan_rows.py`), and a change is reported."""

from __future__ import annotations

import pytest
from plan_rows import KEPT, differences, packed, rows_now, unpacked

from flash_mask_cute.call import splits as splits_module

# Calls of the grid that are planned in a moment.
FEW = slice(0, 120)


def test_plans_are_those_that_were_kept() -> None:
    """A change that means to change plans keeps new rows, and names what this prints."""
    found = differences(unpacked(KEPT.read_bytes()), rows_now())
    assert not found, "\n".join(found)


def test_rows_survive_the_file() -> None:
    rows = rows_now(FEW)
    assert len(rows) > len({tuple(row.items()) for row in rows.values()}) > 20
    assert unpacked(packed(rows)) == rows


def test_a_planted_change_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what its rows have in common, and no other row."""
    before = rows_now(FEW)
    right = splits_module._number_of_splits
    monkeypatch.setattr(
        splits_module,
        "_number_of_splits",
        lambda facts, of: 1 if facts.call.options.num_splits == 7 else right(facts, of),
    )
    found = differences(before, after := rows_now(FEW))
    assert all("splits-7 forward" in x for x in found)
    assert any(x.startswith("split rows -> None") and "decode splits-7" in x for x in found)
    assert after.pop("decode causal forward sm_90a")
    of_one = "row there -> not there, 1 rows: decode causal forward sm_90a"
    assert differences(before, after).count(of_one) == 1
