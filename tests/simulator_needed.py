"""Whether a change can alter what the software GPU computes: `python tests/simulator_needed.py`.

Says what it found. Exit status: 0 if the simulator has to run, NOT_NEEDED if nothing that it runs
differs from the branch `main`: only documents, the benchmark, and tests that run on the CPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_NEEDED = 3
# The tests on the simulator read, import and run nothing of these,
APART = ("docs/", "bench/", "tests/cpu/", "README.md")
# but for the arithmetic of the oracles and the mods written in torch.
READ = ("bench/oracle.py", "bench/flex_mods.py", "bench/mods.py")
MAIN = ("origin/main", "main")


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails, or is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def changed_files(root: Path) -> tuple[str, set[str]] | None:
    """The branch compared with, and files that differ from where it was left; None without one."""
    for branch in MAIN:
        base = _git(root, "merge-base", "HEAD", branch)
        if base is None:
            continue
        differing = _git(
            root, "diff", "--name-only", "--no-renames", "--relative", "-z", base.strip()
        )
        new = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
        if differing is None or new is None:
            return None
        return branch, {name for name in (differing + new).split("\0") if name}
    return None


def verdict(found: tuple[str, set[str]] | None) -> tuple[bool, str]:
    """Whether the simulator has to run, and why."""
    if found is None:
        return True, "there is no branch main to compare with"
    branch, files = found
    if not files:
        return True, f"nothing differs from {branch}"
    telling = sorted(x for x in files if x in READ or not x.startswith(APART))
    if telling:
        return True, f"{len(telling)} files differ from {branch}, the first is {telling[0]}"
    return False, f"nothing but {', '.join(APART)} differs from {branch}"


def main() -> int:
    is_needed, reason = verdict(changed_files(ROOT))
    print(f"simulator: {'runs' if is_needed else 'not run'}, {reason}", flush=True)
    return 0 if is_needed else NOT_NEEDED


if __name__ == "__main__":
    sys.exit(main())
