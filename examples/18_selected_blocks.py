"""Each query chooses its key blocks: training through a selection, and a step of decoding.

    python examples/18_selected_blocks.py

A router scores the key blocks for each query and KV head, here at random, and a query sees the
first block, its own, and the two best ones. Checked against the dense mask of the same selection,
gradients included. Runs on a Hopper GPU where there is one, else on the CPU. Ends with an error if
a result is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dense_check import compare, pick_device
from torch import Tensor

from flash_mask_cute import SelectedBlocks, flash_attn_func, flash_attn_with_kvcache

BLOCK, CHOSEN = 64, 2


def choose(scores: Tensor) -> Tensor:
    """scores (batch, heads_kv, seqlen, blocks) of a router; int64 (batch, heads_kv, seqlen, k)."""
    own = torch.arange(scores.shape[2], device=scores.device) // BLOCK
    later = torch.arange(scores.shape[3], device=scores.device) >= own[:, None]
    largest, best = scores.masked_fill(later, -torch.inf).topk(CHOSEN)
    # early queries have fewer blocks before their own
    best = torch.where(largest == -torch.inf, -1, best)
    ends = torch.stack((torch.zeros_like(own), own), -1)
    return torch.cat((ends.expand(*scores.shape[:2], -1, 2), best), -1)


def written_out(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """visible: bool (batch, heads_q, queries, keys)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    probabilities = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return (probabilities.to(q.dtype) @ v).transpose(1, 2)


def main() -> None:
    device = pick_device()
    torch.manual_seed(0)
    n, heads_q, heads_kv, d = 500, 8, 2, 64
    q = torch.randn(1, n, heads_q, d, dtype=torch.bfloat16, device=device)
    k = torch.randn(1, n, heads_kv, d, dtype=torch.bfloat16, device=device)
    v, dout = torch.randn_like(k), torch.randn_like(q)
    selection = choose(torch.randn(1, heads_kv, n, -(-n // BLOCK), device=device))

    # what it means: a query sees the keys of its blocks up to itself
    key = torch.arange(n, device=device)
    chosen = (selection[..., None] == key // BLOCK).any(-2)
    visible = chosen.repeat_interleave(heads_q // heads_kv, 1) & (key <= key[:, None])

    def gradients(attention: Callable[..., Tensor], *operands: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in operands]
        out = attention(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype)))

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        selected = SelectedBlocks(selection, BLOCK)
        return flash_attn_func(q, k, v, causal=True, block_sparse_tensors=selected)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return written_out(q, k, v, visible)

    exact = gradients(dense, q.double(), k.double(), v.double())
    eager, ours = gradients(dense, q, k, v), gradients(layer, q, k, v)
    for name, x, y, z in zip(("out", "dq", "dk", "dv"), ours, exact, eager, strict=True):
        compare("18_selected_blocks", name, x, y, z)

    # a step of decoding: the last token over a cache, with its own row of the selection
    lengths = torch.tensor([n], dtype=torch.int32, device=device)
    step: Any = flash_attn_with_kvcache(
        q[:, -1:], k, v, cache_seqlens=lengths, causal=True,
        block_sparse_tensors=SelectedBlocks(selection[:, :, -1:], BLOCK),
    )  # fmt: skip
    of_last = exact[0][:, -1:], eager[0][:, -1:]
    compare("18_selected_blocks", "the last token", step, *of_last)


if __name__ == "__main__":
    main()
