"""What bench.run compiles before anything is timed, in processes beside each other.

A job calls its peer once, on the GPU, as the bench will: ours land in the disk cache of the package
(one compiler for each key), FlexAttention's in those of inductor and Triton, cuDNN's where
FLEX_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 makes it keep one. What a process that fails or is late did
not compile is compiled by its case.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch

from bench.cases import CASES, BenchCase, CaseTensors, Saved, make_tensors
from bench.peers import DOCUMENT_MASKS, PEERS

AHEAD = ("ours", "flex", "cudnn_flex")
KINDS = ("attention", "backward")
# Static shapes are part of FlexAttention's code, so it needs whole inputs: about 9 GiB a process.
FLEX_PROCESSES = 8
Job = tuple[str, str]
PeersOf = Callable[[BenchCase], Sequence[str]]


def kernel_of(peer: str, case: BenchCase) -> Hashable:
    """Equal where two cases share kernels: lengths are run-time values, but may choose tiles."""
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


def jobs(cases: Sequence[BenchCase], peers_of: PeersOf) -> list[Job]:
    """(peer, case), one for each kernel, backwards first: they compile longest."""
    found: dict[Hashable, Job] = {}
    for case in cases:
        for peer in peers_of(case):
            if peer in AHEAD and case.kind in KINDS and PEERS[peer].supports(case) is None:
                found.setdefault(kernel_of(peer, case), (peer, case.name))
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
    tensors = make_tensors(case, "cuda", seed=0)
    if case.kind != "backward":
        return tensors
    q, _, v = tensors[:3]
    out = q.new_zeros((*q.shape[:-1], case.d_v))
    rows = (case.heads, case.tokens) if case.varlen else (case.batch, case.heads, case.n)
    lse = v.new_zeros(rows, dtype=torch.float32)
    return tensors._replace(saved=Saved(out, lse, torch.zeros_like(out)))


def compile_job(peer: str, name: str) -> None:
    case = shrink(peer, CASES[name])
    PEERS[peer].prepare(case, _inputs(case))()
    torch.cuda.synchronize()
