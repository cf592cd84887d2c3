"""Block lists: a pattern of blocks that the caller chooses, with nothing else computed.

    python examples/04_block_sparse.py

A pattern in the manner of BigBird (Zaheer et al., 2020), another one for each head: a block of
queries sees its own block and its neighbours, the first block, and two random ones. The lists are
written out of a bool matrix of blocks; then the same lists are used under a causal mask. Checked
against attention written out in float64. Runs on a Hopper GPU where there is one, else on the CPU.
Ends with an error if the result is wrong.
"""

from __future__ import annotations

import torch
from dense_check import check, pick_device
from torch import Tensor

from flash_mask_cute import BlockSparseTensorsTorch, flash_attn_func

BLOCK = 64  # not the kernel's tile: the library fits one to the other


def pattern(heads: int, num_blocks: int, generator: torch.Generator) -> Tensor:
    """Which key blocks a query block sees: bool (1, heads, num_blocks, num_blocks)."""
    block = torch.arange(num_blocks)
    is_near = (block - block[:, None]).abs() <= 1
    is_first = block == 0
    drawn = torch.rand((heads, num_blocks, num_blocks), generator=generator).argsort(-1)[..., :2]
    is_drawn = torch.zeros((heads, num_blocks, num_blocks), dtype=torch.bool)
    is_drawn.scatter_(-1, drawn, True)
    return (is_near | is_first | is_drawn)[None]


def to_lists(blocks: Tensor) -> BlockSparseTensorsTorch:
    """For each row of blocks, how many it sees and which, ascending.

    Entries behind the count are never read. Without a mask_mod a listed block is visible as a
    whole, so one pair of lists says it all.
    """
    count = blocks.sum(-1, dtype=torch.int32)
    seen_first = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return BlockSparseTensorsTorch(count, seen_first.int(), block_size=(BLOCK, BLOCK))


def main() -> None:
    device = pick_device()
    on_gpu = device.type == "cuda"
    seqlen, heads_q, heads_kv, d = (3000, 16, 4, 128) if on_gpu else (600, 4, 2, 64)
    torch.manual_seed(0)
    q = torch.randn(1, seqlen, heads_q, d, dtype=torch.bfloat16, device=device)
    k = torch.randn(1, seqlen, heads_kv, d, dtype=torch.bfloat16, device=device)
    v = torch.randn_like(k)
    num_blocks = -(-seqlen // BLOCK)
    blocks = pattern(heads_q, num_blocks, torch.Generator().manual_seed(0)).to(device)
    lists = to_lists(blocks)
    print(f"{seqlen} tokens, {num_blocks} x {num_blocks} blocks of {BLOCK} x {BLOCK} for each head")
    print(f"{blocks.float().mean():.0%} of them listed")

    visible = blocks.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
    visible = visible[:, :, :seqlen, :seqlen]
    out = flash_attn_func(q, k, v, block_sparse_tensors=lists)
    check("04_block_sparse", "block lists", out, q, k, v, visible)

    out = flash_attn_func(q, k, v, block_sparse_tensors=lists, causal=True)
    check("04_block_sparse", "block lists and causal", out, q, k, v, visible.tril())


if __name__ == "__main__":
    main()
