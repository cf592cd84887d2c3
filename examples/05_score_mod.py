"""score_mod: a bias of your own in the kernel, here ALiBi and the relative bias of T5.

    python examples/05_score_mod.py

ALiBi (Press et al., 2021) computes its bias; T5 (Raffel et al., 2020) reads it from a table, which
is passed beside the callable, so that a new table compiles nothing. Checked against attention
written out in float64. Runs on a Hopper GPU where there is one, else on the CPU. Ends with an error
if the result is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from dense_check import check, pick_device

from flash_mask_cute import flash_attn_func
from flash_mask_cute.utils import scalar_to_ssa


def make_alibi(heads: int) -> Callable[..., Any]:
    """The number of heads becomes a constant of the kernel: another number is another kernel."""
    step = -8.0 / heads

    @cute.jit
    def alibi(
        score: cute.TensorSSA,
        b_idx: cute.TensorSSA,
        h_idx: cute.TensorSSA,
        q_idx: cute.TensorSSA,
        kv_idx: cute.TensorSSA,
        aux_tensors: list[cute.Tensor],
    ) -> cute.TensorSSA:
        exp2 = cute.math.exp2  # type: ignore[attr-defined]
        slope = exp2((h_idx + 1).to(cutlass.Float32) * step)
        return score - slope * abs(q_idx - kv_idx).to(cutlass.Float32)

    return alibi


@cute.jit
def relative_bias(
    score: cute.TensorSSA,
    b_idx: cute.TensorSSA,
    h_idx: cute.TensorSSA,
    q_idx: cute.TensorSSA,
    kv_idx: cute.TensorSSA,
    aux_tensors: list[cute.Tensor],
) -> cute.TensorSSA:
    """aux_tensors[0]: (heads, reach), the bias of a head by distance, the last one for all above.

    An element of a tensor is indexed by scalars: `h_idx[0]` is the scalar in a one-element vector.
    """
    table = aux_tensors[0]
    distance = cutlass.min(abs(q_idx - kv_idx)[0], cute.size(table, mode=[1]) - 1)
    return score + scalar_to_ssa(table[h_idx[0], distance], cutlass.Float32)


def main() -> None:
    device = pick_device()
    on_gpu = device.type == "cuda"
    seqlen, heads_q, heads_kv, d = (2000, 16, 4, 128) if on_gpu else (300, 4, 2, 64)
    torch.manual_seed(0)
    q = torch.randn(1, seqlen, heads_q, d, dtype=torch.bfloat16, device=device)
    k = torch.randn(1, seqlen, heads_kv, d, dtype=torch.bfloat16, device=device)
    v = torch.randn_like(k)
    row = torch.arange(seqlen, device=device)
    distance = (row - row[:, None]).abs()
    causal = row <= row[:, None]

    head = torch.arange(1, heads_q + 1, device=device)
    slopes = torch.exp2(head * (-8.0 / heads_q)).view(-1, 1, 1)
    out = flash_attn_func(q, k, v, causal=True, score_mod=make_alibi(heads_q))
    check("05_score_mod", "ALiBi", out, q, k, v, causal, bias=-slopes * distance)

    for reach in (128, 40):
        table = torch.randn(heads_q, reach, device=device)
        bias = table[:, distance.clamp(max=reach - 1)]
        out = flash_attn_func(q, k, v, causal=True, score_mod=relative_bias, aux_tensors=[table])
        check("05_score_mod", f"relative bias, {reach} distances", out, q, k, v, causal, bias)

    # a score_mod sees scores that are scaled and soft-capped already
    out = flash_attn_func(
        q, k, v, causal=True, softcap=5.0, score_mod=relative_bias, aux_tensors=[table]
    )
    check("05_score_mod", "relative bias after a soft cap", out, q, k, v, causal, bias, softcap=5.0)


if __name__ == "__main__":
    main()
