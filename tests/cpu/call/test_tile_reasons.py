"""What `explain` says of tiles: tile_reasons.txt, which this module writes anew when it is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flash_mask_cute.call.tiles.rows import describe_conditions
from flash_mask_cute.call.tiles.tables import SM90_BWD, SM90_FWD, SM100_BWD, SM100_FWD

PRINTED = Path(__file__).with_name("tile_reasons.txt")
TABLES = {
    "Hopper, forward": SM90_FWD,
    "Hopper, backward": SM90_BWD,
    "Blackwell, forward": SM100_FWD,
    "Blackwell, backward": SM100_BWD,
}
# words that only the authors of the tables understand, or that only repeat another row
IDIOM = re.compile(
    r"not there|of which|what is|whose|walk|waits? ready|chose|listed|behind|tells|"
    r"as (above|up to|for)\b|the same, with|its place|user callables|in turn"
)
REASONS = sorted({row.reason for rows in TABLES.values() for row in rows})


def printed() -> str:
    """Each table: the conditions of its rows in their order, and the reasons below them."""
    lines = []
    for name, rows in TABLES.items():
        lines += [name, "=" * len(name), ""]
        for row in rows:
            lines += [describe_conditions(row), f"    {row.reason}", ""]
    return "\n".join(lines)


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_needs_no_table(reason: str) -> None:
    assert not IDIOM.search(reason), "say it in words of the field"
    assert len(reason.split()) <= 20, "one fact a clause, in a line"


def test_conditions_need_no_table() -> None:
    for rows in TABLES.values():
        for row in rows:
            assert not IDIOM.search(describe_conditions(row)), describe_conditions(row)


def test_the_reasons_are_printed() -> None:
    assert PRINTED.read_text() == printed(), f"`python {__file__}` writes them anew"


if __name__ == "__main__":
    PRINTED.write_text(printed())
