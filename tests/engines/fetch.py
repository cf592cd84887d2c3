"""`python fetch.py DIR NAME==VERSION ...`: the Python files of wheels, without dependencies."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

LEFT_OUT = ".so", ".pyd"


def fetch(folder: Path, wanted: str) -> None:
    with tempfile.TemporaryDirectory() as wheels:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", wheels]
        subprocess.run([*pip, wanted], check=True)
        (wheel,) = Path(wheels).iterdir()
        with ZipFile(wheel) as archive:
            archive.extractall(folder, [x for x in archive.namelist() if not x.endswith(LEFT_OUT)])


if __name__ == "__main__":
    for name in sys.argv[2:]:
        fetch(Path(sys.argv[1]), name)
