"""python docs/site_words.py [PAGE ...]: sentences of the user's pages that must be read twice.

Prints each sentence of more than 30 words, and each with one of the phrases below, then how many
pages, words and lines there are. Exit status 1 if a sentence was printed. A code span counts as one
word. Items of a table cell that semicolons separate count alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).absolute().parents[1]
MOST_WORDS = 30
# Those that docs/README.md leads to in its three paths, and what stands before and after them.
USER_PAGES = ("README.md", "docs/README.md", "docs/CHANGELOG.md") + tuple(
    f"docs/{name}.md"
    for name in (
        *("support", "pytorch", "masks", "mask_gallery", "mods", "flex", "selected", "serving"),
        *("integrations", "integrations_more", "context_parallel", "coming_from"),
    )
)
# Clauses that come too late, and words that mean something else to most readers.
PHRASES = re.compile(
    r"\bof which\b|\bwhat is not\b|\bwhose\b|\b(?:is|are) not there\b|\bdoors?\b|\btells?\b"
    r"|\bbehind\b|\bof one's own\b|\]\([^)]+\) (?:has|have)\b",
    re.I,
)


def without_code(text: str) -> str:
    """A page without its blocks of code and its comments."""
    return re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.S | re.M)


def passages(text: str) -> Iterator[str]:
    """Paragraphs, items of lists and of table cells, each on one line."""
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\||#)", without_code(text)):
        line = " ".join(part.split())
        if line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line):
                yield from (item.strip() for item in re.split(r";", cell))
        elif line:
            yield re.sub(r"^(?:[-*]|\d+\.|#+) ", "", line)


def sentences(text: str) -> Iterator[str]:
    for passage in passages(text):
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z\[`*(\"])", passage)


def num_words(sentence: str) -> int:
    """A code span is one word; of a link, its text counts."""
    sentence = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", sentence)
    sentence = re.sub(r"`[^`]*`", "code", sentence)
    return len([word for word in sentence.split() if re.search(r"\w", word)])


def hard_sentences(text: str) -> list[str]:
    return [x for x in sentences(text) if num_words(x) > MOST_WORDS or PHRASES.search(x)]


def main(argv: Sequence[str]) -> int:
    names = list(argv) or list(USER_PAGES)
    num_found = 0
    for name in names:
        found = hard_sentences((ROOT / name).read_text())
        num_found += len(found)
        for sentence in found:
            sys.stdout.write(f"{name}: {num_words(sentence)} words: {sentence}\n")
    texts = [(ROOT / name).read_text() for name in names]
    words = sum(len(without_code(text).split()) for text in texts)
    lines = sum(len(text.splitlines()) for text in texts)
    sys.stdout.write(
        f"{len(names)} pages, {words} words outside code, {lines} lines: {num_found} sentences to "
        "write again\n"
    )
    return int(num_found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
