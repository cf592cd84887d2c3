"""Plugins of serving engines where no engine is installed; `make test-engines` runs the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOORS = {
    "vllm.general_plugins": "flash_mask_cute_engines.vllm",
    "sglang.srt.plugins": "flash_mask_cute_engines.sglang",
}


PACKAGE = ROOT / "flash_mask_cute_engines"
FIRST_LINES = [ROOT / "README.md", *sorted(PACKAGE.rglob("*.py"))]


@pytest.mark.parametrize("path", FIRST_LINES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_first_line_says_that_no_engine_ran_it(path: Path) -> None:
    assert "have never met a running engine" in path.read_text().partition("\n")[0].replace(
        "has never", "have never"
    )


def test_the_wheel_of_flash_mask_cute_has_no_plugin() -> None:
    assert "entry-points" not in (ROOT.parent / "pyproject.toml").read_text()
    assert not [
        path
        for path in (ROOT.parent / "flash_mask_cute").rglob("*")
        if path.stem in ("vllm", "sglang")
    ]


@pytest.mark.parametrize("group", DOORS)
def test_each_engine_has_an_entry_point(group: str) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split(f'[project.entry-points."{group}"]\n')[1].split("\n\n")[0]
    assert section == f'mask_cute = "{DOORS[group]}:register"'
    assert callable(import_module(DOORS[group]).register)


def test_no_engine_is_imported_before_it_asks() -> None:
    """Engines import the doors at their start, and the backend when it is chosen."""
    code = f"""
import sys
import flash_mask_cute
for name in {[*DOORS.values(), "flash_mask_cute.integrations.hub"]}:
    __import__(name)
heavy = {{"torch", "cutlass", "vllm", "sglang", "kernels", "transformers"}}
print(sorted(heavy & sys.modules.keys()))
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT.parent}"},
    )  # fmt: skip
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("group", DOORS)
def test_without_the_engine_its_name_is_told(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = group.split(".")[0]
    monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(ImportError, match=engine):
        import_module(DOORS[group]).register()
