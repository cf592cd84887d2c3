"""What a visitor meets first: public docstrings, CITATION.cff, the docs site."""

from __future__ import annotations

import doctest
import html
import importlib.util
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from test_architecture import PAGES, anchors
from test_page_sentences import words

import flash_mask_cute
from flash_mask_cute import interface, parallel
from flash_mask_cute.integrations import torch as integrations_torch
from flash_mask_cute.integrations.cuequivariance import triangle_attention
from flash_mask_cute.masks import builders

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = {
    **{name: getattr(flash_mask_cute, name) for name in flash_mask_cute.__all__ if name[0] != "_"},
    **{name: getattr(interface, name) for name in ("_flash_attn_fwd", "_flash_attn_bwd")},
    **{
        f"parallel.{name}": getattr(parallel, name)
        for name in ("Plan", "plan", "context_parallel_attention", "sharded")
    },
}
BUILDERS = [
    name
    for name, x in inspect.getmembers(builders, inspect.isfunction)
    if name[0] != "_" and x.__annotations__.get("return") in ("ColumnMask", "DraftTree")
]
# A name that takes nothing, one whose fields are checked where they are used, and modules.
RAISE_NOTHING = {"compile_count", "BlockSparseTensorsTorch", "builders", "parallel"}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_docstring_has_errors_and_an_example_that_runs(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert "\nRaises:\n" in text or name in RAISE_NOTHING
    found = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert found.examples and "\nExample:\n" in text
    pyplot = pytest.importorskip("matplotlib.pyplot") if name == "plot" else None
    result = doctest.DocTestRunner(verbose=False).run(found)
    assert result.failed == 0
    if pyplot is not None:
        pyplot.close("all")


def test_public_docstrings_have_no_phrase_that_is_read_twice() -> None:
    """Those of `docs/site_words.py`, as in the pages of users."""
    objects = [*PUBLIC.values(), *(getattr(builders, name) for name in BUILDERS)]
    objects += [getattr(integrations_torch, name) for name in integrations_torch.__all__]
    texts = {str(x): inspect.getdoc(x) or "" for x in (*objects, triangle_attention)}
    assert {name: found[0] for name, x in texts.items() if (found := words.PHRASES.search(x))} == {}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_builder_shows_a_mask(name: str) -> None:
    text, names = inspect.getdoc(getattr(builders, name)) or "", {"builders": builders}
    found = doctest.DocTestParser().get_doctest(text, names | vars(builders), name, None, None)
    assert found.examples and "\nExample:\n" in text
    assert doctest.DocTestRunner(verbose=False).run(found).failed == 0


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    plain = dict(re.findall(r"^([\w-]+): (.+)$", text, flags=re.M))
    assert plain["cff-version"] == "1.2.0" and plain["license"] == "Apache-2.0"
    assert plain["version"] == flash_mask_cute.__version__
    assert {"message", "title", "type"} <= plain.keys() and re.search(
        r"^authors:\n  - ", text, re.M
    )


def test_the_citation_is_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["version"] == flash_mask_cute.__version__
    assert all(author["name"] for author in found["authors"])


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs")
@pytest.mark.parametrize("broken", [False, True])
def test_a_broken_link_fails_the_site(broken: bool, tmp_path: Path) -> None:
    """Built from a copy of what it is made of; a page and an anchor that are not there."""
    for path in ROOT.iterdir():
        if path.name != "site" and not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    if broken:
        (tmp_path / "README.md").unlink()
        text = (ROOT / "README.md").read_text()
        (tmp_path / "README.md").write_text(text + "\n[gone](docs/masks.md#no-such-heading)\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    child = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (child.returncode != 0) == broken, child.stderr
    if not broken:
        page = (tmp_path / "site" / "api" / "index.html").read_text()
        assert all(f'id="flash_mask_cute.{name}"' in page for name in PUBLIC if name[0] != "_")
        blocks = blocks_of_code(page)
        shown = [*PUBLIC.values(), *(getattr(builders, name) for name in BUILDERS)]
        found = [example for x in shown for example in examples(inspect.getdoc(x) or "")]
        assert len(found) > len(PUBLIC)
        assert not [example for example in found if example not in blocks]
        text = " ".join(re.sub(r"<[^>]+>", "", page).split())
        assert "Returns out (batch, seqlen_q, heads_q, head_dim_v) in the dtype of q." in text
        assert "**unknown" not in text
        start = (tmp_path / "site" / "index.html").read_text()
        assert re.search(r"<h1[^>]*>flash_mask_cute", start), "the README is the start page"
        backslashes = re.compile(r"<td[^>]*>(?:(?!</td>).)*\\\\\|", re.S)
        for path in (tmp_path / "site").glob("*/index.html"):
            assert not backslashes.search(path.read_text()), path


def examples(docstring: str) -> list[str]:
    """The examples of a docstring: runs of lines that begin with a prompt, with their results."""
    found = []
    for match in re.finditer(r"^Examples?:\n((?:    .*\n?|\n)+)", docstring, flags=re.M):
        for part in textwrap.dedent(match[1]).split("\n\n"):
            lines = [
                re.sub(r"\s*# doctest: .*$", "", line) for line in part.strip("\n").splitlines()
            ]
            if lines and lines[0].startswith(">>> "):
                found.append("\n".join(lines))
    return found


def blocks_of_code(page: str) -> set[str]:
    """What stands in the blocks of code of a page of the site."""
    inner = re.findall(r"<pre[^>]*>(.*?)</pre>", page, flags=re.S)
    return {html.unescape(re.sub(r"<[^>]+>", "", text)).strip("\n") for text in inner}


def test_examples_and_blocks_are_found() -> None:
    text = "A.\n\nExample:\n    >>> f(1)  # doctest: +SKIP\n    2\n\n    >>> g()\n"
    assert examples(text) == [">>> f(1)\n2", ">>> g()"]
    assert blocks_of_code("<pre class='x'><code>a &lt; <b>c</b>\n</code></pre>") == {"a < c"}
    assert examples("No example.") == []


def test_pages_that_code_names_have_these_headings() -> None:
    """`docs/page.md#heading` in a comment or docstring leads somewhere, as links of pages do."""
    found = [
        (path, page, anchor)
        for path in sorted((ROOT / "flash_mask_cute").rglob("*.py"))
        for page, anchor in re.findall(r"\b(docs/[\w/]+\.md)(?:#([\w-]+))?", path.read_text())
    ]
    assert sum(anchor != "" for _, _, anchor in found) >= 10
    for path, page, anchor in found:
        assert (ROOT / page).exists(), f"{path} names {page}"
        assert not anchor or anchor in anchors(ROOT / page), f"{path}: no #{anchor} in {page}"


def test_scripts_of_the_site_find_every_heading() -> None:
    """They look for `#heading`, which is no selector if it begins with a digit."""
    for page in PAGES:
        assert not [x for x in anchors(page) if not x[:1].isalpha() and x[:1] != "_"], page
