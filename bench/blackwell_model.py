"""python -m bench.blackwell_model: what a block of the Blackwell backward costs, by counting.

Compiles the backward for sm_100a, takes the loop of each role out of its machine code,
and counts instructions and bytes of shared memory for a block of 128 queries
by 128 keys. At the published rates of a B200 these give the share of time in which the tensor cores
are busy, at best. It is a prediction, and nothing of it was ever measured.

It needs `nvdisasm` or `cuobjdump`, where `bench.codegen` finds them. `--out` keeps the rows;
`--kept` prints the tables of those that are kept, without a compiler.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import ROOT, Json, commit_here
from bench.codegen import disassembly
from bench.codegen_variants import VARIANTS, AttentionVariant, compile_variant
from bench.machine_code import Code
from bench.rows import row_line
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.compiler import compiler_keeps

KEPT = ROOT / "bench" / "results" / "blackwell_model.jsonl"
NAMES = tuple(f"sm100-bwd-d{d}-{mask}" for d in (64, 96, 128) for mask in ("full", "causal"))
SHOWN = (
    *("MUFU", "FFMA2", "FADD2", "FMUL2", "F2FP", "LDTM", "STTM", "LDS", "STS", "SYNCS", "BAR"),
    *("UTCHMMA", "UTCBAR", "UBLKRED", "UTMALDG"),
)
# flash-attn-4 4.0.0b36, a CTA, head dimension 64, causal: the loops of its machine code, which were
# counted by hand; it masks every block
PEER: dict[str, dict[str, int]] = {
    "compute, partial block": {
        "instructions": 483, "MUFU": 64, "FFMA2": 32, "FADD2": 32, "FMUL2": 32, "F2FP": 64,
        "LDTM": 4, "STTM": 4, "LDS": 32, "STS": 8, "SYNCS": 11, "BAR": 0,
    },
    "mma": {"instructions": 227, "UTCHMMA": 32, "UTCBAR": 7},
    "reduce": {"instructions": 59, "LDTM": 2, "STS": 16, "UBLKRED": 2, "BAR": 4},
}  # fmt: skip
# Of an SM of a B200, in a clock: bf16 operations of the tensor cores, exponentials, operations of
# the fp32 pipe, bytes of shared memory (the paper of FlashAttention-4, arXiv 2603.05451).
TENSOR, EXPONENTIALS, FP32, SHARED = 8192, 16, 128, 128
# rows and columns of a block, lanes, bytes of a vector, and columns of a step of a product
BLOCK, THREADS_OF_WARP, VECTOR, STEP = 128, 32, 16, 16
# of UTCHMMA, those whose operand A is in shared memory and not in tensor memory
FROM_SHARED = "UTCHMMA with A in shared memory"
# commits of a block: S, dQ, Q that was read, dP, dO that was read
COMMITS_OF_BLOCK = 5
NO_DISASSEMBLER = "no nvdisasm and no cuobjdump that knows sm_100a"


class Parts(NamedTuple):
    """Roles in the order of their code, each from its request for registers on."""

    compute: int = 0
    reduce: int = 1
    helpers: int = 2


PARTS = Parts()


class Warps(NamedTuple):
    """How many warps take part in a block."""

    compute: int = 8
    reduce: int = 4


WARPS = Warps()


def part_of(firsts: Sequence[int], place: int) -> int:
    """Which part of the code that begins at one of `firsts` a place is in; -1 before them."""
    return bisect_right(firsts, place) - 1


# -- what a block costs ---------------------------------------------------------------------------


def _count(
    code: Code, places: Sequence[int], wanted: tuple[str, int] | None = None
) -> Counter[str]:
    """Opcodes of the loop through these places; wanted: how often one of them runs, rolled loops
    included, each of which is gone through twice."""
    # not from within a loop of the way
    way = code.loop_through([places[-1], *places[:-1]])
    counts = code.count(way)
    if wanted is not None and counts[wanted[0]] < wanted[1]:
        for inner in code.inner_loops(way):
            if code.count(inner)[wanted[0]]:
                counts += code.count(inner)
                way += inner
    if wanted is not None and counts[wanted[0]] != wanted[1]:
        raise ValueError(f"{wanted[0]} {counts[wanted[0]]} in the loop, {wanted[1]} expected")
    counts["instructions"] = sum(counts.values())
    counts[FROM_SHARED] = sum(
        code.instructions[i].opcode == "UTCHMMA" and code.instructions[i].operands[0] == "g"
        for i in way
    )
    return counts


def count_roles(text: str, tile_d: int, tile_dv: int) -> dict[str, dict[str, int]]:
    """Instructions of a warp for a block, by role, out of a disassembly.

    The parts of the code follow each other as the kernel's branches do. A way that never waits is
    taken, within a walk: from a query block to the next.

    Raises ValueError where the code is not what the kernel's plan says.
    """
    code = Code.create(text)
    firsts = code.where(lambda x: x.opcode == "USETMAXREG")

    def with_query_chunk(part: int, *opcodes: str) -> list[int]:
        found = code.where(lambda x: x.opcode in opcodes)
        return [i for i in found if part_of(firsts, i) == part]

    exponentials = [
        i for i in with_query_chunk(PARTS.compute, "MUFU") if code.instructions[i].kind == ".EX2"
    ]
    per_block = BLOCK // 2
    if len(exponentials) != 2 * per_block:
        raise ValueError(f"{len(exponentials)} exponentials stand in the code, expected 128")
    bodies = [
        _count(code, (exponentials[n], exponentials[n + per_block - 1])) for n in (0, per_block)
    ]
    whole, cut = sorted(bodies, key=lambda counts: counts["instructions"])
    commits = with_query_chunk(PARTS.helpers, "UTCBAR")[:COMMITS_OF_BLOCK]
    products = [i for i in with_query_chunk(PARTS.helpers, "UTCHMMA") if i < commits[-1]]
    steps = (tile_d + tile_dv + 3 * BLOCK) // STEP
    copies = with_query_chunk(PARTS.helpers, "UTMALDG")
    sums = with_query_chunk(PARTS.helpers, "UBLKRED")
    reduced = with_query_chunk(PARTS.reduce, "LDTM", "FENCE")
    roles = {
        "compute, partial block": cut,
        "compute, full block": whole,
        "mma": _count(code, sorted((*products, *commits)), ("UTCHMMA", steps)),
        "reduce": _count(code, reduced, ("LDTM", tile_d // 32)),
        "send": _count(code, sums),
        # the second half brings keys and values
        "load": _count(code, copies[: len(copies) // 2]),
    }
    kept = ("instructions", *SHOWN, FROM_SHARED)
    return {
        role: {op: counts[op] for op in kept if counts[op] or op == "BAR"}
        for role, counts in roles.items()
    }


def shared_bytes(roles: dict[str, dict[str, int]], tile_d: int, tile_dv: int) -> dict[str, int]:
    """Bytes that a whole block moves in and out of shared memory.

    operands: those of the five products that are not in TMEM. statistics: LSE and delta, which all
    lanes of a warp read at once, so an instruction moves one line.
    """
    rows = 2 * BLOCK  # bytes of a column of 128 rows in 16 bits
    operands_a = roles["mma"][FROM_SHARED] * rows * STEP
    operands_b = rows * (3 * tile_d + 2 * tile_dv)
    line = VECTOR * THREADS_OF_WARP
    compute = roles["compute, full block"]
    staged = rows * 2 * tile_d
    return {
        "operands": operands_a + operands_b,
        "dS": compute["STS"] * WARPS.compute * line,
        "dQ staged and read": 2 * staged,
        "Q and dO loaded": rows * (tile_d + tile_dv),
        "statistics": compute["LDS"] * WARPS.compute * SHARED,
    }


def cycles(
    roles: dict[str, dict[str, int]], moved: dict[str, int], tile_d: int, tile_dv: int
) -> dict[str, int]:
    """Cycles of an SM that a whole block takes of each resource."""
    flops = 2 * BLOCK * BLOCK * (3 * tile_d + 2 * tile_dv)
    threads = WARPS.compute * THREADS_OF_WARP
    compute = roles["compute, full block"]
    fp32 = 2 * sum(compute[op] for op in ("FFMA2", "FADD2", "FMUL2"))
    return {
        "tensor cores": flops // TENSOR,
        "shared memory": sum(moved.values()) // SHARED,
        "exponentials": compute["MUFU"] * threads // EXPONENTIALS,
        "fp32": fp32 * threads // FP32,
    }


def row_of(name: str) -> Json:
    """Compile a variant now; its row, less the commit.

    Raises ValueError where no program tells its machine code.
    """
    variant = VARIANTS[name]
    assert isinstance(variant, AttentionVariant)
    with tempfile.TemporaryDirectory() as folder, compile_lock():
        with compiler_keeps(f"--keep-cubin --dump-dir={folder}"):
            compiled, _ = compile_variant(name)
        function: Any = compiled.function
        text = disassembly(function.__cubin__, Path(folder))
    if not text:
        raise ValueError(NO_DISASSEMBLER)
    dims = variant.problem.head_dim, variant.problem.head_dim_v
    roles = count_roles(text, *dims)
    moved = shared_bytes(roles, *dims)
    taken = cycles(roles, moved, *dims)
    share = round(taken["tensor cores"] / max(taken.values()), 4)
    kept = {key: compiled.meta[key] for key in ("registers", "spill_bytes")}
    return {
        "name": name, **kept, "roles": roles, "shared_bytes": moved, "cycles": taken,
        "predicted_tensor_share": share,
    }  # fmt: skip


def read_rows(path: Path = KEPT) -> list[Json]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _label(name: str) -> str:
    return name.removeprefix("sm100-bwd-").replace("-", " ")


def tables(rows: Sequence[Json]) -> str:
    """Instructions by role, and the prediction, as the page has them."""
    lines = []
    sources = [(_label(row["name"]), row["roles"]) for row in rows]
    sources.append(("flash-attn-4, d64 causal", PEER))
    for label, roles in sources:
        for role, counts in roles.items():
            if label.endswith("full") and role != "compute, full block":
                # as with a causal mask
                continue
            told = ", ".join(f"{op} {counts[op]}" for op in SHOWN if op in counts)
            lines.append((label, role, str(counts["instructions"]), told))
    counted = _table(("kernel", "a warp of", "instructions", "of these"), lines)
    kinds, resources = list(rows[0]["shared_bytes"]), list(rows[0]["cycles"])
    of_bytes = _table(
        ("kernel", *(f"{kind}, KB" for kind in kinds), "all, KB"),
        (
            (
                _label(row["name"]),
                *(f"{row['shared_bytes'][kind] / 1024:g}" for kind in kinds),
                f"{sum(row['shared_bytes'].values()) / 1024:g}",
            )
            for row in rows[1::2]
        ),
    )
    predicted = _table(
        ("kernel", *resources, "tensor cores busy at best"),
        (
            (
                _label(row["name"]),
                *(str(row["cycles"][resource]) for resource in resources),
                f"{row['predicted_tensor_share']:.1%}",
            )
            for row in rows[1::2]
        ),
    )
    return "\n\n".join((counted, of_bytes, predicted))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 where no program can tell machine code."""
    parser = argparse.ArgumentParser(prog="python -m bench.blackwell_model", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the rows here, over what was there")
    parser.add_argument("--kept", action="store_true", help="print the kept rows, compile nothing")
    options = parser.parse_args(arguments)
    if options.kept:
        print(tables(read_rows()))
        return 0
    commit = commit_here()
    try:
        rows = [row_of(name) | {"commit": commit} for name in NAMES]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(tables(rows))
    if options.out:
        options.out.write_text("".join(map(row_line, rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
