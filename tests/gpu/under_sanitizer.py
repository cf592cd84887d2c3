"""Small calls of both directions, for compute-sanitizer (docs/testing.md); no test by itself.

python tests/gpu/under_sanitizer.py     # once before, so that nothing is compiled under it
compute-sanitizer --tool memcheck --report-api-errors no python tests/gpu/under_sanitizer.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from torch import Tensor

from flash_mask_cute import builders, create_block_mask, flash_attn_func, flash_attn_varlen_func
from flash_mask_cute.call import plan as plan_module
from flash_mask_cute.call.mask_bits import Limits
from flash_mask_cute.utils import scalar_to_ssa

# so many heads that there are mask bits
SEQLEN_Q, SEQLEN_K, HEADS = 300, 333, 4
# documents of which two begin in slots of their own, so that they are packed
LENGTHS = [100, 0, 500, 50]


@cute.jit
def windowed(b_idx, h_idx, q_idx, kv_idx, aux_tensors):  # type: ignore[no-untyped-def]
    return (kv_idx <= q_idx) & (q_idx - kv_idx < 100)


@cute.jit
def same_document(b_idx, h_idx, q_idx, kv_idx, aux_tensors):  # type: ignore[no-untyped-def]
    return aux_tensors[0][q_idx[0]] == aux_tensors[0][kv_idx[0]]


@cute.jit
def biased(score, b_idx, h_idx, q_idx, kv_idx, aux_tensors):  # type: ignore[no-untyped-def]
    slope = scalar_to_ssa(aux_tensors[0][h_idx[0]], cutlass.Float32)
    return score + slope * (kv_idx - q_idx).to(cutlass.Float32)


@cute.jit
def by_head(b_idx, h_idx, q_idx, kv_idx, aux_tensors):  # type: ignore[no-untyped-def]
    return kv_idx <= q_idx + 50 * h_idx


def leaves(
    d: int,
    tokens: tuple[int, int],
    heads_kv: int = HEADS,
    packed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """q, k and v."""
    sizes = ((tokens[0], HEADS, d), (tokens[1], heads_kv, d), (tokens[1], heads_kv, d))
    shapes = sizes if packed else tuple((1, *size) for size in sizes)
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


def calls(d: int) -> dict[str, Callable[[], tuple[Tensor, list[Tensor]]]]:
    """Output and what it is to be differentiated by, by name."""

    def dense(heads_kv: int = HEADS, **more: Any) -> Any:
        qkv = leaves(d, (SEQLEN_Q, SEQLEN_K), heads_kv)
        return flash_attn_func(*qkv, **more), qkv

    def fp16() -> Any:
        qkv = leaves(d, (SEQLEN_Q, SEQLEN_K), dtype=torch.float16)
        return flash_attn_func(*qkv, causal=True), qkv

    def with_lse() -> Any:
        qkv = leaves(d, (SEQLEN_Q, SEQLEN_K))
        out, lse = flash_attn_func(*qkv, causal=True, return_lse=True)
        return out + lse.mT[..., None].to(out.dtype), qkv

    def columns(mask: Any, **more: Any) -> Any:
        tokens = mask.startend_row_indices.shape[2]
        qkv = leaves(d, (tokens, tokens))
        return flash_attn_func(*qkv, startend_row_indices=mask, **more), qkv

    def packed(**more: Any) -> Any:
        starts = torch.tensor([0, 100, 100, 300], dtype=torch.int32, device="cuda")
        qkv = leaves(d, (300, 300), packed=True)
        return flash_attn_varlen_func(*qkv, starts, starts, 200, 200, causal=True, **more), qkv

    def documents_by_mask_bits() -> Any:
        number = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
        qkv = leaves(d, (sum(LENGTHS), sum(LENGTHS)))
        aux = [number.int().cuda()]
        return flash_attn_func(*qkv, mask_mod=same_document, aux_tensors=aux), qkv

    def listed() -> Any:
        lists = create_block_mask(windowed, None, None, SEQLEN_Q, SEQLEN_K, device="cuda")
        return dense(mask_mod=windowed, block_sparse_tensors=lists)

    def slopes() -> Any:
        learned = torch.ones(HEADS, device="cuda", requires_grad=True)
        out, qkv = dense(score_mod=biased, aux_tensors=[learned], causal=True)
        return out, [*qkv, learned]

    on_gpu = {"device": "cuda"}
    sink = torch.zeros(HEADS, device="cuda", requires_grad=True)
    return {
        "full": dense,
        "causal": lambda: dense(causal=True),
        "causal, one KV head, fixed order": lambda: dense(1, causal=True, deterministic=True),
        "window": lambda: dense(window_size=(40, 10)),
        "soft cap and sink": lambda: dense(softcap=15.0, learnable_sink=sink),
        "packed": packed,
        "fp16": fp16,
        "a gradient by the LSE": with_lse,
        "documents, one vector": lambda: columns(builders.causal_document(LENGTHS, **on_gpu)),
        "documents, two vectors": lambda: columns(builders.document(LENGTHS, **on_gpu)),
        "two vectors": lambda: columns(builders.causal_blockwise(LENGTHS, **on_gpu)),
        "four vectors": lambda: columns(builders.global_sliding_window(300, 100, 40, **on_gpu)),
        "documents, fixed order": lambda: columns(
            builders.causal_document(LENGTHS, **on_gpu), deterministic=True
        ),
        "mask_mod, stored": lambda: dense(mask_mod=windowed),
        "mask_mod, stored, packed": lambda: packed(mask_mod=windowed),
        "mask_mod, mask bits by documents": documents_by_mask_bits,
        "mask_mod, by head": lambda: dense(mask_mod=by_head),
        "mask_mod with lists": listed,
        "score_mod with gradients of its slopes": slopes,
    }


def main() -> None:
    torch.manual_seed(0)
    plan_module.LIMITS = Limits(min_tiles_packed=0)
    for d in map(int, sys.argv[1:] or (64, 128, 256)):
        for name, call in calls(d).items():
            out, wanted = call()
            gradients = torch.autograd.grad(out, wanted, torch.randn_like(out))
            torch.cuda.synchronize()
            is_finite = all(bool(x.isfinite().all()) for x in (out, *gradients))
            sys.stdout.write(f"d={d} {name}: {'finite' if is_finite else 'NOT FINITE'}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
