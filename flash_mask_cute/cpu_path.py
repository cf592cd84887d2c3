"""Forward attention on CPU tensors: the tiles that the GPU kernel walks, one by one, in float64.

The walk is the kernel's own (`BlockInfo`), and a tile that it leaves out is not looked at here
either, so a wrong walk gives a wrong answer without a GPU. The walk does not depend on the head:
all heads of a batch entry take a step together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.block_info import BlockInfo
from flash_mask_cute.masks.band import Band
from flash_mask_cute.seqlen_info import SeqlenInfoQK

NEG_INF = float("-inf")


def flash_attn_fwd_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    learnable_sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    seqlen_q: int,
    seqlen_k: int,
    pack_gqa: int,
    tile_m: int,
    tile_n: int,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Write `out` and, if given, `lse`, from arguments that the caller has validated.

    q, k, v: (batch, seqlen, heads, d), or (total, heads, d) with the cu_seqlens of that side; any
    floating dtype. window_*: tokens, None for an open side, causal already in window_right.
    pack_gqa: how many query heads of a KV head share a tile; row r of such a tile's heads is then
    query r // pack_gqa of head r % pack_gqa. seqlen_*: the length of a dense side.
    out is laid out like q; lse is float32, (batch, heads_q, seqlen_q) or varlen (heads_q, total_q),
    natural log. A row that sees nothing gets 0 and -inf (the sink, if there is one). Rows past
    seqused_q are not written.
    """
    block_info = BlockInfo(
        tile_m,
        tile_n,
        is_local=True,
        window_size_left=window_left,
        window_size_right=window_right,
        qhead_per_kvhead_packgqa=pack_gqa,
    )
    lengths = [
        None if x is None else x.tolist()
        for x in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    ]
    lse_by_row = None if lse is None else lse.transpose(-1, -2)
    for batch_idx in range(q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1):
        seqlen_info = SeqlenInfoQK.create(batch_idx, seqlen_q, seqlen_k, *lengths)
        slot_q = _slot(batch_idx, seqlen_info.offset_q, seqlen_info.seqlen_q, cu_seqlens_q)
        slot_k = _slot(batch_idx, seqlen_info.offset_k, seqlen_info.seqlen_k, cu_seqlens_k)
        sequence_out, sequence_lse = _attend_sequence(
            _to_rows(q[slot_q].double(), k.shape[-2], pack_gqa),
            _to_rows(k[slot_k].double(), k.shape[-2], 1),
            _to_rows(v[slot_k].double(), k.shape[-2], 1),
            _sink_of_rows(learnable_sink, seqlen_info.seqlen_q, k.shape[-2], pack_gqa),
            block_info,
            seqlen_info,
            softmax_scale,
            softcap,
        )
        out[slot_q] = _from_rows(sequence_out, pack_gqa).to(out.dtype)
        if lse_by_row is not None:
            lse_by_row[slot_q] = _from_rows(sequence_lse, pack_gqa).to(lse_by_row.dtype)


def _attend_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    block_info: BlockInfo,
    seqlen_info: SeqlenInfoQK,
    softmax_scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """One batch entry: q (heads_kv, lanes, rows, d), k and v (heads_kv, 1, seqlen_k, .), sink
    (heads_kv, lanes, rows). Returns out and lse of q's rows."""
    tile_m, tile_n = block_info.tile_m, block_info.tile_n
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full(q.shape[:-1], NEG_INF)
    band = block_info.band(seqlen_info)
    num_rows = q.shape[-2]
    for m_block in range(-(-num_rows // tile_m)):
        rows = slice(m_block * tile_m, min((m_block + 1) * tile_m, num_rows))
        q_idx = torch.arange(rows.start, rows.stop)[:, None] // block_info.qhead_per_kvhead_packgqa
        softmax = _OnlineSoftmax(out[..., rows, :])
        for n_block in range(*block_info.get_n_block_min_max(seqlen_info, m_block)):
            keys = slice(n_block * tile_n, min((n_block + 1) * tile_n, seqlen_info.seqlen_k))
            k_idx = torch.arange(keys.start, keys.stop)[None, :]
            scores = _score_tile(q[..., rows, :], k[..., keys, :], softmax_scale, softcap)
            scores.masked_fill_(~_visible(band, q_idx, k_idx), NEG_INF)
            softmax.add(scores, v[..., keys, :])
        out[..., rows, :], lse[..., rows] = softmax.finalize(
            None if sink is None else sink[..., rows]
        )
    return out, lse


def _score_tile(q: Tensor, k: Tensor, softmax_scale: float, softcap: float) -> Tensor:
    """Scores of one tile, before masking."""
    scores = q @ k.mT * softmax_scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _visible(band: Band, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    """Which elements of one tile count, from positions q_idx (rows, 1) and k_idx (1, keys)."""
    first, end = band.k_range(q_idx)
    return (first <= k_idx) & (k_idx < end)


class _OnlineSoftmax:
    """Maximum, sum and output so far of the rows of a query tile. Hidden scores are -inf."""

    def __init__(self, out: Tensor) -> None:
        self.acc = torch.zeros_like(out)
        self.row_max = out.new_full(out.shape[:-1], NEG_INF)
        self.row_sum = out.new_zeros(out.shape[:-1])

    def add(self, scores: Tensor, v: Tensor) -> None:
        new_max = torch.maximum(self.row_max, scores.amax(dim=-1))
        # while a row has seen nothing, any finite reference makes its exponentials 0 instead of NaN
        reference = new_max.masked_fill(new_max == NEG_INF, 0.0)
        rescale = torch.exp(self.row_max - reference)
        probabilities = torch.exp(scores - reference[..., None])
        self.row_max = new_max
        self.row_sum = self.row_sum * rescale + probabilities.sum(dim=-1)
        self.acc = self.acc * rescale[..., None] + probabilities @ v

    def finalize(self, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse). A sink is one more term of the denominator, without a value row."""
        lse = self.row_max + torch.log(self.row_sum)
        if sink is not None:
            lse = torch.logaddexp(lse, sink)
        factor = torch.exp(self.row_max - lse).masked_fill(self.row_sum == 0, 0.0)
        return self.acc * factor[..., None], lse


def _slot(batch_idx: int, offset: int, length: int, cu_seqlens: Tensor | None) -> Any:
    """Index of the used tokens of a batch entry in a tensor of either layout."""
    return (batch_idx, slice(length)) if cu_seqlens is None else slice(offset, offset + length)


def _to_rows(x: Tensor, heads_kv: int, pack: int) -> Tensor:
    """(seqlen, heads, ...) to (heads_kv, lanes, rows, ...): heads of a KV head are interleaved as
    rows, `pack` at a time; each such set of heads is a lane."""
    lanes = x.shape[1] // (heads_kv * pack)
    by_head = x.reshape(x.shape[0], heads_kv, lanes, pack, *x.shape[2:])
    return by_head.movedim(0, 2).flatten(2, 3)


def _from_rows(x: Tensor, pack: int) -> Tensor:
    """The inverse of `_to_rows`."""
    by_head = x.unflatten(2, (x.shape[2] // pack, pack))
    return by_head.movedim(2, 0).flatten(1, 3)


def _sink_of_rows(sink: Tensor | None, seqlen_q: int, heads_kv: int, pack: int) -> Tensor | None:
    return None if sink is None else _to_rows(sink.double().expand(seqlen_q, -1), heads_kv, pack)
