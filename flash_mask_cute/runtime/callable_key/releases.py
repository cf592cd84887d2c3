"""Whose code a module is: of an installed release, of this package, or the caller's own."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import sysconfig
from pathlib import Path, PurePath

_STDLIB_ROOTS = tuple({PurePath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})
_SITE_FOLDERS = frozenset({"site-packages", "dist-packages"})
_PACKAGE = __name__.partition(".")[0]


def release_of(module_name: str | None) -> str | None:
    """What pins the contents of a module that is not the user's own, else None."""
    top = (module_name or "__main__").partition(".")[0]
    if top == _PACKAGE:
        return "this package"
    if top in ("__main__", "__mp_main__"):
        return None
    return _release_of_top(top)


@functools.cache
def _release_of_top(top: str) -> str | None:
    module = sys.modules.get(top)
    path = PurePath(getattr(module, "__file__", None) or "")
    if _SITE_FOLDERS.intersection(path.parts) or _is_recorded(Path(path)):
        version = getattr(module, "__version__", None)
        if version is None:
            try:
                version = importlib.metadata.version(top)
            except importlib.metadata.PackageNotFoundError:
                return None
        return str(version)
    if top in sys.builtin_module_names:
        return "stdlib"
    if top in sys.stdlib_module_names and any(root in path.parents for root in _STDLIB_ROOTS):
        return "stdlib"
    return None


def _is_recorded(path: Path) -> bool:
    """Whether a distribution beside or above the file lists it as its own (`pip --target`)."""
    for root in path.parents:
        line = f"{path.relative_to(root).as_posix()},"
        for record in root.glob("*.dist-info/RECORD"):
            text = record.read_text(encoding="utf-8", errors="replace")
            if text.startswith(line) or f"\n{line}" in text:
                return True
    return False


def resolves(obj: object, module_name: str | None, qualname: str) -> bool:
    """Whether `qualname`, looked up in its module, is this very object."""
    found: object = sys.modules.get(module_name or "")
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found is obj
