"""The kept table of drawn calls of the Blackwell kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from drawn_blackwell import DRAWS, IN_TURN, NEEDED
from drawn_cases import ROOT, UNKNOWN, read_rows, table

KEPT = ROOT / "bench" / "results" / "blackwell_cases.txt"
KIND_OF = {draw.id: draw.kind for draw in DRAWS}


def test_rows_are_of_what_is_drawn() -> None:
    """A draw that has changed has another row."""
    rows, calls = read_rows(KEPT), {draw.id: draw.told for draw in DRAWS}
    assert len(calls) == len(DRAWS)
    for name, row in rows.items():
        assert row.call == calls[name], name
        assert row.share == UNKNOWN or float(row.share) <= 1, row
        assert row.commit.isalnum(), row
    assert KEPT.read_text() == table(KIND_OF, rows)


def test_a_table_is_continued(tmp_path: Path) -> None:
    rows = read_rows(KEPT)
    kinds = {name: KIND_OF[name] for name in rows} | {"forward-C-0": "forward-C"}
    (path := tmp_path / "rows").write_text(table(kinds, rows))
    assert read_rows(path) == rows
    assert f"{len(rows)} of {len(rows) + 1} draws" in path.read_text()
    assert read_rows(tmp_path / "none") == {}


@pytest.mark.parametrize("names", [KIND_OF, read_rows(KEPT)], ids=["drawn", "kept"])
def test_kinds_of_draws(names: Iterable[str]) -> None:
    """What is drawn, and what was right when it was executed."""
    kinds = Counter(KIND_OF[name] for name in names)
    assert kinds["forward-A"] + kinds["forward-A-pair"] >= 40 and kinds["forward-A-pair"] >= 10
    assert kinds["forward-B-pair"] + kinds["forward-B-decoding"] >= 30
    assert kinds["backward-A"] + kinds["backward-A-pair"] >= 60 and kinds["backward-A-pair"] >= 25
    wide = "backward-B", "backward-B-pair", "backward-B-folded-pair"
    assert sum(kinds[name] for name in wide) >= 50 and kinds["backward-B-folded-pair"] >= 10
    for family in "AB":
        in_pairs = kinds[f"backward-{family}-ordered-pair"]
        assert kinds[f"backward-{family}-ordered"] + in_pairs >= 6 and in_pairs >= 4


def test_what_is_needed_comes_first() -> None:
    needed = sum(NEEDED.values())
    first = Counter(draw.kind for draw in IN_TURN[: needed + len(NEEDED)])
    assert all(first[kind] >= count for kind, count in NEEDED.items())
    assert Counter(draw.kind for draw in IN_TURN[: needed // 2]).keys() == NEEDED.keys()
