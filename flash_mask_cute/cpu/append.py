"""Writes new keys and values after those of a cache, on CPU tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.limits import LARGEST_CODE
from flash_mask_cute.seqlen_info import SeqlenInfoQK, SeqlenInfoQKNewK


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of x (rows, heads, d) at positions (rows,), in float32 or wider.

    cos, sin (positions, pairs): of the first 2 * pairs elements, which are rotated as neighbours
    (interleaved) or as halves; the others stay. Positions lie in the tables.
    """
    pairs = cos.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    turned, rest = x[..., : 2 * pairs].to(wide), x[..., 2 * pairs :]
    c, s = (t[positions.long(), None].to(wide) for t in (cos, sin))
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :pairs], turned[..., pairs:]
        turned = torch.cat((a * c - b * s, a * s + b * c), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def lengths_with_new(
    cache_seqlens: list[int],
    seqlen_new: int,
    cu_seqlens_k_new: Tensor | None,
    leftpad: Tensor | None,
) -> list[SeqlenInfoQKNewK]:
    """Lengths of each sequence, as in the kernel. seqlen_new: of rows that are not packed."""
    return [
        SeqlenInfoQKNewK.create(
            b, SeqlenInfoQK(0, 0, 0, length), seqlen_new, cu_seqlens_k_new, leftpad
        )
        for b, length in enumerate(cache_seqlens)
    ]


class Slots(NamedTuple):
    """Where the new rows of a sequence go: entries of the cache, or pages, and rows of these."""

    entries: Tensor
    rows: Tensor


def slots_of(
    infos: list[SeqlenInfoQKNewK],
    entry_rows: int,
    batch_idx: Tensor | None,
    page_table: Tensor | None,
) -> list[Slots]:
    """The slots of each sequence. entry_rows: rows of an entry, or of a page."""
    slots = []
    for b, info in enumerate(infos):
        target = info.offset_k + info.seqlen_k_og + torch.arange(info.seqlen_k_new, device="cpu")
        of_sequence = b if batch_idx is None else int(batch_idx[b])
        if page_table is None:
            entry = torch.full_like(target, of_sequence)
        else:
            entry = page_table[of_sequence, target // entry_rows].long()
            target = target % entry_rows
        slots.append(Slots(entry, target))
    return slots


def append_rows(
    new: Tensor,
    cache: Tensor,
    infos: list[SeqlenInfoQKNewK],
    slots: list[Slots],
    descale: Tensor | None = None,
) -> None:
    """Write new rows (batch, row, heads, d), or (row, heads, d) where packed, into a cache.

    descale: the scales of a cache in fp8, (batch, heads), or (entries, rows, heads), where those
    of the new rows are written; None: 1.
    """
    for b, (info, slot) in enumerate(zip(infos, slots, strict=True)):
        of_sequence = slice(info.offset_k_new, info.offset_k_new + info.seqlen_k_new)
        rows = new[b] if new.dim() == 4 else new[of_sequence]
        if cache.dtype != new.dtype:
            scales = None if descale is None else descale[b]
            if descale is not None and descale.dim() == 3:
                scales = row_scales(rows)
                descale[slot.entries, slot.rows] = scales
            rows = quantised(rows, scales)
        cache[slot.entries, slot.rows] = rows


def row_scales(rows: Tensor) -> Tensor:
    """The scale of each (row, head), with which its largest number has the largest code; 1 for a
    row of zeros. NaN is passed over."""
    largest = rows.float().abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1)
    scales = largest / LARGEST_CODE
    return torch.where(scales > 0, scales, 1.0)


def quantised(rows: Tensor, scales: Tensor | None) -> Tensor:
    """Codes of float8_e4m3fn of rows / scales: nearest, ties to even, saturating. NaN stays NaN.
    scales: (heads,) or (rows, heads)."""
    wide = rows.float()
    if scales is not None:
        wide = wide / scales[..., None]
    return wide.clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.float8_e4m3fn)
