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
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import Json, commit_here, say, timing, versions, why_no_gpu

NO_GPU, DIED = 2, 3
# Seconds of a case that is compiled already, and of compiling one.
CASE_S, COMPILE_S = 7.0, 30.0
Call = Callable[[], Any]


class Ratio(NamedTuple):
    """The least of the keys `over` that a row has, divided by its `under`."""

    label: str
    over: tuple[str, ...]
    under: str


class Isolated(NamedTuple):
    """Cases run in a worker process; when it dies, the next one goes on after the case that killed
    it. compile(case, part): compiles what `measure` calls, for the caches on disk."""

    compile: Callable[[Any, Any], None]
    parts: tuple[Any, ...]


def provenance(run: Run) -> Json:
    """What the rows of a run have in front."""
    today = datetime.now(timezone.utc).date().isoformat()
    made = {"commit": commit_here(), "versions": versions()}
    return {"date": today, "gpu": torch.cuda.get_device_name(), **made}


@dataclass(frozen=True)
class Table:
    """command: "bench.learned". cases: with names, those to measure first in front. measure: the
    rows of a case; it raises ValueError where a result of ours is wrong. small: the cases of --dry,
    on the CPU and not timed. first: rows in front of those of cases. head: what each row has in
    front. ratios, summary: what is said about a row, and about all rows. options: flags of this
    bench alone. launch: runs the cases in another way, and returns the exit status."""

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
    summary: Callable[[Sequence[Json]], Iterable[str]] = lambda rows: ()
    options: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    isolated: Isolated | None = None
    launch: Callable[[Run, list[Any]], int] | None = None


@dataclass
class Run:
    """What a process measures with. ceiling: bytes a microsecond of a stream that only reads."""

    table: Table
    given: argparse.Namespace
    rows: list[Json] = field(default_factory=list)
    ceiling: float = 0.0
    _head: Json | None = None

    def __post_init__(self) -> None:
        self.name, self.deadline = f"{time.time():.0f}", time.time() + self.given.seconds
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
            with open(self.given.out, "a") as file:
                file.write(json.dumps(self._head | row) + "\n")


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
    """One after the other in this process, while time is left."""
    is_isolated = run.table.isolated is not None and not run.is_dry
    for row in run.table.first(run) if run.table.first and not run.is_dry else ():
        run.emit(row)
    for case in cases:
        if run.left() < CASE_S:
            say(f"out of time before {case.name}")
            return
        watchdog = threading.Timer(min(run.given.limit, run.left()), os._exit, (DIED,))
        watchdog.daemon = True
        if is_isolated:
            watchdog.start()
        try:
            for row in run.table.measure(case, run):
                run.emit(row)
        except Exception as error:
            if not is_isolated and not isinstance(error, ValueError):
                raise
            note = f"failed: {type(error).__name__}: {str(error)[:300]}"
            run.emit({"case": case.name, "note": note})
        watchdog.cancel()
        if not run.is_dry:
            torch.cuda.empty_cache()


def work(run: Run, told: Json) -> int:
    """Body of a worker process, which measures cases or compiles parts of them."""
    by_name = {case.name: case for case in run.table.cases()}
    run.name, run.deadline = told["run"], told["deadline"]
    if not told["is_ahead"]:
        measure_cases(run, [by_name[name] for name in told["names"]])
        return 0
    assert run.table.isolated is not None
    for name, part in told["names"]:
        if run.left() > COMPILE_S:
            try:
                run.table.isolated.compile(by_name[name], run.table.isolated.parts[part])
            except Exception as error:
                say(f"{name} is not compiled ahead: {type(error).__name__}: {str(error)[:200]}")
    return 0


