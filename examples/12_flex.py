"""FlexAttention code as it is: one import is changed, and it trains.

    python examples/12_flex.py

The mods are written in torch, as for `torch.nn.attention.flex_attention`: documents under a causal
mask, and a learned bias of distance and head that the score_mod captures. `mod_source` shows what
they become. Document ids of the next batch, as other tensors, trace and compile nothing new.
Checked against attention written out in float64. Runs on a Hopper GPU where there is one, else on
the CPU, where torch's own function has no backward. Ends with an error if the result is wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from dense_check import check, pick_device
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask

# was: from torch.nn.attention.flex_attention import flex_attention
from flash_mask_cute import flex_attention, keep_block_mask, mod_source


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def same_document(ids: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """ids: (batch, length), of any integer dtype."""
    return lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx]


def main() -> None:
    device = pick_device()
    seqlen, heads, d = (2000, 16, 128) if device.type == "cuda" else (330, 2, 64)
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(32, heads, device=device))

    def t5_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[(q_idx - kv_idx).abs().clamp(max=31), h]

    print(mod_source(t5_bias))
    row = torch.arange(seqlen, device=device)
    distance = (row[:, None] - row).abs().clamp(max=31)
    for length in (150, 90):
        q, k, v = (
            torch.randn(1, heads, seqlen, d, dtype=torch.bfloat16, device=device) for _ in range(3)
        )
        ids = (row // length)[None]
        mask = and_masks(same_document(ids), causal)
        block_mask = create_block_mask(mask, 1, None, seqlen, seqlen, device=device.type)
        # the ids do not change while it is used, so it may become documents
        keep_block_mask(block_mask)
        out = flex_attention(q, k, v, score_mod=t5_bias, block_mask=block_mask)
        out.float().square().mean().backward()
        assert table.grad is not None
        print(f"documents of {length}: gradient of the bias {float(table.grad.norm()):.2e}")
        visible = (row[:, None] >= row) & (ids[0, :, None] == ids[0])
        bias = table.detach()[distance].permute(2, 0, 1)
        o, q, k, v = (x.detach().transpose(1, 2) for x in (out, q, k, v))
        check("12_flex", None, o, q, k, v, visible, bias)


if __name__ == "__main__":
    main()
