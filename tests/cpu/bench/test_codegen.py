"""What bench.codegen counts, what it calls a change, and one variant that it compiles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import ROOT, Json, codegen
from bench.codegen_variants import VARIANTS, AttentionVariant
from flash_mask_cute.call.tiles.tables import (
    SM90_BWD,
    SM90_FWD,
    SM90_STATISTICS,
    SM100_BWD,
    SM100_FWD,
)

ROW: Json = {
    "name": "d64-full",
    "arch": "sm_90a",
    "tiles": {"tile_m": 192, "tile_n": 128},
    "registers": 168,
    "spill_bytes": 0,
    "smem_bytes": 1024,
    "warnings": [],
    "code": "0123456789abcdef",
    "isa": "sass",
    "opcodes": {"HGMMA": 40, "BAR": 10, "LDL": 1},
    "compiler": "cutlass_dsl 4.8.1, CUDA 13.4",
    "commit": "1234567",
}


def test_differences() -> None:
    assert codegen.differences(ROW, ROW | {"commit": "89abcde", "compiler": "other"}) == []
    assert codegen.differences(ROW, ROW | {"isa": "ptx", "opcodes": {"wgmma": 1}}) == []
    other = {"code": "fedcba9876543210"}
    new = ROW | {"registers": 160, "opcodes": {"HGMMA": 40, "BAR": 12, "STL": 3}} | other
    assert codegen.differences(ROW, new) == [
        "registers 168 -> 160",
        "code 0123456789abcdef -> fedcba9876543210",
        "BAR 10 -> 12 (+2)",
        "LDL 1 -> 0 (-1)",
        "STL 0 -> 3 (+3)",
    ]
    for key, value in {
        "spill_bytes": 8,
        "smem_bytes": 0,
        "warnings": ["C7510"],
        "tiles": {},
    }.items():
        assert len(codegen.differences(ROW, ROW | {key: value})) == 1
    _, last = codegen.differences(ROW, ROW | {"isa": "ptx", "opcodes": {"wgmma": 1}} | other)
    assert last.startswith("isa sass -> ptx")


def test_status_against_kept_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {key: value for key, value in ROW.items() if key != "commit"}
    monkeypatch.setattr(codegen, "compile_row", lambda name: made | {"name": name})
    kept, again = str(tmp_path / "kept.jsonl"), str(tmp_path / "again.jsonl")
    assert codegen.main(["d64-full", "d64-causal", "--out", kept]) == 0
    assert codegen.main(["d64-[fc]*l", "--against", kept, "--out", again]) == 0
    assert list(codegen.read_rows(Path(again))) == ["d64-full", "d64-causal"]
    assert "unchanged" in capsys.readouterr().out
    assert codegen.main(["d64-window", "--against", kept]) == 1
    assert "not in the other rows" in capsys.readouterr().out
    made["registers"] = 128
    assert codegen.main(["d64-full", "--against", kept]) == 1
    assert "registers 168 -> 128" in capsys.readouterr().out


def test_what_the_variants_cover() -> None:
    """Each row of the tables (tiles of an attention kernel), and each kind of kernel."""
    attention = [x for x in VARIANTS.values() if isinstance(x, AttentionVariant)]
    for rows, arch, is_backward in (
        (SM90_FWD, "sm_90a", False),
        (SM90_STATISTICS, "sm_90a", False),
        (SM90_BWD, "sm_90a", True),
        (SM100_FWD, "sm_100a", False),
        (SM100_FWD, "sm_103a", False),
        (SM100_BWD, "sm_100a", True),
        (SM100_BWD, "sm_103a", True),
    ):
        of_table = [x for x in attention if (x.arch, x.is_backward) == (arch, is_backward)]
        dims = {(x.problem.head_dim, x.problem.head_dim_v) for x in of_table}
        assert {(row.max_dim, row.max_dim_v) for row in rows} <= dims
    preparing = {name for name, x in VARIANTS.items() if not isinstance(x, AttentionVariant)}
    kinds = {re.split(r"[-\d]", name.removeprefix("sm100-"))[0] for name in preparing}
    assert kinds == {
        *("preprocess", "postprocess", "add_parts", "zero_padding", "mask_bits"),
        *("column_bounds", "document_split", "block_scan", "bwd_shared", "bwd_short"),
    }


def test_a_file_of_rows_is_taken_by_either_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And another file is refused, with what is wanted, before anything is compiled."""
    archive = ROOT / "bench" / "results" / "codegen.jsonl.xz"
    by_archive = codegen.rows_of(str(archive), [])
    assert by_archive == codegen.rows_of(str(archive.with_suffix("")), []) and by_archive
    for name, content in (("a.xz", b"no archive"), ("b.jsonl", b"\xff\xfe"), ("c", b"a page")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SystemExit, match="2"):
            codegen.main(["d64-full", "--against", str(tmp_path / name)])
        assert f"takes a file of rows or a commit: {tmp_path / name}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        codegen.main(["d64-full", "--against", "no-such-commit"])
    assert (
        "a file of rows or a commit: 'no-such-commit' is no folder with" in capsys.readouterr().err
    )


def test_kept_rows_hold_every_variant() -> None:
    rows = codegen.read_rows(ROOT / "bench" / "results" / "codegen.jsonl")
    assert list(rows) == list(VARIANTS)
