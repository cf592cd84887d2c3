"""Causal attention: one call, checked against attention written out in float64.

    python examples/01_causal.py

Runs the kernel on a Hopper GPU where there is one, else the CPU path on a smaller problem. Ends
with an error if the result is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from dense_check import attend, check, pick_device, timed_call, within

from flash_mask_cute import flash_attn_func


def milliseconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Mean time of a warm call, launch included."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    call()
    finish()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    finish()
    return (time.perf_counter() - begin) / repeats * 1e3


def main() -> None:
    device = pick_device()
    on_gpu = device.type == "cuda"
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, d = (
        (2, 1900, 2048, 16, 4, 128) if on_gpu else (1, 300, 500, 4, 2, 64)
    )
    torch.manual_seed(0)
    q = torch.randn(batch, seqlen_q, heads_q, d, dtype=torch.bfloat16, device=device)
    k = torch.randn(batch, seqlen_k, heads_kv, d, dtype=torch.bfloat16, device=device)
    v = torch.randn_like(k)

    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)

    # the last query sits at the last key: the first one sees seqlen_k - seqlen_q + 1 keys already
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    visible = visible.tril(seqlen_k - seqlen_q)
    print(f"q {tuple(q.shape)}, k and v {tuple(k.shape)}, bfloat16, causal")
    check("01_causal", None, out, q, k, v, visible)
    _, exact_lse = attend(q.double(), k.double(), v.double(), visible)
    lse_error = (lse.double() - exact_lse).abs().max().item()
    within("01_causal", "largest error of lse", lse_error, 1e-3)

    warm = milliseconds(lambda: flash_attn_func(q, k, v, causal=True), device, 100 if on_gpu else 3)
    print(f"{timed_call(device)}  {warm:.3f} ms")


if __name__ == "__main__":
    main()
