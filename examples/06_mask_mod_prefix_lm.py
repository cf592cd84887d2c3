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
from torch import Tensor

from flash_mask_cute import BlockSparseTensorsTorch, create_block_mask
from flash_mask_cute.interface import _flash_attn_fwd
from flash_mask_cute.utils import scalar_to_ssa


def pick_device() -> torch.device:
    """A Hopper GPU if torch sees one, else the CPU; says which."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        print(f"device: {torch.cuda.get_device_name()}")
        return torch.device("cuda")
    print("device: CPU (no Hopper GPU here), in float64 over the tiles that the kernel would visit")
    return torch.device("cpu")


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


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """O of (batch, seqlen, heads, d) tensors in their dtype; visible: bool (batch, 1, q, k)."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, float("-inf"))
    probabilities = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return (probabilities.to(q.dtype) @ v).transpose(1, 2)


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
        out, _ = _flash_attn_fwd(
            q, k, v, mask_mod=prefix_lm, aux_tensors=[prefix], block_sparse_tensors_torch=lists
        )
        visible = (row <= row[:, None]) | (row < prefix.view(2, 1, 1, 1))
        exact = attend(q.double(), k.double(), v.double(), visible)
        error = (out.double() - exact).abs().max().item()
        eager_error = (attend(q, k, v, visible).double() - exact).abs().max().item()
        print(f"prefixes of {lengths} tokens of {seqlen}: {count_blocks(lists)}")
        print(f"largest error of out {error:.2e} (plain bfloat16 torch: {eager_error:.2e})")
        if not error <= 2 * eager_error + torch.finfo(q.dtype).eps:
            raise SystemExit("06_mask_mod_prefix_lm: wrong result")


if __name__ == "__main__":
    main()
