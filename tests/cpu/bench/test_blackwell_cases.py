"""The kept table of drawn calls of the Blackwell kernels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from drawn_blackwell import DRAWS
from drawn_cases import ROOT, read_rows, table

KEPT = ROOT / "bench" / "results" / "blackwell_cases.txt"


def test_rows_are_of_what_is_drawn() -> None:
    """A draw that has changed has another row."""
    rows, told = read_rows(KEPT), {draw.id: draw.told for draw in DRAWS}
    assert len(told) == len(DRAWS)
    for name, row in rows.items():
        assert row.endswith(f"  {told[name]}"), name
    assert KEPT.read_text() == table(list(told), rows)


def test_a_table_is_continued(tmp_path: Path) -> None:
    rows = read_rows(KEPT)
    names = list(rows)
    (path := tmp_path / "rows").write_text(table([*names, "forward-C-0"], rows))
    assert read_rows(path) == rows
    assert f"{len(rows)} of {len(rows) + 1} draws" in path.read_text()
    assert read_rows(tmp_path / "none") == {}


def test_kinds_of_draws() -> None:
    kinds = Counter(draw.kind for draw in DRAWS)
    assert kinds["forward-A"] >= 30 and kinds["forward-A-pair"] >= 10
    assert kinds["forward-B-pair"] + kinds["forward-B-decoding"] >= 30
    assert kinds["backward-A"] >= 35 and kinds["backward-A-pair"] >= 25
    assert kinds["backward-B"] + kinds["backward-B-pair"] >= 50
    assert kinds["backward-A-ordered"] == kinds["backward-B-ordered"] == 6
