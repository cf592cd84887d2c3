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
from torch import Tensor

from flash_mask_cute.interface import _flash_attn_fwd


def pick_device() -> torch.device:
    """A Hopper GPU if torch sees one, else the CPU; says which."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        print(f"device: {torch.cuda.get_device_name()}")
        return torch.device("cuda")
    print("device: CPU (no Hopper GPU here), in float64 over the tiles that the kernel would visit")
    return torch.device("cpu")


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """O and LSE of (batch, seqlen, heads, d) tensors, in their dtype, every score written out.

    The last query sits at the last key: with fewer queries than keys, the first query already sees
    seqlen_k - seqlen_q + 1 of them.
    """
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    hidden = hidden.triu(1 + k.shape[2] - q.shape[2])
    scores = scores.masked_fill(hidden, float("-inf"))
    probabilities = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return (probabilities.to(q.dtype) @ v).transpose(1, 2), scores.logsumexp(-1)


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

    out, lse = _flash_attn_fwd(q, k, v, causal=True)
    assert lse is not None  # it is on request: return_lse=True, the default

    exact_out, exact_lse = causal_attention(q.double(), k.double(), v.double())
    eager_out, _ = causal_attention(q, k, v)
    error = (out.double() - exact_out).abs().max().item()
    eager_error = (eager_out.double() - exact_out).abs().max().item()
    lse_error = (lse.double() - exact_lse).abs().max().item()
    warm = milliseconds(lambda: _flash_attn_fwd(q, k, v, causal=True), device, 100 if on_gpu else 3)
    print(f"q {tuple(q.shape)}, k and v {tuple(k.shape)}, bfloat16, causal")
    print(f"largest error of out {error:.2e} (plain bfloat16 torch: {eager_error:.2e})")
    print(f"largest error of lse {lse_error:.2e}")
    print(f"time of a warm call  {warm:.3f} ms")
    if not (error <= 2 * eager_error + torch.finfo(q.dtype).eps and lse_error <= 1e-3):
        raise SystemExit("01_causal: wrong result")


if __name__ == "__main__":
    main()
