"""The version is written by one command; a public host runs commands that exist."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

import flash_mask_cute

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, WORKFLOW = ROOT / ".ci" / "release.py", ROOT / ".github" / "workflows" / "ci.yml"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="a source distribution has no .ci")


@pytest.fixture
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path: Path, release: ModuleType) -> Path:
    """A repository with the files that name the version."""
    for name in (*release.PLACES, "docs/CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    changes = tmp_path / "docs/CHANGELOG.md"
    if not release.UNRELEASED.search(changes.read_text()):
        changes.write_text("# Changelog\n\n## Version 99.0.0 (unreleased)\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "user.email", "nobody@example.org")
    git(tmp_path, "config", "user.name", "nobody")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_version_is_written_committed_and_tagged(copy: Path, release: ModuleType) -> None:
    release.main(copy, "98.7.6")
    for name in release.PLACES:
        assert len(re.findall(r"98\.7\.6", (copy / name).read_text())) == 1, name
        assert flash_mask_cute.__version__ not in (copy / name).read_text()
    assert re.search(
        r"^## Version 98\.7\.6 \(\d{4}-\d\d-\d\d\)$", (copy / "docs/CHANGELOG.md").read_text(), re.M
    )
    assert git(copy, "tag").split() == ["v98.7.6"]
    assert git(copy, "log", "-1", "--format=%s").strip() == "Version 98.7.6"
    assert not git(copy, "status", "--porcelain")


def test_what_is_no_next_version_is_refused(copy: Path, release: ModuleType) -> None:
    for version, says in (("1.2", "three numbers"), ("0.0.1", "lower than the present one")):
        with pytest.raises(SystemExit, match=says):
            release.main(copy, version)
    assert not git(copy, "status", "--porcelain")
    (copy / "CITATION.cff").write_text("changed")
    with pytest.raises(SystemExit, match="working tree has changes"):
        release.main(copy, "98.7.6")
    assert not git(copy, "tag")


def test_the_present_version_has_one_number_everywhere(release: ModuleType) -> None:
    for name, pattern in release.PLACES.items():
        (found,) = re.finditer(pattern, (ROOT / name).read_text())
        assert found[0].removeprefix(found[1]) == flash_mask_cute.__version__, name


def test_the_public_workflow_runs_what_is_here() -> None:
    commands = re.findall(r"^ *- run: (.*)$", WORKFLOW.read_text(), re.M)
    assert commands[0] == ".ci/run" and len(commands) == 3
    makefile = (ROOT / "Makefile").read_text()
    for command in commands[1:]:
        program, target, *variables = command.replace("${{ ", "").replace(" }}", "").split()
        assert program == "make" and re.search(rf"^{target}:", makefile, re.M), command
        assert all(x.partition("=")[0] in makefile for x in variables)


def test_the_public_workflow_tries_both_ends() -> None:
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(WORKFLOW.read_text())
    tried = [
        (x["python"], x["torch"]) for x in found["jobs"]["wheel"]["strategy"]["matrix"]["include"]
    ]
    text = (ROOT / "pyproject.toml").read_text()
    oldest = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    assert [x for x, _ in tried] == [oldest[0], oldest[-1]]
    (floor,) = re.findall(r'"torch>=([\d.]+)"', text)
    assert tried[0][1].startswith(floor)
