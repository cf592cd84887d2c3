"""The table of drawn calls of the Blackwell kernels: `python tests/drawn_cases.py`.

Runs each draw of `tests/support/cases/drawn_blackwell.py` on the software GPU: in order, with
delays of two seeds, and with each role slow; or, where sums are in a fixed order, with five seeds
and all numbers of CTAs at a time, which must give equal bits. A draw that was right is a row of
bench/results/blackwell_cases.txt, which is printed. Draws that have a row are not run again, so a
run that was too short is continued by the next one; without the file, all are run.

--rows FILE: the table. --workers N: processes. --seconds S: after so long the run ends.
Exit status: 1 where a draw has no row.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = "cases", "masks"
TESTS = "tests/sim/test_drawn_sm100_sim.py::test_draw"
HEAD = """\
Drawn calls of the Blackwell kernels, executed in the software GPU against float64, by
python tests/drawn_cases.py (docs/testing.md).
{found} of {drawn} draws, {runs} runs; no run had a warning. The largest error is {share} of what is
allowed: twice the error of eager attention in the same dtype, and an ulp.
Columns: draw; runs (in order, with delays of two seeds, and so many sets of warps slow in turn; or
those whose bits are equal); largest error (-: was right, in a run that was cut short before its
numbers were kept); the call.

"""
ROW = re.compile(r"(\S+) +(\d+) .+? (\d\.\d\d|   -)  d")


def read_rows(path: Path) -> dict[str, str]:
    """Rows by the names of their draws."""
    lines = path.read_text().partition("\n\n")[2].splitlines() if path.is_file() else []
    return {line.split()[0]: line for line in lines}


def table(names: list[str], rows: dict[str, str]) -> str:
    found = [rows[name] for name in names if name in rows]
    cells = [match.groups() for row in found if (match := ROW.match(row))]
    runs = sum(int(x[1]) for x in cells)
    share = max((x[2] for x in cells if x[2].strip() != "-"), default="0")
    head = HEAD.format(found=len(found), drawn=len(names), runs=runs, share=share)
    return head + "".join(f"{row}\n" for row in found)


def run(names: list[str], workers: int, seconds: float | None) -> dict[str, str]:
    """Rows of the draws that were right, in time."""
    with tempfile.TemporaryDirectory(prefix="flash_mask_cute_drawn_") as folder:
        log = Path(folder, "rows")
        command = [
            *(sys.executable, "-m", "pytest", "-v", "-n", str(workers), "--dist", "worksteal"),
            *("-p", "no:cacheprovider", *(f"{TESTS}[{name}]" for name in names)),
        ]
        told = {"FLASH_MASK_SIM_ARCH": "sm_100a", "FLASH_MASK_SIM_ROWS": str(log), "TMPDIR": folder}
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | told, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines = log.read_text().splitlines(keepends=True) if log.is_file() else []
        return {line.split()[0]: line.rstrip() for line in lines if line.endswith("\n")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kept = ROOT / "bench" / "results" / "blackwell_cases.txt"
    parser.add_argument("--rows", type=Path, default=kept, help="the table")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, help="after so long the run ends")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / "support" / name) for name in SUPPORT)]
    from drawn_blackwell import DRAWS

    names = [draw.id for draw in DRAWS]
    rows = read_rows(options.rows)
    missing = [name for name in names if name not in rows]
    if missing:
        rows |= run(missing, options.workers, options.seconds)
    options.rows.write_text(text := table(names, rows))
    print(text)
    missing = [name for name in names if name not in rows]
    print(f"{len(missing)} draws have no row: {' '.join(missing)}" if missing else "all have rows")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
