"""The command of a bench whose cases have names: which are asked for, and a row of each."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from bench import Json, commit_here, say, versions, why_no_gpu


@dataclass(frozen=True)
class Bench:
    """command: "bench.learned". cases: with names; measure(case, rounds, seconds of a peer's turn)
    gives a row, or a ValueError that says why there is none; shown(row) is its line. dry: compares
    cases on the CPU. width: of the names in lines."""

    command: str
    about: str
    cases: Callable[[], Iterable[Any]]
    measure: Callable[[Any, int, float], Json]
    shown: Callable[[Json], str]
    dry: Callable[[Sequence[Any]], int]
    width: int

    def wanted(self, patterns: Sequence[str]) -> list[Any]:
        return [
            case
            for case in self.cases()
            if not patterns or any(fnmatch.fnmatch(case.name, x) for x in patterns)
        ]

    def main(self) -> int:
        """By the arguments of the process. Rows are appended to a file."""
        parser = argparse.ArgumentParser(description=self.about.split("\n\n", 1)[0])
        parser.add_argument("patterns", nargs="*", help="names of cases")
        name = self.command.rpartition(".")[2] + ".jsonl"
        parser.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), name))
        parser.add_argument("--rounds", type=int, default=7)
        parser.add_argument("--burst", type=float, default=0.1, help="seconds of a peer's turn")
        parser.add_argument("--list", action="store_true")
        parser.add_argument("--dry", action="store_true")
        told = parser.parse_args()
        cases = self.wanted(told.patterns)
        if told.list:
            say("\n".join(case.name for case in cases))
            return 0
        if told.dry:
            return self.dry(cases)
        if (reason := why_no_gpu(self.command)) is not None:
            say(reason)
            return 2
        import torch

        common = {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "gpu": torch.cuda.get_device_name(), "commit": commit_here(), "versions": versions(),
        }  # fmt: skip
        for case in cases:
            try:
                row = self.measure(case, told.rounds, told.burst)
                line = self.shown(row)
            except ValueError as error:
                row = {"case": case.name, "note": f"failed: {error}"}
                line = row["note"]
            say(f"{case.name:{self.width}} {line}")
            with open(told.out, "a") as file:
                file.write(json.dumps(common | row) + "\n")
            torch.cuda.empty_cache()
        return 0
