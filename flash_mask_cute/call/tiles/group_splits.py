"""The number of CTAs over which the backward splits a group of query heads.

A CTA processes some keys of a KV head, and walks over the query heads of its group in turn. With
few KV heads and short sequences there are too few work tiles for the SMs of a device, or they are
too unequal. After a split, several CTAs process the same keys, each for some of the heads. They
leave partial sums of dK and dV in scratch memory, which a kernel adds in a fixed order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace

from flash_mask_cute.call.problem import AttentionProblem, FwdShapes, TuningClass
from flash_mask_cute.call.tiles.config import BwdChoice
from flash_mask_cute.core.tile_order import MANY, alternating_heads
from flash_mask_cute.runtime.named_tuples import replaced

# Costs in query blocks that a CTA computes: of a work tile, which waits for its keys and stores its
# gradients; of storing them as partial sums; and of adding these afterwards.
TILE, PARTIAL, ADDING = 1.5, 1.5, 1.5
# the least gain of a split, which needs memory
LEAST_GAIN = 1.02
# The longest of unequal walks takes so many times its estimate where it bounds the time: 28/4 heads
# of 8192 tokens took 1.04 times as long as in seven parts, 8/1 heads of 16384 tokens in two parts
# 1.02 times as long as in four, 1.07 times in a loop.
SLOWEST = 1.1


def split_group(
    choice: BwdChoice,
    problem: AttentionProblem,
    shapes: FwdShapes,
    window: tuple[int | None, int | None],
    num_sms: int,
    wanted: int | None,
) -> BwdChoice:
    """The choice with `group_splits` filled in: the caller's, or the one with the shortest
    estimate. window: sides of `FoldedWindow`. Raises ValueError: `wanted` does not divide the
    group."""
    group = shapes.heads_q // shapes.heads_kv if shapes.heads_kv else 1
    splits = [n for n in range(1, group + 1) if group % n == 0]
    if wanted is not None and wanted not in splits:
        raise ValueError(
            f"config group_splits must be one of {splits} for groups of {group} heads, got {wanted}"
        )
    if wanted is None:
        walks = list(_walks(choice, problem, shapes, window))
        if problem.shared_kv:
            # one walk over the queries of all sequences
            walks = [shapes.batch * walk for walk in walks]
            shapes = replaced(shapes, batch=1)
        takers = num_sms // (choice.cluster_tile_n // choice.tile_n)
        masks = replace(problem, score_mod=None).tuning_class
        alternating = masks is TuningClass.CAUSAL and not problem.deterministic
        costs = {n: _estimate(walks, shapes, group, n, takers, alternating) for n in splits}
        wanted = min(splits, key=lambda n: costs[n])
        if costs[1] <= LEAST_GAIN * costs[wanted]:
            wanted = 1
    if wanted == 1:
        return choice
    return replace(
        choice,
        tiles=replace(choice.tiles, splits_group=True),
        group_splits=wanted,
        reason=f"{choice.reason}; {wanted} CTAs share the query heads of a group",
    )


def _walks(
    choice: BwdChoice,
    problem: AttentionProblem,
    shapes: FwdShapes,
    window: tuple[int | None, int | None],
) -> Iterator[int]:
    """Query blocks that the key blocks of a sequence visit, by causal masking and windows. Packed
    sequences are assumed to be equally long."""
    tile_m, tile_n = choice.tiles.tile_m, choice.cluster_tile_n
    seqlen_q, seqlen_k = shapes.seqlen_q, shapes.seqlen_k
    if problem.varlen_q:
        seqlen_q = min(seqlen_q, shapes.mean_seqlen_q)
    if problem.varlen_k:
        seqlen_k = min(seqlen_k, shapes.mean_seqlen_k)
    left, right = window
    right = 0 if problem.is_causal else right
    for first in range(0, seqlen_k, tile_n):
        # positions of queries that see these keys
        begin = 0 if right is None else first - (seqlen_k - seqlen_q) - right
        last = min(first + tile_n, seqlen_k) - 1
        end = seqlen_q if left is None else last - (seqlen_k - seqlen_q) + left + 1
        begin, end = max(begin, 0), min(end, seqlen_q)
        yield max(-(-end // tile_m) - begin // tile_m, 0)


def _estimate(
    walks: list[int], shapes: FwdShapes, group: int, splits: int, takers: int, alternating: bool
) -> float:
    """Query blocks of the busiest SM, in the order in which `takers` CTAs, or pairs of CTAs, take
    work tiles. alternating: those of some heads block by block (`alternating_heads`)."""
    heads = shapes.batch * shapes.heads_kv * splits
    if not heads:
        return 0.0
    beside = TILE if splits == 1 else TILE + PARTIAL
    tiles = [walk * group / splits + beside for walk in walks]
    adding = 0.0 if splits == 1 else ADDING * heads * len(tiles) / takers
    if heads * len(tiles) > MANY * takers:
        return heads * sum(tiles) / takers + max(tiles, default=0.0) / 4 + adding
    busy = [0.0] * takers
    together = 1
    if alternating:
        together = alternating_heads(
            max(len(tiles), 1), heads, takers, lambda x, y, z: y if x else z
        )
    for first in range(0, heads, together):
        for tile in tiles:
            for _ in range(first, min(first + together, heads)):
                heapq.heapreplace(busy, busy[0] + tile)
    longest = SLOWEST * max(tiles, default=0.0) if alternating else 0.0
    return max(*busy, longest) + adding
