"""python -m lab.first_run: the first hour of the Blackwell kernels on a GPU (B200, B300).

Nothing of them has run on hardware yet. The steps go from the smallest call to the largest; each
has a process and a time limit of its own, so that one that hangs or faults costs its limit and no
more. Results are held to attention in fp64. compute-sanitizer repeats the smallest steps where it
is installed. Then come the rates that the model of these kernels lacks, and times of choices that
were only counted. A row a step goes to --out.

    python -m lab.first_run                    # everything
    python -m lab.first_run --simulate         # the same steps on the software GPU, small calls
    python -m lab.first_run one-cta-64 rates   # some steps

lab/README.md says what to do with the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import ROOT, Json, commit_here, versions
from bench.rows import row_line
from flash_mask_cute.runtime.cache import DIRECTORY_VARIABLE

if TYPE_CHECKING:
    from lab.calls import Call, Machine

OUT = ROOT / "lab" / "results" / "blackwell_first_run.jsonl"
ARCH, SIMULATED_SMS = "sm_100a", 2
# limits on the software GPU, in those on a GPU
SIMULATED_LIMIT = 5
# what a child prints before each of its rows
MARK = "first_run: "
WIDE = (192, 192), (256, 256)
PAIRS = (128, 128), (192, 128)
LONG = (4096, 32768)


class Step(NamedTuple):
    """seconds: the limit on a GPU. run: yields rows; see `steps`."""

    name: str
    seconds: int
    run: Callable[[Machine], Iterator[Json]]
    under_sanitizer: bool = False


def _calls(
    forward: Sequence[Call] = (), backward: Sequence[Call] = ()
) -> Callable[[Machine], Iterator[Json]]:
    def run(machine: Machine) -> Iterator[Json]:
        from lab.calls import run_calls

        return run_calls(tuple(forward), tuple(backward), machine)

    return run


def steps() -> dict[str, Step]:
    """All steps by name, in their order."""
    from lab.calls import Call

    def one_cta(d: int) -> Step:
        alone = {"cta_pair": False}
        forward = [Call((d, d), causal=causal, config=alone) for causal in (False, True)]
        backward = [Call((d, d), causal=causal, config=alone) for causal in (False, True)]
        return Step(f"one-cta-{d}", 180, _calls(forward, backward), d == 64)

    ordered = {"deterministic": True}
    pairs = [Call(x, config={"cta_pair": True}, causal=causal)
             for x in PAIRS for causal in (False, True)]  # fmt: skip
    # those of the backward, also with rows that see nothing
    with_256 = *PAIRS, (256, 256)
    gradients_of_pairs = [
        *(Call(x, config={"cta_pair": True}) for x in with_256),
        *(
            Call(x, (1500, 700), (300, 150), causal=True, config={"cta_pair": True})
            for x in with_256
        ),
    ]
    found = [
        one_cta(64),
        one_cta(96),
        one_cta(128),
        Step("pairs", 240, _calls(pairs), True),
        Step("pairs-backward", 240, _calls((), gradients_of_pairs), True),
        Step("wide-heads", 240, _calls([Call(x, causal=True) for x in (*WIDE, (192, 128))])),
        Step("wide-backward", 240, _calls((), [
            Call(x, causal=True, config={"cta_pair": False}) for x in (*WIDE, (192, 128))])),
        Step("deterministic", 240, _calls(
            (), [Call(x, causal=True, config={"cta_pair": in_pairs}, keywords=ordered)
                 for in_pairs, dims in ((False, ((64, 64), (128, 128))), (True, with_256))
                 for x in dims])),
        Step("split-and-pages", 240, _calls([
            Call((128, 128), (1, 4000), (1, 700), (8, 2), True, keywords={"num_splits": 3}),
            Call((128, 128), (1, 4000), (1, 300), (8, 2), True, page=64),
            Call((64, 64), (3, 4000), (3, 300), (8, 2), True, page=16)])),
        Step("rates", 120, _rates),
        Step("pairs-timed", 300, _timed_pairs),
        Step("choices-timed", 300, _timed_choices),
    ]  # fmt: skip
    return {step.name: step for step in found}


def _rates(machine: Machine) -> Iterator[Json]:
    from lab.rates import measure_rates

    sms, clock = SIMULATED_SMS, 0.0
    if machine.target is None:
        import torch

        properties = torch.cuda.get_device_properties(0)
        sms, clock = properties.multi_processor_count, torch.cuda.clock_rate()
    yield from measure_rates(machine.is_simulated, sms, clock)


def _timed_pairs(machine: Machine) -> Iterator[Json]:
    """Pairs and single CTAs in turns, with a full and a causal mask."""
    choices = [{"cta_pair": pair} for pair in (True, False)]
    for causal in (False, True):
        for dims in PAIRS:
            yield from _timed(machine, dims, causal, choices)
            yield from _timed_backward(machine, dims, causal, choices)


def _timed_choices(machine: Machine) -> Iterator[Json]:
    """Key blocks in flight and queries that wait ready; exponentials by polynomial."""
    for dims, choices in (
        ((64, 64), [{"num_stages": n, "stages_q": q} for n, q in ((4, 2), (5, 1), (3, 2))]),
        ((64, 64), [{"polynomial": n} for n in (0, 8, 16, 24, 32)]),
        ((128, 128), [{"polynomial": n} for n in (0, 8, 16, 24)]),
        ((96, 96), [{"num_stages": n, "stages_q": q} for n, q in ((3, 1), (2, 2))]),
    ):
        yield from _timed(machine, dims, True, choices)


def _timed(
    machine: Machine, dims: tuple[int, int], causal: bool, choices: Sequence[dict[str, Any]]
) -> Iterator[Json]:
    """Milliseconds of each choice, in turns; the software GPU checks the results instead."""
    from lab.calls import Call, check_forward

    if machine.is_simulated:
        for config in choices:
            yield check_forward(Call(dims, causal=causal, config=config), machine)
        return
    from bench.timing import median, spread, time_loop
    from flash_mask_cute import flash_attn_func

    for length in LONG:
        q, k, v, _ = Call(dims, (length, length), heads=(8, 8), causal=causal).tensors(machine)
        calls = {
            str(config): partial(flash_attn_func, q, k, v, causal=causal, config=(config, None))
            for config in choices
        }
        for name, samples in time_loop(calls, 5, 0.2).items():
            told = {"ms": round(median(samples), 4), "spread": round(spread(samples), 3)}
            yield {"dims": dims, "causal": causal, "length": length, "config": name, **told}


def _timed_backward(
    machine: Machine, dims: tuple[int, int], causal: bool, choices: Sequence[dict[str, Any]]
) -> Iterator[Json]:
    """As `_timed`, of the backward."""
    from lab.calls import Call, backward_of, check_backward

    if machine.is_simulated:
        for config in choices:
            call = Call(dims, causal=causal, config=config)
            yield {"direction": "backward", **check_backward(call, machine)}
        return
    from bench.timing import median, spread, time_loop

    for length in LONG:
        calls = {
            str(config): backward_of(
                Call(dims, (length, length), heads=(8, 8), causal=causal, config=config), machine
            )
            for config in choices
        }
        for name, samples in time_loop(calls, 5, 0.2).items():
            told = {"ms": round(median(samples), 4), "spread": round(spread(samples), 3)}
            place = {"direction": "backward", "dims": dims, "causal": causal, "length": length}
            yield {**place, "config": name, **told}


# -- processes ------------------------------------------------------------------------------------


def child(name: str, is_simulated: bool) -> int:
    """Run one step in this process, which prints its rows."""
    if is_simulated:
        import software_gpu

        software_gpu.activate(ARCH, sms=SIMULATED_SMS)
        software_gpu.OPTIONS["delay"] = 1
        from lab.simulated import run_what_caches_load

        run_what_caches_load(software_gpu)
    from flash_mask_cute.runtime.target import Target
    from lab.calls import Machine

    target = Target(ARCH, SIMULATED_SMS) if is_simulated else None
    machine = Machine("cpu" if is_simulated else "cuda", target)
    for row in steps()[name].run(machine):
        print(MARK + json.dumps(row), flush=True)
    if is_simulated:
        _refuse_warnings()
    return 0


def _refuse_warnings() -> None:
    import software_gpu

    said = {text for result in software_gpu.RESULTS for text, _, _ in result["warnings"]}
    if said:
        raise SystemExit(f"the software GPU warns: {sorted(said)}")


def supervise(name: str, seconds: int, is_simulated: bool, before: Sequence[str] = ()) -> Json:
    """Run a step in a process of its own; its row. before: a command to run it under."""
    command = [*before, sys.executable, "-m", "lab.first_run", "--child", name]
    begin, state, error = time.monotonic(), "right", ""
    environment = dict(os.environ)
    with (
        tempfile.TemporaryFile("w+") as told,
        tempfile.TemporaryFile("w+") as said,
        tempfile.TemporaryDirectory() as folder,
    ):
        if is_simulated:
            command.append("--simulate")
            # what is compiled for the software GPU runs nowhere else
            environment[DIRECTORY_VARIABLE] = folder
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=told, stderr=said, timeout=seconds
            )
            state = "right" if done.returncode == 0 else "wrong"
        except subprocess.TimeoutExpired:
            state = "late"
        told.seek(0)
        said.seek(0)
        figures = [json.loads(x[len(MARK) :]) for x in told if x.startswith(MARK)]
        if state != "right":
            error = said.read()[-2000:]
    lasted = round(time.monotonic() - begin, 1)
    return {"state": state, "seconds": lasted, "figures": figures, "error": error}


def run_all(names: Sequence[str], is_simulated: bool, out: Path | None) -> int:
    """Run steps one after another; the number of those that were not right."""
    bad = 0
    head = {"kind": "first_run", "date": time.strftime("%Y-%m-%d"), "commit": commit_here(),
            "gpu": "software GPU" if is_simulated else _gpu(), "versions": versions()}  # fmt: skip
    sanitizer = None if is_simulated else shutil.which("compute-sanitizer")
    for name in names:
        step = steps()[name]
        runs: list[tuple[str, Sequence[str]]] = [(name, ())]
        if step.under_sanitizer and sanitizer:
            checks = [sanitizer, "--tool", "memcheck", "--report-api-errors", "no",
                      "--error-exitcode", "1"]  # fmt: skip
            runs.append((f"{name} under compute-sanitizer", checks))
        for label, before in runs:
            limit = step.seconds * (SIMULATED_LIMIT if is_simulated else 1)
            row = supervise(name, limit, is_simulated, before)
            bad += row["state"] != "right"
            print(f"{label}: {row['state']}, {row['seconds']} s", flush=True)
            for figure in row["figures"]:
                print("   ", ", ".join(f"{key} {value}" for key, value in figure.items()))
            print(row["error"], end="", flush=True)
            if out is not None:
                with out.open("a") as file:
                    file.write(row_line({**head, "step": label, **row}))
    return bad


def _gpu() -> str:
    import torch

    return str(torch.cuda.get_device_name())


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if a step was not right, 2 where there is no such GPU or no such step."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.first_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("steps", nargs="*", help="names of steps; all without any")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--simulate", action="store_true", help="on the software GPU")
    parser.add_argument(
        "--out", type=Path, help=f"append rows here; on a GPU {OUT.name} without it"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return child(options.child, options.simulate)
    names = list(steps())
    if unknown := [name for name in options.steps if name not in names]:
        parser.error(f"no step is called {', '.join(unknown)}; --list names them")
    if options.list:
        print("\n".join(names))
        return 0
    if not options.simulate:
        import torch

        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        if capability not in ((10, 0), (10, 3)):
            there = "none" if capability is None else ".".join(map(str, capability))
            parser.error(
                "a GPU of compute capability 10.0 or 10.3 is needed, there is "
                f"{there}; --simulate needs no GPU"
            )
    out = options.out or (None if options.simulate else OUT)
    return int(bool(run_all(options.steps or names, options.simulate, out)))


if __name__ == "__main__":
    sys.exit(main())
