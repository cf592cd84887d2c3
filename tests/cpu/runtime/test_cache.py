"""Compile cache: what is found, what is rebuilt, and what trouble it survives."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flash_mask_cute.runtime import cache as cache_module
from flash_mask_cute.runtime.cache import CompileCache, Compiled, compile_count, compile_lock

ROOT = Path(cache_module.__file__).resolve().parents[2]
OPTIONS = "--enable-tvm-ffi --gpu-arch sm_90a"
META = {"registers": 168, "smem": 1024, "spills": 0}

# One text for this process and for its children: adds `addend` to n elements of an int32 array.
KERNEL = """
import cutlass
import cutlass.cute as cute

OPTIONS = "--enable-tvm-ffi --gpu-arch sm_90a"

def compile_adder(addend):
    @cute.jit
    def add(x: cute.Tensor, n: cutlass.Int32):
        for i in range(n):
            x[i] = x[i] + addend

    x = cute.runtime.make_fake_compact_tensor(
        cutlass.Int32, (cute.sym_int(),), memspace=cutlass.AddressSpace.generic
    )
    return cute.compile(add, x, cutlass.Int32(0), options=OPTIONS, no_jit_engine=True)

@cute.kernel
def fill(x: cute.Tensor, value: cutlass.Int32):
    x[cute.arch.thread_idx()[0]] = value

@cute.jit
def launch_fill(x: cute.Tensor, value: cutlass.Int32, stream):
    fill(x, value).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

def compile_fill():
    x = cute.runtime.make_fake_compact_tensor(cutlass.Int32, (cute.sym_int(),))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch_fill, x, cutlass.Int32(0), stream, options=OPTIONS)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("kernels") / "cached_kernels.py"
    path.write_text(KERNEL)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def adders(kernels: Any) -> Callable[[int], Any]:
    """`adders(addend)` compiles a host function, once per addend, which only the cache can load."""
    return functools.cache(kernels.compile_adder)


class Builder:
    """Builds an adder and counts how often it is asked to."""

    def __init__(self, adders: Callable[[int], Any]) -> None:
        self._adders = adders
        self.calls = 0

    def __call__(self, addend: int = 1) -> Callable[[], Compiled]:
        def build() -> Compiled:
            self.calls += 1
            return Compiled(self._adders(addend), META)

        return build


@pytest.fixture
def builder(adders: Callable[[int], Any]) -> Builder:
    return Builder(adders)


def _get(cache: CompileCache, build: Callable[[], Compiled], **change: Any) -> Compiled:
    arguments: dict[str, Any] = {
        "name": "adder",
        "key": {"addend": 1},
        "arch": "sm_90a",
        "options": OPTIONS,
    }
    arguments |= change
    return cache.get(arguments.pop("name"), arguments.pop("key"), build, **arguments)


def _apply(compiled: Compiled) -> int:
    x = np.zeros(3, dtype=np.int32)
    compiled.function(x, 3)
    assert len(set(x.tolist())) == 1
    return int(x[0])


def _files(folder: Path) -> list[str]:
    return sorted(path.suffix for path in (folder / "v1").iterdir())


def _entry(folder: Path, suffix: str) -> Path:
    (path,) = (folder / "v1").glob(f"*{suffix}")
    return path


@pytest.fixture(autouse=True)
def no_surprising_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


# -- hits and misses ----------------------------------------------------------------------------


def test_memory_then_disk(tmp_path: Path, builder: Builder) -> None:
    cache = CompileCache(tmp_path)
    before = compile_count()
    built = _get(cache, builder())
    assert _apply(built) == 1 and built.meta == META
    assert _get(cache, builder()) is built
    assert _files(tmp_path) == [".json", ".o"]

    cache.clear_memory()
    loaded = _get(cache, builder())
    assert loaded is not built and _apply(loaded) == 1 and loaded.meta == META
    assert _apply(_get(CompileCache(tmp_path), builder())) == 1
    assert builder.calls == 1 and compile_count() == before + 1


