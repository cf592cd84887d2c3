"""Statistics of P on CPU tensors, in float64, over the tiles that a forward walks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from flash_mask_cute.cpu.call import CpuCall
from flash_mask_cute.cpu.forward import modify_tile, score_tile
from flash_mask_cute.cpu.tiles import NEG_INF, SequenceWalk, Tile, from_rows, sequence_walks


def statistics_cpu(
    call: CpuCall, lse: Tensor, sums: Mapping[str, Tensor], block_size: tuple[int, int]
) -> None:
    """Add to `sums`, by name: float64 zeros in the layouts of the operands.

    key_sums is like k without head_dim, entropy like q without head_dim. block_sums and
    block_maxima are like q, with heads_kv and key blocks in place of heads_q and head_dim; with
    more than one query in a block they are (batch, query blocks, heads_kv, key blocks). lse is that
    of the forward.
    """
    x, masks = call.tensors, call.masks
    for walk in sequence_walks(call):
        q, k, bias = walk.rows_of_q(x.q), walk.rows_of_k(x.k), walk.rows_of_q(lse.mT)
        bias = bias.masked_fill(bias == NEG_INF, 0.0)[..., None]
        modify = None
        if masks.score_mod is not None:
            modify = partial(modify_tile, masks.score_mod, masks.aux_tensors, walk.batch_idx)
        for m_block in range(walk.num_m_blocks):
            rows = walk.rows(m_block)
            for n_block in walk.n_blocks(m_block):
                tile, keys = walk.tile(m_block, n_block), walk.keys(n_block)
                heads, visible = walk.visible(tile)
                if heads.any():
                    scores = score_tile(q[..., rows, :], k[..., keys, :], tile, heads, walk, modify)
                    log_p = (scores - bias[..., rows, :]).masked_fill_(~visible, NEG_INF)
                    _add_tile(log_p, walk, tile, sums, block_size)


def _add_tile(
    log_p: Tensor,
    walk: SequenceWalk,
    tile: Tile,
    sums: Mapping[str, Tensor],
    block_size: tuple[int, int],
) -> None:
    """log_p: (heads_kv, lanes, rows, keys) of a tile."""
    p, queries = log_p.exp(), slice(tile.queries.start, tile.queries.stop)
    if "entropy" in sums:
        # 0 times -inf would be NaN
        of_rows = (p * log_p.clamp(min=-1e4)).sum(-1)
        sums["entropy"][walk.slot_q][queries] -= from_rows(of_rows, tile.pack)
    # (queries, heads_kv, heads of a group, keys)
    p = from_rows(p, tile.pack).unflatten(1, (walk.heads_kv, -1))
    if "key_sums" in sums:
        keys = slice(tile.keys.start, tile.keys.stop)
        sums["key_sums"][walk.slot_k][keys] += p.sum((0, 2)).mT
    queries_of_block, keys_of_block = block_size
    key_blocks = torch.arange(tile.keys.start, tile.keys.stop, device="cpu") // keys_of_block
    for name, op, of_group in (
        ("block_sums", "sum", p.sum(2)),
        ("block_maxima", "amax", p.amax(2)),
    ):
        if name not in sums:
            continue
        target = sums[name]
        by_block = p.new_zeros((*of_group.shape[:2], target.shape[-1]))
        index = key_blocks.expand_as(of_group)
        by_block.scatter_reduce_(2, index, of_group, op)
        of_sequence = target[walk.slot_q][queries]
        blocks = torch.arange(len(tile.queries), device="cpu")
        if queries_of_block > 1:
            of_sequence = target[walk.batch_idx]
            blocks = (blocks + tile.queries.start) // queries_of_block
        of_sequence.scatter_reduce_(0, blocks[:, None, None].expand_as(by_block), by_block, op)
