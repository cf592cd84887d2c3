"""The kernels of the backward without the host path, compiled once, on tensors of your own.

    python examples/10_native_backward.py

Three kernels run one after the other: `BwdPreprocess` writes LSE and delta of each row block,
`FlashAttentionBackwardSm90` dK, dV and the sums of dQ, `BwdPostprocess` turns these into dQ. As in
07_native_api.py nothing is validated, and the scratch tensors between the kernels are the caller's.
Needs a Hopper GPU; elsewhere it says so. Ends with an error if a gradient is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from dense_check import attend, compare, has_hopper
from torch import Tensor

from flash_mask_cute.flash_bwd import BwdPostprocess, BwdPreprocess, FlashAttentionBackwardSm90
from flash_mask_cute.interface import _flash_attn_fwd

DTYPE = cutlass.BFloat16
TILE_M = 64


class Kernels(NamedTuple):
    """The compiled functions, and how many fp32 sums of dQ a row of queries has."""

    before: Callable[..., Any]
    main: Callable[..., Any]
    after: Callable[..., Any]
    sums_per_row: int


def rows(d: int) -> Any:
    """Stands for (batch, seqlen, heads, d) in 16 bits, rows contiguous, all else free."""
    extents = tuple(cute.sym_int() for _ in range(3))
    strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
    return make_fake_tensor(DTYPE, (*extents, d), (*strides, 1), assumed_align=16)


def contiguous(dtype: type[cutlass.Numeric], rank: int, *inner: int) -> Any:
    """Stands for a contiguous tensor of `rank` free extents, and those that are given."""
    strides = [1]
    for extent in reversed(inner):
        strides.insert(0, strides[0] * extent)
    extents = tuple(cute.sym_int() for _ in range(rank))
    free = tuple(cute.sym_int64(divisibility=strides[0]) for _ in range(rank - 1))
    align = 16 if inner else 4
    return make_fake_tensor(dtype, (*extents, *inner), (*free, *strides), assumed_align=align)


def compile_kernels(d: int) -> Kernels:
    """Causal attention with heads of d columns, of q and of v; queries in blocks of TILE_M."""
    main = FlashAttentionBackwardSm90(DTYPE, d, d, is_causal=True, tile_m=TILE_M)
    sums_per_row = main.traits.tile_d
    by_row = contiguous(cutlass.Float32, 3)
    stats = contiguous(cutlass.Float32, 2, 2 * TILE_M)
    sums = contiguous(cutlass.Float32, 2, TILE_M * sums_per_row)
    semaphores = contiguous(cutlass.Int32, 2)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    scale = cutlass.Float32(1.0)

    def build(kernel: Any, *given: Any) -> Callable[..., Any]:
        return cute.compile(kernel, *given, options="--enable-tvm-ffi")

    before = (
        rows(d),
        rows(d),
        by_row,
        None,
        stats,
        None,
        semaphores,
        None,
        None,
        stream,
        None,
        None,
    )
    operands = [rows(d) for _ in range(4)]
    gradients = [rows(d) for _ in range(2)]
    return Kernels(
        build(BwdPreprocess(DTYPE, d, TILE_M), *before),
        build(main, *operands, stats, sums, semaphores, *gradients, scale, stream),
        build(
            BwdPostprocess(DTYPE, d, TILE_M, sums_per_row),
            *(sums, semaphores, rows(d), scale, stream, None, None),
        ),
        sums_per_row,
    )


def backward(
    kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv. Operands as in a causal `_flash_attn_fwd`, whose out and lse these are."""
    batch, seqlen_q, heads_q, d = q.shape
    row_blocks = batch * -(-seqlen_q // TILE_M)
    stats = lse.new_empty(heads_q, row_blocks, 2 * TILE_M)
    sums = lse.new_empty(heads_q, row_blocks, TILE_M * kernels.sums_per_row)
    semaphores = lse.new_empty(heads_q, row_blocks, dtype=torch.int32)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    scale = d**-0.5
    kernels.before(out, dout, lse, None, stats, None, semaphores, None, None, None, None)
    kernels.main(q, k, v, dout, stats, sums, semaphores, dk, dv, scale)
    kernels.after(sums, semaphores, dq, scale, None, None)
    return dq, dk, dv


def written_out(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """dq, dk, dv by autograd through causal attention in dtype."""
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    out, _ = attend(q, k, v, visible)
    return torch.autograd.grad(out, (q, k, v), dout.to(dtype))


def main() -> None:
    if not has_hopper():
        print("10_native_backward needs a Hopper GPU, and there is none here: nothing was run")
        return
    torch.manual_seed(0)
    d = 128
    kernels = compile_kernels(d)
    # other sizes and groups of heads: the same compiled kernels
    for batch, seqlen, heads_q, heads_kv in ((2, 1000, 4, 4), (1, 2500, 8, 2)):
        shapes = ((batch, seqlen, heads, d) for heads in (heads_q, heads_kv, heads_kv, heads_q))
        q, k, v, dout = (torch.randn(s, dtype=torch.bfloat16, device="cuda") for s in shapes)
        out, lse = _flash_attn_fwd(q, k, v, causal=True, return_lse=True)
        assert lse is not None
        found = backward(kernels, q, k, v, out, lse, dout)
        print(f"q {tuple(q.shape)}, {heads_kv} KV heads, bfloat16, causal")
        exact, eager = (written_out(q, k, v, dout, x) for x in (torch.float64, q.dtype))
        for name, *gradients in zip(("dq", "dk", "dv"), found, exact, eager, strict=True):
            compare("10_native_backward", name, *gradients)


if __name__ == "__main__":
    main()
