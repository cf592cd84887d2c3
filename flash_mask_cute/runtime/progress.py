"""A progress line on the terminal for long work."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

INTERVAL_S = 1.0


@contextlib.contextmanager
def tells_progress(what: str, done: Callable[[], int], total: int) -> Iterator[None]:
    """Context of long work: once a second a line on stderr shows how much of it is done, if stderr
    is a terminal.

    what: names the work. done: returns how much of `total`, at least 1, is done. It is called from
    another thread, so the work must release Python's global interpreter lock.
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
