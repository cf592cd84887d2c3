"""What all threads of the process share while it compiles or traces.

A forked child has only the thread that forked. What others held or changed, this module gives back.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator

# How long a fork waits for a thread that traces a mod.
_FORK_WAITS_S = 10.0

_compile_lock = threading.RLock()
_trace_lock = threading.RLock()
_fork_holds_trace_lock = threading.local()
_pauses_collector = False
_pipe_ends: set[int] = set()
_builds = 0
_says_builds = threading.local()


def compile_lock() -> threading.RLock:
    """The lock under which this process compiles: two threads in `cute.compile` abort it."""
    return _compile_lock


def trace_lock() -> threading.RLock:
    """The lock under which this process traces mods written in torch. A fork waits for it."""
    return _trace_lock


def compile_count() -> int:
    """Number of kernels that this process has compiled, without those from the cache.

    Example:
        >>> from flash_mask_cute import compile_count
        >>> before = compile_count()  # an equal number after a step: it has compiled nothing
    """
    return _builds


def count_build() -> None:
    global _builds
    _builds += 1


@contextlib.contextmanager
def builds_are_said(who: str) -> Iterator[None]:
    """Write a line to stderr before each kernel that this thread builds in the context."""
    _says_builds.who = who
    try:
        yield
    finally:
        _says_builds.who = None


def say_build() -> None:
    if (who := getattr(_says_builds, "who", None)) is not None:
        sys.stderr.write(f"{who} compiles a kernel, which takes some seconds and is kept\n")
        sys.stderr.flush()


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection in the context, under `compile_lock()`. Allocations of tracing would
    trigger scans of all objects of the process, most of which belong to torch."""
    global _pauses_collector
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _pauses_collector = True
    try:
        yield
    finally:
        _pauses_collector = False
        gc.enable()


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe, as the descriptors of its reading and of its writing end, closed after the context. A
    forked child closes both ends at once: who reads waits until nobody can write any more."""
    ends = os.pipe()
    _pipe_ends.update(ends)
    try:
        yield ends
    finally:
        for end in ends:
            close_end(end)


def close_end(descriptor: int) -> None:
    """Close an end of a `pipe` unless it is closed already."""
    if descriptor in _pipe_ends:
        _pipe_ends.discard(descriptor)
        os.close(descriptor)


def _before_fork() -> None:
    _fork_holds_trace_lock.value = _trace_lock.acquire(timeout=_FORK_WAITS_S)


def _after_fork_in_parent() -> None:
    if _fork_holds_trace_lock.value:
        _trace_lock.release()


def _after_fork_in_child() -> None:
    global _compile_lock, _trace_lock, _builds, _pauses_collector
    _compile_lock = threading.RLock()
    if _fork_holds_trace_lock.value:
        _trace_lock.release()
    else:
        _trace_lock = threading.RLock()
    if _pauses_collector:
        _pauses_collector = False
        gc.enable()
    for end in list(_pipe_ends):
        close_end(end)
    _builds = 0


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
