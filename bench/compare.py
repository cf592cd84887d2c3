"""python -m bench.compare --base REF [PATTERN ...]: this tree against other commits, in turns.

Each side, this tree and every REF, is a few processes (--processes, 2) of their own with the side's
copy of the package, this tree's bench, and the same inputs. Only one works at a time: after all
passed the gate of a case, they take turns burst by burst, and the order rotates by one each round,
so that clocks and temperature drift over all alike. A figure is the median of the rounds' ratios,
in which a side counts by the mean of its processes. How far these are apart is told beside it: the
same machine code differs between processes, by 3 % in some cases, and a smaller difference between
sides means nothing if each is only one. Nothing is appended to the rows: a row is of one commit.

Exit status: 1 where this tree is slower than a REF by more than --limit, or a case could not be
compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import ROOT, Json, measure, say, timing, why_no_gpu
from bench.cases import CASES, BenchCase, select
from bench.flops import tflops
from bench.history import PACKAGE, environment, unpacked
from bench.peers import Call

HERE = "here"
KINDS = ("attention", "backward")
DEFAULT = ("*d128-8k-causal*", "*d128-8k-document", "*d64-8k-document", "bwd-d*-8k")
PROGRAM = "import sys; from bench.compare import serve; serve(sys.argv[1])"


class Failed(Exception):
    """A side could not do what it was asked."""


@dataclass(frozen=True)
class Comparison:
    """Milliseconds a call by side, of each of its processes a sample a round."""

    name: str
    samples: Mapping[str, Sequence[Sequence[float]]]

    @property
    def bases(self) -> list[str]:
        return [side for side in self.samples if side != HERE]

    def rounds(self, side: str) -> list[float]:
        """The mean of a side's processes, round by round."""
        return [statistics.fmean(samples) for samples in zip(*self.samples[side], strict=True)]

    def ratios(self, base: str) -> list[float]:
        """Time of this tree over that of a base, round by round."""
        both = zip(self.rounds(HERE), self.rounds(base), strict=True)
        return [here / there for here, there in both]

    def ratio(self, base: str) -> float:
        return timing.median(self.ratios(base))

    def apart(self, base: str) -> float:
        """How far processes are apart: of this tree or of a base, whichever is more."""
        return max(
            timing.spread([timing.median(samples) for samples in self.samples[side]])
            for side in (HERE, base)
        )

    def line(self, base: str, limit: float) -> str:
        case, ratio = CASES[self.name], self.ratio(base)
        rates = (tflops(case, timing.median(self.rounds(side))) for side in (HERE, base))
        shown = " / ".join(f"{rate:.1f}" for rate in rates)
        word = "slower" if ratio > 1 + limit else "faster" if ratio < 1 - limit else "ok"
        spread = f"spread {timing.spread(self.ratios(base)):.1%}"
        if len(self.samples[base]) > 1:
            spread += f", processes {self.apart(base):.1%} apart"
        name = f"{self.name:40} {shown} TFLOP/s of {HERE} / {base}"
        return f"{name}, time x {ratio:.4f}, {spread}: {word}"


