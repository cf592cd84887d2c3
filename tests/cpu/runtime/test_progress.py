"""What long work says on a terminal, and that it says nothing elsewhere."""

from __future__ import annotations

import io
import re
import sys
import threading
import time

import pytest
import torch

from flash_mask_cute import create_block_mask
from flash_mask_cute.runtime import progress
from flash_mask_cute.runtime.progress import tells_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as stderr, and lines every 20 ms. No fixture: pytest sets stderr after those."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setattr(progress, "INTERVAL_S", 0.02)
    return made


def wait_for(text: str, terminal: Terminal) -> None:
    deadline = time.monotonic() + 60.0
    while text not in terminal.getvalue():
        assert time.monotonic() < deadline, f"{text} was never written"
        time.sleep(0.001)


def lines_of(terminal: Terminal) -> list[str]:
    """What was written over itself, line by line; the last one was ended."""
    text = terminal.getvalue()
    assert text.startswith("\r") and text.endswith("\n") and text.count("\n") == 1
    return text.strip().split("\r")


def test_a_share_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    is_half_done = threading.Event()
    with tells_progress("counting", lambda: 5 if is_half_done.is_set() else 0, 10):
        wait_for("0%", terminal)
        is_half_done.set()
        wait_for("50%", terminal)
    lines = lines_of(terminal)
    assert re.fullmatch(r"counting:   0% after \d+ s", lines[0])
    assert re.fullmatch(r"counting:  50% after \d+ s", lines[-1])


def test_short_work_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(progress, "INTERVAL_S", 60.0)
    begin = time.monotonic()
    with tells_progress("counting", lambda: 0, 1):
        pass
    assert terminal.getvalue() == ""
    assert time.monotonic() - begin < 30.0, "it waited for the next line"


def test_an_error_ends_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    threads = threading.active_count()
    with pytest.raises(ValueError, match="broken"), tells_progress("counting", lambda: 1, 2):
        wait_for("50%", terminal)
        raise ValueError("broken")
    assert lines_of(terminal)[-1].startswith("counting:  50%")
    assert threading.active_count() == threads


def test_no_terminal_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL_S", 0.0)
    for stderr in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stderr)
        threads = threading.active_count()
        with tells_progress("counting", lambda: 0, 1):
            assert threading.active_count() == threads
        assert stderr is None or stderr.getvalue() == ""


def long_mod(b_idx, h_idx, q_idx, kv_idx, aux_tensors):
    return (q_idx * 7 + kv_idx * 3) >= -1


def test_block_lists_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan lets the watching thread run, and counts lists; an unwatched one gives the same."""
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("FLASH_MASK_CUTE_CACHE_DIR", "off")
    monkeypatch.setattr(progress, "INTERVAL_S", 0.002)
    create_block_mask(long_mod, 1, 1, 8, 8, device="cpu")
    terminal.truncate(0)
    terminal.seek(0)
    watched = create_block_mask(long_mod, 1, 4, 8192, 8192, device="cpu")
    shares = [
        re.fullmatch(r"block lists of long_mod: +(\d+)% after \d+ s", x) for x in lines_of(terminal)
    ]
    percents = [int(share[1]) for share in shares if share is not None]
    # how many there are depends on when the machine lets the watching thread run
    assert len(percents) == len(shares) >= 1
    assert percents == sorted(percents) and percents[-1] <= 100
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    alone = create_block_mask(long_mod, 1, 4, 8192, 8192, device="cpu")
    assert torch.equal(watched.mask_block_cnt, alone.mask_block_cnt)
    assert watched.full_block_cnt is not None and alone.full_block_cnt is not None
    assert torch.equal(watched.full_block_cnt, alone.full_block_cnt)
    assert torch.equal(alone.full_block_cnt, torch.full((1, 4, 64), 64, dtype=torch.int32))
