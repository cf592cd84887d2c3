"""A file of rows: one JSON object on a line, appended, never edited.

What the rows of a run have in common stands once, in the head of the run, a line without `kind`. A
row has its `run` and what is its own, which wins over the head. A head holds for the rows of its
run after it, up to another head of that run. Runs may append to one file at the same time.

Rows of finished runs may move to an archive beside the file, `<file>.xz`, which is read first:
`xz -9e < FILE >> FILE.xz` appends to it, and then the file is emptied. A twentieth of the size is
left.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path

from bench import ROOT, Json

RESULTS = ROOT / "bench" / "results" / "h200.jsonl"
HEAD = ("run", "date", "gpu", "commit", "versions", "tokens", "dtype", "deterministic")


def row_line(value: Json) -> str:
    """Without spaces: the rows are a large part of the repository."""
    return json.dumps(value, separators=(",", ":")) + "\n"


def append_row(path: str | Path, row: Json) -> None:
    """Appends a whole row, and the head of its run before it where the file lacks it.

    Raises KeyError for a row without a field of the head.
    """
    head = row_line({key: row[key] for key in HEAD})
    own = row_line({key: row[key] for key in row if key == "run" or key not in HEAD})
    begin = head.partition('"date":')[0] + '"date":'
    with open(path, "a+") as file:
        file.seek(0)
        # Lines are told by how they begin and not parsed: those of other runs may be half written.
        heads = [line for line in file if line.startswith(begin)]
        # Written at once, so that no line of another run gets in between.
        file.write(own if heads[-1:] == [head] else head + own)


def archive_of(path: Path) -> Path:
    return path.with_name(path.name + ".xz")


def _text(path: Path) -> str:
    """Raises ValueError for a file that is not what its name says."""
    try:
        if path.suffix == ".xz":
            with lzma.open(path, "rt") as file:
                return str(file.read())
        return path.read_text()
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        kind = "xz archive" if path.suffix == ".xz" else "text file"
        raise ValueError(f"{path} is no {kind}: {error}") from error


def lines(path: Path) -> list[tuple[str, str]]:
    """The lines of a file, its archive's first, each with the place that an error names."""
    if path.suffix == ".xz":
        path = path.with_suffix("")
    archive = archive_of(path)
    found = [x for x in (archive, path) if x.exists()] or [path]
    texts = [(x, _text(x)) for x in found]
    return [
        (f"{source}, line {number}", line)
        for source, text in texts
        for number, line in enumerate(text.splitlines(), 1)
    ]


def read_rows(path: str | Path) -> list[Json]:
    """The rows of a file and its archive, each with what its head says.

    Raises FileNotFoundError where there is neither, and ValueError, with file and line, for a row
    that lacks a field of the head because no head of its run stands before it.
    """
    heads, rows = dict[str, Json](), list[Json]()
    for place, line in lines(Path(path)):
        value: Json = json.loads(line)
        if "kind" not in value:
            heads[value["run"]] = value
            continue
        row = heads.get(value["run"], {}) | value
        if missing := [key for key in HEAD if key not in row]:
            lacks = f"a row of run {row['run']!r} before its head, without {', '.join(missing)}"
            raise ValueError(f"{place}: {lacks}")
        rows.append(row)
    return rows
