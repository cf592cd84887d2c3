"""python -m bench.codegen [NAMES]: what the compiler makes of the kernels, without a GPU.

Compiles the variants of bench.codegen_variants and prints a line for each: a digest of the machine
code, registers, spills, shared memory, and how often each opcode occurs. `--out` keeps the rows,
`--against` says what differs from kept ones, or from what an earlier commit compiles to now, by its
own bench.codegen. A change that should not touch the code of a variant is seen here before anything
is timed.

Opcodes are machine instructions (`"isa": "sass"`) where `cuobjdump` or `nvdisasm` is found on PATH,
in an installed triton or in NVIDIA's package for pip, else those of the PTX (`"isa": "ptx"`). The
two are never compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from bench import Json, commit_here, versions
from bench.codegen_variants import VARIANTS, compile_variant
from bench.history import PACKAGE, environment, unpacked
from bench.rows import archive_of, lines, row_line
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.compiler import compiler_keeps
from flash_mask_cute.runtime.machine_code import SASS, disassembly

FIGURES = ("arch", "tiles", "registers", "spill_bytes", "smem_bytes", "warnings", "code")
# Opcodes that say most about a loop, for the printed line.
SHOWN = (
    *("HGMMA", "UTCHMMA", "MUFU", "FFMA", "FMNMX", "F2FP"),
    *("UTMALDG", "RED", "BAR", "SYNCS", "LDL", "STL"),
)
PTX = re.compile(r"(?:^|[;{}])\s*(?:@!?%?\w+\s+)?([a-z]\w*)(?=[.\s;])", re.MULTILINE)


def count_sass(text: str) -> dict[str, int]:
    """How often each base opcode (HGMMA, of HGMMA.64x128x16.F32.BF16) occurs in a disassembly."""
    return dict(sorted(Counter(SASS.findall(text)).items()))


def count_ptx(text: str) -> dict[str, int]:
    """How often each base instruction (mad, of mad.lo.s32) occurs in a PTX text."""
    return dict(sorted(Counter(PTX.findall(re.sub(r"//[^\n]*", "", text))).items()))


def count_opcodes(cubin: bytes, ptx: str, folder: Path) -> tuple[str, dict[str, int]]:
    """The instruction set that was counted, and the counts. `folder` is written to."""
    text = disassembly(cubin, folder)
    return ("sass", count_sass(text)) if text else ("ptx", count_ptx(ptx))


def machine_code_digest(cubin: bytes) -> str:
    """16 digits of the SHA-256 of a cubin's ELF sections `.text.*`, sorted, without names."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_size, count, names_index = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<2I4Q", cubin, table + i * entry_size) for i in range(count)]
    names_at = headers[names_index][4]
    code = sorted(
        cubin[offset : offset + size]
        for name, _, _, _, offset, size in headers
        if cubin.startswith(b".text.", names_at + name)
    )
    return hashlib.sha256(b"".join(code)).hexdigest()[:16]


