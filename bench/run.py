"""python -m bench.run [PATTERN ...]: gate, time, append rows, print a table. See --help.

A case is timed only after our result passed `bench.gate.check` on the very input; a red case writes
no row and makes the exit code 1. Cases run in a worker process. When it dies (a CUDA error,
a hang longer than --case-seconds) a new one goes on with the cases that are left, as a run of its
own: figures of different runs are never compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

from bench import ROOT, Json, commit_here, format_table, versions
from bench.cases import CASES, select
from bench.flops import listing
from bench.linearity import summary
from bench.measure import Options, measure, say
from bench.peers import DEFAULT_PEERS, PEERS

RESULTS = ROOT / "bench" / "results" / "h200.jsonl"
FIRST_CASE_S = 30.0
DONE, SKIPPED = "done", "not run: out of time"
DIED = 3
Report = dict[str, str]


def append(path: str, value: Json | list[str]) -> None:
    """One more line of JSON."""
    with open(path, "a") as file:
        file.write(json.dumps(value) + "\n")


def work(told: str) -> int:
    """Body of a worker process; `told` is the JSON of its Options."""
    import torch

    options = Options(**json.loads(told))
    common = {
        "run": options.run,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "commit": options.commit,
        "versions": versions(),
    }
    begin, slowest = time.time(), FIRST_CASE_S
    for number, name in enumerate(options.names):
        started = time.time()
        if started + slowest > options.deadline:
            for left in options.names[number:]:
                append(options.report, [left, SKIPPED])
            break
        limit = min(options.case_s, options.deadline - started)
        append(options.report, [name, f"died: a crash, or longer than {limit:.0f} s"])
        watchdog = threading.Timer(limit, os._exit, (DIED,))
        watchdog.daemon = True
        watchdog.start()
        outcome, rows = DONE, list[Json]()
        try:
            for row in measure(CASES[name], options):
                rows.append(common | row)
                append(options.out, rows[-1])
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        for line in format_table(rows).splitlines():
            say(f"    {line}")
        append(options.report, [name, outcome])
        slowest = max(slowest if number else 0.0, time.time() - started)
        gone = time.time() - begin
        left_s = gone / (number + 1) * (len(options.names) - number - 1)
        say(f"{name}: {outcome} ({gone:.0f} s gone, about {left_s:.0f} s left)")
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return DIED
        finally:
            watchdog.cancel()
    return 0


def references(left: Sequence[str], done: Sequence[str]) -> tuple[str, ...]:
    """Those of `done` that rows of `left` are compared with: full and causal of the same size."""
    sizes = {name.rpartition("-")[0] for name in left if name.startswith(("mask-", "bwd-mask-"))}
    kept = {f"{size}-{mask}" for size in sizes for mask in ("full", "causal")}
    return tuple(name for name in done if name in kept)


def supervise(names: Sequence[str], launch: Callable[[tuple[str, ...], int], Report]) -> Report:
    """Launch workers until every case has an outcome; one that reports nothing ends it.

    A new worker is a run of its own, so it measures the references of its cases again.
    """
    outcomes: Report = {}
    attempt = 0
    while left := tuple(name for name in names if name not in outcomes):
        done = [name for name, outcome in outcomes.items() if outcome == DONE]
        reported = launch((*references(left, done), *left), attempt)
        outcomes |= reported or dict.fromkeys(left, "the worker could not start")
        attempt += 1
    return outcomes


def launch_worker(options: Options, names: tuple[str, ...], attempt: int) -> Report:
    """One worker process over `names`; what it reported of each case it began."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report")
        path.touch()
        run = f"{options.run}.{attempt}" if attempt else options.run
        told = json.dumps(asdict(replace(options, names=names, run=run, report=str(path))))
        program = "import sys; from bench.run import work; sys.exit(work(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", program, told])
        return dict(json.loads(line) for line in path.read_text().splitlines())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench.run", description="Speed on one GPU.")
    add = parser.add_argument
    add("patterns", nargs="*", default=["*"], help="globs over case names")
    add("--list", action="store_true", help="print the cases and stop")
    others = ", ".join(name for name in PEERS if name not in DEFAULT_PEERS)
    add("--peers", default=",".join(DEFAULT_PEERS), help=f"default: %(default)s; also {others}")
    add("--repeats", type=int, default=5, help="rounds of loop; 0: none")
    add("--singles", type=int, default=10, help="rounds of single; 0: none")
    add("--burst", type=float, default=0.4, help="seconds of one loop burst")
    add("--load", type=float, default=1.0, help="seconds of load to read clock and power; 0: none")
    add("--seconds", type=float, default=math.inf, help="time for everything; stops cleanly")
    add("--case-seconds", type=float, default=240.0, help="longest a case may take")
    add("--seed", type=int, default=random.randrange(2**31), help="of the inputs; else random")
    add("--out", default=str(RESULTS), help="JSONL file that rows are appended to")
    add("--commit", help="short hash, where git cannot tell")
    args = parser.parse_args(argv)
    args.peers = tuple(args.peers.split(","))
    try:
        if unknown := set(args.peers) - set(PEERS):
            raise ValueError(f"--peers: {sorted(unknown)} not in {sorted(PEERS)}")
        args.names = select(args.patterns)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.list:
        say(listing())
        return 0
    run = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}-{random.randrange(16**4):04x}"
    taken = ("names", "peers", "repeats", "singles", "seed", "out")
    options = Options(
        **{key: getattr(args, key) for key in taken},
        burst_s=args.burst,
        load_s=args.load,
        case_s=args.case_seconds,
        deadline=time.time() + args.seconds,
        commit=args.commit or commit_here(),
        run=run,
    )
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.touch()
    say(f"run {run}, commit {options.commit}, seed {options.seed}, rows to {out}")
    outcomes = supervise(options.names, lambda names, n: launch_worker(options, names, n))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    rows = [row for row in rows if row["run"].partition(".")[0] == run]
    say("\n".join((format_table(rows), *summary(rows))))
    unfinished = {name: outcome for name, outcome in outcomes.items() if outcome != DONE}
    for name, outcome in unfinished.items():
        say(f"{name}: {outcome}")
    return 1 if set(unfinished.values()) - {SKIPPED} else 0


if __name__ == "__main__":
    sys.exit(main())
