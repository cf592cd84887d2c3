"""Compile cache: a directory that others can write to, and one that cannot be written."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from cached_adders import KERNEL, Builder, apply, entry_of, files_of, get_adder

from flash_mask_cute.runtime import cache as cache_module
from flash_mask_cute.runtime.cache import CompileCache

pytestmark = pytest.mark.usefixtures("no_surprising_warnings")

ROOT = Path(cache_module.__file__).resolve().parents[2]


@pytest.mark.parametrize("suffix", [".o", ".json"])
@pytest.mark.parametrize("mode", [0o666, 0o620])
def test_an_entry_that_others_can_write_is_rebuilt(
    tmp_path: Path, builder: Builder, suffix: str, mode: int
) -> None:
    get_adder(CompileCache(tmp_path), builder())
    entry_of(tmp_path, suffix).chmod(mode)
    assert apply(get_adder(CompileCache(tmp_path), builder())) == 1
    assert builder.calls == 2
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "v1").iterdir()} == {0o600}
    get_adder(CompileCache(tmp_path), builder())
    assert builder.calls == 2


def test_files_are_private_whatever_the_umask(tmp_path: Path, builder: Builder) -> None:
    before = os.umask(0)
    try:
        get_adder(CompileCache(tmp_path / "cache"), builder())
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "cache" / "v1").iterdir()} == {
        0o600
    }
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_directory_that_others_can_write_is_not_used(
    tmp_path: Path, builder: Builder, mode: int
) -> None:
    get_adder(CompileCache(tmp_path / "cache"), builder())
    (tmp_path / "cache").chmod(mode)
    with pytest.warns(RuntimeWarning, match=f"cache can be written by other users .mode {mode:o}"):
        assert apply(get_adder(CompileCache(tmp_path / "cache"), builder())) == 1
    assert builder.calls == 2
    # a folder in it is private, as the warning says
    get_adder(CompileCache(tmp_path / "cache" / "mine"), builder())
    assert files_of(tmp_path / "cache" / "mine") == [".json", ".o"]


def test_a_directory_like_tmp_is_used(tmp_path: Path, builder: Builder) -> None:
    """The sticky bit keeps others from replacing the folder in it."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o1777)
    get_adder(CompileCache(tmp_path / "cache"), builder())
    get_adder(CompileCache(tmp_path / "cache"), builder())
    assert builder.calls == 1 and files_of(tmp_path / "cache") == [".json", ".o"]


def test_a_directory_of_another_user_is_not_used(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_adder(CompileCache(tmp_path), builder())
    really_stat = Path.stat

    def stat_of_another(path: Path, **options: bool) -> os.stat_result:
        status = really_stat(path, **options)
        if path != tmp_path:
            return status
        fields = list(status)
        fields[4] = os.geteuid() + 1  # st_uid
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", stat_of_another)
    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        get_adder(CompileCache(tmp_path), builder())
    assert builder.calls == 2


def test_what_is_loaded_is_what_was_checked(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is replaced after the check is not code that runs."""
    get_adder(CompileCache(tmp_path), builder(1))
    really_read = cache_module._read_own

    def read_and_replace(path: Path) -> bytes:
        content = really_read(path)
        if path.suffix == ".o":
            path.write_bytes(b"written by somebody else")
        return content

    monkeypatch.setattr(cache_module, "_read_own", read_and_replace)
    assert apply(get_adder(CompileCache(tmp_path), builder(2))) == 1
    assert builder.calls == 1


@pytest.mark.parametrize("suffix", [".o", ".json", ".lock"])
def test_a_pipe_in_the_folder_stops_nobody(tmp_path: Path, builder: Builder, suffix: str) -> None:
    get_adder(CompileCache(tmp_path), builder())
    path = entry_of(tmp_path, ".o").with_suffix(suffix)
    path.unlink(missing_ok=True)
    if suffix == ".lock":
        entry_of(tmp_path, ".o").unlink()
    os.mkfifo(path, 0o600)
    results: list[int] = []
    thread = threading.Thread(
        target=lambda: results.append(apply(get_adder(CompileCache(tmp_path), builder()))),
        daemon=True,
    )
    thread.start()
    thread.join(60)
    assert results == [1] and builder.calls == 2
    assert files_of(tmp_path) == [".json", ".o"] and entry_of(tmp_path, ".o").is_file()


@pytest.mark.parametrize("variable", ["FLASH_MASK_CUTE_CACHE_DIR", "XDG_CACHE_HOME"])
def test_a_tilde_is_the_home_directory(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FLASH_MASK_CUTE_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, "~/kernels")
    get_adder(CompileCache(), builder())
    below = "flash_mask_cute" if variable == "XDG_CACHE_HOME" else "."
    assert files_of(tmp_path / "home" / "kernels" / below) == [".json", ".o"]
    assert list((tmp_path / "work").iterdir()) == []
    assert CompileCache().usage().kernels == 1


def test_a_home_that_is_not_known(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASH_MASK_CUTE_CACHE_DIR", "~nobody_of_this_name/kernels")
    with pytest.warns(RuntimeWarning, match="cannot use its directory"):
        assert apply(get_adder(CompileCache(), builder())) == 1
    assert CompileCache().usage().folder is None and list(tmp_path.iterdir()) == []


CHILD = KERNEL + textwrap.dedent(
    """
    import resource
    import sys

    import numpy as np

    from flash_mask_cute.runtime.cache import CompileCache, Compiled

    if sys.argv[2] == "limited":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    x = np.zeros(3, dtype=np.int32)
    for directory in sys.argv[1], "/proc/nowhere":
        found = CompileCache(directory).get(
            "adder", lambda: {"addend": 5}, lambda: Compiled(compile_adder(5), {}), arch="sm_90a",
            options=OPTIONS, token=5,
        )
        found.function(x, 3)
    sys.exit(int(x[0]) != 10)
    """
)


@pytest.mark.shares(3)
def test_a_limit_on_the_size_of_files_fails_no_call(tmp_path: Path) -> None:
    """Such as `ulimit -f`. It holds for files in memory, too."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def run(limit: str) -> str:
        command = [sys.executable, str(script), str(tmp_path / "cache"), limit]
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "File too large" in run("limited")
    assert files_of(tmp_path / "cache") == []
    run("free")
    assert files_of(tmp_path / "cache") == [".json", ".o"]
    assert "File too large" not in run("limited")  # what is there is read
