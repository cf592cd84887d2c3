"""Statistics of P on CPU tensors, in float64, over the tiles that a forward walks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flash_mask_cute.cpu.call import CpuCall
from flash_mask_cute.cpu.forward import score_tile
from flash_mask_cute.cpu.tiles import NEG_INF, SequenceWalk, Tile, from_rows, sequence_walks


def statistics_cpu(
    call: CpuCall, lse: Tensor, sums: Mapping[str, Tensor], block_size: tuple[int, int]
) -> None:
    """Add to `sums`, by name, float64 zeros.

    key_sums is (batch, heads_kv, keys), or (heads_kv, keys) of packed keys; entropy (1, ...) of a
    tensor like lse, which is that of the forward; block_sums and block_maxima (batch, heads_kv,
    query blocks, key blocks), with a batch of 1 where each row of packed queries is a block.
    """
    x, masks = call.tensors, call.masks
    for walk in sequence_walks(call):
        q, k, bias = walk.rows_of_q(x.q), walk.rows_of_k(x.k), walk.rows_of_q(lse.mT)
        bias = bias.masked_fill(bias == NEG_INF, 0.0)[..., None]
        for m_block in range(walk.num_m_blocks):
            rows = walk.rows(m_block)
            for n_block in walk.n_blocks(m_block):
                tile, keys = walk.tile(m_block, n_block), walk.keys(n_block)
                heads, visible = walk.visible(tile)
                if heads.any():
                    scores = score_tile(q[..., rows, :], k[..., keys, :], tile, heads, walk, masks)
                    log_p = (scores - bias[..., rows, :]).masked_fill_(~visible, NEG_INF)
                    _add_tile(log_p, walk, tile, sums, block_size)


def _add_tile(
    log_p: Tensor, walk: SequenceWalk, tile: Tile, sums: Mapping[str, Tensor],
    block_size: tuple[int, int],
) -> None:  # fmt: skip
    """log_p: (heads_kv, lanes, rows, keys) of a tile."""
    p, queries = log_p.exp(), slice(tile.queries.start, tile.queries.stop)
    if "entropy" in sums:
        # 0 times -inf would be NaN
        of_rows = (p * log_p.clamp(min=-1e4)).sum(-1)
        sums["entropy"][0].mT[walk.slot_q][queries] -= from_rows(of_rows, tile.pack)
    # (queries, heads_kv, heads of a group, keys)
    p = from_rows(p, tile.pack).unflatten(1, (walk.heads_kv, -1))
    if "key_sums" in sums:
        keys = slice(tile.keys.start, tile.keys.stop)
        sums["key_sums"].mT[walk.slot_k][keys] += p.sum((0, 2)).mT
    (m, n), is_packed = block_size, isinstance(walk.slot_q, slice)
    key_blocks = torch.arange(tile.keys.start, tile.keys.stop, device="cpu") // n
    blocks = torch.arange(tile.queries.start, tile.queries.stop, device="cpu") // m
    for name, op in (("block_sums", "sum"), ("block_maxima", "amax")):
        if name in sums:
            by_block = sums[name].transpose(1, 2)[0 if is_packed and m == 1 else walk.batch_idx]
            of_sequence = by_block[walk.slot_q] if is_packed and m == 1 else by_block
            of_group = p.sum(2) if op == "sum" else p.amax(2)
            of_keys = p.new_zeros((*of_group.shape[:2], by_block.shape[-1]))
            of_keys.scatter_reduce_(2, key_blocks.expand_as(of_group), of_group, op)
            of_sequence.scatter_reduce_(0, blocks[:, None, None].expand_as(of_keys), of_keys, op)
