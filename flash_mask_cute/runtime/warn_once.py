"""Warnings that are given once in a process, at the line of the user's code that made the call."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

PACKAGE = __name__.partition(".")[0]
_given: set[str] = set()
"""The topics of the warnings so far."""


def warn_once(topic: str, message: str) -> None:
    """Emit a UserWarning, unless there was one with this topic. It is shown at the first line
    outside this package and torch on the stack."""
    if topic not in _given:
        _given.add(topic)
        levels = len(_frames_inside(sys._getframe())) + 1
        warnings.warn(message, UserWarning, stacklevel=levels)


def modules_on_stack() -> set[str]:
    """Names of the modules of this package and torch that were called, up to the user's line."""
    return {frame.f_globals["__name__"] for frame in _frames_inside(sys._getframe(1))}


def _frames_inside(frame: FrameType | None) -> list[FrameType]:
    """This frame and its callers, up to the first outside of this package and torch."""
    found: list[FrameType] = []
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in (PACKAGE, "torch"):
        found.append(frame)
        frame = frame.f_back
    return found
