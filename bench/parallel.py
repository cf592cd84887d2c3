"""python -m bench.parallel: context parallel attention beside one GPU that has the whole sequence.

    python -m bench.parallel                         # on two GPUs, then four, as many as there are
    python -m bench.parallel 'documents-*' --world 2 --out rows.jsonl
    python -m bench.parallel 'causal-*' --profile    # and what of the messages is under attention

A case is a mask and a length, of one sequence with 32 heads, 8 of keys, head dimension 128, in
bf16. First each rank compares its rows of the output and of the gradients with those of one GPU.
Then a rank's time is that of a forward, or of a forward and its backward, between two barriers, and
the time of the group is that of its slowest rank. The rate is that of one GPU, which rank 0 times
in the same process, over that of the group times its ranks. Of one causal sequence there are rows
"torch" and "torch, ours": torch's own context_parallel, on its flash attention and on our kernels.
With --profile a row also has the time in which kernels of NCCL run, and the share of it in which
attention runs, too: of one call more, on the rank where the share is least.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench import Json, commit_here, say, versions, why_no_gpu
from bench.overlap import profiled

COMMAND = "bench.parallel"
HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
ROUNDS, CALLS = 5, 3
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

    def mask(self) -> Any:
        """A ColumnMask on the CPU."""
        import torch

        from flash_mask_cute import builders

        if not self.documents:
            return builders.causal(self.seqlen)
        generator = torch.Generator().manual_seed(0)
        count = self.seqlen // self.documents
        cuts = torch.randperm(self.seqlen - 1, generator=generator)[: count - 1].sort()[0] + 1
        ends = [0, *cuts.tolist(), self.seqlen]
        return builders.causal_document([b - a for a, b in zip(ends, ends[1:], strict=False)])


CASES = {
    case.name: case
    for case in (Case(65536, 0), Case(65536, 6554), Case(131072, 0), Case(131072, 13107))
}
Call = Callable[[], Any]


def milliseconds(call: Call, rounds: int) -> float:
    """Of the slowest rank, the median of rounds."""
    import torch
    import torch.distributed as dist

    for _ in range(2):
        call()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / CALLS)
    slowest = torch.tensor(statistics.median(found), device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def calls_of(attend: Callable[..., Any], tensors: list[Any], dout: Any) -> dict[str, Call]:
    """A forward without gradients, and a forward with its backward."""
    import torch

    inputs = [x.detach().requires_grad_() for x in tensors]

    def forward() -> Any:
        with torch.no_grad():
            return attend(*inputs)

    def both() -> tuple[Any, ...]:
        out = attend(*inputs)
        return out, *torch.autograd.grad(out, inputs, dout)

    return {"forward": forward, "both": both}


def why_wrong(found: tuple[Any, ...], expected: tuple[Any, ...]) -> str | None:
    for name, *pair in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        x, y = (given.detach().float() for given in pair)
        error = float((x - y).abs().max() / y.abs().max())
        if not error <= ALLOWED:
            return f"{name} differs from that of one GPU by {error:.1e} of its largest number"
    return None


class Options(NamedTuple):
    """rounds: of which the median is told. is_profiled: tell the overlap of messages."""

    rounds: int = ROUNDS
    is_profiled: bool = False


def measure(case: Case, rank: int, world: int, options: Options) -> Iterator[Json]:
    """The rows of a case, the same in all ranks, which measure each together."""
    import torch

    from flash_mask_cute import flash_attn_func, parallel

    mask, generator = case.mask(), torch.Generator("cuda").manual_seed(0)
    plan = parallel.plan(mask, world, seqlen=case.seqlen)
    load = plan.load(mask)
    heads = HEADS, HEADS_KV, HEADS_KV, HEADS
    *whole, dout = (
        torch.randn(1, case.seqlen, n, HEAD_DIM, device="cuda", generator=generator).bfloat16()
        for n in heads
    )
    on_gpu = mask.to("cuda")
    of_one = calls_of(lambda *x: flash_attn_func(*x, startend_row_indices=on_gpu), whole, dout)
    expected = tuple(plan.shard(x, rank).contiguous() for x in of_one["both"]())
    one = {name: milliseconds(call, options.rounds) for name, call in of_one.items()}
    own, own_dout = [plan.shard(x, rank).contiguous() for x in whole], plan.shard(dout, rank)
    attend = parallel.context_parallel_attention
    common: Json = {"kind": "parallel", "case": case.name, "world": world}
    of_plan = {"imbalance": round(load.imbalance, 3), "keys_received": max(load.keys)}
    for method in METHODS:
        calls = calls_of(lambda *x, m=method: attend(*x, on_gpu, plan, method=m), own, own_dout)
        yield common | {"method": method} | of_plan | timed(calls, expected, one, options)
    if not case.documents:
        for row in by_torch(whole, dout, of_one["both"](), one, options):
            yield common | row


def timed(
    calls: dict[str, Call], expected: tuple[Any, ...], one: dict[str, float], options: Options
) -> Json:
    """Times and rates; or why the results of some rank are wrong, or are not there."""
    import torch.distributed as dist

    world = dist.get_world_size()
    why: list[str | None] = [None] * world
    try:
        wrong = why_wrong(calls["both"](), expected)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        wrong = str(error)
    dist.all_gather_object(why, wrong)
    if any(why):
        return {"note": f"failed: {'; '.join(x for x in why if x)}"}
    row: Json = {}
    for name, call in calls.items():
        ms = milliseconds(call, options.rounds)
        row |= {f"{name}_ms": round(ms, 3), f"{name}_one_ms": round(one[name], 3)}
        row[f"{name}_rate"] = round(one[name] / (world * ms), 3)
        if options.is_profiled:
            of_ranks: list[Any] = [None] * world
            dist.all_gather_object(of_ranks, profiled(call))
            least = min(of_ranks, key=lambda x: x.share)
            row[f"{name}_messages_ms"] = round(least.messages, 3)
            row[f"{name}_attention_ms"] = round(least.attention, 3)
            row[f"{name}_hidden"] = round(least.share, 3)
    return row


def by_torch(
    whole: list[Any],
    dout: Any,
    expected: tuple[Any, ...],
    one: dict[str, float],
    options: Options,
) -> Iterator[Json]:
    """Rows of torch's own context_parallel. expected: of one GPU."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from bench import torch_ring

    world, seqlen = dist.get_world_size(), dout.shape[1]
    mesh = init_device_mesh("cuda", (world,))
    for name, is_ours in torch_ring.WAYS.items():
        with torch_ring.ring(mesh, seqlen, is_ours=is_ours) as own:
            *tensors, own_dout = (x.index_select(1, own) for x in (*whole, dout))
            calls = calls_of(torch_ring.attend, tensors, own_dout)
            of_rows = tuple(x.index_select(1, own) for x in expected)
            found = timed(calls, of_rows, one, options)
        yield {"method": name, "imbalance": 1.0, "keys_received": seqlen - len(own)} | found