def test_kernels_are_exported_too(tmp_path: Path, kernels: Any) -> None:
    """A function that launches a kernel is compiled, stored and found again without a GPU."""
    calls = []

    def build() -> Compiled:
        calls.append(1)
        return Compiled(kernels.compile_fill(), {})

    _get(CompileCache(tmp_path), build)
    loaded = _get(CompileCache(tmp_path), build)
    assert len(calls) == 1
    with pytest.raises(ValueError, match="device_type=cuda"):
        loaded.function(np.zeros(32, dtype=np.int32), 1)


def test_files_are_private(tmp_path: Path, builder: Builder) -> None:
    _get(CompileCache(tmp_path / "new" / "cache"), builder())
    folder = tmp_path / "new" / "cache"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "v1").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (folder / "v1").iterdir()} == {0o600}


@pytest.mark.parametrize(
    "change",
    [
        {"key": {"addend": 2}},
        {"key": {"addend": 1, "more": [1, None, "x"]}},
        {"key": {"addend": True}},
        {"key": {"addend": 1.0}},
        {"key": {}},
        {"name": "subtractor"},
        {"arch": "sm_100a"},
        {"options": OPTIONS + " --opt-level 2"},
    ],
)
def test_every_part_of_the_key_counts(
    tmp_path: Path, builder: Builder, change: dict[str, Any]
) -> None:
    cache = CompileCache(tmp_path)
    _get(cache, builder(1))
    other = _get(cache, builder(2), **change)
    assert _apply(other) == 2 and builder.calls == 2
    assert _apply(_get(cache, builder())) == 1 and builder.calls == 2
    again = CompileCache(tmp_path)
    assert _apply(_get(again, builder(), **change)) == 2 and builder.calls == 2


def test_order_of_the_key_does_not_count(tmp_path: Path, builder: Builder) -> None:
    _get(CompileCache(tmp_path), builder(), key={"a": 1, "b": (2, 3)})
    _get(CompileCache(tmp_path), builder(), key={"b": [2, 3], "a": 1})
    assert builder.calls == 1


