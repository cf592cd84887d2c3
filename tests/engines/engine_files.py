"""Skips tests that need the Python files of an engine's own wheel (`make test-engines`)."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs_engine(name: str) -> None:
    """Skip a module of tests before it imports an engine that is missing."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not here: `make test-engines` fetches it", allow_module_level=True)
