"""Examples as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


def load_example(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module, until the end of a test."""
    monkeypatch.syspath_prepend(path.parent)  # as `python examples/NN_name.py` does
    name = f"example_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module
