"""What a block of the Blackwell backward costs: machine code as a graph, and the kept rows."""

from __future__ import annotations

import pytest

from bench import ROOT, blackwell_model
from bench.blackwell_model import (
    NAMES,
    NO_DISASSEMBLER,
    PEER,
    read_rows,
    row_of,
    tables,
)


def test_kept_rows_reach_the_bars() -> None:
    """No loop is longer than flash-attn-4's."""
    rows = {row["name"]: row for row in read_rows()}
    assert tuple(rows) == NAMES
    for name, row in rows.items():
        roles, peer = row["roles"], PEER["compute, partial block"]
        assert row["spill_bytes"] == 0, name
        for role, most in (("compute, partial block", 483), ("compute, full block", 450)):
            counts = roles[role]
            assert counts["instructions"] <= most, (name, role)
            assert (counts["BAR"], counts["LDTM"], counts["STTM"]) == (0, 4, 4), name
            for op in ("MUFU", "FFMA2", "FADD2", "FMUL2", "F2FP", "STS", "SYNCS"):
                assert counts[op] <= peer[op], (name, op)
        dim = next(d for d in (64, 96, 128) if f"-d{d}-" in name)
        assert roles["mma"]["UTCHMMA"] == {64: 32, 96: 36, 128: 40}[dim]
        least = {64: 0.525, 96: 0.585, 128: 0.62}[dim]
        assert row["predicted_tensor_share"] >= least, name
        taken = row["cycles"]
        share = taken["tensor cores"] / max(taken.values())
        assert row["predicted_tensor_share"] == pytest.approx(share, abs=1e-4)
        assert taken["shared memory"] * 128 == sum(row["shared_bytes"].values())


def test_the_page_has_the_tables_of_the_kept_rows(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "backward_sm100.md").read_text()
    for table in tables(read_rows()).split("\n\n"):
        assert table in page
    assert "predicted, never measured" in page
    assert blackwell_model.main(["--kept"]) == 0
    assert capsys.readouterr().out == tables(read_rows()) + "\n"


def test_counts_of_this_code() -> None:
    """As long as nothing is kept anew, the code is what was counted."""
    name = "sm100-bwd-d64-causal"
    try:
        found = row_of(name)
    except ValueError as error:
        assert str(error) == NO_DISASSEMBLER
        pytest.skip(NO_DISASSEMBLER)
    kept = next(row for row in read_rows() if row["name"] == name)
    kept.pop("commit")
    assert found == kept
