"""Tests with the Python files of an engine's own wheel, on the CPU: `make test-engines`.

An engine that is not there is skipped, with this reason.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs_engine(name: str) -> None:
    """Skip a module of tests, before it imports what is not there."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not here: `make test-engines` fetches it", allow_module_level=True)
