"""Earlier commits of this project, unpacked beside it."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench import ROOT

PACKAGE = "flash_mask_cute"


@contextlib.contextmanager
def unpacked(ref: str, *folders: str) -> Iterator[Path]:
    """A folder with those folders of a commit and nothing else, for as long as the context lasts.

    ref: what git takes for a commit; or, where there is no repository, a folder that holds them.

    Raises ValueError where it is neither.
    """
    if (Path(ref) / PACKAGE).is_dir():
        with tempfile.TemporaryDirectory() as folder:
            for name in folders:
                Path(folder, name).symlink_to(Path(ref, name).resolve())
            yield Path(folder)
        return
    command = ["git", "-C", str(ROOT), "archive", ref, *folders]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise ValueError(f"{ref!r} is no folder with {PACKAGE} and no commit: {said}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def environment(*folders: Path) -> dict[str, str]:
    """This process's, with modules looked for in `folders` first."""
    places = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
