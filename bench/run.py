"""python -m bench.run [PATTERN ...]: gate, time, append rows, print a table. See --help.

A case is timed only after our result passed `bench.peers.check` on the very input; a red case
writes no row and makes the exit code 1. Cases run in a worker process. When it dies (a CUDA error,
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from bench import ROOT, Json, commit_here, format_table, row_of, timing, versions
from bench.cases import CASES, BenchCase, make_tensors, select
from bench.flops import listing
from bench.peers import PEER_RULE, PEERS, RULE, Call, Verdict, check, poison

RESULTS = ROOT / "bench" / "results" / "h200.jsonl"
FIRST_CASE_S = 30.0
DONE, SKIPPED = "done", "not run: out of time"
DIED = 3
Report = dict[str, str]


class Refused(Exception):
    """Our result is wrong on this input, so its speed means nothing."""


@dataclass(frozen=True)
class Options:
    """What a worker is told; `deadline` is in seconds since the epoch."""

    names: tuple[str, ...]
    peers: tuple[str, ...]
    repeats: int
    singles: int
    burst_s: float
    case_s: float
    deadline: float
    seed: int
    out: str
    commit: str
    run: str
    report: str = ""


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def append(path: str, value: Json | list[str]) -> None:
    """One more line of JSON."""
    with open(path, "a") as file:
        file.write(json.dumps(value) + "\n")


def admit(case: BenchCase, options: Options) -> tuple[dict[str, Call], dict[str, Verdict]]:
    """Ready calls of the peers that compute this case. Raises Refused where ours does not."""
    import torch

    tensors = make_tensors(case, "cuda", options.seed)
    calls: dict[str, Call] = {}
    verdicts: dict[str, Verdict] = {}
    for name in sorted(options.peers, key=lambda name: name != "ours"):
        peer, rule = PEERS[name], RULE if name == "ours" else PEER_RULE
        try:
            if reason := peer.supports(case):
                raise NotImplementedError(reason)
            call = peer.prepare(case, tensors)
            poison(case, tensors)
            out, lse = peer.unpack(call())
            torch.cuda.synchronize()
            verdict = check(case, tensors, out, lse, rule=rule, seed=options.seed)
            if not verdict.ok:
                raise Refused(verdict.text)
            calls[name], verdicts[name] = call, verdict
        except Exception as error:
            torch.cuda.synchronize()
            if name == "ours":
                raise
            say(f"    {name} left out: {type(error).__name__}: {error}")
    return calls, verdicts


def measure(case: BenchCase, options: Options) -> Iterator[Json]:
    """Gate and time one case; each row as soon as it is known."""
    calls, verdicts = admit(case, options)
    if case.kind == "cold":
        for name in calls:
            for variant, seconds in timing.time_cold(name, case.name).items():
                yield row_of(case, name, variant, seconds * 1e6, ())
        return
    modes: dict[str, Callable[[], timing.Samples]] = {
        "loop": lambda: timing.time_loop(calls, options.repeats, options.burst_s),
        "single": lambda: timing.time_single(calls, options.singles),
    }
    if case.kind == "host":
        modes = {"warm": lambda: timing.time_host(calls)}
    for variant, take in modes.items():
        for name, values in take().items():
            if values:
                middle = timing.median(values)
                load = timing.load_note(calls[name], middle) if variant == "loop" else ""
                remarks = (f"spread {timing.spread(values):.1%}", load, verdicts[name].text)
                yield row_of(case, name, variant, middle, remarks)


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


def supervise(names: Sequence[str], launch: Callable[[tuple[str, ...], int], Report]) -> Report:
    """Launch workers until every case has an outcome; one that reports nothing ends it."""
    outcomes: Report = {}
    attempt = 0
    while left := tuple(name for name in names if name not in outcomes):
        reported = launch(left, attempt)
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
    parser = argparse.ArgumentParser("python -m bench.run", description="Forward speed on one GPU.")
    add = parser.add_argument
    add("patterns", nargs="*", default=["*"], help="globs over case names")
    add("--list", action="store_true", help="print the cases and stop")
    add("--peers", default=",".join(PEERS), help="default: %(default)s")
    add("--repeats", type=int, default=5, help="rounds of loop; 0: none")
    add("--singles", type=int, default=10, help="rounds of single; 0: none")
    add("--burst", type=float, default=0.4, help="seconds of one loop burst")
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
    say(format_table([row for row in rows if row["run"].partition(".")[0] == run]))
    unfinished = {name: outcome for name, outcome in outcomes.items() if outcome != DONE}
    for name, outcome in unfinished.items():
        say(f"{name}: {outcome}")
    return 1 if set(unfinished.values()) - {SKIPPED} else 0


if __name__ == "__main__":
    sys.exit(main())
