"""python -m bench.run [PATTERN ...] [--table NAME]: gate, time, append rows, print a table.

A case is timed only after our result passed `bench.gate.check` on the very input; a red case writes
no row and makes the exit code 1. Cases run in a worker process. When it dies (a CUDA error,
a hang longer than --case-seconds) a new one goes on with the cases that are left, as a run of its
own: figures of different runs are never compared.

With --resume, which --table implies, cases whose rows of this very commit are in --out are
left out, but for the references of their size, which every run measures itself.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from bench import (
    Json,
    commit_here,
    cudnn_cases,
    everyday,
    format_table,
    name_of,
    paper,
    peer_of,
    say,
    tells_code,
    versions,
    why_no_gpu,
)
from bench.ahead import LIMIT_S, compile_ahead, deal, jobs
from bench.cases import CASES, BenchCase, select
from bench.flops import attention_flops, listing
from bench.measure import TABLES, Inputs, Options, measure
from bench.peers import DEFAULT_PEERS, PEERS
from bench.rows import RESULTS, append_row, read_rows
from bench.sweep import summary
from bench.timing import LONG_ROUNDS

DONE, SKIPPED = "done", "not run: out of time"
DIED = 3
NO_GPU = 2
Report = dict[str, str]
FIGURES = ("fwd", "bwd", "us", "bytes")
# Unless the command says otherwise: in general, and for each table.
GENERAL = {
    "peers": ",".join(DEFAULT_PEERS),
    "repeats": 5,
    "singles": 10,
    "shorts": 0,
    "burst": 0.4,
    "load": 1.0,
    "gate_rows": 64,
    "resume": False,
    "ahead": 0,
}
FOR_PAPER = GENERAL | {
    "peers": "ours,fa4",
    "singles": 0,
    "burst": 0.15,
    "load": 0.0,
    "gate_rows": 16,
    "resume": True,
    "ahead": min(14, max(1, (os.cpu_count() or 2) - 2)),
}
DEFAULTS = {"": GENERAL, "paper": FOR_PAPER}
DEFAULTS["shapes"] = FOR_PAPER | {"peers": "ours,fa4,cudnn", "shorts": 9}
DEFAULTS["cudnn"] = FOR_PAPER | {"peers": "ours,cudnn_flex", "burst": 0.06, "shorts": 5}
NAMES = {
    "paper": paper.table_names,
    "shapes": everyday.table_names,
    "cudnn": cudnn_cases.table_names,
}


# -- how long cases take -------------------------------------------------------------------------

# Operations a second that a forecast assumes; no figure of anything.
ASSUMED = 5e14
# Imports, the context of the device, and kernels that nobody compiled before.
START_S = 30.0
OTHER_KIND_S = 20.0
# What a case costs beside its calls: inputs, its mask, and float64 on the sampled rows.
CASE_S = 0.4
# What a peer costs besides: FlexAttention is traced in every case, kernels cached or not; cuDNN is
# told row intervals, which numpy makes.
PEER_S = {"flex": 4.0, "flex_flash": 10.0, "cudnn_flex": 0.5}
# The gradients of a head over 131072 tokens, in float64 and in the dtype of the case.
GRADIENTS_S = 2.0 / 131072**2
MARGIN = 1.5
BAR = 30


def loop_calls(call_s: float, rounds: int, burst_s: float, least: int) -> float:
    """Calls of one peer in mode loop, as `bench.timing.time_loop` makes them."""
    if call_s > burst_s:
        rounds = min(rounds, LONG_ROUNDS)
    few = min(2, least)
    count = max(least, burst_s / call_s)
    return few + least + rounds * (count + max(few, count // 8))


def forecast(
    case: BenchCase, peers: Sequence[str], rounds: int, burst_s: float, least: int
) -> float:
    """Seconds of a case in mode loop, with these peers."""
    if case.kind not in ("attention", "backward"):
        return OTHER_KIND_S
    call_s = attention_flops(case) / ASSUMED
    seconds = CASE_S + sum(PEER_S.get(peer, 0.0) for peer in peers)
    seconds += len(peers) * call_s * (1 + loop_calls(call_s, rounds, burst_s, least))
    if case.kind == "backward":
        group = case.heads // case.heads_kv
        seconds += min(2, case.batch) * group * GRADIENTS_S * case.n * (case.n_k or case.n)
    return seconds


@dataclass
class Pace:
    """Of the cases of one process. expected: seconds by case, in order."""

    expected: Mapping[str, float]
    _took: dict[str, float] = field(default_factory=dict)

    def _scale(self) -> float:
        """Real seconds of a forecast one. The first case, which pays for the start, only counts
        while it is alone."""
        counted = list(self._took)[1:] or list(self._took)
        if not counted:
            return 1.0
        return sum(self._took[name] for name in counted) / sum(
            self.expected[name] for name in counted
        )

    def done(self, name: str, seconds: float) -> None:
        self._took[name] = seconds

    def needs(self, name: str) -> float:
        """Seconds to have in hand before a case is begun."""
        first = 0.0 if self._took else START_S
        return first + MARGIN * self.expected[name] * max(1.0, self._scale())

    def left(self) -> float:
        """Seconds of the cases that are not done."""
        rest = (self.expected[name] for name in self.expected if name not in self._took)
        return sum(rest) * self._scale()

    def bar(self) -> str:
        """How far the cases are by expected time, as `[####----] 12/144`."""
        total = sum(self.expected.values())
        share = sum(self.expected[name] for name in self._took) / total if total else 1.0
        full = int(share * BAR)
        return f"[{'#' * full}{'-' * (BAR - full)}] {len(self._took)}/{len(self.expected)}"


def tell(report: str, name: str, outcome: str) -> None:
    """Appends to a worker's report; the last outcome of a case counts."""
    with open(report, "a") as file:
        file.write(json.dumps([name, outcome]) + "\n")


