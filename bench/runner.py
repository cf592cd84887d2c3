"""The runner of the benches that are tables of cases: their command, which cases run, their rows.

A bench makes a `Table`, and its command is `main(table)`. `measure` compares results before it
times anything. A row is printed, and is a line of JSON in --out. A row of a wrong result makes the
exit status 1.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import Json, commit_here, say, timing, versions, why_no_gpu

NO_GPU, DIED = 2, 3
# How a case of a worker ended; else by a crash, which the outcome says.
DONE, FAILED, LATE = "done", "failed", "out of time"
# Seconds that a case takes at least, and that compiling ahead may take.
CASE_S, AHEAD_S = 7.0, 240.0
Call = Callable[[], Any]


class Ratio(NamedTuple):
    """The least of the keys `over` that a row has, divided by its `under`."""

    label: str
    over: tuple[str, ...]
    under: str


class Isolated(NamedTuple):
    """Cases run in a worker process; when it dies, the next one goes on after the case that killed
    it. hands: what each of --ahead processes compiles for the caches on disk, job by job. compile:
    one job. done: names of cases that kept rows of this commit hold. again: of (left, done), the
    done ones that each worker measures again, because rows of the others are compared with them."""

    hands: Callable[[Run, Sequence[Any]], list[list[Any]]]
    compile: Callable[[Run, Any], None]
    done: Callable[[Run, Sequence[Any]], Collection[str]]
    again: Callable[[Sequence[str], Sequence[str]], Sequence[str]] = lambda left, done: ()


def provenance(run: Run) -> Json:
    """What the rows of a run have in front."""
    today = datetime.now(timezone.utc).date().isoformat()
    made = {"commit": commit_here(), "versions": versions()}
    return {"date": today, "gpu": torch.cuda.get_device_name(), **made}


def append_line(path: Path, row: Json) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


@dataclass(frozen=True)
class Table:
    """command: "bench.flex". cases: with names, those to measure first in front. measure: the
    rows of a case; it raises ValueError where a result of ours is wrong. small: the cases of --dry,
    on the CPU and not timed. first: rows in front of those of cases. head: what each row has in
    front. ratios, line, summary: what is said about a row, and about all rows. options: flags of
    this bench alone; defaults: of all. settle: fills what the command left open, and returns the
    cases to measure.
    launch: runs the cases in another way, and returns the exit status. append, read: of a file.
    keeps_failures: a case that failed is a row, too."""

    command: str
    about: str | None
    cases: Callable[[], Iterable[Any]]
    measure: Callable[[Any, Run], Iterable[Json]]
    small: Callable[[list[Any]], Sequence[Any]] | None = None
    peers: tuple[str, ...] = ()
    rounds: int = 7
    burst_s: float = 0.1
    seconds: float = math.inf
    first: Callable[[Run], Iterable[Json]] | None = None
    head: Callable[[Run], Json] = provenance
    ratios: tuple[Ratio, ...] = ()
    line: Callable[[Json], str] | None = None
    summary: Callable[[Sequence[Json]], Iterable[str]] = lambda rows: ()
    options: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    settle: Callable[[argparse.Namespace, list[Any]], list[Any]] = lambda given, cases: cases
    listing: Callable[[Sequence[Any]], str] = lambda cases: "\n".join(x.name for x in cases)
    isolated: Isolated | None = None
    launch: Callable[[Run, list[Any]], int] | None = None
    append: Callable[[Path, Json], None] = append_line
    read: Callable[[Path], list[Json]] = lambda path: rows_in([path])
    keeps_failures: bool = True


@dataclass
class Run:
    """What a process measures with. ceiling: bytes a microsecond of a stream that only reads.
    report: where a worker says how its cases ended."""

    table: Table
    given: argparse.Namespace
    rows: list[Json] = field(default_factory=list)
    ceiling: float = 0.0
    failed: bool = False
    report: str = ""
    _head: Json | None = None

    def __post_init__(self) -> None:
        begin = datetime.now(timezone.utc)
        self.name = f"{begin:%Y%m%dT%H%M%S}-{random.randrange(16**4):04x}"
        self.deadline = time.time() + self.given.seconds
        self.is_dry = bool(self.given.dry)
        self.device = "cpu" if self.is_dry else "cuda"
        self.dtype = torch.float32 if self.is_dry else torch.bfloat16
        self.peers = tuple(self.given.peers.split(","))

    def left(self) -> float:
        return self.deadline - time.time()

    def time(self, calls: Mapping[str, Call], least: int = 1) -> timing.Samples:
        """Milliseconds by call and round; none of a dry run."""
        rounds = 0 if self.is_dry else self.given.rounds
        return timing.time_loop(calls, rounds, self.given.burst, least)

    def emit(self, row: Json) -> None:
        if self._head is None:
            self._head = {} if self.is_dry else self.table.head(self)
        self.rows.append(self._head | row)
        say(line_of(self.table, row))
        if not self.is_dry:
            self.table.append(Path(self.given.out), self._head | row)

    def fail(self, case: str, why: str) -> None:
        self.failed = True
        if self.table.keeps_failures:
            self.emit({"case": case, "note": f"failed: {why}"})
        else:
            say(f"{case}: {why}")

    def tell(self, case: str, outcome: str) -> None:
        """The last outcome of a case counts."""
        if self.report:
            append_line(Path(self.report), {"case": case, "outcome": outcome})


# -- tensors, results and what rows say -----------------------------------------------------------


def normal(
    device: str, dtype: torch.dtype, *shapes: tuple[int, ...], seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(x, device=device, generator=generator).to(dtype) for x in shapes]


def calls_of(
    attend: Callable[..., Tensor], inputs: Sequence[Tensor], leaves: Sequence[Tensor], dout: Tensor
) -> tuple[Call, Call, Call]:
    """A forward without a graph; a backward (of `leaves`) of a forward that has run; and both."""
    alone = torch.no_grad()(attend)

    def backward_of(out: Tensor, keep: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=keep)

    def both() -> tuple[Tensor, ...]:
        out = attend(*inputs)
        return out, *backward_of(out, False)

    graph = list[Tensor]()

    def backward() -> tuple[Tensor, ...]:
        if not graph:
            graph.append(attend(*inputs))
        return backward_of(graph[0], True)

    return lambda: alone(*inputs), backward, both


def share_off(found: Tensor, right: Tensor) -> float:
    """The largest error, as a share of the largest right number."""
    return float((found - right).abs().max() / right.abs().max())


def worst(errors: Iterable[float]) -> float:
    """The largest, and NaN if one of them is."""
    known = list(errors)
    return math.nan if any(map(math.isnan, known)) else max(known)


def compare(
    who: str, names: Sequence[str], found: Sequence[Tensor], right: Sequence[Tensor], allowed: float
) -> float:
    """The largest `share_off`. Raises ValueError, with who and which, where it is not allowed."""
    errors = [share_off(*pair) for pair in zip(found, right, strict=True)]
    for name, error in zip(names, errors, strict=True):
        if not error <= allowed:
            raise ValueError(f"{who}: {name} is off by {error:.3g} of the largest number")
    return worst(errors)


def left_out(peer: str, error: Exception) -> str:
    return f"{peer} left out: {type(error).__name__}: {str(error)[:200]}"


def taking_part(
    ours: Sequence[str], others: Sequence[str], check: Callable[[str], float | None]
) -> tuple[list[str], str]:
    """The peers whose results are right, and what all are off by. check returns that, None for a
    peer that is not compared, and raises for a wrong one: of ours that ends the case."""
    peers, told = list[str](), list[str]()
    for peer in (*ours, *others):
        try:
            error = check(peer)
        except Exception as refused:
            if peer in ours:
                raise
            told.append(left_out(peer, refused))
        else:
            peers.append(peer)
            told += [] if error is None else [f"{peer} {error:.1e}"]
    return peers, ", ".join(told)


def figures(samples: timing.Samples, flops: float = 0.0, way: str = "") -> Json:
    """Milliseconds and spread of each peer, and the rate where operations are counted."""
    row: Json = {}
    for peer, values in samples.items():
        ms = timing.median(values)
        row[f"{peer}{way}_ms"] = round(ms, 5)
        row[f"{peer}{way}_spread"] = round(timing.spread(values), 4)
        row |= {f"{peer}{way}_tflops": round(flops / ms * 1e-9, 1)} if flops else {}
    return row


def line_of(table: Table, row: Json) -> str:
    if table.line is not None:
        return table.line(row)
    parts = [f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()]
    for label, over, under in table.ratios:
        if under in row and (known := [row[key] for key in over if key in row]):
            parts.append(f"{label} {min(known) / row[under]:.3f}")
    return " ".join(parts).replace("\n", " ")


def is_wrong(row: Json) -> bool:
    failed = str(row.get("note", "")).startswith("failed")
    return failed or row.get("kind") == "wrong" or row.get("ok") is False


def rows_in(paths: Iterable[str | Path]) -> list[Json]:
    texts = (Path(path).read_text() for path in paths if Path(path).exists())
    return [json.loads(line) for text in texts for line in text.splitlines()]


# -- runs -----------------------------------------------------------------------------------------


def measure_cases(run: Run, cases: Iterable[Any]) -> None:
    """One after the other in this process, while time is left. In a worker any error ends its case
    alone, and a case that takes too long ends the worker."""
    for row in run.table.first(run) if run.table.first and not run.is_dry else ():
        run.emit(row)
    longest = CASE_S
    for case in cases:
        if run.left() < longest:
            say(f"out of time before {case.name}")
            return
        begin, limit = time.time(), run.given.limit
        watchdog = threading.Timer(min(limit, run.left()), os._exit, (DIED,))
        watchdog.daemon = True
        if run.report:
            watchdog.start()
            run.tell(case.name, LATE if run.left() < limit else f"a crash, or over {limit:.0f} s")
        outcome = DONE
        try:
            for row in run.table.measure(case, run):
                run.emit(row)
        except Exception as error:
            if not run.report and not isinstance(error, ValueError):
                raise
            outcome = f"{type(error).__name__}: {str(error)[:300]}"
            run.fail(case.name, outcome)
        run.tell(case.name, DONE if outcome == DONE else FAILED)
        watchdog.cancel()
        longest = max(longest, time.time() - begin)
        if not run.is_dry:
            # raises where an error of the device stays with the process
            torch.cuda.empty_cache()


def work(table: Table, told: Json) -> int:
    """Body of a worker process, which measures cases or compiles jobs."""
    run = Run(table, argparse.Namespace(**told["given"]))
    run.name, run.deadline, run.report = told["run"], told["deadline"], told["report"]
    assert table.isolated is not None
    if told["names"]:
        by_name = {case.name: case for case in table.cases()}
        measure_cases(run, [by_name[name] for name in told["names"]])
    for job in told["jobs"]:
        try:
            table.isolated.compile(run, job)
        except Exception as error:
            say(f"{job} is not compiled ahead: {type(error).__name__}: {str(error)[:200]}")
    return 0


def supervise(run: Run, cases: Sequence[Any]) -> None:
    """Workers, until each case that is not done has an outcome, or the time is gone. Each worker is
    a run of its own: figures of two of them are never compared."""
    table, isolated, given = run.table, run.table.isolated, run.given
    assert isolated is not None

    def worker(name: str, **told: Any) -> subprocess.Popen[bytes]:
        told = {"run": name, "deadline": run.deadline, "names": [], "jobs": [], "report": ""} | told
        told["given"] = vars(given) | {"out": str(given.out)}
        command = [sys.executable, "-m", table.command, "--worker", json.dumps(told)]
        # jobs stand beside each other, one to a core
        more = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        return subprocess.Popen(command, env=os.environ | (more if told["jobs"] else {}))

    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.touch()
    done = isolated.done(run, cases)
    names = [case.name for case in cases if case.name not in done]
    say(f"run {run.name}: {len(names)} of {len(cases)} cases are left, rows to {given.out}")
    if given.ahead and names:
        hands = isolated.hands(run, [case for case in cases if case.name in names])
        limit = time.time() + min(AHEAD_S, run.left() / 2)
        for process in [worker(run.name, jobs=hand) for hand in hands if hand]:
            try:
                process.wait(max(0.0, limit - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
    outcomes: dict[str, str] = {}
    attempt = 0
    while (left := [x for x in names if x not in outcomes]) and run.left() > CASE_S:
        name = f"{run.name}.{attempt}" if attempt else run.name
        finished = [*done, *(x for x, outcome in outcomes.items() if outcome == DONE)]
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report")
            again = isolated.again(left, finished)
            worker(name, names=[*again, *left], report=str(report)).wait()
            told = {row["case"]: row["outcome"] for row in rows_in([report])}
        for case, outcome in (told or {left[0]: "the worker did not start"}).items():
            outcomes[case] = outcome
            if outcome not in (DONE, FAILED, LATE):
                run.fail(case, outcome)
        run.failed |= FAILED in outcomes.values()
        attempt += 1
    rows = table.read(Path(given.out))
    run.rows = [row for row in rows if row.get("run", "").partition(".")[0] == run.name]
    say(f"{len(names) - sum(x != LATE for x in outcomes.values())} cases are left")


def parse(table: Table, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[Any]]:
    """What the command says, and the cases that it asks for."""
    about, name = (table.about or "").split("\n\n", 1)[0], table.command.rpartition(".")[2]
    parser = argparse.ArgumentParser(prog=f"python -m {table.command}", description=about)
    add, out = parser.add_argument, Path(os.environ.get("OUT", "."), f"{name}.jsonl")
    add("patterns", nargs="*", help="names of cases, as globs")
    add("--out", type=Path, default=out, help="a file that rows are appended to")
    add("--peers", default=",".join(table.peers), help="default: %(default)s")
    add("--rounds", "--repeats", type=int, default=table.rounds)
    add("--burst", type=float, default=table.burst_s, help="seconds of a peer's turn")
    add("--seconds", type=float, default=table.seconds, help="time for everything")
    add(
        "--limit",
        "--case-seconds",
        type=float,
        default=150.0,
        help="seconds of a case in a worker process",
    )
    add("--list", action="store_true", help="print the cases and stop")
    add("--dry", action="store_true", help="small, on the CPU, compared and not timed")
    add("--report", nargs="+", help="print what the rows of these files say, and stop")
    if table.isolated is not None:
        add("--resume", nargs="*", default=[], help="files of rows that are there")
        add("--ahead", type=int, default=few_processes(), help="processes that compile before")
    for flag, told in table.options.items():
        add(flag, **told)
    parser.set_defaults(**table.defaults)
    given = parser.parse_args(arguments)
    if given.dry and table.small is None:
        parser.error("--dry: these cases need GPUs")
    cases = list(table.cases())
    names = [case.name for case in cases]
    for pattern in given.patterns:
        if not fnmatch.filter(names, pattern):
            parser.error(f"no case matches {pattern!r}; they are {', '.join(names)}")
    try:
        cases = table.settle(given, [x for x in cases if is_asked(x.name, given.patterns)])
    except ValueError as error:
        parser.error(str(error))
    if unknown := {*given.peers.split(",")} - {*table.peers, ""}:
        parser.error(f"--peers: {', '.join(unknown)} not among {', '.join(table.peers)}")
    return given, cases


def few_processes() -> int:
    return min(14, max(1, (os.cpu_count() or 2) - 2))


def is_asked(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def main(table: Table, arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 where a result is wrong, 2 without a GPU."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--worker"]:
        return work(table, json.loads(arguments[1]))
    given, cases = parse(table, arguments)
    if given.list:
        say(table.listing(cases))
        return 0
    run = Run(table, given)
    if given.report is not None:
        run.rows = rows_in(given.report)
        say("\n".join(line_of(table, row) for row in run.rows))
    elif given.dry and table.small is not None:
        measure_cases(run, table.small(cases))
    elif (reason := why_no_gpu(table.command)) is not None:
        say(reason)
        return NO_GPU
    elif table.launch is not None:
        return table.launch(run, cases)
    elif table.isolated is not None:
        supervise(run, cases)
    else:
        measure_cases(run, cases)
    for line in table.summary(run.rows):
        say(line)
    return int(run.failed or any(map(is_wrong, run.rows)))
