"""The runner of torch's own tests of attention: what it draws, and what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RUNNER = ROOT / "tests" / "torch_suite.py"
# Named as torch names what it makes of a test for a device; a call is recorded as the doors do it.
SUITE = """
import unittest
from flash_mask_cute.integrations.ran import left_to_torch, ran_here

class TestAttentionCUDA(unittest.TestCase):
    def test_ours(self):
        ran_here("forward")
        ran_here("backward")
    def test_of_both(self):
        ran_here("forward")
        left_to_torch("backward", "dropout_p=0.1 is not supported")
    def test_wrong(self):
        ran_here("forward")
        self.assertEqual(1, 2)
    def test_another(self):
        pass

class TestAttentionCPU(unittest.TestCase):
    def test_wrong(self):
        self.fail()
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_suite.py").write_text(SUITE)
    command = [sys.executable, str(RUNNER), str(folder / "test_suite.py"), "--as-is", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )


@pytest.mark.shares(6)
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_what_is_said(tmp_path: Path, workers: tuple[str, ...]) -> None:
    done = run(tmp_path, "--failed", str(tmp_path / "failed.txt"), *workers)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "all: 1 failed, 3 passed" in lines
    assert "which called flash attention: 1 failed, 2 passed" in lines
    assert "whose calls ran on: 2 flash_mask_cute, 1 flash_mask_cute and torch" in lines
    assert "left to torch in 1 tests, backward: dropout_p=0.1 is not supported" in lines
    assert "FAILED test_wrong (flash_mask_cute)" in lines
    case = "test_suite.py::TestAttentionCUDA::test_wrong"
    assert (tmp_path / "failed.txt").read_text().split() == [case]


@pytest.mark.shares(3)
def test_only_what_is_named(tmp_path: Path) -> None:
    named = tmp_path / "named.txt"
    named.write_text("test_suite.py::TestAttentionCUDA::test_ours\n")
    done = run(tmp_path, "--only", str(named))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all: 1 passed" in done.stdout.splitlines()


def test_files_that_are_not_there() -> None:
    done = subprocess.run(
        [sys.executable, str(RUNNER), "nowhere.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "no such files: nowhere.py" in done.stdout


def test_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RUNNER.parent))
    from torch_suite import drawn

    names = [("a", f"a{i}") for i in range(50)] + [("b", "b0")]
    found = drawn(names, 7)
    assert len(found) == 8 and "b0" in found
    assert drawn(reversed(names), 7) == found
    assert drawn(names, 0) == {case for _, case in names}
