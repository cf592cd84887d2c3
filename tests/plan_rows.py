"""What plans of a grid of calls decide, a row for each: `make plan-rows`.

Prints what differs from the kept rows, and keeps the rows of now. There is a group for each set of
changes, with the number of rows and what these have in common. A commit that changes plans names
these groups. Without `--write` nothing is kept, and the exit status is 1 if a row differs.

Machine code depends on problem, tiles and target alone, which the rows hold. So a change that
leaves rows equal changes no kernel of these calls.
"""

from __future__ import annotations

import lzma
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from plan_grid import PlannedCall, grid
from planned import planned

from flash_mask_cute.runtime.target import Target

KEPT = Path(__file__).with_name("plan_rows.tsv.xz")
TARGETS = Target("sm_90a", num_sms=132), Target("sm_100a", num_sms=148)
# of callables, which differ between versions of Python
CALLABLES = "score_mod", "mask_mod", "score_mod_bwd"
# Of a plan, what the name of its row says, or what other fields follow from.
SKIPPED = "direction", "target", "device", "shapes", "masks"
# of tiles, in words
REASON = "reason"
NONE_KEPT = "not there"

# A plan by the names of its decisions, and plans by the names of their calls.
Row: TypeAlias = dict[str, str]
Rows: TypeAlias = dict[str, Row]


def _decisions(name: str, value: Any, default: Any = MISSING) -> Iterator[tuple[str, str]]:
    """The parts of a value that differ from their defaults, by dotted names."""
    if name.rpartition(".")[2] in CALLABLES:
        value = None if value is None else "given"
    if value is None or (default is not MISSING and value == default):
        return
    if is_dataclass(value):
        known = (x for x in fields(value) if x.name not in SKIPPED)
        parts = {x.name: (getattr(value, x.name), x.default) for x in known}
    elif hasattr(value, "_fields"):
        defaults = value._field_defaults
        parts = {x: (getattr(value, x), defaults.get(x, MISSING)) for x in value._fields}
    elif isinstance(value, Mapping):
        parts = {x: (inner, MISSING) for x, inner in value.items()}
    else:
        text = value.value if isinstance(value, Enum) else value
        yield name, str(text).replace("\n", " ").replace("\t", " ")
        return
    for part, given in parts.items():
        if part != REASON:
            yield from _decisions(f"{name}.{part}", *given)


def row_of(call: PlannedCall, target: Target) -> Row:
    """What the plan of a call decides, or the text of its refusal."""
    try:
        found = planned(call.call(), target)
    except (TypeError, ValueError, NotImplementedError) as error:
        return {"refused": f"{type(error).__name__}: {error}".replace("\n", " ")}
    return {name.partition(".")[2]: text for name, text in _decisions("plan", found)}


def name_of(call: PlannedCall, target: Target) -> str:
    """Of a row: shape, options, direction and architecture, by spaces."""
    return " ".join((call.shape, *call.options, call.direction.value, target.arch))


def rows_now(only: slice = slice(None)) -> Rows:
    """only: of the calls of the grid."""
    calls = list(grid())[only]
    return {name_of(x, target): row_of(x, target) for x in calls for target in TARGETS}


def packed(rows: Rows) -> bytes:
    """The rows as the file holds them: a line each, name and decisions by tabs."""
    text = "".join(
        "\t".join((name, *(f"{x}={y}" for x, y in row.items()))) + "\n"
        for name, row in rows.items()
    )
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


def unpacked(data: bytes) -> Rows:
    lines = (line.split("\t") for line in lzma.decompress(data).decode().splitlines())
    return {name: dict(x.split("=", 1) for x in parts) for name, *parts in lines}


class Change(NamedTuple):
    """before, after: None where the plan does not decide it."""

    decision: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        name = self.decision.removeprefix("problem.").removeprefix("choice.")
        return f"{name} {self.before} -> {self.after}"


def changes_of(before: Row | None, after: Row | None) -> tuple[Change, ...]:
    """What differs between two rows."""
    if before is None or after is None:
        return (Change("row", *(NONE_KEPT if x is None else "there" for x in (before, after))),)
    names = dict.fromkeys((*before, *after))
    return tuple(
        Change(x, before.get(x), after.get(x)) for x in names if before.get(x) != after.get(x)
    )


def _in_common(names: list[str]) -> str:
    """What rows have in common, by the words of their names."""
    counts = Counter(word for name in names for word in set(name.split()))
    shared = [word for word in names[0].split() if counts[word] == len(names)]
    return " ".join(shared) or f"no word in common, as {names[0]}"


def differences(before: Rows, after: Rows) -> list[str]:
    """Lines that say what differs, most rows first."""
    groups: dict[tuple[Change, ...], list[str]] = {}
    for name in dict.fromkeys((*before, *after)):
        if changes := changes_of(before.get(name), after.get(name)):
            groups.setdefault(changes, []).append(name)
    return [
        f"{'; '.join(map(str, changes))}, {len(names)} rows: {_in_common(names)}"
        for changes, names in sorted(groups.items(), key=lambda x: -len(x[1]))
    ]


def main(arguments: list[str]) -> int:
    now = rows_now()
    found = differences(unpacked(KEPT.read_bytes()) if KEPT.exists() else {}, now)
    print("\n".join(found) or f"{len(now)} plans, none of which differs")
    if arguments == ["--write"]:
        KEPT.write_bytes(packed(now))
        return 0
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
