"""Python of the pages runs on the CPU: blocks alone (ALONE), or one after the other (IN_ORDER)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from example_modules import ROOT, load_example

ALONE = (
    *("README.md", "docs/coming_from.md", "docs/serving.md", "docs/flex.md"),
    *("docs/mods.md", "docs/context_parallel.md", "docs/mask_gallery.md"),
    "docs/integrations.md",
)
IN_ORDER = ("docs/masks.md", "docs/pytorch.md", "docs/selected.md", "docs/statistics.md")
# run by tests/engines/test_more.py
ELSEWHERE = ("docs/integrations_more.md",)


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), flags=re.S | re.M)


SNIPPETS = [
    *(
        pytest.param(code, id=f"{page}-{number}")
        for page in ALONE
        for number, code in enumerate(blocks(page), 1)
    ),
    *(pytest.param("\n".join(blocks(page)), id=page) for page in IN_ORDER),
]


@pytest.mark.shares(3)
@pytest.mark.parametrize("code", SNIPPETS)
def test_a_snippet_runs_without_a_gpu(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written to a file, because the compiler reads the source of callables back."""
    assert code, "a page without snippets"
    if "plot(" in code:
        pytest.importorskip("matplotlib")
    if "transformers" in code:
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.manual_seed(0)
    path = tmp_path / f"snippet_{tmp_path.name}.py"
    path.write_text(code)
    load_example(path, monkeypatch)


def test_no_page_with_python_is_left_out() -> None:
    pages = (path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    assert {x for x in pages if blocks(x)} | {"README.md"} == {*ALONE, *IN_ORDER, *ELSEWHERE}


def test_the_readme_is_short_and_trains_first() -> None:
    """At most 110 lines; the first snippet has a forward and a backward."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
    first = blocks("README.md")[0]
    assert "flash_attn_func(" in first and ".backward()" in first