def supporting(case: BenchCase, options: Options) -> tuple[str, ...]:
    """The peers that are wanted in a case and say that they can do it."""
    return tuple(p for p in options.peers_of(case) if PEERS[p].supports(case) is None)


def pace_of(options: Options) -> Pace:
    """A forecast of the cases of `options`."""
    return Pace(
        {
            name: forecast(
                case,
                supporting(case, options),
                options.repeats,
                options.burst_s,
                options.least_calls(case),
            )
            for name, case in ((name, CASES[name]) for name in options.names)
        }
    )


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
    begin, pace, inputs = time.time(), pace_of(options), Inputs()
    for number, name in enumerate(options.names):
        started = time.time()
        if started + pace.needs(name) > options.deadline:
            for left in options.names[number:]:
                tell(options.report, left, SKIPPED)
            break
        limit = min(options.case_s, options.deadline - started)
        tell(options.report, name, f"died: a crash, or longer than {limit:.0f} s")
        watchdog = threading.Timer(limit, os._exit, (DIED,))
        watchdog.daemon = True
        watchdog.start()
        outcome, rows = DONE, list[Json]()
        try:
            for row in measure(CASES[name], options, inputs):
                rows.append(common | row)
                append_row(options.out, rows[-1])
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        for line in format_table(rows).splitlines():
            say(f"    {line}")
        tell(options.report, name, outcome)
        pace.done(name, time.time() - started)
        gone = f"{time.time() - begin:.0f} s gone, about {pace.left():.0f} s left"
        say(f"{pace.bar()} {name}: {outcome} ({gone})")
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return DIED
        finally:
            watchdog.cancel()
    return 0


def references(left: Sequence[str], done: Sequence[str]) -> tuple[str, ...]:
    """Those of `done` that rows of `left` are compared with: full and causal of the same size, or
    other head dimensions of the same shape."""
    sizes = {name.rpartition("-")[0] for name in left if name.startswith(("mask-", "bwd-mask-"))}
    kept = {f"{size}-{mask}" for size in sizes for mask in ("full", "causal")}
    kept |= everyday.compared(left)
    return tuple(name for name in done if name in kept)


