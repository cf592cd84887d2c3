"""Which sources the process runs, and no disk cache where that is unknown."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from cached_adders import KERNEL, Builder, files_of, get_adder

from flash_mask_cute.runtime import cache as cache_module
from flash_mask_cute.runtime import sources as sources_module
from flash_mask_cute.runtime.cache import CompileCache
from flash_mask_cute.runtime.sources import Sources

PACKAGE = Path(sources_module.__file__).resolve().parents[1]


def test_every_file_counts(tmp_path: Path) -> None:
    seen = set()
    for name, text in (
        ("runtime/cache.py", "x = 1"),
        ("runtime/cache.py", "x = 2"),
        ("a.py", ""),
        ("deep/er/b.py", "y"),
        ("deep/er/b.py", "z"),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        seen.add(Sources(tmp_path).fingerprint())
    assert len(seen) == 5
    (tmp_path / "notes.txt").write_text("not code")
    (tmp_path / ".#a.py").symlink_to("nowhere")  # as an editor leaves it
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "c.py").write_text("not code")
    assert Sources(tmp_path).fingerprint() in seen


def _rewrite(folder: Path) -> None:
    (folder / "a.py").write_text("y = 1")


def _rewrite_at_the_same_time(folder: Path) -> None:
    before = (folder / "a.py").stat()
    (folder / "a.py").write_text("y = 1")
    os.utime(folder / "a.py", ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace(folder: Path) -> None:
    (folder / "new").write_text("y = 1")
    os.replace(folder / "new", folder / "a.py")


def _add(folder: Path) -> None:
    (folder / "b.py").write_text("")


def _remove(folder: Path) -> None:
    (folder / "a.py").unlink()


@pytest.mark.parametrize(
    "change", [_rewrite, _rewrite_at_the_same_time, _replace, _add, _remove, shutil.rmtree]
)
def test_a_change_beside_the_process_is_seen(tmp_path: Path, change: object) -> None:
    assert callable(change)
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1")
    (folder / "z.py").write_text("")
    sources = Sources(folder)
    assert sources.fingerprint() == Sources(folder).fingerprint()
    change(folder)
    with pytest.raises(LookupError, match="have changed since|are gone"):
        sources.fingerprint()


def test_equal_files_under_another_state_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    sources = Sources(tmp_path)
    before = sources.fingerprint()
    os.link(tmp_path / "a.py", tmp_path / "link")  # as installers do that share files
    (tmp_path / "copy").write_text("x = 1")
    os.replace(tmp_path / "copy", tmp_path / "a.py")
    assert sources.fingerprint() == before


@pytest.mark.parametrize("folder", ["absent", "empty"])
def test_no_sources(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(LookupError, match="sources of flash_mask_cute"):
        Sources(tmp_path / folder).fingerprint()


def test_an_edit_while_a_kernel_is_compiled_keeps_it_off_the_disk(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("x = 1")
    monkeypatch.setattr(cache_module, "SOURCES", Sources(package))
    cache = CompileCache(tmp_path / "cache")
    get_adder(cache, builder())
    assert files_of(tmp_path / "cache") == [".json", ".o"]

    def edit_and_build() -> object:
        (package / "a.py").write_text("x = 2")
        return builder(2)()

    with pytest.warns(RuntimeWarning, match="have changed since this process imported them"):
        get_adder(cache, edit_and_build, key={"addend": 2})  # type: ignore[arg-type]
    assert files_of(tmp_path / "cache") == [".json", ".o"]
    # from now on nothing on the disk serves, under no identity
    get_adder(cache, builder(3), key={"addend": 3})
    assert files_of(tmp_path / "cache") == [".json", ".o"] and builder.calls == 3
    cache._memory.clear()
    get_adder(cache, builder())
    assert builder.calls == 4


CHILD = KERNEL + textwrap.dedent(
    """
    import sys
    from pathlib import Path

    from flash_mask_cute.runtime.cache import CompileCache, Compiled

    if sys.argv[2] == "edit":
        import flash_mask_cute
        path = Path(flash_mask_cute.__file__).parent / "limits.py"
        path.write_text(path.read_text() + "# an upgrade\\n")
    CompileCache(sys.argv[1]).get(
        "adder", lambda: {"addend": 5}, lambda: Compiled(compile_adder(5), {}), arch="sm_90a",
        options=OPTIONS, token=5,
    )
    """
)


def _run(script: Path, cache: Path, what: str, path: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(script), str(cache), what],
        env=os.environ | {"PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stderr


@pytest.mark.shares(3)
def test_an_upgrade_beside_a_process_stores_no_old_kernel(tmp_path: Path) -> None:
    """The kernel of the code at the import would be found by processes that run the new code."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    shutil.copytree(
        PACKAGE, tmp_path / "at" / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__")
    )
    told = _run(script, tmp_path / "cache", "edit", tmp_path / "at")
    assert "have changed since this process imported them" in told
    assert files_of(tmp_path / "cache") == []
    assert _run(script, tmp_path / "cache", "keep", tmp_path / "at") == ""
    assert files_of(tmp_path / "cache") == [".json", ".o"]


@pytest.mark.shares(3)
def test_a_package_in_a_zip_archive_has_no_disk_cache(tmp_path: Path) -> None:
    """All versions would have one identity."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        for path in PACKAGE.rglob("*.py"):
            archive.write(path, path.relative_to(PACKAGE.parent))
    told = _run(script, tmp_path / "cache", "keep", tmp_path / "package.zip")
    assert "the sources of flash_mask_cute cannot be read" in told
    assert files_of(tmp_path / "cache") == []
