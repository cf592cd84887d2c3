"""A line on the terminal that says how far long work is."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

INTERVAL_S = 1.0


@contextlib.contextmanager
def tells_progress(what: str, done: Callable[[], int], total: int) -> Iterator[None]:
    """Context of long work: once a second a line of stderr says how much of it is done.

    Work that is shorter than a second says nothing, and nothing is written where stderr is no
    terminal. The line is written over itself, and ended when the work ends.

    what: names the work. done: tells how much of `total`, which is at least 1, is done. It is
    called from another thread, so the work must let go of Python's global lock.

    Example:
        >>> with tells_progress("compiling", lambda: len(finished), len(kernels)):
        ...     compile_all(kernels, finished)
    """
    terminal = sys.stderr
    if terminal is None or not terminal.isatty():
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        begin, has_written = time.monotonic(), False
        while not ended.wait(INTERVAL_S):
            share, seconds = min(done() / total, 1.0), time.monotonic() - begin
            terminal.write(f"\r{what}: {share:4.0%} after {seconds:.0f} s")
            terminal.flush()
            has_written = True
        if has_written:
            terminal.write("\n")
            terminal.flush()

    watcher = threading.Thread(target=watch, name="flash_mask_cute progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