def compile_row(name: str) -> Json:
    """Compile a variant now; its row, less the commit."""
    from cutlass import CUDA_VERSION as CUDA

    arch = VARIANTS[name].arch
    with tempfile.TemporaryDirectory() as folder, compile_lock():
        with compiler_keeps(f"--keep-cubin --keep-ptx --dump-dir={folder}"):
            compiled, tiles = compile_variant(name)
        function: Any = compiled.function
        isa, opcodes = count_opcodes(function.__cubin__, function.__ptx__, Path(folder))
    compiler = f"cutlass_dsl {versions()['cutlass_dsl']}, CUDA {CUDA.major}.{CUDA.minor}"
    figures = {"arch": arch, "tiles": tiles, "smem_bytes": None, **compiled.meta}
    figures["code"] = machine_code_digest(function.__cubin__)
    counted = {"isa": isa, "opcodes": opcodes, "compiler": compiler}
    return {"name": name, **{key: figures[key] for key in FIGURES}, **counted}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What changed from one row of a variant to another, other than where the rows come from
    (commit, compiler); opcodes only where the code differs, and within one instruction set."""
    found = [f"{key} {old[key]} -> {new[key]}" for key in FIGURES if old[key] != new[key]]
    if old["code"] == new["code"]:
        return found
    if old["isa"] != new["isa"]:
        return [*found, f"isa {old['isa']} -> {new['isa']}: opcodes not compared"]
    before, after = Counter(old["opcodes"]), Counter(new["opcodes"])
    for opcode in sorted(before | after):
        if before[opcode] != after[opcode]:
            change = after[opcode] - before[opcode]
            found.append(f"{opcode} {before[opcode]} -> {after[opcode]} ({change:+d})")
    return found


def read_rows(path: Path) -> dict[str, Json]:
    """Rows by name of variant; of equal names the last counts. Those of an archive beside the file,
    `<file>.xz`, come first: `xz -9e < FILE > FILE.xz`, and then the file may go.

    Raises ValueError, with the place, for a line that is no such row."""
    rows = {}
    for place, line in lines(path):
        try:
            row = json.loads(line) if line.strip() else {"name": ""}
            rows[row["name"]] = row
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{place} is no row of bench.codegen --out: {line[:60]!r}") from error
    return {name: row for name, row in rows.items() if name}


def rows_of(source: str, names: Sequence[str]) -> dict[str, Json]:
    """Kept rows, where `source` is a file; else what that commit compiles to, for the names that it
    knows.

    Raises ValueError where it is neither, or a file of something else.
    """
    if Path(source).is_file() or archive_of(Path(source)).is_file():
        return read_rows(Path(source))
    command = [sys.executable, "-m", "bench.codegen"]
    with unpacked(source, PACKAGE, "bench") as folder:
        told: dict[str, Any] = {"cwd": folder, "env": environment(folder), "text": True}
        listed = subprocess.run([*command, "--list"], capture_output=True, check=True, **told)
        known = [name for name in names if name in listed.stdout.split()]
        if not known:
            return {}
        with tempfile.TemporaryDirectory() as out:
            path = Path(out, "rows.jsonl")
            subprocess.run([*command, *known, "--out", str(path)], check=True, **told)
            return read_rows(path)


def _line(row: Json) -> str:
    tiles, counts = row["tiles"], row["opcodes"]
    shown = " ".join(f"{op} {counts[op]}" for op in SHOWN if op in counts)
    shape = f"{tiles['tile_m']}x{tiles['tile_n']}" if tiles else "-"
    figures = f"regs {row['registers']}  spill {row['spill_bytes']}  smem {row['smem_bytes']}"
    parts = [f"{row['name']:26} {shape:8} {row['code']}", figures]
    return "  ".join([*parts, f"{row['isa']} {sum(counts.values())}", shown, *row["warnings"]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if anything differs from the rows of --against, 2 if no name matches."""
    parser = argparse.ArgumentParser(prog="python -m bench.codegen", description=__doc__)
    parser.add_argument("names", nargs="*", default=["*"], help="names of variants, or patterns")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--out", type=Path, help="write the rows here, over what was there")
    against = "compare with a file of rows (of --out, or its .xz archive), or with a commit"
    parser.add_argument("--against", help=against)
    options = parser.parse_args(arguments)
    names = [name for name in VARIANTS if any(fnmatch(name, p) for p in options.names)]
    if not names:
        parser.error(f"no variant is called {', '.join(options.names)}; --list names them")
    if options.list:
        print("\n".join(names))
        return 0
    try:
        known = rows_of(options.against, names) if options.against else {}
    except ValueError as error:
        parser.error(f"--against takes a file of rows or a commit: {error}")
    commit, rows, changed = commit_here(), [], False
    for name in names:
        row = compile_row(name) | {"commit": commit}
        rows.append(row)
        print(_line(row), flush=True)
        if options.against:
            found = differences(known[name], row) if name in known else ["not in the other rows"]
            changed |= bool(found)
            print("\n".join(f"    {text}" for text in found or ["unchanged"]), flush=True)
    if options.out:
        options.out.write_text("".join(map(row_line, rows)))
    return int(changed)


if __name__ == "__main__":
    sys.exit(main())
