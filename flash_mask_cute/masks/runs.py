"""Runs of hidden queries of each key, and the vectors of column intervals that store them.

A run is a range [start, end) of rows, as two tensors (batch, heads, seqlen_k).
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_mask_cute.mask_prep.documents import filled
from flash_mask_cute.rules.intervals import Intervals

Runs: TypeAlias = tuple[Tensor, Tensor]
MAX_INT32 = 2**31 - 1


class HiddenRuns(NamedTuple):
    """How many separate runs hide each key, and the first and the last of them.

    Without a run they go from the last row to 0.
    """

    num_runs: Tensor
    first: Runs
    last: Runs


def hidden_runs(masks: list[tuple[Tensor, bool]], num_rows: int) -> HiddenRuns:
    """The runs of rows [0, num_rows) that at least one mask hides a key from.

    masks: startend_row_indices of one shape but for n, and whether it is causal. What causal
    masking hides in addition does not count.
    """
    edges: list[Tensor] = []
    for indices, causal in masks:
        values = indices.unbind(3)
        for start_end in Intervals(len(values), causal).hidden_rows(values, num_rows):
            edges += (filled(x, values[0]) for x in start_end)
    edges = [x.clamp(0, num_rows) for x in edges]
    starts, ends = torch.stack(edges[::2], dim=-1), torch.stack(edges[1::2], dim=-1)
    # empty ranges go last, and end nowhere
    is_empty = starts >= ends
    starts, order = starts.masked_fill(is_empty, num_rows).sort(dim=-1)
    # the largest end up to each range
    ends = ends.masked_fill(is_empty, 0).gather(-1, order).cummax(dim=-1).values
    before = F.pad(ends, (1, 0), value=-1)[..., :-1]
    is_new = (starts > before) & (ends > starts)
    num_runs = is_new.sum(-1)
    # one that follows another run at once belongs to it
    is_second = is_new & (is_new.cumsum(-1) == 2)
    first_end = torch.where(is_second, before, 0).amax(-1)
    last = torch.where(is_new, starts, 0).amax(-1), ends[..., -1]
    first = starts[..., 0], torch.where(num_runs > 1, first_end, last[1])
    is_none = num_runs == 0
    last = last[0].masked_fill(is_none, num_rows), last[1].masked_fill(is_none, 0)
    first = first[0].masked_fill(is_none, num_rows), first[1].masked_fill(is_none, 0)
    return HiddenRuns(num_runs, first, last)


def dense_runs(hidden: Tensor) -> HiddenRuns:
    """The runs of a dense mask: hidden is bool (batch, heads, seqlen_q, seqlen_k)."""
    seqlen_q = hidden.shape[2]
    padded = F.pad(hidden, (0, 0, 1, 1)).to(torch.int8)
    step = padded.diff(dim=2)
    rises, falls = (step > 0).to(torch.uint8), (step < 0).to(torch.uint8)
    num_runs = rises.sum(dim=2)

    def edge(steps: Tensor, none: int, is_last: bool) -> Tensor:
        at = seqlen_q - steps.flip(2).argmax(dim=2) if is_last else steps.argmax(dim=2)
        return torch.where(num_runs > 0, at, none)

    first, last = (
        (edge(rises, seqlen_q, is_last), edge(falls, 0, is_last)) for is_last in (False, True)
    )
    return HiddenRuns(num_runs, first, last)


def fit_vectors(runs: HiddenRuns, diagonal: Tensor | int, num_rows: int, is_causal: bool) -> Tensor:
    """The vectors of the first form that can hold up to two runs in each column.

    Keys of a block with the same visibility should have the same vectors, so that bounds can prove
    the block hidden. So a run that reaches the last query or the first query is stored as such. In
    a causal mask a run that reaches the diagonal counts as reaching the first query, because
    nothing before the diagonal counts. The call waits for the device.

    diagonal: the first query that causal masking lets see a key, or 0, so that nothing is taken to
    be hidden by it.
    """
    num_runs, first, last = runs
    if is_causal:
        is_only = num_runs == 1
        start = torch.where((num_runs > 0) & (first[0] <= diagonal), 0, first[0])
        first, last = (start, first[1]), (torch.where(is_only, start, last[0]), last[1])
    at_top, at_end = (num_runs > 0) & (first[0] == 0), (num_runs > 0) & (last[1] == num_rows)
    suffix = torch.where(at_end, last[0], num_rows)
    prefix = torch.where(at_top, first[1], 0)
    vectors: tuple[Tensor, ...]
    if is_causal and bool((num_runs <= at_end).all()):
        vectors = (suffix,)
    elif is_causal and bool((num_runs <= 1).all()):
        vectors = first
    elif not is_causal and bool((num_runs <= at_top.int() + at_end).all()):
        vectors = (suffix, prefix)
    else:
        is_low = (num_runs == 2) | at_end | (first[0] >= diagonal)
        is_high = (num_runs == 2) | at_top | ~is_low
        vectors = (
            torch.where(is_low, last[0], num_rows),
            torch.where(is_low, last[1], 0),
            torch.where(is_high, first[0], num_rows),
            torch.where(is_high, first[1], 0),
        )
    return torch.stack(vectors, dim=-1).int()


def vectors_of(masks: list[tuple[Tensor, bool]], num_rows: int) -> Tensor | None:
    """The vectors that hide what at least one mask hides (`hidden_runs`), without causal masking;
    None: some key has more than two runs. The call waits for the device."""
    runs = hidden_runs(masks, num_rows)
    if bool((runs.num_runs > 2).any()):
        return None
    return fit_vectors(runs, 0, num_rows, is_causal=False)


def in_form(indices: Tensor, causal: bool, num_vectors: int, num_rows: int) -> Tensor:
    """The same mask with more vectors; nothing is read. num_rows: no row is as large."""
    n = indices.shape[3]
    if n == num_vectors:
        return indices
    values = indices.unbind(3)
    hidden = Intervals(n, causal).hidden_rows(values, num_rows)
    edges = [x for start_end in hidden for x in start_end]
    # an empty range hides nothing
    edges += [num_rows, 0] * (num_vectors // 2 - len(hidden))
    return torch.stack([filled(x, values[0]) for x in edges], dim=-1)
