"""Do the tests of plans notice an altered condition of `flash_mask_cute/call`?

    python tests/altered_conditions.py --list                  # sixty conditions, by a seed
    python tests/altered_conditions.py                         # against plan rows, then TESTS
    python tests/altered_conditions.py --seed 2 --count 20
    python tests/altered_conditions.py --tests-of COMMIT --only missed.txt

An alteration changes one place of a module that decides a plan or builds its kernels: `<` and `<=`,
`and` and `or`, a `not`, or a number of a comparison by one. It is made in a copy of
the checkout. The plan rows come first, and end at the first row that differs; then come the tests.

`--tests-of COMMIT` runs the tests of that commit instead, without plan rows, over the same
alterations. So two sets of tests are compared. The last line counts what each noticed.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from planted_faults import ROOT, copy_of_checkout

CALL = Path("flash_mask_cute/call")
# Modules of `call` that neither decide a plan nor build kernels: checks of arguments, words for
# the caller, and what runs in each call.
OTHERS = {
    *("append", "arguments", "aux_sums", "backward", "cache_writes", "explain"),
    *("explain_backward", "given_outputs", "lookup", "mask_arguments", "operands", "prepare"),
}
TESTS = ("tests/cpu/call",)
# the operator as it is written, and instead of it
SWAPPED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
}  # fmt: skip
LIMIT_S = 1800.0
# Plans a part of the grid at a time, and ends at the first row that differs.
ROWS = """
import sys
from plan_rows import KEPT, TARGETS, differences, grid, name_of, row_of, unpacked
kept = unpacked(KEPT.read_bytes())
calls = list(grid())
for first in range(61):
    for call in calls[first::61]:
        for target in TARGETS:
            name = name_of(call, target)
            if row_of(call, target) != kept[name]:
                sys.exit(f"row {name}")
"""


class Alteration(NamedTuple):
    """begin, end: offsets in the text of the file, which `new` replaces."""

    file: Path
    line: int
    begin: int
    end: int
    new: str
    what: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(CALL)}:{self.line} {self.what}"


def _places(file: Path) -> Iterator[Alteration]:
    text = (ROOT / file).read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        head = text[starts[line - 1] : starts[line]].encode()[:column]
        return starts[line - 1] + len(head.decode())

    def between(left: ast.expr, right: ast.expr) -> tuple[int, int]:
        assert left.end_lineno is not None and left.end_col_offset is not None
        begin = offset(left.end_lineno, left.end_col_offset)
        return begin, offset(right.lineno, right.col_offset)

    def of_word(left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Alteration]:
        begin, end = between(left, right)
        found = text.find(old, begin, end)
        if found >= 0:
            yield Alteration(
                file, left.lineno, found, found + len(old), new, f"`{old}` becomes `{new}`"
            )

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            operands = node.left, *node.comparators
            for op, left, right in zip(node.ops, operands, operands[1:], strict=False):
                if type(op) in SWAPPED:
                    yield from of_word(left, right, *SWAPPED[type(op)])
            for x in operands:
                if isinstance(x, ast.Constant) and type(x.value) in (int, float):
                    begin = offset(x.lineno, x.col_offset)
                    end = begin + len(ast.get_source_segment(text, x) or "")
                    new = str(x.value + 1)
                    yield Alteration(file, x.lineno, begin, end, new, f"{x.value} becomes {new}")
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from of_word(left, right, old, new)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            begin = offset(node.lineno, node.col_offset)
            yield Alteration(file, node.lineno, begin, begin + 4, "", "without `not`")
        elif isinstance(node, (ast.If, ast.IfExp)) and isinstance(
            node.test, (ast.Name, ast.Attribute, ast.Call)
        ):
            begin = offset(node.test.lineno, node.test.col_offset)
            yield Alteration(file, node.test.lineno, begin, begin, "not ", "with `not`")


def alterations(seed: int, count: int) -> list[Alteration]:
    """Drawn from all places, in the order of the draw. Kinds come as often as they are written."""
    files = sorted(
        x.relative_to(ROOT)
        for x in (*(ROOT / CALL).glob("*.py"), *(ROOT / CALL / "tiles").glob("*.py"))
        if x.stem not in OTHERS
    )
    places = [x for file in files for x in _places(file)]
    return random.Random(seed).sample(places, count)


def altered(alteration: Alteration, text: str) -> str:
    """The text of its file with it."""
    return text[: alteration.begin] + alteration.new + text[alteration.end :]


def _python(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    support = [folder / "tests", *(folder / "tests" / "support").iterdir()]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (folder, *support))),
        "FLASH_MASK_CUTE_CACHE_DIR": f"{folder}/cache",
    }
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip


def noticed(folder: Path, tests: list[str], with_rows: bool) -> str:
    """What notices the change of the copy: a row or a test; "" if nothing does."""
    if with_rows:
        done = _python(folder, "-c", ROWS)
        if done.returncode:
            said = done.stderr.strip().splitlines()[-1]
            return said if said.startswith("row ") else f"rows: {said[:80]}"
    if not tests:
        return ""
    done = _python(
        *(folder, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not shares"), *tests
    )
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" ")[1]
    if done.returncode:
        raise RuntimeError(f"pytest failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--list", action="store_true", help="say what is altered, and stop")
    parser.add_argument("--tests", nargs="*", default=list(TESTS))
    parser.add_argument("--tests-of", default="", help="a commit, whose tests run without rows")
    parser.add_argument("--only", default="", help="a file with lines of --list; no others")
    parser.add_argument("--rows-only", action="store_true", help="no tests")
    given = parser.parse_args()
    chosen = alterations(given.seed, given.count)
    if given.only:
        wanted = Path(given.only).read_text().splitlines()
        chosen = [x for x in chosen if any(line.startswith(str(x)) for line in wanted)]
    if given.list:
        print("\n".join(map(str, chosen)))
        return 0
    found = 0
    with tempfile.TemporaryDirectory(prefix="altered_") as temporary:
        folder = Path(temporary)
        copy_of_checkout(folder)
        if given.tests_of:
            archive = subprocess.run(
                ["git", "archive", given.tests_of, "tests"], cwd=ROOT, capture_output=True,
                check=True,
            ).stdout  # fmt: skip
            subprocess.run(["rm", "-r", str(folder / "tests")], check=True)
            subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
        # the altered file is compiled anew, whenever it was written
        _python(folder, *["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "."])
        for alteration in chosen:
            path = folder / alteration.file
            text = path.read_text()
            path.write_text(altered(alteration, text))
            begin = time.monotonic()
            tests = [] if given.rows_only else given.tests
            by = noticed(folder, tests, not given.tests_of)
            path.write_text(text)
            found += bool(by)
            seconds = time.monotonic() - begin
            print(f"{alteration}: {by or 'NOT NOTICED'} ({seconds:.0f} s)", flush=True)
    print(f"seed {given.seed}: {found} of {len(chosen)} alterations noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
