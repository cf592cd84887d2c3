"""mask_mod with block lists: a prefix that everyone sees, another one for each sequence.

    python examples/06_mask_mod_prefix_lm.py

A query of a prefix language model sees the keys up to its own and the whole prefix. The mask is a
callable that reads the length of the prefix from a tensor; `create_block_mask` asks it once which
blocks are hidden, visible or cut, for all heads and layers. Checked against attention written out
in float64. Runs on a Hopper GPU where there is one, else on the CPU. Ends with an error if the
result is wrong.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from dense_check import check, pick_device

from flash_mask_cute import BlockSparseTensorsTorch, create_block_mask, flash_attn_func
from flash_mask_cute.utils import scalar_to_ssa


@cute.jit
def prefix_lm(
    b_idx: cute.TensorSSA,
    h_idx: cute.TensorSSA,
    q_idx: cute.TensorSSA,
    kv_idx: cute.TensorSSA,
    aux_tensors: list[cute.Tensor],
) -> cute.TensorSSA:
    """aux_tensors[0]: int32 (batch,), tokens of each prefix.

    Conditions are joined by | and &: Python's `or` and `and` would decide while tracing.
    """
    prefix = scalar_to_ssa(aux_tensors[0][b_idx[0]], cutlass.Int32)
    return (kv_idx <= q_idx) | (kv_idx < prefix)


def count_blocks(lists: BlockSparseTensorsTorch) -> str:
    assert lists.full_block_cnt is not None
    full, cut = int(lists.full_block_cnt.sum()), int(lists.mask_block_cnt.sum())
    total = lists.mask_block_idx.numel()
    return f"{full} blocks visible, {cut} cut, {total - full - cut} hidden"


def main() -> None:
    device = pick_device()
    on_gpu = device.type == "cuda"
    seqlen, heads_q, heads_kv, d = (2000, 16, 4, 128) if on_gpu else (330, 2, 1, 64)
    torch.manual_seed(0)
    q = torch.randn(2, seqlen, heads_q, d, dtype=torch.bfloat16, device=device)
    k = torch.randn(2, seqlen, heads_kv, d, dtype=torch.bfloat16, device=device)
    v = torch.randn_like(k)
    row = torch.arange(seqlen, device=device)

    # other prefixes are other contents of a tensor, not another kernel
    for lengths in ([seqlen // 2 + 3, 0], [1, seqlen // 3]):
        prefix = torch.tensor(lengths, dtype=torch.int32, device=device)
        # H=None: the mask is the same for all heads
        lists = create_block_mask(
            prefix_lm, 2, None, seqlen, seqlen, device=device, aux_tensors=[prefix]
        )
        out = flash_attn_func(
            q, k, v, mask_mod=prefix_lm, aux_tensors=[prefix], block_sparse_tensors=lists
        )
        visible = (row <= row[:, None]) | (row < prefix.view(2, 1, 1, 1))
        print(f"prefixes of {lengths} tokens of {seqlen}: {count_blocks(lists)}")
        check("06_mask_mod_prefix_lm", None, out, q, k, v, visible)


if __name__ == "__main__":
    main()
