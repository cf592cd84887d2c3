"""Compile cache: threads and processes that want the same entry."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cached_adders import KERNEL, META, Builder, apply, entry_of, files_of, get_adder

from flash_mask_cute.runtime import cache as cache_module
from flash_mask_cute.runtime.cache import CompileCache, Compiled, compile_count, compile_lock

pytestmark = pytest.mark.usefixtures("no_surprising_warnings")

ROOT = Path(cache_module.__file__).resolve().parents[2]


def test_threads_build_once(tmp_path: Path, adders: Callable[[int], Any]) -> None:
    cache = CompileCache(tmp_path)
    running, calls, results = threading.Semaphore(0), [], []

    def build() -> Compiled:
        calls.append(1)
        running.release()
        time.sleep(0.1)
        return Compiled(adders(1), META)

    threads = [
        threading.Thread(target=lambda: results.append(get_adder(cache, build))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len(results) == 4
    assert all(result is results[0] for result in results)


def test_builds_of_different_keys_do_not_overlap(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    active, most = [0], [0]

    def build() -> Compiled:
        active[0] += 1
        most[0] = max(most[0], active[0])
        time.sleep(0.02)
        active[0] -= 1
        raise LookupError

    def run(number: int) -> None:
        with pytest.raises(LookupError):
            get_adder(cache, build, key={"number": number})

    threads = [threading.Thread(target=run, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_hits_do_not_wait_for_a_compile(tmp_path: Path, builder: Builder) -> None:
    cache = CompileCache(tmp_path)
    first = get_adder(cache, builder())
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with compile_lock():
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(30)
        found = []
        reader = threading.Thread(target=lambda: found.append(get_adder(cache, builder())))
        reader.start()
        reader.join(10)
        assert found == [first]
    finally:
        done.set()
        thread.join()


def test_builders_may_use_the_cache(tmp_path: Path, builder: Builder) -> None:
    cache = CompileCache(tmp_path)

    def outer() -> Compiled:
        get_adder(cache, builder(2), key={"addend": 2})
        return builder(1)()

    assert apply(get_adder(cache, outer)) == 1
    assert apply(get_adder(cache, builder(), key={"addend": 2})) == 2
    assert builder.calls == 2 and files_of(tmp_path) == [".json", ".json", ".o", ".o"]


def test_lock_held_too_long(tmp_path: Path, builder: Builder) -> None:
    get_adder(CompileCache(tmp_path), builder())
    stem = entry_of(tmp_path, ".o").with_suffix("")
    for path in list((tmp_path / "v1").iterdir()):
        path.unlink()
    with open(stem.with_suffix(".lock"), "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.warns(RuntimeWarning, match=r"held for more than 0\.1 s"):
            cache = CompileCache(tmp_path, lock_timeout_s=0.1)
            assert apply(get_adder(cache, builder())) == 1
        assert builder.calls == 2 and files_of(tmp_path) == [".lock"]
    get_adder(CompileCache(tmp_path), builder())  # a lock file without a holder is no obstacle
    assert builder.calls == 3 and files_of(tmp_path) == [".json", ".o"]


def test_lock_file_deleted_while_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last holder deletes the file between our open and our lock: we must not own a ghost."""
    entry = cache_module._Entry(tmp_path, "adder", "{}")
    really_lock = fcntl.flock
    calls: list[int] = []

    def lock(descriptor: int, operation: int) -> None:
        if not calls:
            entry.lock_path.unlink()
        calls.append(operation)
        really_lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    held = entry.try_lock()
    assert held is not None and len(calls) == 2
    assert os.path.samestat(os.fstat(held), entry.lock_path.stat())
    assert entry.try_lock() is None
    os.close(held)


CHILD = KERNEL + textwrap.dedent(
    """
    import sys, time
    from pathlib import Path

    import numpy as np
    from flash_mask_cute.runtime import cache
    from flash_mask_cute.runtime.cache import CompileCache, Compiled, compile_count
    from flash_mask_cute.runtime.sources import Sources

    cache.SOURCES = Sources(Path(sys.argv[1]))  # which nobody edits while the test runs
    folder, role = Path(sys.argv[1]), sys.argv[2]

    def build():
        (folder / f"built-by-{role}").touch()
        time.sleep(0.3)
        return Compiled(compile_adder(5), {"role": role})

    (folder / f"ready-{role}").touch()
    wanted = int(sys.argv[3])
    while len(list(folder.glob("ready-*"))) < wanted:
        time.sleep(0.005)
    found = CompileCache(folder / "cache").get(
        "adder", lambda: {"addend": 5}, build, arch="sm_90a", options=OPTIONS, token=5
    )
    x = np.zeros(3, dtype=np.int32)
    found.function(x, 3)
    print(x.tolist(), found.meta["role"], compile_count())
    """
)


def _start(script: Path, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.shares(2)
def test_racing_processes_compile_once(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    racers = [_start(script, tmp_path, role, 2) for role in ("one", "two")]
    outputs = [racer.communicate(timeout=120)[0].split() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    (marker,) = tmp_path.glob("built-by-*")
    winner = marker.name.removeprefix("built-by-")
    assert sorted(outputs) == sorted(
        [["[5,", "5,", "5]", winner, "1"], ["[5,", "5,", "5]", winner, "0"]]
    )

    later = _start(script, tmp_path, "later", 3)
    assert later.communicate(timeout=120)[0].split() == ["[5,", "5,", "5]", winner, "0"]
    assert list(tmp_path.glob("built-by-*")) == [marker]
    assert files_of(tmp_path / "cache") == [".json", ".o"]


def test_forked_child_has_a_fresh_lock(tmp_path: Path, builder: Builder) -> None:
    get_adder(CompileCache(tmp_path), builder())
    assert compile_count() > 0
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with compile_lock():
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 advises against forking with threads
            child = os.fork()
        if child == 0:
            free = compile_lock().acquire(timeout=5)
            os._exit(0 if free and compile_count() == 0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        done.set()
        thread.join()
