"""The kept table of drawn calls of the Blackwell kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import drawn_blackwell
import drawn_cases
import pytest
from drawn_blackwell import DRAWS, NEEDED, SEQUENTIAL_SPLITS
from drawn_cases import ROOT, UNKNOWN, Row, read_rows, table

KEPT = ROOT / "bench" / "results" / "blackwell_cases.txt"
KIND_OF = {draw.id: draw.kind for draw in DRAWS}


def test_rows_are_of_what_is_drawn() -> None:
    """A draw that has changed has another row."""
    rows, calls = read_rows(KEPT), {draw.id: draw.told for draw in DRAWS}
    assert len(calls) == len(DRAWS)
    for name, row in rows.items():
        assert row.call == calls[name] and row.was_right, name
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


RERUN = """\
import os
import signal
from pathlib import Path
import pytest

@pytest.mark.parametrize("draw", {names})
def test_draw(draw):
    assert draw != {names}[1]
    if draw == {names}[2]:
        os.kill(os.getpid(), signal.SIGKILL)
    with Path(os.environ["FLASH_MASK_SIM_ROWS"]).open("a") as file:
        file.write(draw + "\\t\\t7 runs\\t0.25\\tcall\\n")
"""


def test_a_draw_that_fails_when_it_runs_again_loses_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one is right, the second one is not, and the third one ends its process."""
    draws = DRAWS[:3]
    names = [draw.id for draw in draws]
    for name in ("DRAWS", "SEQUENTIAL_SPLITS"):
        monkeypatch.setattr(drawn_blackwell, name, draws)
    (tests := tmp_path / "test_again.py").write_text(RERUN.format(names=names))
    monkeypatch.setattr(drawn_cases, "TESTS", f"{tests}::test_draw")
    monkeypatch.setattr(drawn_cases, "BUILD", "")
    monkeypatch.setattr(drawn_cases, "PAUSE", 0.1)
    path = tmp_path / "rows"
    kept = {x.id: Row(x.id, "older", "9 runs", UNKNOWN, x.told) for x in draws}
    path.write_text(table(KIND_OF, kept))
    asked = ["drawn_cases.py", "--rows", str(path), "--workers", "1", "--commit", "newer"]
    monkeypatch.setattr("sys.argv", asked)
    assert drawn_cases.main() == 1
    found = read_rows(path)
    assert [found[name].runs for name in names] == ["7 runs", "FAILED", "FAILED"]
    assert all(found[x.id] == (x.id, "newer", *found[x.id][2:4], x.told) for x in draws)
    assert "1 of 3 draws, 7 runs" in path.read_text() and "\n2 FAILED.\n" in path.read_text()
    said = capsys.readouterr().out
    assert all(f"python -m pytest '{tests}::test_draw[{name}]'" in said for name in names[1:])


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
    first = Counter(draw.kind for draw in SEQUENTIAL_SPLITS[: needed + len(NEEDED)])
    assert all(first[kind] >= count for kind, count in NEEDED.items())
    assert Counter(draw.kind for draw in SEQUENTIAL_SPLITS[: needed // 2]).keys() == NEEDED.keys()
