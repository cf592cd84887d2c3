"""The pages that a user reads: how many, how long, and sentences that are read once."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_WORDS = 20_000  # outside blocks of code
MOST_LINES = 6_250


def load_words() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_words", ROOT / "docs" / "site_words.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


words = load_words()


@pytest.mark.parametrize("page", words.USER_PAGES)
def test_no_sentence_must_be_read_twice(page: str) -> None:
    assert not words.hard_sentences((ROOT / page).read_text())


@pytest.mark.parametrize(
    "text",
    [
        "A " + "word " * 31 + "long.",
        "It takes keys, of which some are new.",
        "A call says\nwhat is not supported.",
        "A mask whose rows are hidden.",
        "Keys that are not there.",
        "| a | keys behind the end |",
        "- [masks](masks.md) has more.",
    ],
)
def test_a_hard_sentence_is_noticed(text: str) -> None:
    assert words.hard_sentences(text)
    assert not words.hard_sentences(f"```\n{text}\n```\n")


def test_an_easy_page_passes() -> None:
    text = "A [long link](a/very/long/path.md) and `code of several words`. " + "Short one. " * 20
    assert not words.hard_sentences(f"# A title\n\n{text}\n\n| a; b | c |\n")
    assert words.num_words("A [b c](d.md) and `e f g`.") == 5


def paths() -> str:
    """docs/README.md up to the pages for readers of the code."""
    return (ROOT / "docs" / "README.md").read_text().split("\n## How it works\n")[0]


def test_three_paths_lead_to_twelve_pages() -> None:
    headings = re.findall(r"^## (.+)$", paths(), flags=re.M)
    assert headings == ["Train", "Serve", "Write a mask"]
    linked = set(re.findall(r"\]\((\w+\.md)", paths()))
    assert len(linked) == 12
    assert {f"docs/{name}" for name in linked} < set(words.USER_PAGES)


def test_the_pages_are_short() -> None:
    texts = [(ROOT / page).read_text() for page in words.USER_PAGES]
    assert sum(len(words.without_code(text).split()) for text in texts) <= MOST_WORDS
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert sum(len(page.read_text().splitlines()) for page in pages) <= MOST_LINES
    assert len((ROOT / "docs" / "CHANGELOG.md").read_text().splitlines()) <= 60