def shown(row: Json) -> str:
    parts = [f"{row['case']:14} {row['world']} GPUs  {row['method']:10}"]
    for name in ("forward", "both"):
        if f"{name}_ms" in row:
            times = f"{row[f'{name}_ms']:8.3f} ms, one GPU {row[f'{name}_one_ms']:8.3f}"
            parts.append(f"{name} {times}: {row[f'{name}_rate']:.2f}")
        if f"{name}_hidden" in row:
            share = f"{100 * row[f'{name}_hidden']:.0f} % under attention"
            parts.append(f"messages {row[f'{name}_messages_ms']:.3f} ms, {share}")
    parts.append(row.get("note") or f"imbalance {row['imbalance']}, keys {row['keys_received']}")
    return "  ".join(parts)


def work(rank: int, world: int, store: str, names: list[str], out: str, options: Options) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=world, device_id=device
    )
    common = {"gpu": torch.cuda.get_device_name(), "commit": commit_here(), **versions()}
    try:
        for name in names:
            for row in measure(CASES[name], rank, world, options):
                if rank == 0:
                    say(shown(row))
                    if out:
                        with Path(out).open("a") as file:
                            file.write(json.dumps(common | row) + "\n")
            torch.cuda.empty_cache()
    finally:
        dist.destroy_process_group()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {COMMAND}", description=__doc__)
    parser.add_argument("patterns", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--world", type=int, help="only as many GPUs")
    parser.add_argument("--out", default="", help="append the rows to this file")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--profile", action="store_true", help="overlap of messages, by a profile")
    given = parser.parse_args(arguments)
    patterns = given.patterns or ["*"]
    names = [x for x in CASES if any(fnmatch.fnmatch(x, pattern) for pattern in patterns)]
    if not names:
        parser.error(f"{', '.join(patterns)} is none of {', '.join(CASES)}")
    if (why := why_no_gpu(COMMAND)) is not None:
        say(why)
        return 2
    import torch
    import torch.multiprocessing as mp

    there = torch.cuda.device_count()
    worlds = [given.world] if given.world else [x for x in (2, 4, 8) if x <= there]
    if not worlds or max(worlds) > there:
        say(f"{COMMAND} needs {given.world or 2} GPUs, there are {there}")
        return 2
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            options = Options(given.rounds, given.profile)
            told = world, os.path.join(folder, "store"), names, given.out, options
            mp.start_processes(work, told, nprocs=world, start_method="spawn")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
