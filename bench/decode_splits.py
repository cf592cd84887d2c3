"""python -m bench.decode_splits: decoding in one pass, in splits and in chunks, for its cost.

Each line is a shape and the microseconds of each way, by CUDA-graph replay with a cold L2: 1 is one
pass, n > 1 that many splits of each work tile, 0 equal stream-K chunks. The estimate of
`call/tiles/decode_costs.py` is fitted to such lines. Each way is compared with fp32 before it is
timed, and ways take turns.

    python -m bench.decode_splits '32/8_*' --out FILE --compile 12
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench import Json, runner, say, timing
from bench.decode import TOLERANCE, DecodeCase, Problem
from flash_mask_cute.call import splits
from flash_mask_cute.call.arguments import AttentionCall, Direction
from flash_mask_cute.call.plan import plan
from flash_mask_cute.call.prepare import compiled_fwd
from flash_mask_cute.call.tiles.decode_costs import KEYS, NUMBERS
from flash_mask_cute.interface import _flash_attn_fwd
from flash_mask_cute.runtime.target import Target

NUMBERS_AND_CHUNKS = 0, *NUMBERS
# bytes of a graph's caches, microseconds of a sample, samples
FOOTPRINT, BURST_US, ROUNDS = 4e8, 5e3, 3
LIMIT_S = 3.0

# (heads_q, heads_kv), d, and (batch, keys, queries) each: lengths are those of the tensors
EQUAL: tuple[tuple[tuple[int, int], int, tuple[tuple[int, int, int], ...]], ...] = (
    ((32, 8), 128, (
        (8, 4096, 1), (8, 32768, 1), (8, 32768, 4), (1, 16384, 1), (1, 131072, 1), (1, 4096, 1),
        (3, 20000, 1), (5, 5000, 1), (12, 3000, 1), (2, 32768, 1), (4, 16384, 4), (6, 8192, 2),
        (32, 1024, 8), (64, 4096, 1),
    )),
    ((64, 8), 64, (
        (64, 4096, 1), (8, 32768, 1), (1, 65536, 1), (3, 9000, 1), (40, 3000, 1), (8, 8192, 4),
    )),
    ((8, 1), 128, ((3, 10000, 1), (48, 2048, 1), (96, 6000, 1), (1, 65536, 1), (16, 2048, 1))),
    ((28, 4), 128, ((8, 32768, 1), (3, 12000, 1))),
    ((32, 32), 128, ((16, 4096, 1), (2, 4096, 1))),
    ((24, 2), 256, ((1, 65536, 1), (8, 8192, 1), (64, 4096, 1), (20, 5000, 1), (8, 32768, 1))),
)  # fmt: skip
# the same with lengths on the device and the page size, 0: contiguous
VARYING: tuple[tuple[tuple[int, int], int, tuple[tuple[Any, ...], ...]], ...] = (
    ((32, 8), 128, (
        (8, 4096, 1, 16), (8, 4096, 1, 0), (8, 32768, 1, 16), (1, 16384, 1, 16), (1, 131072, 1, 16),
        (1, 131072, 1, 0), (16, 2048, 1, 16), (4, 8192, 1, 0), (128, (1024, 8192), 1, 0),
        (8, (1024, 8192), 1, 0), (32, (512, 4096), 1, 16), (1, 1024, 1, 0), (1, 4096, 1, 16),
    )),
    ((64, 8), 64, ((64, 4096, 1, 16), (8, 32768, 1, 0), (1, 131072, 1, 16), (8, 4096, 4, 16))),
    ((24, 2), 256, ((8, 4096, 1, 0), (64, 4096, 1, 0))),
    ((8, 1), 128, ((8, 4096, 1, 0), (64, 1024, 1, 0), (64, (512, 2048), 1, 0))),
)  # fmt: skip


def cases(pattern: str) -> Iterator[tuple[DecodeCase, bool]]:
    """A case with one page size, and whether its lengths are on the device. pattern: of names."""
    for (heads, d, shapes), varies in itertools.chain(
        ((x, False) for x in EQUAL), ((x, True) for x in VARYING)
    ):
        for batch, keys, queries, *page in shapes:
            name = f"{heads[0]}/{heads[1]}_d{d}_{batch}x{keys}_q{queries}"
            if fnmatch.fnmatch(name, pattern):
                yield DecodeCase(name, batch, keys, heads, d, queries, tuple(page) or (0,)), varies


def _told(case: DecodeCase, p: Any, varies: bool) -> Json:
    told: Json = {"causal": True, "return_lse": False}
    if varies:
        told["seqused_k"] = p.full
    if case.pages[0]:
        told["page_table"] = p.table(case.pages[0])
    return told


def compile_part(part: int, parts: int, pattern: str) -> None:
    """Compile this part of the kernels, into the cache on disk."""
    done: set[Any] = set()
    for case, varies in cases(pattern):
        (heads_q, heads_kv), page = case.heads, case.pages[0]
        shape = (case.batch, case.most_keys)
        if page:
            shape = (case.batch * case.most_keys // page, page)
        k = torch.empty(*shape, heads_kv, case.d, dtype=torch.bfloat16)
        q = torch.empty(case.batch, case.queries, heads_q, case.d, dtype=torch.bfloat16)
        told: Json = {"causal": True, "return_lse": False}
        if varies:
            told["seqused_k"] = torch.full((case.batch,), case.most_keys, dtype=torch.int32)
        if page:
            told["page_table"] = torch.zeros(case.batch, case.most_keys // page, dtype=torch.int32)
        for number in (0, 1, 2):
            of = {**told, "num_splits": number}
            call = AttentionCall.from_arguments(Direction.FORWARD, q, k, k, **of)
            found = plan(call, Target.default())
            key = found.problem, found.fwd_choice.tiles
            if key not in done:
                done.add(key)
                if len(done) % parts == part:
                    compiled_fwd(found)
                    if found.splits is not None:
                        splits.CombinedForward.of_plan(found)


def measure(case: DecodeCase, varies: bool) -> Json:
    """The microseconds of each way."""
    p, page = Problem(case, "cuda"), case.pages[0]
    told, copies = _told(case, p, varies), [[p.pool(x, page) for x in y] for y in p.caches.copies]
    graphs: dict[int, tuple[Callable[[], Any], int]] = {}
    numbers = p.caches.numbers()
    for number in NUMBERS_AND_CHUNKS:
        if number * KEYS > case.most_keys:
            continue
        call = functools.partial(_flash_attn_fwd, p.q, num_splits=number, **told)
        error = p.error(call(*copies[0])[0], page, numbers)
        if not error < TOLERANCE:
            raise RuntimeError(f"{case.name}: {number} splits are {error} off")
        torch.cuda.synchronize()
        count = max(len(copies), 8)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(count):
                call(*copies[i % len(copies)])
        graphs[number] = graph.replay, count
    samples: dict[int, list[float]] = {number: [] for number in graphs}
    for order in timing.rotations(list(graphs), ROUNDS):
        for number in order:
            replay, count = graphs[number]
            if not samples[number]:
                samples[number].append(timing.burst(replay, 1, 0) * 1e3 / count)
            us = samples[number][0] * count
            replays = max(1, min(100, round(BURST_US / us)))
            samples[number].append(timing.burst(replay, replays, 0) * 1e3 / count)
    return {
        "card": torch.cuda.get_device_name().split()[1], "heads": case.heads, "d": case.d,
        "batch": case.batch, "keys": case.keys, "queries": case.queries, "page": page,
        "varies": varies,
        "us": {number: round(timing.median(us[1:]), 2) for number, us in samples.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pattern", nargs="?", default="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compile", type=int, default=1)
    parser.add_argument("--part", type=int)
    parser.add_argument("--seconds", type=float, default=200.0)
    options = parser.parse_args()
    begin = time.time()
    # without an estimate, chunks
    splits._has_known_cost = lambda facts, problem: False
    splits.are_enough_tiles = lambda *of_call: False
    if options.part is not None:
        compile_part(options.part, options.compile, options.pattern)
        return
    command = [sys.executable, "-m", "bench.decode_splits", options.pattern]
    command += ["--compile", str(options.compile)]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    parts = [
        subprocess.Popen([*command, "--part", str(i)], env=env) for i in range(options.compile)
    ]
    for part in parts:
        part.wait()
    sys.stderr.write(f"compiled after {time.time() - begin:.0f} s\n")
    timing.FOOTPRINT = FOOTPRINT
    for case, varies in cases(options.pattern):
        if time.time() - begin > options.seconds - LIMIT_S:
            break
        row = measure(case, varies)
        say(f"{time.time() - begin:.1f} {json.dumps(row)}")
        if options.out:
            runner.append_line(options.out, row)


if __name__ == "__main__":
    main()
