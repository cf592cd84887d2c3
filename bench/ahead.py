"""Compile the kernels of the cases before anything is timed, in processes beside each other.

Each process calls its peers once, on the GPU, as the bench will: ours land in the disk cache of the
package (one compiler for each key), FlexAttention's in those of inductor and Triton, cuDNN's where
FLEX_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 makes it keep one. A process that
fails or is late loses nothing but time: what it did not compile is compiled by its case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from bench.cases import CASES, BenchCase, CaseTensors, Saved, make_tensors
from bench.peers import DOCUMENT_MASKS, PEERS
from flash_mask_cute.runtime.progress import tells_progress

AHEAD = ("ours", "flex", "cudnn_flex")
KINDS = ("attention", "backward")
# Static shapes are part of FlexAttention's code, so it needs whole inputs: about 9 GiB a process.
FLEX_PROCESSES = 8
LIMIT_S = 150.0
Job = tuple[str, str]
PeersOf = Callable[[BenchCase], Sequence[str]]


def kernel_of(peer: str, case: BenchCase) -> Hashable:
    """Equal where two cases share their kernels. Lengths are run-time values of ours, but they may
    choose other tiles where flags tell the mask."""
    if peer == "cudnn_flex":
        of_mask = case.kind, case.varlen
        return peer, *of_mask, case.d, case.d_v, case.dtype, case.heads // case.heads_kv
    if peer != "ours":
        return peer, case.name
    mask = case.mask_of(case.n)
    told: Hashable = (case.mask, case.n)
    if case.form == "columns":
        told = mask.hidden.shape[1], mask.causal, case.mask in DOCUMENT_MASKS
    fields: tuple[Hashable, ...] = (
        *(case.kind, case.d, case.d_v, case.dtype, case.form, case.score_mod, case.varlen),
        *(case.n_k, case.sink),
    )
    return *fields, told, case.heads // case.heads_kv, bool(case.softcap)


def jobs(names: Sequence[str], peers_of: PeersOf) -> list[Job]:
    """(peer, case), one for each kernel, backwards first: they compile longest."""
    found: dict[Hashable, Job] = {}
    for name in names:
        case = CASES[name]
        for peer in peers_of(case):
            if peer in AHEAD and case.kind in KINDS and PEERS[peer].supports(case) is None:
                found.setdefault(kernel_of(peer, case), (peer, name))
    return sorted(found.values(), key=lambda job: CASES[job[1]].kind != "backward")


def deal(work: Sequence[Job], processes: int) -> list[list[Job]]:
    """What each process compiles, in turns; FlexAttention in processes of its own."""
    hands: list[list[Job]] = []
    for most, part in (
        (processes, [job for job in work if job[0] != "flex"]),
        (min(processes, FLEX_PROCESSES), [job for job in work if job[0] == "flex"]),
    ):
        hands += [part[first::most] for first in range(most)]
    return [hand for hand in hands if hand]


def shrink(peer: str, case: BenchCase) -> BenchCase:
    """A case that runs the same kernel on less: one sequence, one KV head."""
    if peer != "ours" or case.varlen:
        return case
    return replace(case, tokens=case.n, heads=case.heads // case.heads_kv, heads_kv=1)


def _inputs(case: BenchCase) -> CaseTensors:
    """With what a backward is given; only its code matters here."""
    import torch

    tensors = make_tensors(case, "cuda", seed=0)
    if case.kind != "backward":
        return tensors
    q, _, v = tensors[:3]
    out = q.new_zeros((*q.shape[:-1], case.d_v))
    rows = (case.heads, case.tokens) if case.varlen else (case.batch, case.heads, case.n)
    lse = v.new_zeros(rows, dtype=torch.float32)
    return tensors._replace(saved=Saved(out, lse, torch.zeros_like(out)))


def compile_jobs(told: str) -> None:
    """Body of a process; `told` is the JSON of its jobs."""
    import torch

    for peer, name in json.loads(told):
        try:
            case = shrink(peer, CASES[name])
            PEERS[peer].prepare(case, _inputs(case))()
            torch.cuda.synchronize()
        except Exception as error:
            sys.stdout.write(f"    {name} not compiled ahead: {type(error).__name__}: {error}\n")


def compile_ahead(hands: Sequence[Sequence[Job]], limit_s: float = LIMIT_S) -> None:
    """Run a process for each hand until all are done, or end those that are not in time."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    program = (
        "import sys; from bench.ahead import compile_jobs; sys.exit(compile_jobs(sys.argv[1]))"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", program, json.dumps(hand)], env=environment)
        for hand in hands
    ]
    deadline = time.monotonic() + limit_s

    def ended() -> int:
        return sum(child.poll() is not None for child in children)

    with tells_progress("compiling ahead, processes that ended", ended, len(children) or 1):
        for child in children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
