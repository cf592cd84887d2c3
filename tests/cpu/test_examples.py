"""Every example runs on the CPU and notices a wrong result."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from example_modules import ROOT, load_example

# dense_check.py is what they import, every other file is an example
EXAMPLES = sorted(
    path for path in (ROOT / "examples").glob("*.py") if path.name != "dense_check.py"
)
NEEDS_GPU = ("07_native_api", "10_native_backward")


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module, on a machine that has no GPU as far as it can see."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return load_example(path, monkeypatch)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_runs_without_a_gpu(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load(path, monkeypatch).main()
    said = capsys.readouterr().out
    if path.stem in NEEDS_GPU:
        assert "needs a Hopper GPU" in said
    else:
        assert "largest error" in said


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if path.stem not in NEEDS_GPU], ids=lambda path: path.stem
)
def test_ends_with_an_error_if_the_result_is_wrong(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load(path, monkeypatch)
    calls = "flash_attn_func", "_flash_attn_fwd", "flex_attention", "flash_attn_with_kvcache"
    name = next(x for x in calls if hasattr(module, x))
    attend = getattr(module, name)

    def slightly_wrong(*args: Any, **keywords: Any) -> Any:
        result = attend(*args, **keywords)
        return (result[0] * 1.1, result[1]) if isinstance(result, tuple) else result * 1.1

    monkeypatch.setattr(module, name, slightly_wrong)
    with pytest.raises(SystemExit, match=path.stem):
        module.main()


def test_the_demo_runs_every_example() -> None:
    """`make demo` lists them, in order."""
    named = re.findall(r"examples/(\w+\.py)", (ROOT / "Makefile").read_text())
    assert named == [path.name for path in EXAMPLES]


def test_lanes_have_the_versions_of_torch_that_the_docs_name() -> None:
    lanes = re.findall(r"^TORCHES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(
        r"^\| torch \| (\S+) \| (\S+) \|$", (ROOT / "docs/support.md").read_text(), re.M
    )
    assert [tuple(x.split()) for x in lanes] == named
    floor = re.findall(r'"torch>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    assert all(oldest.startswith(floor[0]) for oldest, _ in named)
