"""Packed documents: sequences of different lengths in one tensor, without padding.

    python examples/02_varlen.py

Each document attends causally to itself, over a sliding window, and is checked against attention
written out in float64 for that document alone. Runs on a Hopper GPU where there is one, else on the
CPU. Ends with an error if the result is wrong.
"""

from __future__ import annotations

import time
from itertools import accumulate, pairwise

import torch
from dense_check import attend, compare, pick_device, timed_call
from torch import Tensor

from flash_mask_cute import flash_attn_varlen_func

LENGTHS_GPU = (1, 4000, 129, 2048, 511, 7, 1496)
LENGTHS_CPU = (1, 400, 129, 63)


def attend_document(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """O of one document, (seqlen, heads, d): each token sees itself and `window` before it."""
    row = torch.arange(q.shape[0], device=q.device)
    distance = row[:, None] - row
    out, _ = attend(q[None], k[None], v[None], (distance >= 0) & (distance <= window))
    return out[0]


def main() -> None:
    device = pick_device()
    on_gpu = device.type == "cuda"
    lengths = LENGTHS_GPU if on_gpu else LENGTHS_CPU
    heads_q, heads_kv, d, window = (16, 4, 128, 1000) if on_gpu else (4, 2, 64, 100)
    starts = (0, *accumulate(lengths))
    torch.manual_seed(0)
    q = torch.randn(starts[-1], heads_q, d, dtype=torch.bfloat16, device=device)
    k = torch.randn(starts[-1], heads_kv, d, dtype=torch.bfloat16, device=device)
    v = torch.randn_like(k)
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)

    def forward() -> Tensor:
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max(lengths),
            max_seqlen_k=max(lengths),
            causal=True,
            window_size=(window, None),
        )

    out = forward()
    exact, eager = torch.empty_like(q, dtype=torch.float64), torch.empty_like(q)
    for first, end in pairwise(starts):
        q_i, k_i, v_i = (x[first:end] for x in (q, k, v))
        exact[first:end] = attend_document(q_i.double(), k_i.double(), v_i.double(), window)
        eager[first:end] = attend_document(q_i, k_i, v_i, window)
    print(f"{len(lengths)} documents of {lengths} tokens, {heads_q} query and {heads_kv} KV heads")
    print(f"causal, window of {window} tokens, head_dim {d}, bfloat16")
    compare("02_varlen", None, out, exact, eager)

    repeats = 100 if on_gpu else 3
    begin = time.perf_counter()
    for _ in range(repeats):
        forward()
    if on_gpu:
        torch.cuda.synchronize()
    warm = (time.perf_counter() - begin) / repeats * 1e3
    print(f"{timed_call(device)}  {warm:.3f} ms")


if __name__ == "__main__":
    main()
