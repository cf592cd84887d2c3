"""Forward attention on CPU tensors, in float64, over the tiles that the GPU kernel walks
(`tiles.py`). All heads of a batch entry take a step together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.cpu.call import CpuCall, CpuMasks
from flash_mask_cute.cpu.splits import RowCuts, StreamKCuts
from flash_mask_cute.cpu.tiles import (
    NEG_INF,
    SequenceWalk,
    Tile,
    from_rows,
    heads_in_tile,
    sequence_walks,
)
from flash_mask_cute.mods.on_cpu import eval_score_mod


def flash_attn_fwd_cpu(call: CpuCall) -> None:
    """Write `out` and, if they are among the tensors, `lse`, `lse_low` and `max_scores`.

    Shapes and values are those of `interface._flash_attn_fwd`. Rows past seqused_q are not written.
    Raises NotImplementedError, TypeError, ValueError: as `eval_mask_mod`."""
    x, tiles = call.tensors, call.tiles
    assert x.out is not None
    walks = list(sequence_walks(call))
    cuts: RowCuts | StreamKCuts | None = None
    if tiles.split is not None:
        heads = x.q.shape[-2] // tiles.pack_gqa
        if tiles.split == "rows":
            cuts = RowCuts(walks, heads, tiles.num_splits)
        else:
            cuts = StreamKCuts(walks, heads, tiles.num_splits, tiles.tile_m)
    targets = [None if y is None else y.mT for y in (x.lse, x.lse_low, x.max_scores)]
    for number, walk in enumerate(walks):
        cuts_of = None if cuts is None else partial(cuts.of, number)
        sequence_out, *row_values = _attend_sequence(call, walk, cuts_of)
        x.out[walk.slot_q] = from_rows(sequence_out, tiles.pack_gqa).to(x.out.dtype)
        for target, values in zip(targets, row_values, strict=True):
            if target is not None:
                target[walk.slot_q] = from_rows(values, tiles.pack_gqa).to(target.dtype)


def _attend_sequence(
    call: CpuCall, walk: SequenceWalk, cuts: Callable[[int], Mapping[int, Tensor]] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Out of one batch entry and, of its rows, lse, its rounding error in the dtype of the call's
    lse, and the largest score. cuts: `RowCuts.of` of the sequence."""
    tensors = call.tensors
    q, sink = walk.rows_of_q(tensors.q), walk.rows_of_sink(tensors.learnable_sink)
    k, v = walk.rows_of_k(tensors.k), walk.rows_of_k(tensors.v)
    lse_dtype = torch.float32 if tensors.lse is None else tensors.lse.dtype
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full(q.shape[:-1], NEG_INF)
    low = q.new_zeros(q.shape[:-1])
    largest = torch.full_like(lse, NEG_INF)
    for m_block in range(walk.num_m_blocks):
        rows = walk.rows(m_block)
        sink_of_rows = None if sink is None else sink[..., rows]
        softmax = _OnlineSoftmax(out[..., rows, :])
        splits = _Splits(softmax, sink_of_rows)
        begins = {} if cuts is None else cuts(m_block)
        for n_block in walk.n_blocks(m_block):
            if n_block in begins:
                splits.end(begins[n_block].view(q.shape[:2]))
            keys = walk.keys(n_block)
            tile = walk.tile(m_block, n_block)
            heads, visible = walk.visible(tile)
            if heads.any():
                scores = score_tile(q[..., rows, :], k[..., keys, :], tile, heads, walk, call.masks)
                scores.masked_fill_(~visible, NEG_INF)
                softmax.add(scores, v[..., keys, :])
        result = splits.combined()
        out[..., rows, :] = result.out
        lse[..., rows], low[..., rows] = result.lse_and_low(lse_dtype)
        largest[..., rows] = softmax.row_max
    return out, lse, low, largest


def score_tile(
    q: Tensor, k: Tensor, tile: Tile, heads: Tensor, walk: SequenceWalk, masks: CpuMasks
) -> Tensor:
    """Scores (heads_kv, lanes, rows, keys) of a tile, modified in these heads, before masking."""
    scores = walk.capped_scores(q, k)
    if masks.score_mod is not None:
        for of_head in heads_in_tile(tile, heads):
            part = of_head.part(scores)
            place = walk.batch_idx, of_head.head_idx, of_head.q_idx, of_head.k_idx
            part.copy_(eval_score_mod(masks.score_mod, part, masks.aux_tensors, *place))
    return scores