def unmeasured(names: Sequence[str], rows: Sequence[Json], options: Options) -> tuple[str, ...]:
    """Those of `names` that lack a figure of this commit by a peer that can do them.

    A commit that does not tell the code (none known, or changes on top of it) has measured nothing.
    """
    if not tells_code(options.commit):
        return tuple(names)
    known = {
        (name_of(row), peer_of(row))
        for row in rows
        if row["commit"] == options.commit and any(key in row for key in FIGURES)
    }
    return tuple(
        name
        for name in names
        if any((name, peer) not in known for peer in supporting(CASES[name], options))
    )


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
    parser = argparse.ArgumentParser(
        "python -m bench.run",
        description="Speed on one GPU.",
        epilog="; ".join(f"for --table {name}: {DEFAULTS[name]}" for name in TABLES),
    )
    add = parser.add_argument
    add("patterns", nargs="*", default=["*"], help="globs over case names")
    add("--list", action="store_true", help="print the cases and stop")
    tables = "the cases of the FlashMask paper's tables, of everyday shapes, or of cuDNN's masks"
    add("--table", choices=tuple(TABLES), default="", help=tables)
    others = ", ".join(name for name in PEERS if name not in DEFAULT_PEERS)
    add("--peers", help=f"default: {GENERAL['peers']}; also {others}")
    add("--repeats", type=int, help="rounds of loop (5); 0: none")
    add("--singles", type=int, help="rounds of single (10); 0: none")
    add("--shorts", type=int, help="rounds of short, single bursts of ten calls (0); 0: none")
    add("--burst", type=float, help="seconds of one loop burst (0.4)")
    add("--load", type=float, help="seconds of load to read clock and power (1); 0: none")
    add("--gate-rows", type=int, help="random rows that the gate of a forward samples (64)")
    add("--resume", action=argparse.BooleanOptionalAction, help="leave out what --out holds")
    add("--ahead", type=int, help="processes that compile before the first case (0: none)")
    add("--seconds", type=float, default=math.inf, help="time for everything; stops cleanly")
    add("--case-seconds", type=float, default=240.0, help="longest a case may take")
    add("--seed", type=int, default=random.randrange(2**31), help="of the inputs; else random")
    add("--out", default=str(RESULTS), help="JSONL file that rows are appended to")
    add("--commit", help="short hash, where git cannot tell")
    args = parser.parse_args(argv)
    for key, value in DEFAULTS[args.table].items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    args.peers = tuple(args.peers.split(","))
    try:
        if unknown := set(args.peers) - set(PEERS):
            raise ValueError(f"--peers: {sorted(unknown)} not in {sorted(PEERS)}")
        args.names = select(args.patterns)
        if args.table:
            args.names = tuple(name for name in NAMES[args.table]() if name in args.names)
        if not args.names:
            raise ValueError(f"--table {args.table}: no case of it matches {args.patterns}")
    except ValueError as error:
        parser.error(str(error))
    return args


def resume(options: Options, rows: Sequence[Json]) -> Options:
    """`options` without the cases that `rows` hold, and with the references of the others."""
    left = unmeasured(options.names, rows, options)
    done = [name for name in options.names if name not in left]
    again = references(left, done)
    say(f"{len(done)} of {len(options.names)} cases are measured, {len(again)} of them again")
    return replace(options, names=(*again, *left))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.list:
        say(listing())
        return 0
    if reason := why_no_gpu("bench.run"):
        say(reason)
        return NO_GPU
    run = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}-{random.randrange(16**4):04x}"
    taken = ("names", "peers", "repeats", "singles", "shorts", "seed", "out", "gate_rows", "table")
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
    if args.resume:
        options = resume(options, read_rows(out))
    if args.ahead:
        begin, hands = time.time(), deal(jobs(options.names, options.peers_of), args.ahead)
        say(f"compiling ahead: {sum(map(len, hands))} kernels in {len(hands)} processes")
        compile_ahead(hands, min(LIMIT_S, args.seconds / 2))
        say(f"compiling ahead: {time.time() - begin:.0f} s")
    say(f"{len(options.names)} cases, about {pace_of(options).left():.0f} s")
    outcomes = supervise(options.names, lambda names, n: launch_worker(options, names, n))
    rows = [row for row in read_rows(out) if row["run"].partition(".")[0] == run]
    say("\n".join((format_table(rows), *summary(rows))))
    unfinished = {name: outcome for name, outcome in outcomes.items() if outcome != DONE}
    for name, outcome in unfinished.items():
        say(f"{name}: {outcome}")
    return 1 if set(unfinished.values()) - {SKIPPED} else 0


if __name__ == "__main__":
    sys.exit(main())
