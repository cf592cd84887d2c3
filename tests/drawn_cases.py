"""The table of drawn calls of the Blackwell kernels: `python tests/drawn_cases.py`.

Runs each draw of `tests/support/cases/drawn_blackwell.py` on the software GPU: in order, with
delays of two seeds, and with each role slow; or, where sums are in a fixed order, with five seeds
and all numbers of CTAs at a time, which must give equal bits. A draw that has run is a row of
bench/results/blackwell_cases.txt, which is printed, with the commit that was run, and FAILED if it
was not right. Draws that were right are not run again, unless the error is not known. So a run that
was too short is continued by the next one; without the file, all are run.

--rows FILE: the table. --workers N: processes. --seconds S: after so long the run ends. --commit
NAME: of this tree, where git does not say it.
Exit status: 1 where a draw has no row, or has failed.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = "cases", "masks"
TESTS = "tests/sim/test_drawn_sm100_sim.py::test_draw"
# the libraries of the software GPU, once, and not by every worker
BUILD = """\
import software_gpu
from software_gpu import interpreter
software_gpu.activate("sm_100a")
interpreter.lib()
"""
# of a run that is told to end, to say what failed
SECONDS_TO_END = 20
# seconds after which the table is written again
PAUSE = 5.0
# an error that was not kept
UNKNOWN = "-"
# in the place of the runs
FAILED = "FAILED"
# where tests write rows
ROWS = "FLASH_MASK_SIM_ROWS"
HEAD = """\
Drawn calls of the Blackwell kernels, executed in the software GPU against float64, by
python tests/drawn_cases.py (docs/testing.md).
{found} of {drawn} draws, {runs} runs; no run had a warning. The largest error is {share} of what is
allowed: twice the error of eager attention in the same dtype, and an ulp.
{kinds}
{failed}\
Columns: draw; commit; runs (in order, with delays of two seeds, and so many sets of warps slow in
turn; or those whose bits are equal); largest error (-: was right, and its number was not kept); the
call.

"""


class Row(NamedTuple):
    """A draw that was right, or has failed. commit: "" in what a test writes."""

    draw: str
    commit: str
    runs: str
    share: str
    call: str

    def __str__(self) -> str:
        return f"{self.draw:25} {self.commit:9} {self.runs:35} {self.share:>4}  {self.call}"

    @property
    def was_right(self) -> bool:
        return self.runs != FAILED

    @property
    def line(self) -> str:
        """As a test writes it."""
        return "\t".join(self) + "\n"

    @classmethod
    def read(cls, line: str) -> Row:
        draw, commit, rest = line.split(maxsplit=2)
        runs, share, call = rest[:35], rest[36:40], rest[42:]
        return cls(draw, commit, runs.rstrip(), share.strip(), call)


def read_rows(path: Path) -> dict[str, Row]:
    """Rows by the names of their draws."""
    lines = path.read_text().partition("\n\n")[2].splitlines() if path.is_file() else []
    return {row.draw: row for row in map(Row.read, lines)}


def table(kinds: Mapping[str, str], rows: Mapping[str, Row]) -> str:
    """kinds: of all draws, by their names."""
    rows_in_order = [rows[name] for name in kinds if name in rows]
    found = [row for row in rows_in_order if row.was_right]
    failed = len(rows_in_order) - len(found)
    counts, drawn = Counter(kinds[row.draw] for row in found), Counter(kinds.values())
    told = ", ".join(f"{kind} {counts[kind]} of {n}" for kind, n in drawn.items())
    head = HEAD.format(
        found=len(found),
        drawn=len(kinds),
        runs=sum(int(row.runs.split()[0]) for row in found),
        share=max((row.share for row in found if row.share != UNKNOWN), default="0"),
        kinds=textwrap.fill(f"Draws: {told}.", 100, break_on_hyphens=False),
        failed=f"{failed} FAILED.\n" if failed else "",
    )
    return head + "".join(f"{row}\n" for row in rows_in_order)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """`run` gives this module to pytest, to hear of draws that fail or end their process."""
    if report.failed and ROWS in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        draw = report.nodeid.partition("[")[2].removesuffix("]")
        with open(os.environ[ROWS], "a") as file:
            file.write(Row(draw, "", FAILED, UNKNOWN, "").line)


def run(names: list[str], workers: int, seconds: float | None) -> Iterator[list[Row]]:
    """Rows of the draws that have ended, until the time is up, in the order of their names."""
    with tempfile.TemporaryDirectory(prefix="flash_mask_cute_drawn_") as folder:
        log = Path(folder, "rows")
        command = [
            *(sys.executable, "-m", "pytest", "-v", "-rf", "--tb=short", "--durations=12"),
            *("-n", str(workers), "--dist", "load", "--maxschedchunk", "1"),
            *(
                "-p",
                "no:cacheprovider",
                "-p",
                "tests.drawn_cases",
                *(f"{TESTS}[{name}]" for name in names),
            ),
        ]
        told = {"FLASH_MASK_SIM_ARCH": "sm_100a", ROWS: str(log)}
        subprocess.run([sys.executable, "-c", BUILD], cwd=ROOT, check=True)
        # not that of a test that calls this
        own = {key: x for key, x in os.environ.items() if key != "PYTEST_XDIST_WORKER"}
        process = subprocess.Popen(command, cwd=ROOT, env=own | told, start_new_session=True)
        end = time.monotonic() + (math.inf if seconds is None else seconds)
        while process.poll() is None and time.monotonic() < end:
            time.sleep(min(PAUSE, max(0.0, end - time.monotonic())))
            yield _written(log)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        yield _written(log)


def _written(log: Path) -> list[Row]:
    lines = log.read_text().splitlines(keepends=True) if log.is_file() else []
    return [Row(*line.rstrip("\n").split("\t")) for line in lines if line.endswith("\n")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kept = ROOT / "bench" / "results" / "blackwell_cases.txt"
    parser.add_argument("--rows", type=Path, default=kept, help="the table")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, help="after so long the run ends")
    parser.add_argument("--commit", help="of this tree, where git does not say it")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / "support" / name) for name in SUPPORT)]
    from drawn_blackwell import DRAWS, SEQUENTIAL_SPLITS

    from bench import commit_here

    calls, kinds = {x.id: x.told for x in DRAWS}, {x.id: x.kind for x in DRAWS}
    rows = {x.draw: x for x in read_rows(options.rows).values() if calls.get(x.draw) == x.call}
    known = {name for name, row in rows.items() if row.share != UNKNOWN}
    missing = [draw.id for draw in SEQUENTIAL_SPLITS if draw.id not in known]
    missing.sort(key=lambda name: name in rows)
    if missing:
        commit = options.commit or commit_here()
        for found in run(missing, options.workers, options.seconds):
            rows |= {x.draw: x._replace(commit=commit, call=calls[x.draw]) for x in found}
            options.rows.write_text(table(kinds, rows))
    text = table(kinds, rows)
    print(text)
    missing = [name for name in calls if name not in rows]
    failed = [name for name, row in rows.items() if not row.was_right]
    print(f"{len(missing)} draws have no row: {' '.join(missing)}" if missing else "all have rows")
    again = (f"FAILED: FLASH_MASK_SIM_ARCH=sm_100a python -m pytest '{TESTS}[{x}]'" for x in failed)
    print("\n".join(again) if failed else "none failed")
    return int(bool(missing or failed))


if __name__ == "__main__":
    sys.exit(main())