class _Result(NamedTuple):
    """Rows of the output, and their LSE as the sum of two numbers: the largest score, and the
    logarithm of the sum of exponentials relative to it, which would be lost beside 1e17."""

    out: Tensor
    largest: Tensor
    log_total: Tensor

    def lse_and_low(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """low is the rounding error of lse in dtype, 0 where lse is -inf."""
        is_empty = self.largest == NEG_INF
        lse = (self.largest + self.log_total).masked_fill(is_empty, NEG_INF)
        return lse, ((self.largest - lse.to(dtype)) + self.log_total).masked_fill(is_empty, 0.0)


class _Splits:
    """Sums of the rows of a query tile, split by split. sink: which the first split adds."""

    def __init__(self, softmax: _OnlineSoftmax, sink: Tensor | None) -> None:
        self._softmax = softmax
        self._sink = None if sink is None else sink.expand(softmax.row_max.shape).clone()
        self._ended: list[_Result] = []

    def end(self, heads: Tensor) -> None:
        """End the splits of some heads, Boolean (heads_kv, lanes), and begin others."""
        result = self._softmax.finalize(self._sink)
        largest = result.largest.masked_fill(~heads[..., None], NEG_INF)
        self._ended.append(result._replace(largest=largest))
        if self._sink is not None:
            self._sink[heads] = NEG_INF
        self._softmax.clear(heads)

    def combined(self) -> _Result:
        last = self._softmax.finalize(self._sink)
        if not self._ended:
            return last
        splits = zip(*self._ended, last, strict=True)
        outs, largest_of_each, log_totals = (torch.stack(tensors) for tensors in splits)
        largest = largest_of_each.amax(dim=0)
        weights = torch.exp((largest_of_each - _finite(largest)) + log_totals)
        total = weights.sum(dim=0)
        weights = weights / total.masked_fill(largest == NEG_INF, 1.0)
        weights = weights[..., None]
        # what counts for nothing may hold infinities
        out = (weights * torch.where(weights > 0, outs, 0.0)).sum(dim=0)
        return _Result(out, largest, torch.log(total))


class _OnlineSoftmax:
    """Running maximum, sum and output of the rows of a query tile. Hidden scores are -inf."""

    def __init__(self, out: Tensor) -> None:
        self.acc = torch.zeros_like(out)
        self.row_max = out.new_full(out.shape[:-1], NEG_INF)
        self.row_sum = out.new_zeros(out.shape[:-1])

    def add(self, scores: Tensor, v: Tensor) -> None:
        new_max = torch.maximum(self.row_max, scores.amax(dim=-1))
        # while a row has seen nothing, any finite reference makes its exponentials 0 instead of NaN
        reference = _finite(new_max)
        rescale = torch.exp(self.row_max - reference)
        probabilities = torch.exp(scores - reference[..., None])
        self.row_max = new_max
        self.row_sum = self.row_sum * rescale + probabilities.sum(dim=-1)
        self.acc = self.acc * rescale[..., None] + probabilities @ v

    def clear(self, heads: Tensor) -> None:
        """Reset some heads."""
        self.acc[heads] = 0.0
        self.row_max[heads] = NEG_INF
        self.row_sum[heads] = 0.0

    def finalize(self, sink: Tensor | None) -> _Result:
        """A sink is one more term of the denominator, without a value row."""
        largest, total, factor = self.row_max, self.row_sum, torch.ones_like(self.row_sum)
        if sink is not None:
            largest = torch.maximum(self.row_max, sink)
            reference = _finite(largest)
            factor = torch.exp(self.row_max - reference)
            total = total * factor + torch.exp(sink - reference)
        out = self.acc * factor[..., None] / total[..., None]
        out = out.masked_fill(self.row_sum[..., None] == 0, 0.0)
        return _Result(out, largest, torch.log(total))


def _finite(largest: Tensor) -> Tensor:
    """What exponents are relative to, also if nothing was seen."""
    return largest.masked_fill(largest == NEG_INF, 0.0)
