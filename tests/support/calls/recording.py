"""What a kernel's class is called with."""

from __future__ import annotations

from typing import Any

import pytest


def calls_of(kind: type, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The objects of a class that are called from now on, one for each call."""
    called, run = [], kind.__call__

    def call(self: Any, *arguments: Any) -> Any:
        called.append(self)
        return run(self, *arguments)

    monkeypatch.setattr(kind, "__call__", call)
    return called
