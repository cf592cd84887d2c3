"""Which reads of a score_mod are answered from tables of differences, and how large these are.

`mods/difference_reads.py` says what a table is. A launch before attention fills all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from flash_mask_cute.call.choose.masks import ResolvedMasks
from flash_mask_cute.call.problem import AttentionProblem, FwdShapes
from flash_mask_cute.mods.read_classes import (
    MOST_POSITION,
    DifferenceRead,
    DifferenceTerm,
    Span,
)
from flash_mask_cute.mods.traits import difference_reads

# Fewer scores take less time than the launch that fills the tables.
LEAST_SCORES = 2**22
# Of a table; an element takes as long as some scores.
SCORES_OF_ELEMENT = 8
# Of differences. Positions past the end of a sequence are less than a tile behind it.
MARGIN = 256
# Positions whose functions the host evaluates, and differences of a table.
MOST_EVALUATED = 2**22
MOST_BLOCKS = 65535

Shape = tuple[int, int, int]


class DifferenceTables(NamedTuple):
    """The tables of a call. shapes: (batch | 1, heads | 1, differences). dtypes: names of torch
    dtypes."""

    reads: tuple[DifferenceRead, ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        sizes = (getattr(torch, name).itemsize for name in self.dtypes)
        return sum(math.prod(shape) * size for shape, size in zip(self.shapes, sizes, strict=True))

    def describe(self) -> str:
        count = "one table" if len(self.reads) == 1 else f"{len(self.reads)} tables"
        parts = (
            f"aux_tensors[{read.tensor}] {' x '.join(map(str, shape))}"
            for read, shape in zip(self.reads, self.shapes, strict=True)
        )
        return f"{count} of all differences, {self.num_bytes} bytes: {', '.join(parts)}"


def choose_tables(
    problem: AttentionProblem, shapes: FwdShapes, masks: ResolvedMasks
) -> DifferenceTables | None:
    """The tables of a call that runs a kernel; None: there are none."""
    score_mod, aux_tensors = masks.score_mod, masks.aux_tensors
    if score_mod is None or aux_tensors is None or any(x.numel() == 0 for x in aux_tensors):
        return None
    if problem.q_start is not None:
        # a query may stand anywhere
        return None
    # a packed sequence may be longer than it is said to be
    lengths = (
        shapes.total_q if problem.varlen_q else shapes.seqlen_q,
        shapes.total_k if problem.varlen_k else shapes.seqlen_k,
    )
    keys = shapes.mean_seqlen_k if problem.varlen_k else shapes.seqlen_k
    scores = shapes.total_q * keys * shapes.heads_q
    if scores < LEAST_SCORES or max(lengths) > min(MOST_POSITION, MOST_EVALUATED):
        return None
    reads, found = [], list[Shape]()
    for read in difference_reads(score_mod, problem):
        most = _most_difference(read.terms, *lengths)
        if most is None:
            continue
        batch = shapes.batch if read.by_batch else 1
        heads = shapes.heads_q if read.by_head else 1
        shape = batch, heads, 2 * (most + MARGIN) + 1
        if math.prod(shape) * SCORES_OF_ELEMENT <= scores:
            reads.append(read)
            found.append(shape)
    batch, heads = (max((x[i] for x in found), default=0) for i in range(2))
    if not reads or max(batch * len(reads), heads) > MOST_BLOCKS:
        return None
    dtypes = tuple(problem.aux[read.tensor][0] for read in reads)
    return DifferenceTables(tuple(reads), tuple(found), dtypes)


def _most_difference(terms: Sequence[DifferenceTerm], seqlen_q: int, seqlen_k: int) -> int | None:
    """The largest magnitude of a difference; None: a table of so many differences is too large."""
    low = high = 0
    for is_key, length in ((True, seqlen_k), (False, seqlen_q)):
        span = _span_of([x for x in terms if x.is_key == is_key], length)
        if span is None:
            return None
        low, high = low + span[0], high + span[1]
    most = max(-low, high)
    return most if 2 * most < MOST_EVALUATED else None


def _span_of(terms: Sequence[DifferenceTerm], length: int) -> Span | None:
    """The least and the greatest sum of functions of the same positions."""
    place = torch.arange(length, device="cpu")
    total, low, high = torch.zeros_like(place), 0, 0
    for term in terms:
        if term.divisor is not None:
            total += place // term.divisor * term.factor
        elif term.span is None:
            return None
        else:
            ends = sorted(x * term.factor for x in term.span)
            low, high = low + ends[0], high + ends[1]
    return low + int(total.min()), high + int(total.max())
