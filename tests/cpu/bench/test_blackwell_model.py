"""What a block of the Blackwell backward costs: machine code as a graph, and the kept rows."""

from __future__ import annotations

import pytest

from bench import ROOT, blackwell_model
from bench.blackwell_model import (
    NAMES,
    NO_DISASSEMBLER,
    PEER,
    Code,
    read_rows,
    row_of,
    tables,
)

# Two bodies in a loop, of which one has an inner loop, and a wait with a slow way.
TEXT = """
.L_x_1:
        /*0000*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR6+0x8], R3 ;
        /*0010*/              @!P0 BRA `(.L_x_9) ;
.L_x_2:
        /*0020*/                   BRA.U UP1, `(.L_x_4) ;
        /*0030*/                   MUFU.EX2 R1, R2 ;
        /*0040*/                   BRA `(.L_x_5) ;
.L_x_4:
        /*0050*/                   MUFU.RCP R1, R2 ;
.L_x_6:
        /*0060*/                   UTCHMMA gdesc[UR74], gdesc[UR4], tmem[UR5] ;
        /*0070*/               @P1 BRA `(.L_x_6) ;
.L_x_5:
        /*0080*/               @P2 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
.L_x_9:
        /*00a0*/                   NOP ;
        /*00b0*/                   BRA `(.L_x_2) ;
"""


def test_ways_through_code() -> None:
    code = Code.create(TEXT)
    assert [x.opcode for x in code.instructions][:3] == ["SYNCS", "BRA", "BRA"]
    (first,) = code.where(lambda x: (x.opcode, x.kind) == ("MUFU", ".EX2"))
    (product,) = code.where(lambda x: x.opcode == "UTCHMMA")
    (end,) = code.where(lambda x: x.opcode == "EXIT")
    # the wait succeeds, and the other body is left out
    assert code.count(code.loop_through([first])) == {"SYNCS": 1, "BRA": 4, "MUFU": 1}
    # a place to itself goes around its inner loop, unless the way has to leave that
    assert code.loop_through([product]) == [product + 1, product]
    way = code.loop_through([0, product])
    assert code.count(way) == {"SYNCS": 1, "BRA": 4, "MUFU": 1, "UTCHMMA": 1}
    assert list(code.inner_loops(way)) == [[product, product + 1]]
    with pytest.raises(ValueError, match=f"no way from instruction {end}"):
        code.way(end, first)


def test_addresses_stand_for_labels() -> None:
    """As cuobjdump prints them."""
    code = Code.create(
        "        /*0000*/                   MUFU.EX2 R1, R2 ;\n"
        "        /*0010*/              @!P0 BRA 0x0 ;\n"
        "        /*0020*/                   EXIT ;\n"
    )
    assert code.following == ((1,), (0, 2), ())


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
