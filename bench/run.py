"""python -m bench.run [PATTERN ...] [--table NAME]: gate, time, append rows, print a table.

A case is timed only after our result passed `bench.gate.check` on the very input; a red case writes
no row and makes the exit code 1. Cases run in a worker process. When it dies (a CUDA error, a hang
longer than --limit) a new one goes on with the cases that are left, as a run of its own: figures of
different runs are never compared.

With --resume, which --table implies, cases whose rows of this very commit are in --out are left
out, but for the references of their size, which every run measures itself.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from bench import (
    Json,
    commit_here,
    cudnn_cases,
    everyday,
    format_table,
    name_of,
    paper,
    peer_of,
    runner,
    tells_code,
)
from bench.ahead import compile_job, deal, jobs
from bench.cases import CASES, BenchCase
from bench.flops import listing
from bench.measure import TABLES, Inputs, Options
from bench.measure import measure as measure_case
from bench.peers import DEFAULT_PEERS, PEERS
from bench.rows import RESULTS, append_row, read_rows
from bench.runner import Run, Table
from bench.sweep import summary

FIGURES = ("fwd", "bwd", "us", "bytes")
# Unless the command says otherwise: in general, and for each table.
GENERAL = {
    "peers": ",".join(DEFAULT_PEERS),
    "rounds": 5,
    "singles": 10,
    "shorts": 0,
    "burst": 0.4,
    "load": 1.0,
    "gate_rows": 64,
    "ahead": 0,
}
FOR_PAPER = GENERAL | {
    "peers": "ours,fa4",
    "singles": 0,
    "burst": 0.15,
    "load": 0.0,
    "gate_rows": 16,
    "ahead": runner.few_processes(),
}
DEFAULTS = {"": GENERAL, "paper": FOR_PAPER}
DEFAULTS["shapes"] = FOR_PAPER | {"peers": "ours,fa4,cudnn", "shorts": 9}
DEFAULTS["cudnn"] = FOR_PAPER | {"peers": "ours,cudnn_flex", "burst": 0.06, "shorts": 5}
NAMES = {
    "paper": paper.table_names,
    "shapes": everyday.table_names,
    "cudnn": cudnn_cases.table_names,
}
# The tensors of the last case of this process.
INPUTS = Inputs()


def settle(given: argparse.Namespace, cases: list[BenchCase]) -> list[BenchCase]:
    """The cases of --table, in its order. Raises ValueError where there are none."""
    for key, value in DEFAULTS[given.table].items():
        if getattr(given, key) is None:
            setattr(given, key, value)
    given.commit = given.commit or commit_here()
    if given.table:
        asked = {case.name for case in cases}
        cases = [CASES[name] for name in NAMES[given.table]() if name in asked]
    if not cases:
        raise ValueError(f"--table {given.table}: no case of it matches {given.patterns}")
    return cases


def options_of(run: Run) -> Options:
    given = run.given
    return Options(
        run.peers, given.seed, given.rounds, given.singles, given.shorts, given.burst, given.load,
        given.gate_rows, given.table,
    )  # fmt: skip


def measure(case: BenchCase, run: Run) -> Iterable[Json]:
    return measure_case(case, options_of(run), INPUTS)


def references(left: Sequence[str], done: Sequence[str]) -> tuple[str, ...]:
    """Those of `done` that rows of `left` are compared with: full, causal, or other widths."""
    sizes = {name.rpartition("-")[0] for name in left if name.startswith(("mask-", "bwd-mask-"))}
    kept = {f"{size}-{mask}" for size in sizes for mask in ("full", "causal")}
    kept |= everyday.compared(left)
    return tuple(name for name in done if name in kept)


def done(run: Run, cases: Sequence[BenchCase]) -> set[str]:
    """Cases that have a figure of this commit by each peer that can do them.

    A commit that does not tell the code (none known, or changes on top of it) has measured nothing.
    """
    given, options = run.given, options_of(run)
    if not (given.table or given.resume) or not tells_code(given.commit):
        return set()
    known = {
        (name_of(row), peer_of(row))
        for path in (given.out, *given.resume)
        for row in read_rows(path)
        if row["commit"] == given.commit and any(key in row for key in FIGURES)
    }

    def lacks(case: BenchCase) -> bool:
        can = (peer for peer in options.peers_of(case) if PEERS[peer].supports(case) is None)
        return any((case.name, peer) not in known for peer in can)

    return {case.name for case in cases if not lacks(case)}


def hands(run: Run, cases: Sequence[BenchCase]) -> list[list[Any]]:
    found: list[list[Any]] = deal(jobs(cases, options_of(run).peers_of), run.given.ahead)
    return found


def line_of(row: Json) -> str:
    found = " ".join(f"{key} {row[key]:.2f}" for key in FIGURES if key in row)
    return f"    {name_of(row)} {peer_of(row)} {row['variant']} {found}"


TABLE = Table(
    command="bench.run", about=__doc__, cases=CASES.values, measure=measure, peers=tuple(PEERS),
    head=lambda run: {"run": run.name, **runner.provenance(run), "commit": run.given.commit},
    line=line_of, settle=settle, listing=listing, append=append_row, read=read_rows,
    summary=lambda rows: (format_table(rows), *summary(rows)), keeps_failures=False,
    isolated=runner.Isolated(hands, lambda run, job: compile_job(*job), done, references),
    options={
        "--table": {"choices": tuple(TABLES), "default": "", "help": "of the FlashMask paper's "
                    "tables, of everyday shapes, or of cuDNN's masks"},
        "--singles": {"type": int, "help": "rounds of single (10); 0: none"},
        "--shorts": {"type": int, "help": "rounds of single bursts of ten calls (0)"},
        "--load": {"type": float, "help": "seconds of load to read clock and power (1)"},
        "--gate-rows": {"type": int, "help": "random rows that the gate of a forward samples (64)"},
        "--seed": {"type": int, "default": random.randrange(2**31), "help": "else random"},
        "--commit": {"help": "short hash, where git cannot tell"},
    },
    defaults={"out": RESULTS, "limit": 240.0, "seconds": math.inf, "peers": None, "rounds": None,
              "burst": None, "ahead": None},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(runner.main(TABLE))
