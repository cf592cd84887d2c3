"""Warnings that are given once in a process, at the line of the user's code that made the call."""

from __future__ import annotations

import sys
import warnings

_given: set[str] = set()
"""The topics of the warnings so far."""


def warn_once(topic: str, message: str) -> None:
    """Emit a UserWarning, unless there was one with this topic.

    It is shown at the first line outside this package and torch on the stack.
    """
    if topic not in _given:
        _given.add(topic)
        warnings.warn(message, UserWarning, stacklevel=_levels_to_caller())


def _levels_to_caller() -> int:
    """Stack levels from the calling function to the first outside of this package and torch."""
    between = __name__.partition(".")[0], "torch"
    frame, levels = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in between:
        frame, levels = frame.f_back, levels + 1
    return levels
