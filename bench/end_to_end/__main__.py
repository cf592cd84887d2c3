"""python -m bench.end_to_end: training steps of a model of transformers.

    python -m bench.end_to_end --task lora --model llama3-8b --tokens 32768 --docs 4096
    python -m bench.end_to_end --impl ours,sdpa,eager --task dpo --tiny
    python -m bench.end_to_end --impl ours,fa4,flex --task sft --model gpt-oss --in-turns
    python -m bench.end_to_end --report rows.jsonl

Weights and tokens are random, and the same for every implementation, each of which has a process of
its own; with --in-turns they share one, and its model, and take a step each in turn. sft trains all
weights of four layers; lora, dpo and rm train LoRA of rank 16 in all layers. Every layer is
checkpointed, and logits exist for 1024 rows at a time.

Exit status: 1 where losses of two implementations differ by more than rounding (LIMITS of rows.py),
or one failed, 2 where nothing could be run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import torch

from bench import ROOT, Json, runner, say
from bench.end_to_end.attentions import IMPLEMENTATIONS
from bench.end_to_end.rows import disagreements, table
from bench.end_to_end.shapes import SHAPES
from bench.end_to_end.tasks import TASKS
from bench.end_to_end.training import LeftOut, Run, measure, measure_in_turns

COMMAND = "bench.end_to_end"
DEFAULT = "ours,fa4,sdpa,flex"
FAILED = "failed"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {COMMAND}", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--impl", default=DEFAULT, help=f"some of {', '.join(IMPLEMENTATIONS)}, by commas")
    add("--task", choices=TASKS, default="lora")
    add("--model", choices=SHAPES, default="llama3-8b")
    add("--tokens", type=int, help="of a step, 8192 to 262144 (8192; tiny: 256)")
    add("--docs", type=int, help="mean length of documents (4096; tiny: 64)")
    add("--layers", type=int, help="other than all, or 4 of sft")
    add("--steps", type=int, help="the first one is told apart (6; tiny: 2)")
    add("--tiny", action="store_true", help="small layers, also for a CPU")
    add("--device", choices=("cuda", "cpu"), help="a GPU if there is one; a CPU computes in fp32")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="append the rows to this file")
    add("--report", type=Path, nargs="+", help="only print the tables of these files")
    add("--in-turns", action="store_true", help="one process and model for all")
    add("--row", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.impls = given.impl.split(",")
    if unknown := sorted(set(given.impls) - IMPLEMENTATIONS.keys()):
        parser.error(f"--impl: {', '.join(unknown)} is none of {', '.join(IMPLEMENTATIONS)}")
    for name, values in {"tokens": (8192, 256), "docs": (4096, 64), "steps": (6, 2)}.items():
        if getattr(given, name) is None:
            setattr(given, name, values[given.tiny])
    if not 32 <= given.docs <= given.tokens:
        parser.error(f"--docs must be from 32 to --tokens {given.tokens}, got {given.docs}")
    if given.steps < 1 or (given.layers is not None and given.layers < 1):
        parser.error("--steps and --layers must be 1 or more")
    return given


def runs_of(given: argparse.Namespace) -> list[Run]:
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return [
        Run(
            impl, given.task, given.model, given.tokens, given.docs, given.steps, given.layers,
            given.tiny, device, given.seed,
        )
        for impl in given.impls
    ]  # fmt: skip


def row_of(run: Run) -> Json:
    """The row of a run in this process."""
    try:
        return measure(run)
    except LeftOut as why:
        return left_out(run, str(why))


def rows_of(
    runs: Sequence[Run], given: argparse.Namespace, arguments: Sequence[str]
) -> Iterator[Json]:
    if not given.in_turns:
        yield from (row_of_process(run, arguments) for run in runs)
        return
    for run, row in zip(runs, measure_in_turns(runs), strict=True):
        yield left_out(run, row) if isinstance(row, str) else row


def left_out(run: Run, why: str) -> Json:
    row = {x.name: getattr(run, x.name) for x in fields(run)}
    device = torch.cuda.get_device_name() if run.device == "cuda" else "cpu"
    row |= {"layers": run.shape.layers, "tiny": row.pop("is_tiny"), "device": device}
    return {"kind": "end_to_end", **row, "left_out": why}


def row_of_process(run: Run, arguments: Sequence[str]) -> Json:
    """The row of a run in a process of its own, which is given the arguments of this one."""
    command = [sys.executable, "-m", COMMAND, *arguments, "--impl", run.impl, "--row"]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if child.returncode:
        sys.stderr.write(child.stderr)
        return left_out(run, f"{FAILED}: {child.stderr.strip().splitlines()[-1]}")
    row: Json = json.loads(child.stdout.splitlines()[-1])
    return row


def main(arguments: Sequence[str]) -> int:
    given = parse(arguments)
    if given.report is not None:
        rows = runner.rows_in(given.report)
    else:
        if missing := [x for x in ("transformers", "peft") if find_spec(x) is None]:
            say(f"{COMMAND} needs {' and '.join(missing)}: pip install '.[end-to-end]'")
            return 2
        runs = runs_of(given)
        if not given.tiny and runs[0].device == "cpu":
            say(f"{COMMAND} needs a GPU, or --tiny")
            return 2
        if given.row:
            say(json.dumps(row_of(runs[0])))
            return 0
        rows = []
        for row in rows_of(runs, given, arguments):
            rows.append(row)
            if given.out is not None:
                runner.append_line(given.out, row)
    say(table(rows))
    differing = disagreements(rows)
    for line in differing:
        say(line)
    has_failed = any(row.get("left_out", "").startswith(FAILED) for row in rows)
    return 1 if differing or has_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
