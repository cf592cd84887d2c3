"""Runs all examples: `make demo`.

    python examples/demo.py [NAMES]

Prints a line for each example: "ok", the result that came closest to its bound, with its error and
bound, and the seconds that the example took. Then a summary. NAMES: only the examples whose file
names contain one of them. The exit code is 0 if all are right.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
CHECKED = re.compile(r"^(.*) ([\d.]+e[+-]\d+), bound ([\d.]+e[+-]\d+)", re.M)


class Checked(NamedTuple):
    """A result of an example, which was compared with one in float64."""

    what: str
    error: float
    bound: float


def results_of(output: str) -> list[Checked]:
    return [Checked(what, float(x), float(y)) for what, x, y in CHECKED.findall(output)]


def run(path: Path) -> bool:
    """Run an example, and print its line; all that it printed only if it failed."""
    root = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
    began = time.perf_counter()
    child = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    )
    seconds = time.perf_counter() - began
    found = results_of(child.stdout)
    is_right = child.returncode == 0 and bool(found)
    if is_right:
        worst = max(found, key=lambda x: x.error / x.bound)
        told = f"error {worst.error:.1e}, bound {worst.bound:.1e}, of {len(found)} results"
    else:
        told = f"exit code {child.returncode}"
    print(f"{'ok' if is_right else 'FAILED':7}{path.stem:28}{told}, {seconds:.0f} s", flush=True)
    if not is_right:
        print(child.stdout + child.stderr, flush=True)
    return is_right


def main(*names: str) -> int:
    """The exit code."""
    examples = [
        path
        for path in sorted(HERE.glob("[0-9]*.py"))
        if not names or any(name in path.name for name in names)
    ]
    began = time.perf_counter()
    right = sum([run(path) for path in examples])
    minutes = (time.perf_counter() - began) / 60
    print(f"{right} of {len(examples)} examples are right, {minutes:.1f} minutes")
    return 0 if 0 < right == len(examples) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
