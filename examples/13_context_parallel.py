"""A long sequence on several devices: each holds some rows, and masks are those of one device.

    torchrun --nproc-per-node 2 examples/13_context_parallel.py
    python examples/13_context_parallel.py  # one process on a GPU, two on the CPU

`parallel.plan` divides the rows so that all ranks have the same work, by counted tiles of the mask.
Every rank keeps its rows through the whole model; only attention sees other ranks.
`context_parallel_attention` has three methods, and all of them take any ColumnMask. Rows keep their
positions in the sequence (`plan.index`), which rotary embeddings need.

A layer is run, and its gradients are summed over the ranks, as FSDP or DDP does it. Checked against
attention over the whole sequence, written out. Runs on as many GPUs as there are processes (NCCL),
else on the CPU (gloo). Ends with an error if the result is wrong.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from dense_check import attend, compare
from ranks import launch, start
from torch import Tensor

from flash_mask_cute import ColumnMask, builders, parallel
from flash_mask_cute.parallel import context_parallel_attention

HEADS, HEADS_KV, HEAD_DIM = 4, 2, 64


def main() -> None:
    device = start()
    try:
        run(device)
    finally:
        dist.destroy_process_group()


def run(device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    seqlen = 512 * world
    mask = builders.causal_document([seqlen * 5 // 8, seqlen * 3 // 8], device=device)
    plan = parallel.plan(mask, world, seqlen=seqlen)
    load = plan.load(mask)
    if rank == 0:
        print(f"rows of each rank: {plan.rows}")
        print(f"imbalance {load.imbalance:.2f}, keys received {load.keys}")
    # the same on all ranks, as from one data loader; each takes its rows
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int) -> Tensor:
        x = torch.randn(1, seqlen, heads, HEAD_DIM, generator=generator)
        return x.bfloat16().to(device)

    whole = [normal(heads) for heads in (HEADS, HEADS_KV, HEADS_KV)]
    weight = normal(HEADS)
    sink = torch.zeros(HEADS, device=device, requires_grad=True)
    own = [plan.shard(x, rank).requires_grad_() for x in whole]
    for method in ("all_gather", "ring", "ulysses"):
        q, k, v = own
        if method == "ulysses" and (HEADS % world or (HEADS_KV % world and world % HEADS_KV)):
            print(f"ulysses: {HEADS} and {HEADS_KV} heads do not divide among {world} ranks")
            continue
        out = context_parallel_attention(q, k, v, mask, plan, method=method, learnable_sink=sink)
        loss = (out.float() * plan.shard(weight, rank)).sum()
        gradients = torch.autograd.grad(loss, (q, k, v))
        check(plan, rank, method, [out.detach(), *gradients], whole, weight, mask)


def check(
    plan: parallel.Plan,
    rank: int,
    method: str,
    found: list[Tensor],
    whole: list[Tensor],
    weight: Tensor,
    mask: ColumnMask,
) -> None:
    """The rows of this rank, of attention over the whole sequence with a sink of 0."""
    visible = mask.dense(plan.seqlen)

    def by_torch(dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in whole)
        out, lse = attend(q, k, v, visible)
        # one more logit of 0 in each row
        out = out * lse.sigmoid().mT[..., None].to(dtype)
        loss = (out.double() * weight).sum()
        return [out.detach(), *torch.autograd.grad(loss, (q, k, v))]

    exact, eager = by_torch(torch.float64), by_torch(torch.bfloat16)
    for name, x, right, rough in zip(("out", "dq", "dk", "dv"), found, exact, eager, strict=True):
        told = f"rank {rank}, {method}, {name}"
        compare("13_context_parallel", told, x, plan.shard(right, rank), plan.shard(rough, rank))


if __name__ == "__main__":
    launch(__file__, main)
