"""Docstrings as the docs site shows them: an extension of griffe, named in mkdocs.yml.

In a docstring a line `name: what it is` describes a parameter, and indented lines are a table. Here
the first become items of a list, and the second a block of text. `Returns:` and `Raises:` are
prose, which the parser of mkdocstrings would take for tables. An `Example:` becomes a block of
code, also in the docstring of a module.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

import griffe

# from here on a docstring has sections that the parser knows
SECTION = re.compile(r"^(Args|Returns|Raises|Example|Examples|Yields|Attributes):$")
PROSE = ("Returns", "Raises", "Yields")
ERROR = re.compile(r"^    ([A-Z]\w*(?:, [A-Z]\w*)*): (.*)$")
DESCRIPTION = re.compile(r"^([a-z_][\w*]*(?:\([^)]*\))?(?: -> \w+)?(?:, [a-z_*][\w*]*)*): (.*)$")


def shown(docstring: str, parameters: set[str]) -> str:
    """The docstring as the parser of mkdocstrings reads it: examples are `Examples:` there."""
    lines: list[str] = []
    pending = re.sub(r"^Example:$", "Examples:", docstring, flags=re.M).splitlines()
    is_item = False
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
    return "\n".join([*lines, *sections(pending)])


def sections(lines: list[str]) -> list[str]:
    """The sections at the end of a docstring, with the prose of results and errors as Markdown."""
    shown: list[str] = []
    is_prose = is_error = False
    for line in lines:
        if match := SECTION.match(line):
            is_prose, is_error = match[1] in PROSE, match[1] == "Raises"
            shown += [f"**{match[1]}**", ""] if is_prose else [line]
        elif not is_prose:
            shown.append(line)
        elif is_error and (error := ERROR.match(line)):
            shown.append(f"- `{error[1]}`: {error[2]}")
        else:
            shown.append("  " * is_error + line[4:] if line.strip() else "")
    return shown


class ParameterLists(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if "unknown" in func.parameters:  # what turns the names of other libraries into errors
            del func.parameters["unknown"]
        self._show(func, {p.name.lstrip("*") for p in func.parameters})

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        self._show(mod, set())

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        self._show(cls, set(cls.members) | {p.name for p in cls.parameters})

    def _show(self, found: Any, parameters: set[str]) -> None:
        if found.docstring is not None:
            found.docstring.value = shown(found.docstring.value, parameters)
