"""`triangle_attention` with the arguments of cuequivariance-torch 0.13, which need not be there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.functional import flash_attn_func
from flash_mask_cute.interface import _flash_attn_fwd


def triangle_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None,
    scale: float | None = None, return_aux: bool = False, *, kv_lengths: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention of each row n of a pair representation, with one bias for all rows.

    q (B, N, H, Q, D), k and v (B, N, H, K, D): bf16 or fp16 on CUDA, also fp32 and fp64 on the CPU.
    bias (B, 1, H, Q, K): added to the scores in fp32. mask (B, N, 1, 1, K): nonzero where row n
    sees key k. kv_lengths, integers (B, N, 1, 1, 1): row n sees its first keys, so many; give it
    or mask. All come without B if q does. scale: 1 / sqrt(D) by default. Gradients: q, k, v, bias.

    A row that sees no key has output 0 and lse -inf. cuequivariance adds -1e9 to hidden scores, so
    there it is the mean of v.

    Returns:
        out, shaped like q. With return_aux, (out, lse, max): fp32 (B, N, H, Q), the natural log of
        the sums and the largest visible scores, both after scale and bias. max takes one more
        forward and has no gradient.

    Raises:
        ValueError: mask and kv_lengths are given, or a shape does not fit; the message names it.
        NotImplementedError: q is fp32 on a GPU, outside of autocast.

    Example:
        >>> import torch
        >>> from flash_mask_cute.integrations.cuequivariance import triangle_attention
        >>> q, k, v = torch.randn(3, 1, 12, 2, 12, 8)
        >>> triangle_attention(q, k, v, torch.randn(1, 1, 2, 12, 12)).shape
        torch.Size([1, 12, 2, 12, 8])
    """
    if mask is not None and kv_lengths is not None:
        raise ValueError("mask and kv_lengths are both given: pass one of them")
    if torch.is_autocast_enabled(q.device.type) and q.dtype == torch.float32:
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if q.is_cuda and q.dtype == torch.float32:
        raise NotImplementedError(
            f"q is float32 on {q.device}, and kernels take bfloat16 and float16: cast q, k and v, "
            "or call inside torch.autocast('cuda', torch.bfloat16)"
        )
    if q.dim() not in (4, 5):
        raise ValueError(f"q must have shape (B, N, H, Q, D) or (N, H, Q, D), got {tuple(q.shape)}")
    given = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "kv_lengths": kv_lengths}
    tensors = {name: x for name, x in given.items() if x is not None}
    for name, x in tensors.items():
        if x.dim() != q.dim():
            raise ValueError(f"{name} must have {q.dim()} dimensions as q, got {tuple(x.shape)}")
    if q.dim() == 4:
        tensors = {name: x[None] for name, x in tensors.items()}
    batch, rows, heads, queries, dim = tensors["q"].shape
    keys, dim_v = tensors["k"].shape[3], tensors["v"].shape[4]
    wanted = {"k": (batch, rows, heads, keys, dim), "v": (batch, rows, heads, keys, dim_v)}
    wanted |= {"bias": (batch, 1, heads, queries, keys), "mask": (batch, rows, 1, 1, keys)}
    wanted["kv_lengths"] = (batch, rows, 1, 1, 1)
    for name, shape in wanted.items():
        if name in tensors and tensors[name].shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensors[name].shape)}")
    if kv_lengths is not None:
        tensors["mask"] = torch.arange(keys, device=q.device) < tensors["kv_lengths"]
    results = [_of_entry(tensors, b, scale, return_aux) for b in range(batch)]
    joined = [x[0] if q.dim() == 4 else torch.stack(x) for x in zip(*results, strict=True)]
    return (joined[0], joined[1], joined[2]) if return_aux else joined[0]


def _of_entry(
    tensors: dict[str, Tensor], b: int, scale: float | None, return_aux: bool
) -> tuple[Tensor, ...]:
    """Results of a batch entry; its rows are the batch of a call."""
    # loads the compiler
    from flash_mask_cute.integrations import triangle_mods as mods

    q, k, v = (tensors[name][b].transpose(1, 2) for name in ("q", "k", "v"))
    aux_tensors = [tensors["bias"][b, 0].float()]
    options: dict[str, Any] = {"softmax_scale": scale, "score_mod": mods.biased}
    if "mask" in tensors:
        options["mask_mod"] = mods.shown
        aux_tensors.append(tensors["mask"][b, :, 0, 0].bool())
    options["aux_tensors"] = aux_tensors
    out, lse = flash_attn_func(q, k, v, return_lse=True, **options)
    if not return_aux:
        return (out.transpose(1, 2),)
    largest = torch.full_like(lse, -torch.inf)
    _flash_attn_fwd(q.detach(), k.detach(), v.detach(), max_scores=largest, **options)
    return out.transpose(1, 2), lse, largest
