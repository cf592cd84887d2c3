"""`python .ci/release.py VERSION`: writes a version where it is named, commits it and tags it.

Nothing is pushed. The working tree must be clean, and the version not lower than the present one.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

FORM = re.compile(r"\d+\.\d+\.\d+")
# The places of the version, as a pattern whose first group stays in front of it.
PLACES = {
    "flash_mask_cute/__init__.py": r'(?m)^(__version__ = ")[\d.]+(?=")',
    "CITATION.cff": r"(?m)^(version: )[\d.]+$",
    "contrib/pyproject.toml": r'(?m)^(version = ")[\d.]+(?=")',
}
UNRELEASED = re.compile(r"(?m)^## Version [\d.]+ \(unreleased\)$")


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def write_version(root: Path, version: str, day: str) -> list[str]:
    """Write the version into the files of root; which files these are.

    Raises:
        SystemExit: it is no version, or lower than the present one, or a place of it is missing.
    """
    if not FORM.fullmatch(version):
        raise SystemExit(f"VERSION must be three numbers, as 1.2.3, got {version!r}")
    text = (root / "flash_mask_cute/__init__.py").read_text()
    present = re.search(r'(?m)^__version__ = "([\d.]+)"$', text)
    if present is None or numbers(version) < numbers(present[1]):
        known = "unknown" if present is None else present[1]
        raise SystemExit(f"VERSION {version} is lower than the present one, {known}")
    for name, pattern in PLACES.items():
        path = root / name
        text, count = re.subn(pattern, rf"\g<1>{version}", path.read_text())
        if count != 1:
            raise SystemExit(f"{name} names the version {count} times, not once")
        path.write_text(text)
    changes = root / "docs/CHANGELOG.md"
    text, count = UNRELEASED.subn(f"## Version {version} ({day})", changes.read_text())
    if count != 1:
        raise SystemExit(f"docs/CHANGELOG.md has {count} unreleased versions, not one")
    changes.write_text(text)
    return [*PLACES, "docs/CHANGELOG.md"]


def main(root: Path, version: str) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    if git("status", "--porcelain"):
        raise SystemExit("the working tree has changes: commit them first")
    if git("tag", "--list", f"v{version}"):
        raise SystemExit(f"the tag v{version} exists")
    git("add", *write_version(root, version, datetime.date.today().isoformat()))
    git("commit", "--quiet", "--message", f"Version {version}")
    git("tag", "--annotate", f"v{version}", "--message", f"Version {version}")
    sys.stdout.write(f"committed and tagged v{version}; push both: git push --follow-tags\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python .ci/release.py VERSION")
    main(Path(__file__).resolve().parents[1], sys.argv[1])
