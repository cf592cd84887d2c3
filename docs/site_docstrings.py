"""Docstrings as the docs site shows them: an extension of griffe, named in mkdocs.yml.

In a docstring a line `name: what it is` describes a parameter, and indented lines are a table. Here
the first become items of a list, and the second a block of text.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

import griffe

# from here on a docstring has sections that the parser knows
SECTION = re.compile(r"^(Args|Returns|Raises|Example|Examples|Yields|Attributes):$")
DESCRIPTION = re.compile(r"^([a-z_][\w*]*(?:\([^)]*\))?(?: -> \w+)?(?:, [a-z_*][\w*]*)*): (.*)$")


def shown(docstring: str, parameters: set[str]) -> str:
    lines: list[str] = []
    pending, is_item = docstring.splitlines(), False
    while pending and not SECTION.match(pending[0]):
        match = DESCRIPTION.match(pending[0])
        if match and match[1].split(",")[0].split("(")[0] in parameters:
            if not is_item:
                lines.append("")
            lines.append(f"- `{match[1]}`: {match[2]}")
            is_item = True
            del pending[0]
            continue
        indent = "  " if is_item else ""
        if pending[0].startswith("    "):
            table = list(takewhile(lambda line: line.startswith("    "), pending))
            del pending[: len(table)]
            rows = [indent + line[4:] for line in table]
            lines += ["", f"{indent}```text", *rows, f"{indent}```", ""]
            continue
        is_item = is_item and pending[0] != ""
        lines.append(indent * is_item + pending.pop(0))
    return "\n".join([*lines, *pending])


class ParameterLists(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        self._show(func, {p.name.lstrip("*") for p in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        self._show(cls, set(cls.members) | {p.name for p in cls.parameters})

    def _show(self, found: Any, parameters: set[str]) -> None:
        if found.docstring is not None:
            found.docstring.value = shown(found.docstring.value, parameters)
