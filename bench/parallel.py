"""python -m bench.parallel: context parallel attention beside one GPU that has the whole sequence.

    python -m bench.parallel                         # on two GPUs, then four, as many as there are
    python -m bench.parallel 'documents-*' --world 2 --out rows.jsonl

A case is a mask and a length, of one sequence with 32 heads, 8 of keys, head dimension 128, in
bf16. First each rank compares its rows of the output and of the gradients with those of one GPU.
Then a rank's time is that of a forward, or of a forward and its backward, between two barriers, and
the time of the group is that of its slowest rank. The rate is that of one GPU, which rank 0 times
in the same process, over that of the group times its ranks. Of one causal sequence there are rows
"torch" and "torch, ours": torch's own context_parallel, on its flash attention and on our kernels.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bench import Json, commit_here, runner, say, timing, versions
from bench.runner import Call, Run, Table
from flash_mask_cute import ColumnMask, builders, flash_attn_func, parallel

HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
CALLS = 3
# Of the largest number of a result: bf16 rounds to 2^-9, and gradients are sums of rounded numbers.
ALLOWED = 2e-2
METHODS = ("all_gather", "ring", "ulysses")


class Case(NamedTuple):
    """documents: mean length, 0: one document."""

    seqlen: int
    documents: int

    @property
    def name(self) -> str:
        return f"{'documents' if self.documents else 'causal'}-{self.seqlen // 1024}k"

    def mask(self) -> ColumnMask:
        """On the CPU."""
        if not self.documents:
            return builders.causal(self.seqlen)
        generator = torch.Generator().manual_seed(0)
        count = self.seqlen // self.documents
        cuts = torch.randperm(self.seqlen - 1, generator=generator)[: count - 1].sort()[0] + 1
        ends = [0, *cuts.tolist(), self.seqlen]
        return builders.causal_document([b - a for a, b in zip(ends, ends[1:], strict=False)])


CASES = (Case(65536, 0), Case(65536, 6554), Case(131072, 0), Case(131072, 13107))


def milliseconds(call: Call, rounds: int) -> float:
    """Of the slowest rank, the median of rounds."""
    call()
    call()

    def round_of() -> float:
        torch.cuda.synchronize()
        dist.barrier()
        return timing.burst(call, CALLS, untimed=0)

    slowest = torch.tensor(timing.median([round_of() for _ in range(rounds)]), device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def calls_of(
    attend: Callable[..., Any], tensors: Sequence[Tensor], dout: Tensor
) -> dict[str, Call]:
    """A forward without gradients, and a forward with its backward."""
    inputs = [x.detach().requires_grad_() for x in tensors]
    forward, _, both = runner.calls_of(attend, inputs, inputs, dout)
    return {"forward": forward, "both": both}


def compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """With the results of one GPU. Raises ValueError."""
    exact, right = ([x.detach().float() for x in given] for given in (found, expected))
    return runner.compare("beside one GPU", ("out", "dq", "dk", "dv"), exact, right, ALLOWED)


def measure(case: Case, run: Run) -> Iterator[Json]:
    """The rows of a case, the same in all ranks, which measure each together."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mask = case.mask()
    plan = parallel.plan(mask, world, seqlen=case.seqlen)
    load = plan.load(mask)
    shapes = [(1, case.seqlen, n, HEAD_DIM) for n in (HEADS, HEADS_KV, HEADS_KV, HEADS)]
    *whole, dout = runner.normal("cuda", torch.bfloat16, *shapes)
    on_gpu = mask.to("cuda")
    of_one = calls_of(lambda *x: flash_attn_func(*x, startend_row_indices=on_gpu), whole, dout)
    results = of_one["both"]()
    expected = [plan.shard(x, rank).contiguous() for x in results]
    one = {name: milliseconds(call, run.given.rounds) for name, call in of_one.items()}
    own, own_dout = [plan.shard(x, rank).contiguous() for x in whole], plan.shard(dout, rank)
    common: Json = {"kind": "parallel", "case": case.name, "world": world}
    of_plan = {"imbalance": round(load.imbalance, 3), "keys_received": max(load.keys)}
    for method in METHODS:

        def attend(*tensors: Tensor, method: str = method) -> Any:
            return parallel.context_parallel_attention(*tensors, on_gpu, plan, method=method)

        found = timed(calls_of(attend, own, own_dout), expected, one, run)
        yield common | {"method": method} | of_plan | found
    if not case.documents:
        for row in by_torch([*whole, dout], results, one, run):
            yield common | row


def timed(
    calls: dict[str, Call], expected: Sequence[Tensor], one: dict[str, float], run: Run
) -> Json:
    """Times and rates; or why the results of some rank are wrong or missing."""
    world = dist.get_world_size()
    why, wrong = [""] * world, ""
    try:
        compare(calls["both"](), expected)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        wrong = str(error)
    dist.all_gather_object(why, wrong)
    if any(why):
        return {"note": f"failed: {'; '.join(filter(None, why))}"}
    row: Json = {}
    for name, call in calls.items():
        ms = milliseconds(call, run.given.rounds)
        row |= {f"{name}_ms": round(ms, 3), f"{name}_one_ms": round(one[name], 3)}
        row[f"{name}_rate"] = round(one[name] / (world * ms), 3)
    return row


def by_torch(
    whole: Sequence[Tensor], results: Sequence[Tensor], one: dict[str, float], run: Run
) -> Iterator[Json]:
    """Rows of torch's own context_parallel. whole: q, k, v and dout. results: of one GPU."""
    from bench import torch_ring

    world, seqlen = dist.get_world_size(), whole[0].shape[1]
    mesh = init_device_mesh("cuda", (world,))
    for name, is_ours in torch_ring.WAYS.items():
        with torch_ring.ring(mesh, seqlen, is_ours=is_ours) as own:
            *tensors, own_dout = (x.index_select(1, own) for x in whole)
            calls = calls_of(torch_ring.attend, tensors, own_dout)
            found = timed(calls, [x.index_select(1, own) for x in results], one, run)
        yield {"method": name, "imbalance": 1.0, "keys_received": seqlen - len(own)} | found


def work(rank: int, world: int, store: str, cases: list[Case], given: argparse.Namespace) -> None:
    """Body of the process of a rank; rank 0 has the rows."""
    torch.cuda.set_device(rank)
    told: dict[str, Any] = {"rank": rank, "world_size": world, "init_method": f"file://{store}"}
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank), **told)
    run = Run(TABLE, given)
    try:
        for case in cases:
            for row in measure(case, run):
                if rank == 0:
                    run.emit(row)
            torch.cuda.empty_cache()
    finally:
        dist.destroy_process_group()


def launch(run: Run, cases: list[Case]) -> int:
    has, asked = torch.cuda.device_count(), run.given.world
    worlds = [asked] if asked else [x for x in (2, 4, 8) if x <= has]
    if not worlds or max(worlds) > has:
        say(f"{TABLE.command} needs {asked or 2} GPUs, and torch sees {has}")
        return runner.NO_GPU
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            told = world, os.path.join(folder, "store"), cases, run.given
            mp.start_processes(work, told, nprocs=world, start_method="spawn")
    return 0


def head(run: Run) -> Json:
    return {"gpu": torch.cuda.get_device_name(), "commit": commit_here(), **versions()}


TABLE = Table(
    command="bench.parallel", about=__doc__, cases=lambda: CASES, measure=measure, head=head,
    launch=launch, rounds=5,
    options={"--world": {"type": int, "default": 0, "help": "only as many GPUs"}},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(runner.main(TABLE))