def compare(
    name: str, sides: Mapping[str, Sequence[Child]], rounds: int, burst_s: float, least: int
) -> Comparison:
    """Time a case on all sides in turns. Raises Failed."""
    # neighbours in a round are of different sides; all have as many processes
    places = [(side, i) for i in range(len(sides[HERE])) for side in sides]
    for side, i in places:
        sides[side][i].prepare(name)
    slowest = max(sides[side][i].first(least) for side, i in places)
    few = min(2, least)
    # As many calls on all sides, so that a burst means the same.
    count = timing.calls_in(burst_s, slowest, least)
    samples: dict[str, list[list[float]]] = {side: [[] for _ in sides[side]] for side in sides}
    for order in timing.rotations(places, rounds):
        for side, i in order:
            samples[side][i].append(sides[side][i].burst(count, max(few, count // 8)))
    return Comparison(name, samples)


# -- a process of a side ------------------------------------------------------------------------


class Child:
    """The package in `folder`, in a process that is spoken to in lines of JSON."""

    def __init__(self, label: str, folder: Path, seed: int, gate_rows: int) -> None:
        told = json.dumps({"folder": str(folder), "seed": seed, "gate_rows": gate_rows})
        self._label = label
        self._child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, told],
            cwd=folder,
            env=environment(folder, ROOT),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self._child.kill()
        self._child.communicate()

    def _ask(self, **question: Any) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(question) + "\n")
            self._child.stdin.flush()
        except OSError as error:
            raise Failed(f"{self._label}: its process died") from error

    def _answer(self) -> float:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise Failed(f"{self._label}: its process died")
        answer: Json = json.loads(line)
        if "error" in answer:
            raise Failed(f"{self._label}: {answer['error']}")
        milliseconds: float = answer["ms"]
        return milliseconds

    def prepare(self, name: str) -> None:
        """Start to make inputs, compile and pass the gate. `first` raises what failed."""
        self._ask(prepare=name)

    def first(self, least: int) -> float:
        """Wait until it is prepared; milliseconds of a call. Raises Failed."""
        self._answer()
        return self.burst(least, min(2, least))

    def burst(self, count: int, untimed: int) -> float:
        """Milliseconds a call, over `count` calls after untimed ones. Raises Failed."""
        self._ask(burst=[count, untimed])
        return self._answer()


def serve(told: str) -> None:
    """Body of such a process. What anybody prints there goes to the standard error."""
    options = json.loads(told)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    package = __import__(PACKAGE)
    if not Path(str(package.__file__)).is_relative_to(options["folder"]):
        raise ImportError(f"{PACKAGE} of {options['folder']} was wanted, not {package.__file__}")
    of_ours = measure.Options(("ours",), options["seed"], gate_rows=options["gate_rows"])
    inputs = measure.Inputs()
    call: Call | None = None
    for line in sys.stdin:
        question: Json = json.loads(line)
        answer: Json = {"ms": 0.0}
        try:
            if "prepare" in question:
                call = None  # before the next case needs its memory
                calls, _ = measure.admit(CASES[question["prepare"]], of_ours, inputs)
                call = calls.pop("ours")
            elif call is None:
                answer = {"error": "no case is prepared"}
            else:
                answer["ms"] = timing.burst(call, *question["burst"])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


# -- the command --------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    about = "Speed of this tree against other commits'."
    parser = argparse.ArgumentParser("python -m bench.compare", description=about)
    add = parser.add_argument
    add("patterns", nargs="*", default=DEFAULT, help=f"globs over case names; default: {DEFAULT}")
    add(
        "--base", required=True, action="append", help="a commit, or a folder that holds its "
        "package; may be given several times",
    )  # fmt: skip
    add("--repeats", type=int, default=7, help="rounds; default: %(default)s")
    add("--processes", type=int, default=2, help="of each side; default: %(default)s")
    add("--burst", type=float, default=0.2, help="seconds of one burst; default: %(default)s")
    add("--limit", type=float, default=0.02, help="share of time that is too much (%(default)s)")
    add("--gate-rows", type=int, default=16, help="random rows that the gate of a forward samples")
    add("--seed", type=int, default=random.randrange(2**31), help="of the inputs; else random")
    args = parser.parse_args(argv)
    try:
        names = select(args.patterns)
    except ValueError as error:
        parser.error(str(error))
    args.names = tuple(name for name in names if CASES[name].kind in KINDS)
    if not args.names or args.repeats < 1 or args.processes < 1:
        kinds = " or ".join(KINDS)
        parser.error(f"no case of kind {kinds}, no round or no process: nothing to compare")
    if len(set(args.base)) < len(args.base) or HERE in args.base:
        parser.error(f"--base: each once, and not {HERE}, got {args.base}")
    return args


def compare_all(args: argparse.Namespace, folders: Mapping[str, Path]) -> bool:
    """Whether no case is slower than a base by more than --limit; a line is said for each.

    All sides are started again after a failure, since an error of the device stays with its
    process.
    """
    left, good = list(args.names), True
    while left:
        with ExitStack() as running:
            sides = {
                side: [
                    running.enter_context(Child(side, folder, args.seed, args.gate_rows))
                    for _ in range(args.processes)
                ]
                for side, folder in folders.items()
            }
            while left:
                name, begin = left.pop(0), time.monotonic()
                try:
                    least = least_calls(CASES[name])
                    found = compare(name, sides, args.repeats, args.burst, least)
                except Failed as failure:
                    good = False
                    say(f"{name}: {failure}")
                    break
                for base in found.bases:
                    good &= found.ratio(base) <= 1 + args.limit
                    say(f"{found.line(base, args.limit)} ({time.monotonic() - begin:.0f} s)")
    return good


def least_calls(case: BenchCase) -> int:
    """Of a burst."""
    return 1 if case.kind == "backward" else 3


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    folders = {HERE: ROOT}
    with ExitStack() as unpacking:
        try:
            for ref in args.base:
                folders[ref] = unpacking.enter_context(unpacked(ref, PACKAGE))
        except ValueError as error:
            say(f"--base: {error}")
            return 2
        if reason := why_no_gpu("bench.compare"):
            say(reason)
            return 2
        return int(not compare_all(args, folders))


if __name__ == "__main__":
    sys.exit(main())