def supervise(run: Run, cases: Sequence[Any], arguments: Sequence[str]) -> None:
    """Workers, until each case that this commit has no row of has one, or the time is gone."""
    assert run.table.isolated is not None
    given, commit = run.given, commit_here()

    def worker(names: Sequence[Any], is_ahead: bool) -> subprocess.Popen[bytes]:
        told = {"run": run.name, "deadline": run.deadline, "names": names, "is_ahead": is_ahead}
        command = [sys.executable, "-m", run.table.command, *arguments]
        return subprocess.Popen([*command, "--worker", json.dumps(told)])

    kept = [row for row in rows_in([given.out, *given.resume]) if row["commit"] == commit]
    done = {row["case"] for row in kept}
    left = [case.name for case in cases if case.name not in done]
    say(f"{len(left)} of {len(cases)} cases are left")
    if given.ahead:
        reach = max(1, int((given.seconds - 100) / (CASE_S + COMPILE_S / given.ahead)))
        parts = range(len(run.table.isolated.parts))
        jobs = [(name, part) for name in left[:reach] for part in parts]
        shares = [jobs[i :: given.ahead] for i in range(given.ahead)]
        for process in [worker(share, True) for share in shares if share]:
            process.wait()
    while left and run.left() > CASE_S:
        worker(left, False).wait()
        finished = {row["case"] for row in rows_in([given.out])}
        before, left = left, [name for name in left if name not in finished]
        if left == before and run.left() > CASE_S:
            note = f"failed: a crash, or longer than {given.limit:.0f} s"
            run.emit({"case": left.pop(0), "note": note})
    run.rows = [*kept, *(row for row in rows_in([given.out]) if row.get("run") == run.name)]
    say(f"{len(left)} cases are left")


def parse(table: Table, arguments: Sequence[str]) -> argparse.Namespace:
    about, name = (table.about or "").split("\n\n", 1)[0], table.command.rpartition(".")[2]
    parser = argparse.ArgumentParser(prog=f"python -m {table.command}", description=about)
    add, out = parser.add_argument, Path(os.environ.get("OUT", "."), f"{name}.jsonl")
    add("patterns", nargs="*", help="names of cases, as globs")
    add("--out", type=Path, default=out, help="a file that rows are appended to")
    add("--peers", default=",".join(table.peers), help="default: %(default)s")
    add("--rounds", type=int, default=table.rounds)
    add("--burst", type=float, default=table.burst_s, help="seconds of a peer's turn")
    add("--seconds", type=float, default=table.seconds, help="time for everything")
    add("--limit", type=float, default=150.0, help="seconds of a case in a worker process")
    add("--list", action="store_true", help="print the names of cases and stop")
    add("--dry", action="store_true", help="small, on the CPU, compared and not timed")
    add("--report", nargs="+", help="print what the rows of these files say, and stop")
    add("--worker", type=json.loads, help=argparse.SUPPRESS)
    if table.isolated is not None:
        few = min(14, max(1, (os.cpu_count() or 2) - 2))
        add("--resume", nargs="*", default=[], help="files of rows that are there")
        add("--ahead", type=int, default=few, help="processes that compile before the first case")
    for flag, told in table.options.items():
        add(flag, **told)
    given = parser.parse_args(arguments)
    if given.dry and table.small is None:
        parser.error("--dry: these cases need GPUs")
    names = [case.name for case in table.cases()]
    for pattern in given.patterns:
        if not fnmatch.filter(names, pattern):
            parser.error(f"no case matches {pattern!r}; they are {', '.join(names)}")
    if unknown := {*given.peers.split(",")} - {*table.peers, ""}:
        parser.error(f"--peers: {', '.join(unknown)} not among {', '.join(table.peers)}")
    return given


def main(table: Table, arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 where a result is wrong, 2 without a GPU."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = parse(table, arguments)
    patterns = given.patterns or ["*"]
    cases = [x for x in table.cases() if any(fnmatch.fnmatch(x.name, p) for p in patterns)]
    run = Run(table, given)
    if given.list:
        say("\n".join(case.name for case in cases))
        return 0
    if given.report is not None:
        run.rows = rows_in(given.report)
        say("\n".join(line_of(table, row) for row in run.rows))
    elif given.dry and table.small is not None:
        measure_cases(run, table.small(cases))
    elif (reason := why_no_gpu(table.command)) is not None:
        say(reason)
        return NO_GPU
    elif given.worker:
        return work(run, given.worker)
    elif table.launch is not None:
        return table.launch(run, cases)
    elif table.isolated is not None:
        supervise(run, cases, arguments)
    else:
        measure_cases(run, cases)
    for line in table.summary(run.rows):
        say(line)
    return int(any(map(is_wrong, run.rows)))
