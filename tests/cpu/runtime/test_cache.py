"""Compile cache: what is found, what is rebuilt, and what trouble it survives."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cached_adders import META, OPTIONS, Builder, apply, entry_of, files_of, get_adder

from flash_mask_cute.runtime import cache as cache_module
from flash_mask_cute.runtime.cache import CompileCache, Compiled, compile_count
from flash_mask_cute.runtime.sources import Sources

pytestmark = pytest.mark.usefixtures("no_surprising_warnings")

# -- hits and misses ----------------------------------------------------------------------------


def test_memory_then_disk(tmp_path: Path, builder: Builder) -> None:
    cache = CompileCache(tmp_path)
    before = compile_count()
    built = get_adder(cache, builder())
    assert apply(built) == 1 and built.meta == META
    assert get_adder(cache, builder()) is built
    assert files_of(tmp_path) == [".json", ".o"]

    cache._memory.clear()
    loaded = get_adder(cache, builder())
    assert loaded is not built and apply(loaded) == 1 and loaded.meta == META
    assert apply(get_adder(CompileCache(tmp_path), builder())) == 1
    assert builder.calls == 1 and compile_count() == before + 1


def test_kernels_are_exported_too(tmp_path: Path, kernels: Any) -> None:
    """A function that launches a kernel is compiled, stored and found again without a GPU."""
    calls = []

    def build() -> Compiled:
        calls.append(1)
        return Compiled(kernels.compile_fill(), {})

    get_adder(CompileCache(tmp_path), build)
    loaded = get_adder(CompileCache(tmp_path), build)
    assert len(calls) == 1
    with pytest.raises(ValueError, match="device_type=cuda"):
        loaded.function(np.zeros(32, dtype=np.int32), 1)


def test_files_are_private(tmp_path: Path, builder: Builder) -> None:
    get_adder(CompileCache(tmp_path / "new" / "cache"), builder())
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
    get_adder(cache, builder(1))
    other = get_adder(cache, builder(2), **change)
    assert apply(other) == 2 and builder.calls == 2
    assert apply(get_adder(cache, builder())) == 1 and builder.calls == 2
    again = CompileCache(tmp_path)
    assert apply(get_adder(again, builder(), **change)) == 2 and builder.calls == 2


def test_order_of_the_key_does_not_count(tmp_path: Path, builder: Builder) -> None:
    get_adder(CompileCache(tmp_path), builder(), key={"a": 1, "b": (2, 3)})
    get_adder(CompileCache(tmp_path), builder(), key={"b": [2, 3], "a": 1})
    assert builder.calls == 1


def test_sources_versions_and_environment_count(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misses() -> bool:
        before = builder.calls
        get_adder(CompileCache(tmp_path), builder())
        return builder.calls > before

    assert misses() and not misses()
    with monkeypatch.context() as patch:
        (tmp_path / "other.py").write_text("")
        patch.setattr(cache_module, "SOURCES", Sources(tmp_path))
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

    first = get_adder(cache, builder(), key=key, token=("adder", 1))
    assert get_adder(cache, builder(), key=key, token=("adder", 1)) is first
    assert len(made) == 1
    assert get_adder(cache, builder(), key=lambda: {"addend": 2}, token=("adder", 2)) is not first
    # The files know the key, not the token.
    get_adder(CompileCache(tmp_path), builder(), key={"addend": 1})
    assert builder.calls == 2


@pytest.mark.parametrize("value", [object(), {1, 2}, float("nan")])
def test_keys_that_are_not_json(tmp_path: Path, builder: Builder, value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        get_adder(CompileCache(tmp_path), builder(), key={"x": value})
    assert builder.calls == 0


def test_errors_of_the_builder_reach_the_caller(tmp_path: Path, builder: Builder) -> None:
    cache = CompileCache(tmp_path)

    def fail() -> Compiled:
        raise ZeroDivisionError("from the builder")

    before = compile_count()
    with pytest.raises(ZeroDivisionError, match="from the builder"):
        get_adder(cache, fail)
    assert compile_count() == before
    assert files_of(tmp_path) == []  # no lock is left behind
    assert apply(get_adder(cache, builder())) == 1


# -- damaged and foreign entries ----------------------------------------------------------------


def _truncate_object(folder: Path) -> None:
    path = entry_of(folder, ".o")
    path.write_bytes(path.read_bytes()[:1000])


def _append_to_object(folder: Path) -> None:
    with entry_of(folder, ".o").open("ab") as file:
        file.write(b"x")


def _remove_object(folder: Path) -> None:
    entry_of(folder, ".o").unlink()


def _remove_sidecar(folder: Path) -> None:
    entry_of(folder, ".json").unlink()


def _garble_sidecar(folder: Path) -> None:
    entry_of(folder, ".json").write_text('{"identity": ')


def _sidecar_of_another_shape(folder: Path) -> None:
    entry_of(folder, ".json").write_text("[]")


def _sidecar_of_another_key(folder: Path) -> None:
    sidecar = json.loads(entry_of(folder, ".json").read_text())
    sidecar["identity"]["key"] = {"addend": 2}
    entry_of(folder, ".json").write_text(json.dumps(sidecar))


def _garbage_with_a_right_checksum(folder: Path) -> None:
    entry_of(folder, ".o").write_bytes(b"not an object file")
    sidecar = json.loads(entry_of(folder, ".json").read_text())
    sidecar["object_sha256"] = hashlib.sha256(b"not an object file").hexdigest()
    entry_of(folder, ".json").write_text(json.dumps(sidecar))


def _symbolic_link(folder: Path) -> None:
    path = entry_of(folder, ".o")
    target = folder / "elsewhere"
    target.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize(
    "damage",
    [
        *(_truncate_object, _append_to_object, _remove_object, _remove_sidecar, _garble_sidecar),
        *(_sidecar_of_another_shape, _sidecar_of_another_key, _garbage_with_a_right_checksum),
        _symbolic_link,
    ],
)
def test_damaged_entry_is_rebuilt(
    tmp_path: Path, builder: Builder, damage: Callable[[Path], None]
) -> None:
    get_adder(CompileCache(tmp_path), builder())
    damage(tmp_path)
    assert apply(get_adder(CompileCache(tmp_path), builder())) == 1
    assert builder.calls == 2
    assert files_of(tmp_path) == [".json", ".o"] and not entry_of(tmp_path, ".o").is_symlink()
    assert apply(get_adder(CompileCache(tmp_path), builder())) == 1
    assert builder.calls == 2


def test_entries_of_another_user_are_not_loaded(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_adder(CompileCache(tmp_path), builder())
    me = os.geteuid()
    answers = iter([me])  # the folder is mine, the files are not
    monkeypatch.setattr(os, "geteuid", lambda: next(answers, me + 1))
    get_adder(CompileCache(tmp_path), builder())
    assert builder.calls == 2


def test_folder_of_another_user_is_not_used(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_adder(CompileCache(tmp_path), builder())
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.warns(RuntimeWarning, match="belongs to the current user"):
        get_adder(CompileCache(tmp_path), builder())
    assert builder.calls == 2


def test_folder_that_others_can_write_is_not_used(tmp_path: Path, builder: Builder) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="written by other users .mode 777"):
        assert apply(get_adder(CompileCache(tmp_path), builder())) == 1
    assert files_of(tmp_path) == []


# -- a disk that cannot be used -----------------------------------------------------------------


def test_directory_that_cannot_be_made(tmp_path: Path, builder: Builder) -> None:
    (tmp_path / "file").write_text("")
    cache = CompileCache(tmp_path / "file" / "cache")
    with pytest.warns(RuntimeWarning, match="FLASH_MASK_CUTE_CACHE_DIR") as caught:
        assert apply(get_adder(cache, builder(1))) == 1
        assert apply(get_adder(cache, builder(2), key={"addend": 2})) == 2
    assert len(caught) == 1  # one warning, however many kernels
    assert apply(get_adder(cache, builder())) == 1 and builder.calls == 2


def test_read_only_directory(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is used, the rest is compiled. (Root may write anywhere: hence the patch.)"""
    get_adder(CompileCache(tmp_path), builder())
    really_open = os.open

    def read_only(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            raise OSError(30, "Read-only file system", str(path))
        return really_open(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", read_only)
    cache = CompileCache(tmp_path)
    assert apply(get_adder(cache, builder())) == 1 and builder.calls == 1
    with pytest.warns(RuntimeWarning, match="Read-only file system"):
        assert apply(get_adder(cache, builder(2), key={"addend": 2})) == 2
    assert files_of(tmp_path) == [".json", ".o"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into any directory")
def test_directory_without_write_permission(tmp_path: Path, builder: Builder) -> None:
    (tmp_path / "v1").mkdir(mode=0o500)
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        assert apply(get_adder(CompileCache(tmp_path), builder())) == 1


def test_full_disk(tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    cache = CompileCache(tmp_path)
    monkeypatch.setattr(os, "replace", no_space)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        kernels = [get_adder(cache, builder(n), key={"addend": n}) for n in (1, 2)]
    assert [apply(kernel) for kernel in kernels] == [1, 2]
    assert files_of(tmp_path) == []


def test_errors_of_the_export_reach_the_caller(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="export_to_c"):
        get_adder(CompileCache(tmp_path), lambda: Compiled(lambda x, n: x.fill(7), {}))
    assert files_of(tmp_path) == []


@pytest.mark.parametrize("value", ["0", "off", "OFF"])
def test_disabled_by_the_environment(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("FLASH_MASK_CUTE_CACHE_DIR", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    cache = CompileCache()
    assert get_adder(cache, builder()) is get_adder(cache, builder())
    assert apply(get_adder(CompileCache(), builder())) == 1
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
    get_adder(CompileCache(), builder())
    assert files_of(tmp_path / expected) == [".json", ".o"]


# -- eviction -----------------------------------------------------------------------------------


def test_least_recently_used_entries_go_first(tmp_path: Path, builder: Builder) -> None:
    def get(number: int, cache: CompileCache) -> None:
        get_adder(cache, builder(), key={"number": number})

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
    get_adder(CompileCache(tmp_path, max_bytes=0), builder())
    assert not old.exists() and fresh.exists()
    get_adder(CompileCache(tmp_path), builder())
    assert builder.calls == 1
