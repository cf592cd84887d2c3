"""Block diffusion: train every block of a text at once, each on the clean blocks before it.

    python examples/15_block_diffusion.py

A model denoises one block at a time, and blocks follow each other as tokens do (Arriola et al.
2025). Training puts a noisy copy of a text before the clean one. A noisy token sees its own noisy
block and the clean blocks before it; a clean token sees clean blocks up to its own.
`builders.block_diffusion` is that mask as column intervals, so tiles that nobody sees are skipped.

Sampling then needs only the cached clean blocks and one noisy block. Its output is the same as in
training, which is checked too. Ends with an error if the result is wrong.
"""

from __future__ import annotations

import torch
from dense_check import check, pick_device

from flash_mask_cute import builders, flash_attn_func


def main() -> None:
    device = pick_device()
    seqlen, block = (1000, 48) if device.type == "cuda" else (200, 24)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, 2 * seqlen, heads, 64, dtype=torch.bfloat16, device=device)
        for heads in (4, 2, 2)
    )
    mask = builders.block_diffusion(seqlen, block, device=device)
    out = flash_attn_func(q, k, v, startend_row_indices=mask)
    row, key = (
        torch.arange(2 * seqlen, device=device)[:, None],
        torch.arange(2 * seqlen, device=device),
    )
    of_row, of_key = row % seqlen // block, key % seqlen // block
    in_training = torch.where(
        row < seqlen,
        torch.where(key < seqlen, of_row == of_key, of_key < of_row),
        (key >= seqlen) & (of_key <= of_row),
    )
    check("15_block_diffusion", "training", out, q, k, v, in_training)
    # one step of sampling: the noisy block after three clean ones
    start, end = 3 * block, 4 * block
    clean = torch.arange(seqlen, seqlen + start, device=device)
    seen = torch.cat((clean, torch.arange(start, end, device=device)))
    step = flash_attn_func(q[:, start:end], k[:, seen], v[:, seen])
    everything = torch.ones(1, 1, dtype=torch.bool, device=device)
    check(
        "15_block_diffusion", "sampling", step, q[:, start:end], k[:, seen], v[:, seen], everything
    )
    same = (step.float() - out[:, start:end].float()).abs().max().item()
    print(f"training and sampling differ by {same:.2e}")


if __name__ == "__main__":
    main()
