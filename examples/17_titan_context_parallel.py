"""A training step in the form of torchtitan: FSDP2 over all ranks, attention over a context.

    torchrun --nproc-per-node 4 examples/17_titan_context_parallel.py
    python examples/17_titan_context_parallel.py  # one process on a GPU, two on the CPU

The mesh has two dimensions, as torchtitan makes it: "data", whose ranks have batches of their own,
and "context", whose ranks have rows of one batch. Weights are sharded over all of them. A layer
calls a module `inner_attention(q, k, v, attention_masks=...)`; here that is context parallel. What
a batch of documents needs beside its tokens is made once a step: the mask, the plan of the rows,
and the positions in documents. Labels are shifted in the whole sequence, before it is divided.

Gradients of all weights are checked against one process that has all batches, with every score
written out. Runs on as many GPUs as there are processes (NCCL), else on the CPU (gloo). Ends with
an error if the result is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense_check import attend, compare
from ranks import launch, start
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flash_mask_cute import ColumnMask, builders, parallel
from flash_mask_cute.parallel import context_parallel_attention

VOCABULARY, DIM, HEADS, HEADS_KV, HEAD_DIM, LAYERS = 64, 64, 4, 2, 32, 2
NO_LABEL = -100


class Masks(NamedTuple):
    """What attention of a step needs beside q, k and v: of this batch, and of this rank."""

    mask: ColumnMask
    plan: parallel.Plan
    group: dist.ProcessGroup | None


class ContextParallelAttention(nn.Module):
    """In place of torchtitan's inner attention. q: (batch, own rows, heads, head_dim); k, v
    alike."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Masks) -> Tensor:
        x = attention_masks
        dtype = torch.bfloat16 if q.is_cuda else q.dtype
        operands = (y.to(dtype) for y in (q, k, v))
        return context_parallel_attention(*operands, x.mask, x.plan, x.group).to(q.dtype)


class DenseAttention(nn.Module):
    """The same of whole sequences, written out."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Masks) -> Tensor:
        visible = attention_masks.mask.dense(q.shape[1])
        out, _ = attend(q.to(self.dtype), k.to(self.dtype), v.to(self.dtype), visible)
        return out.to(q.dtype)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, (HEADS + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.inner_attention: nn.Module = ContextParallelAttention()
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)

    def forward(self, x: Tensor, attention_masks: Masks) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split((HEADS, HEADS_KV, HEADS_KV), dim=2)
        attended = self.inner_attention(q, k, v, attention_masks=attention_masks)
        return x + self.out(attended.flatten(2))


class Decoder(nn.Module):
    def __init__(self, seqlen: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, DIM), nn.Embedding(seqlen, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attention_masks: Masks) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, attention_masks)
        return self.head(x)


class Batch(NamedTuple):
    """A whole sequence of documents: int64 (1, seqlen) each, and its mask."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    mask: ColumnMask

    @staticmethod
    def of(number: int, seqlen: int, device: torch.device) -> Batch:
        """The same on all ranks, as from one data loader."""
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, VOCABULARY, (1, seqlen), generator=generator)
        lengths = [seqlen // 2 + 31 * number, seqlen // 4]
        lengths.append(seqlen - sum(lengths))
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        # a document's last token predicts nothing; no other one needs to know where rows lie
        labels = tokens.roll(-1, 1).masked_fill(positions.roll(-1, 1) == 0, NO_LABEL)
        mask = builders.causal_document(lengths, device=device)
        return Batch(tokens.to(device), labels.to(device), positions.to(device), mask)


def sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="sum"
    )


def main() -> None:
    device = start()
    try:
        run(device)
    finally:
        dist.destroy_process_group()


def run(device: torch.device) -> None:
    world = dist.get_world_size()
    context = 2 if world % 2 == 0 else world
    seqlen = 256 * context
    mesh = init_device_mesh(
        device.type, (world // context, context), mesh_dim_names=("data", "context")
    )
    batches = [Batch.of(number, seqlen, device) for number in range(world // context)]
    num_labels = sum(int((x.labels != NO_LABEL).sum()) for x in batches)

    torch.manual_seed(0)
    model = Decoder(seqlen).to(device)
    whole = copy.deepcopy(model)
    # one more mesh over the same ranks, of one dimension: sharded over data and context together
    ranks = init_device_mesh(device.type, (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=ranks)
    fully_shard(model, mesh=ranks)

    # -- a step
    batch, group = batches[mesh.get_local_rank("data")], mesh["context"].get_group()
    rank = mesh.get_local_rank("context")
    plan = parallel.plan(batch.mask, context, seqlen=seqlen)
    own = [plan.shard(x, rank) for x in (batch.tokens, batch.labels, batch.positions)]
    tokens, labels, positions = own
    logits = model(tokens, positions, Masks(batch.mask, plan, group))
    # FSDP averages gradients over all ranks, of which each has a part of the sum
    (sum_of_losses(logits, labels) * world / num_labels).backward()

    gradients: dict[str, Any] = {name: x.grad for name, x in model.named_parameters()}
    found = {name: x.full_tensor() for name, x in gradients.items()}
    check(found, whole, batches, num_labels)


def check(found: dict[str, Tensor], model: Decoder, batches: list[Batch], num_labels: int) -> None:
    """The gradients of one process with all batches."""

    def by_torch(dtype: torch.dtype, attention: Callable[[], nn.Module]) -> dict[str, Any]:
        one = copy.deepcopy(model).to(dtype)
        for layer in one.layers:
            layer.inner_attention = attention()
        for x in batches:
            masks = Masks(x.mask, parallel.plan(x.mask, 1, seqlen=x.tokens.shape[1]), None)
            logits = one(x.tokens, x.positions, masks)
            (sum_of_losses(logits, x.labels) / num_labels).backward()
        return {name: x.grad for name, x in one.named_parameters()}

    exact = by_torch(torch.float64, lambda: DenseAttention(torch.float64))
    eager = by_torch(torch.float32, lambda: DenseAttention(torch.bfloat16))
    for name, gradient in found.items():
        told = f"rank {dist.get_rank()}, gradient of {name}"
        compare("17_titan_context_parallel", told, gradient, exact[name], eager[name])


if __name__ == "__main__":
    launch(__file__, main)
