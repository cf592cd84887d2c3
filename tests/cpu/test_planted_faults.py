"""The planted faults: each is still a change of one place of the package."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import altered_conditions
import planted_faults
import pytest
from planted_faults import FAULTS, HOST, KERNEL, KNOWN, PACKAGE, ROOT, Fault, NotFoundError, plant


def test_there_are_twenty() -> None:
    kinds = Counter(fault.kind for fault in FAULTS)
    assert kinds == {KNOWN: 8, KERNEL: 6, HOST: 6}
    assert len(planted_faults.BY_NAME) == len(FAULTS)
    for fault in FAULTS:
        assert bool(fault.archs) == (fault.kind != HOST)
        assert fault.whole and all((ROOT / tests).exists() for tests in fault.whole), fault.name


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_one_place(fault: Fault, tmp_path: Path) -> None:
    """In a copy, and what comes out is Python; where this fails, write the fault anew."""
    path = planted_faults.place_of(fault, ROOT)
    (copy := tmp_path / path.relative_to(ROOT)).parent.mkdir(parents=True)
    copy.write_text(path.read_text())
    assert plant(fault, tmp_path) == copy
    changed = {*copy.read_text().splitlines()} ^ {*path.read_text().splitlines()}
    assert len(changed) <= 3
    (moved := tmp_path / PACKAGE / "elsewhere.py").write_text(path.read_text())
    copy.unlink()
    assert plant(fault, tmp_path) == moved, "found where the file has moved to"
    moved.write_text("")
    with pytest.raises(NotFoundError, match=f"{fault.name}: .* must be once in {PACKAGE}"):
        plant(fault, tmp_path)


def test_a_table_names_who_noticed() -> None:
    name = FAULTS[0].name
    found = planted_faults.Outcome(name, "1", "tests/sim/test_a.py::test_b", 1.0, "")
    lines = list(
        planted_faults.table([found, found._replace(seed="2", failed="")], ["1", "2", "3"])
    )
    cells = "tests/sim/test_a.py::test_b | **not noticed** | not run"
    assert lines[2] == f"| {name} | {KNOWN} | {cells} |"


def test_conditions_that_are_altered_are_drawn_by_their_seed() -> None:
    """Each replaces what it says by other Python."""
    drawn = altered_conditions.alterations(3, 40)
    assert drawn == altered_conditions.alterations(3, 40)
    assert drawn != altered_conditions.alterations(4, 40)
    for x in drawn:
        text = (ROOT / x.file).read_text()
        assert text[: x.begin].count("\n") + 1 in range(x.line, x.line + 12), x
        changed = altered_conditions.altered(x, text)
        assert changed != text
        compile(changed, str(x.file), "exec")
