"""Speculative decoding with a tree of draft tokens, over pages, for a batch.

    python examples/16_draft_tree.py

A draft model proposes several continuations as a tree (EAGLE, Medusa, MTP with alternatives), and
the target model verifies them in one step: each draft token sees the cache, its ancestors and
itself. `builders.draft_tree` packs that into one int64 word for each draft token. The words and the
lengths of the cache are read by each call, so the next step changes them in place; a captured CUDA
graph would replay the same call.

After the step, the keys of the accepted path are moved behind the cache, as an engine does it.
Checked against attention with the tree written out. Ends with an error if the result is wrong.
"""

from __future__ import annotations

import torch
from dense_check import check, pick_device
from torch import Tensor

from flash_mask_cute import builders, flash_attn_with_kvcache

PAGE, DRAFTS = 16, 6
STEPS = [
    [[-1, 0, 0, 1, 1, 2], [-1, -1, 0, 1, 2, 2]],
    [[-1, 0, 1, 2, 3, 4], [-1, -1, -1, 0, 1, 2]],
]
ACCEPTED = [[0, 1, 4], [1, 3]]  # of the first step, from the first draft on


def path_of(parents: list[int], draft: int) -> list[int]:
    """A draft token and its ancestors."""
    return [] if draft < 0 else [*path_of(parents, parents[draft]), draft]


def main() -> None:
    device = pick_device()
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    k_pool, v_pool = normal(16, PAGE, 2, 64), normal(16, PAGE, 2, 64)
    pages = torch.randperm(16, device=device).view(2, 8).int()
    lengths = torch.tensor([90, 37], dtype=torch.int32, device=device)
    tree = builders.draft_tree(STEPS[0], device=device)
    mask_mod = tree.mask_mod(lengths)
    for number, parents in enumerate(STEPS):
        tree.bits.copy_(builders.draft_tree(parents, device=device).bits)
        # a model rotates q and k by lengths[:, None] + tree.depths
        q, k, v = normal(2, DRAFTS, 4, 64), normal(2, DRAFTS, 2, 64), normal(2, DRAFTS, 2, 64)
        out = flash_attn_with_kvcache(
            q, k_pool, v_pool, k, v, cache_seqlens=lengths, page_table=pages, mask_mod=mask_mod
        )
        assert isinstance(out, Tensor)
        for i, first in enumerate(lengths.tolist()):
            seen = torch.zeros(DRAFTS, first + DRAFTS, dtype=torch.bool, device=device)
            seen[:, :first] = True
            for draft in range(DRAFTS):
                seen[draft, [first + j for j in path_of(parents[i], draft)]] = True
            keys, values = (
                pool[pages[i].long()].flatten(0, 1)[None, : first + DRAFTS]
                for pool in (k_pool, v_pool)
            )
            name = f"step {number}, sequence {i}"
            check("16_draft_tree", name, out[i : i + 1], q[i : i + 1], keys, values, seen)
        if number == 0:
            accept(k_pool, v_pool, pages, lengths)


def accept(k_pool: Tensor, v_pool: Tensor, pages: Tensor, lengths: Tensor) -> None:
    """Move the keys of accepted drafts to the end of the cache, and count them."""
    for i, (first, path) in enumerate(zip(lengths.tolist(), ACCEPTED, strict=True)):
        places = torch.arange(first, first + DRAFTS, device=pages.device)
        page, row = pages[i, places // PAGE].long(), places % PAGE
        for pool in (k_pool, v_pool):
            pool[page[: len(path)], row[: len(path)]] = pool[page[path], row[path]]
        lengths[i] += len(path)


if __name__ == "__main__":
    main()