def test_sources_versions_and_environment_count(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misses() -> bool:
        before = builder.calls
        _get(CompileCache(tmp_path), builder())
        return builder.calls > before

    assert misses() and not misses()
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "source_fingerprint", lambda: "other")
        assert misses()
    for field in ("cutlass", "cuda", "tvm_ffi", "machine"):
        with monkeypatch.context() as patch:
            other = cache_module._toolchain() | {field: "other"}
            patch.setattr(cache_module, "_toolchain", lambda other=other: other)
            assert misses()
    for variable in ("CUTE_DSL_LINEINFO", "CUTE_DSL_COMPILER_OPT", "CUTE_DSL_ENABLE_ASSERTIONS"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            assert misses()
    for variable in ("CUTE_DSL_LOG_LEVEL", "CUTE_DSL_KEEP", "CUTE_DSL_DUMP_DIR", "UNRELATED"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            assert not misses()
    assert not misses()


def test_source_fingerprint_covers_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = cache_module.source_fingerprint.__wrapped__
    host = tmp_path / "package" / "host"
    host.mkdir(parents=True)
    monkeypatch.setattr(cache_module, "__file__", str(host / "cache.py"))
    seen = set()
    for name, text in (
        ("runtime/cache.py", "x = 1"),
        ("runtime/cache.py", "x = 2"),
        ("a.py", ""),
        ("deep/er/b.py", "y"),
        ("deep/er/b.py", "z"),
    ):
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        seen.add(compute())
    assert len(seen) == 5
    (tmp_path / "package" / "notes.txt").write_text("not code")
    assert compute() in seen


def test_toolchain_names_the_compiler() -> None:
    import cutlass

    toolchain = cache_module._toolchain()
    assert toolchain["cutlass"] == cutlass.__version__
    assert toolchain["cuda"].split(".") == [
        str(cutlass.CUDA_VERSION.major),
        str(cutlass.CUDA_VERSION.minor),
    ]


def test_token_spares_the_key(tmp_path: Path, builder: Builder) -> None:
    cache = CompileCache(tmp_path)
    made = []

    def key() -> dict[str, int]:
        made.append(1)
        return {"addend": 1}

    first = _get(cache, builder(), key=key, token=("adder", 1))
    assert _get(cache, builder(), key=key, token=("adder", 1)) is first
    assert len(made) == 1
    assert _get(cache, builder(), key=lambda: {"addend": 2}, token=("adder", 2)) is not first
    # The files know the key, not the token.
    _get(CompileCache(tmp_path), builder(), key={"addend": 1})
    assert builder.calls == 2


@pytest.mark.parametrize("value", [object(), {1, 2}, float("nan")])
def test_keys_that_are_not_json(tmp_path: Path, builder: Builder, value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        _get(CompileCache(tmp_path), builder(), key={"x": value})
    assert builder.calls == 0


def test_errors_of_the_builder_reach_the_caller(tmp_path: Path, builder: Builder) -> None:
    cache = CompileCache(tmp_path)

    def fail() -> Compiled:
        raise ZeroDivisionError("from the builder")

    before = compile_count()
    with pytest.raises(ZeroDivisionError, match="from the builder"):
        _get(cache, fail)
    assert compile_count() == before
    assert _files(tmp_path) == []  # no lock is left behind
    assert _apply(_get(cache, builder())) == 1


# -- damaged and foreign entries ----------------------------------------------------------------


def _truncate_object(folder: Path) -> None:
    path = _entry(folder, ".o")
    path.write_bytes(path.read_bytes()[:1000])


def _append_to_object(folder: Path) -> None:
    with _entry(folder, ".o").open("ab") as file:
        file.write(b"x")


def _remove_object(folder: Path) -> None:
    _entry(folder, ".o").unlink()


def _remove_sidecar(folder: Path) -> None:
    _entry(folder, ".json").unlink()


def _garble_sidecar(folder: Path) -> None:
    _entry(folder, ".json").write_text('{"identity": ')


def _sidecar_of_another_shape(folder: Path) -> None:
    _entry(folder, ".json").write_text("[]")


def _sidecar_of_another_key(folder: Path) -> None:
    sidecar = json.loads(_entry(folder, ".json").read_text())
    sidecar["identity"]["key"] = {"addend": 2}
    _entry(folder, ".json").write_text(json.dumps(sidecar))


def _garbage_with_a_right_checksum(folder: Path) -> None:
    _entry(folder, ".o").write_bytes(b"not an object file")
    sidecar = json.loads(_entry(folder, ".json").read_text())
    sidecar["object_sha256"] = hashlib.sha256(b"not an object file").hexdigest()
    _entry(folder, ".json").write_text(json.dumps(sidecar))


def _symbolic_link(folder: Path) -> None:
    path = _entry(folder, ".o")
    target = folder / "elsewhere"
    target.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize(
    "damage",
    [
        _truncate_object,
        _append_to_object,
        _remove_object,
        _remove_sidecar,
        _garble_sidecar,
        _sidecar_of_another_shape,
        _sidecar_of_another_key,
        _garbage_with_a_right_checksum,
        _symbolic_link,
    ],
)
def test_damaged_entry_is_rebuilt(
    tmp_path: Path, builder: Builder, damage: Callable[[Path], None]
) -> None:
    _get(CompileCache(tmp_path), builder())
    damage(tmp_path)
    assert _apply(_get(CompileCache(tmp_path), builder())) == 1
    assert builder.calls == 2
    assert _files(tmp_path) == [".json", ".o"] and not _entry(tmp_path, ".o").is_symlink()
    assert _apply(_get(CompileCache(tmp_path), builder())) == 1
    assert builder.calls == 2


def test_entries_of_another_user_are_not_loaded(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _get(CompileCache(tmp_path), builder())
    me = os.geteuid()
    answers = iter([me])  # the folder is mine, the files are not
    monkeypatch.setattr(os, "geteuid", lambda: next(answers, me + 1))
    _get(CompileCache(tmp_path), builder())
    assert builder.calls == 2


def test_folder_of_another_user_is_not_used(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _get(CompileCache(tmp_path), builder())
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.warns(RuntimeWarning, match="belongs to the current user"):
        _get(CompileCache(tmp_path), builder())
    assert builder.calls == 2


def test_folder_that_others_can_write_is_not_used(tmp_path: Path, builder: Builder) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="written by other users .mode 777"):
        assert _apply(_get(CompileCache(tmp_path), builder())) == 1
    assert _files(tmp_path) == []


# -- a disk that cannot be used -----------------------------------------------------------------


def test_directory_that_cannot_be_made(tmp_path: Path, builder: Builder) -> None:
    (tmp_path / "file").write_text("")
    cache = CompileCache(tmp_path / "file" / "cache")
    with pytest.warns(RuntimeWarning, match="FLASH_MASK_CUTE_CACHE_DIR") as caught:
        assert _apply(_get(cache, builder(1))) == 1
        assert _apply(_get(cache, builder(2), key={"addend": 2})) == 2
    assert len(caught) == 1  # one warning, however many kernels
    assert _apply(_get(cache, builder())) == 1 and builder.calls == 2


def test_read_only_directory(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is used, the rest is compiled. (Root may write anywhere: hence the patch.)"""
    _get(CompileCache(tmp_path), builder())
    really_open = os.open

    def read_only(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            raise OSError(30, "Read-only file system", str(path))
        return really_open(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", read_only)
    cache = CompileCache(tmp_path)
    assert _apply(_get(cache, builder())) == 1 and builder.calls == 1
    with pytest.warns(RuntimeWarning, match="Read-only file system"):
        assert _apply(_get(cache, builder(2), key={"addend": 2})) == 2
    assert _files(tmp_path) == [".json", ".o"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into any directory")
def test_directory_without_write_permission(tmp_path: Path, builder: Builder) -> None:
    (tmp_path / "v1").mkdir(mode=0o500)
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        assert _apply(_get(CompileCache(tmp_path), builder())) == 1


def test_full_disk(tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    cache = CompileCache(tmp_path)
    monkeypatch.setattr(os, "replace", no_space)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        kernels = [_get(cache, builder(n), key={"addend": n}) for n in (1, 2)]
    assert [_apply(kernel) for kernel in kernels] == [1, 2]
    assert _files(tmp_path) == []


def test_errors_of_the_export_reach_the_caller(tmp_path: Path) -> None:
    def build() -> Compiled:
        return Compiled(lambda x, n: x.fill(7), {})

    with pytest.warns(RuntimeWarning), pytest.raises(AttributeError, match="export_to_c"):
        _get(CompileCache(tmp_path), build)
    assert _files(tmp_path) == []


@pytest.mark.parametrize("value", ["0", "off", "OFF"])
def test_disabled_by_the_environment(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("FLASH_MASK_CUTE_CACHE_DIR", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    cache = CompileCache()
    assert _get(cache, builder()) is _get(cache, builder())
    assert _apply(_get(CompileCache(), builder())) == 1
    assert builder.calls == 2 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"FLASH_MASK_CUTE_CACHE_DIR": "{}/mine", "XDG_CACHE_HOME": "{}/xdg"}, "mine"),
        ({"XDG_CACHE_HOME": "{}/xdg"}, "xdg/flash_mask_cute"),
        ({"FLASH_MASK_CUTE_CACHE_DIR": "", "XDG_CACHE_HOME": ""}, ".cache/flash_mask_cute"),
        ({}, ".cache/flash_mask_cute"),
    ],
)
def test_location(
    tmp_path: Path,
    builder: Builder,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    expected: str,
) -> None:
    for variable in ("FLASH_MASK_CUTE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value.format(tmp_path))
    _get(CompileCache(), builder())
    assert _files(tmp_path / expected) == [".json", ".o"]


# -- eviction -----------------------------------------------------------------------------------


def test_least_recently_used_entries_go_first(tmp_path: Path, builder: Builder) -> None:
    def get(number: int, cache: CompileCache) -> None:
        _get(cache, builder(), key={"number": number})

    unlimited = CompileCache(tmp_path)
    for number in range(3):
        get(number, unlimited)
        for path in (tmp_path / "v1").iterdir():
            os.utime(path, (path.stat().st_mtime - 100,) * 2)  # age what is there
    size = sum(path.stat().st_size for path in (tmp_path / "v1").iterdir()) // 3
    get(0, CompileCache(tmp_path))  # used now: 1 is the oldest
    assert builder.calls == 3

    get(3, CompileCache(tmp_path, max_bytes=3 * size + size // 2))
    assert builder.calls == 4
    for number in (0, 2, 3):
        get(number, CompileCache(tmp_path))
    assert builder.calls == 4
    get(1, CompileCache(tmp_path))
    assert builder.calls == 5


def test_the_new_entry_is_kept_and_leftovers_go(tmp_path: Path, builder: Builder) -> None:
    (tmp_path / "v1").mkdir(mode=0o700)
    old, fresh = tmp_path / "v1" / ".tmp-old.o", tmp_path / "v1" / ".tmp-fresh.o"
    for path, age in ((old, 7200), (fresh, 60)):
        path.write_bytes(b"x")
        os.utime(path, (time.time() - age,) * 2)
    _get(CompileCache(tmp_path, max_bytes=0), builder())
    assert not old.exists() and fresh.exists()
    _get(CompileCache(tmp_path), builder())
    assert builder.calls == 1


# -- threads and processes ----------------------------------------------------------------------


def test_threads_build_once(tmp_path: Path, adders: Callable[[int], Any]) -> None:
    cache = CompileCache(tmp_path)
    running, calls, results = threading.Semaphore(0), [], []

    def build() -> Compiled:
        calls.append(1)
        running.release()
        time.sleep(0.1)
        return Compiled(adders(1), META)

    threads = [
        threading.Thread(target=lambda: results.append(_get(cache, build))) for _ in range(4)
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
            _get(cache, build, key={"number": number})

    threads = [threading.Thread(target=run, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_hits_do_not_wait_for_a_compile(tmp_path: Path, builder: Builder) -> None:
    cache = CompileCache(tmp_path)
    first = _get(cache, builder())
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
        reader = threading.Thread(target=lambda: found.append(_get(cache, builder())))
        reader.start()
        reader.join(10)
        assert found == [first]
    finally:
        done.set()
        thread.join()


def test_builders_may_use_the_cache(tmp_path: Path, builder: Builder) -> None:
    cache = CompileCache(tmp_path)

    def outer() -> Compiled:
        _get(cache, builder(2), key={"addend": 2})
        return builder(1)()

    assert _apply(_get(cache, outer)) == 1
    assert _apply(_get(cache, builder(), key={"addend": 2})) == 2
    assert builder.calls == 2 and _files(tmp_path) == [".json", ".json", ".o", ".o"]


def test_lock_held_too_long(tmp_path: Path, builder: Builder) -> None:
    _get(CompileCache(tmp_path), builder())
    stem = _entry(tmp_path, ".o").with_suffix("")
    for path in list((tmp_path / "v1").iterdir()):
        path.unlink()
    with open(stem.with_suffix(".lock"), "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.warns(RuntimeWarning, match=r"held for more than 0\.1 s"):
            cache = CompileCache(tmp_path, lock_timeout_s=0.1)
            assert _apply(_get(cache, builder())) == 1
        assert builder.calls == 2 and _files(tmp_path) == [".lock"]
    _get(CompileCache(tmp_path), builder())  # a lock file without a holder is no obstacle
    assert builder.calls == 3 and _files(tmp_path) == [".json", ".o"]


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

    cache.source_fingerprint = lambda: "sources that nobody edits while the test runs"
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
        "adder", {"addend": 5}, build, arch="sm_90a", options=OPTIONS
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
    assert _files(tmp_path / "cache") == [".json", ".o"]


def test_forked_child_has_a_fresh_lock(tmp_path: Path, builder: Builder) -> None:
    _get(CompileCache(tmp_path), builder())
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


def test_import_does_not_import_the_compiler() -> None:
    code = (
        "import sys, flash_mask_cute.runtime.cache, flash_mask_cute.runtime.callable_key;"
        "sys.exit(any(name.partition('.')[0] == 'cutlass' for name in sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
