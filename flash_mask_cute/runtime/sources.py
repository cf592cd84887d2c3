"""Which code of this package the process runs, as a hash of its sources.

The files are read when the package is imported. The compiler reads the text of a kernel when it
compiles, which may have been edited meanwhile. So `fingerprint` looks at the files again.

Importing this module imports neither cutlass nor torch, and takes 2 ms.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path


class Sources:
    """The Python files below a folder, as they are when this object is made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states: object = None
        self._digest: str | None = None
        try:
            # before the contents: a file that is written meanwhile counts as changed
            self._states = self._look()
            self._digest = self._read()
        except OSError as error:
            self._trouble = f"the sources of flash_mask_cute cannot be read: {error}"
        else:
            self._trouble = f"there are no sources of flash_mask_cute in {folder}"

    def fingerprint(self) -> str:
        """SHA-256 of all files, which are what they were at the import. Raises LookupError: there
        are no files, as in a zip archive, they cannot be read, or they have changed. The text says
        which."""
        if self._digest is None or not self._states:
            raise LookupError(self._trouble)
        try:
            states = self._look()
            if states != self._states:
                # a new link to a file or a copy of it has another state, and the same contents
                if self._read() != self._digest:
                    raise LookupError(
                        f"the sources of flash_mask_cute in {self._folder} have changed since this "
                        "process imported them; a new process uses the disk cache again"
                    )
                self._states = states
        except OSError as error:
            raise LookupError(f"the sources of flash_mask_cute are gone: {error}") from error
        return self._digest

    def _look(self) -> list[tuple[str, int, int, int, int]]:
        found = []
        for path in _python_files(self._folder):
            status = os.stat(path)
            times = status.st_mtime_ns, status.st_ctime_ns
            found.append((path, status.st_size, *times, status.st_ino))
        return sorted(found)

    def _read(self) -> str:
        digest = hashlib.sha256()
        for path in sorted(_python_files(self._folder)):
            with open(path, "rb", buffering=0) as file:
                content = file.read()
            name = os.path.relpath(path, self._folder).replace(os.sep, "/")
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()


def _python_files(folder: str | Path) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):  # no module, such as the lock of an editor
                continue
            if entry.name.endswith(".py"):
                yield entry.path
            elif entry.name != "__pycache__" and entry.is_dir(follow_symlinks=False):
                yield from _python_files(entry.path)


SOURCES = Sources(Path(__file__).resolve().parents[1])
"""Those of this package."""
