"""What bench.codegen counts, what it calls a change, and one variant that it compiles."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest

from bench import ROOT, Json, codegen
from bench.codegen_variants import VARIANTS, AttentionVariant
from flash_mask_cute.call.tiles.tables import SM90_BWD, SM90_FWD, SM100_BWD, SM100_FWD

SASS = """
\tcode for sm_90a
\t\tFunction : kernel_flash
\t.headerflags\t@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   LDC R1, c[0x0][0x28] ;         /* 0x00000a00ff017b82 */
                                                                  /* 0x000fe20000000800 */
        /*0010*/              @!P0 BRA `(.L_x_3) ;                /* 0x0000000000088947 */
        /*0020*/             @!UPT UIADD3 URZ, URZ, URZ, URZ ;    /* 0x0000003f3f3ff290 */
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;
        /*10040*/              @PT HGMMA.64x80x16.F32.BF16 R24, gdesc[UR4], !UPT ;
        /*10050*/           @!UP0 UTMALDG.4D [UR8], [UR4], desc[UR6] ;
.L_x_3:
        /*10060*/                  BRA `(.L_x_3);
"""
SASS_COUNTS = {"BRA": 2, "HGMMA": 2, "LDC": 1, "UIADD3": 1, "UTMALDG": 1}

PTX = """
.version 8.8
.target sm_90a
.visible .entry kernel_flash(
\t.param .u32 kernel_flash_param_0
)
.reqntid 384, 1, 1
{
\t.reg .pred \t%p<3>;
\t.loc\t1 10 0                          // setp.eq.s32 in a comment
$L__BB0_1:
\t@%p1 bra \t$L__BB0_1;
\t// begin inline asm
\t{ .reg .pred P1; setp.eq.s32 P1, 1, 1; @P1 bra.uni DONE; bra.uni $L__BB0_1; DONE: }
\t// end inline asm
\twgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16
\t\t{%f1, %f2,
\t\t%f3}, %rd1, %rd2, p, 1, 1, 0, 0;
\tex2.approx.ftz.f32 \t%f1, %f2;
\tret;
}
"""
PTX_COUNTS = {"bra": 3, "ex2": 1, "ret": 1, "setp": 1, "wgmma": 1}

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


def test_ptx_is_counted_where_no_disassembler_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for commands in ([], [["false"]], [["true"]]):
        monkeypatch.setattr(codegen, "disassemblers", lambda commands=commands: iter(commands))
        assert codegen.count_opcodes(b"", PTX, tmp_path) == ("ptx", PTX_COUNTS)
    text = tmp_path / "sass"
    text.write_text(SASS)
    monkeypatch.setattr(codegen, "disassemblers", lambda: iter([["false"], ["cat", str(text)]]))
    assert codegen.count_opcodes(b"", PTX, tmp_path) == ("sass", SASS_COUNTS)


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


STUB = """
import json, sys
if "--list" in sys.argv:
    print("d64-full\\nd64-gone")
else:
    names, out = sys.argv[1:-2], sys.argv[-1]
    import flash_mask_cute
    row = json.loads(flash_mask_cute.ROW)
    open(out, "w").write("".join(json.dumps(row | {"name": name}) + "\\n" for name in names))
"""


def test_against_what_an_earlier_commit_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, name, text in (
        ("bench", "codegen.py", STUB),
        ("bench", "__init__.py", ""),
        ("flash_mask_cute", "__init__.py", f"ROW = {json.dumps(ROW | {'registers': 160})!r}"),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(text)
    made = {key: value for key, value in ROW.items() if key != "commit"}
    monkeypatch.setattr(codegen, "compile_row", lambda name: made | {"name": name})
    assert codegen.rows_of(str(tmp_path), ["d64-causal"]) == {}
    assert codegen.main(["d64-full", "d64-causal", "--against", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "registers 160 -> 168" in said and "not in the other rows" in said
    with pytest.raises(SystemExit, match="2"):
        codegen.main(["d64-full", "--against", "no-such-commit"])


def elf(*sections: tuple[str, bytes]) -> bytes:
    """A 64-bit ELF file with these sections, and one that holds their names."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, _ in sections) + b".shstrtab\0"
    contents = [*sections, (".shstrtab", names)]
    header_size, at, headers, body = 64, 1, [bytes(64)], b""
    for name, content in contents:
        headers.append(
            struct.pack("<2I4Q", at, 1, 0, 0, header_size + len(body), len(content)) + bytes(24)
        )
        at += len(name) + 1
        body += content
    start = bytes(40) + struct.pack("<Q", header_size + len(body)) + bytes(10)
    return start + struct.pack("<3H", 64, len(headers), len(headers) - 1) + body + b"".join(headers)


def test_digest_of_machine_code() -> None:
    cubin = elf((".text.kernel", b"code"), (".debug_line", b"one"), (".text.other", b"more"))
    renamed = elf((".text.other", b"more"), (".text.new_name", b"code"), (".debug_line", b"two"))
    changed = elf((".text.kernel", b"Code"), (".debug_line", b"one"), (".text.other", b"more"))
    digest = codegen.machine_code_digest(cubin)
    assert digest == codegen.machine_code_digest(renamed) != codegen.machine_code_digest(changed)
    assert len(digest) == 16


def test_what_the_variants_cover() -> None:
    """Each row of the tables (tiles of an attention kernel), and each kind of kernel."""
    attention = [x for x in VARIANTS.values() if isinstance(x, AttentionVariant)]
    for rows, arch, is_backward in (
        (SM90_FWD, "sm_90a", False),
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


def test_kept_rows_hold_every_variant() -> None:
    rows = codegen.read_rows(ROOT / "bench" / "results" / "codegen.jsonl")
    assert list(rows) == list(VARIANTS)


def test_a_variant_compiles(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert codegen.main(["d64-window", "--out", str(out)]) == 0
    row = json.loads(out.read_text())
    assert row.keys() == ROW.keys()
    assert (row["tiles"]["tile_m"], row["tiles"]["tile_n"]) == (128, 128), "the narrow window's row"
    assert row["registers"] and row["spill_bytes"] == 0 and not row["warnings"]
    present = {"sass": ("HGMMA", "MUFU", "UTMALDG"), "ptx": ("wgmma", "ex2", "mbarrier")}
    assert all(row["opcodes"][opcode] for opcode in present[row["isa"]])
