"""Over how many CTAs a backward splits a group of heads."""

from __future__ import annotations

import heapq

import pytest
import torch

import flash_mask_cute as fmc
from flash_mask_cute.call.problem import AttentionProblem, FwdShapes
from flash_mask_cute.call.tiles.config import BwdChoice, select_bwd_config
from flash_mask_cute.call.tiles.group_splits import split_group
from flash_mask_cute.core.tile_order import alternating_heads
from flash_mask_cute.interface import _flash_attn_bwd

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

SMS = 132


def split(
    batch: int,
    seqlen: int,
    heads_q: int,
    heads_kv: int,
    *,
    dim: int = 128,
    is_causal: bool = True,
    left: int | None = None,
    wanted: int | None = None,
) -> BwdChoice:
    dims = dim, dim
    problem = AttentionProblem("bfloat16", *dims, is_causal=is_causal)
    shapes = FwdShapes(
        batch, seqlen, seqlen, batch * seqlen, batch * seqlen, heads_q, heads_kv, *dims
    )
    choice = select_bwd_config(*dims, problem.tuning_class, seqlen_k=seqlen)
    return split_group(choice, problem, shapes, (left, None), SMS, wanted)


@pytest.mark.parametrize(
    ("call", "least"),
    [((1, 4096, 8, 1), 8), ((1, 8192, 28, 4), 7), ((1, 4096, 32, 8), 1), ((8, 2048, 16, 8), 1)],
)
def test_few_work_tiles_are_split(call: tuple[int, int, int, int], least: int) -> None:
    """Where work tiles are many, or short ones are left for the end, no part is worth its sums."""
    choice = split(*call)
    splits = choice.group_splits
    assert splits == 1 if least == 1 else splits >= least
    assert choice.tiles.splits_group is (splits > 1)
    assert ("CTAs share the query heads" in choice.reason) is (splits > 1)


def longest(rows: list[list[int]], together: int, ctas: int) -> int:
    """When the last CTA ends, if each takes the next work tile when it is done."""
    busy = [0] * ctas
    for first in range(0, len(rows), together):
        for blocks in zip(*rows[first : first + together], strict=True):
            for blocks_of_row in blocks:
                heapq.heapreplace(busy, busy[0] + blocks_of_row)
    return max(busy)


@pytest.mark.parametrize(
    ("heads", "blocks"), [(8, 32), (4, 64), (32, 16), (8, 32), (16, 64), (28, 16), (2, 128)]
)
def test_heads_in_turn_leave_no_tail(heads: int, blocks: int) -> None:
    """Of causal walks, an SM is busy for 1.1 of the average at most, or the longest walk."""
    walks = [2 * (blocks - i) for i in range(blocks)]
    together = alternating_heads(blocks, heads, SMS, lambda x, y, z: y if x else z)
    assert 1 < together <= heads
    total = heads * sum(walks) / SMS
    ends = longest([walks] * heads, together, SMS)
    assert ends <= max(1.1 * total, 2 * blocks) and ends <= longest([walks] * heads, 1, SMS)


def test_many_work_tiles_keep_their_order() -> None:
    assert alternating_heads(64, 64, SMS, lambda x, y, z: y if x else z) == 1


def test_a_call_without_sequences_is_not_split() -> None:
    assert split(0, 4096, 8, 1).group_splits == 1


def test_what_a_config_asks_for() -> None:
    choice = split(64, 4096, 8, 1, wanted=2)
    assert choice.group_splits == 2 and choice.tiles.splits_group
    assert split(1, 4096, 8, 1, wanted=1).group_splits == 1
    with pytest.raises(ValueError, match=r"group_splits must be one of \[1, 2, 4, 8\] .* got 3"):
        split(1, 4096, 8, 1, wanted=3)


def test_scratch_memory_is_bounded_by_the_sums_of_dq() -> None:
    """There are no more parts than query heads, and each has two sums for one of dQ."""
    for batch, seqlen, heads_q, heads_kv in ((1, 4096, 8, 1), (2, 2048, 28, 4)):
        q, k = (torch.empty(batch, seqlen, n, 128).bfloat16() for n in (heads_q, heads_kv))
        told = fmc.explain(q, k, k, causal=True, target="sm_90a").backward
        assert told is not None
        assert 0 < told.partial_sums_bytes <= 2 * batch * heads_q * seqlen * 128 * 4


def test_a_split_that_a_call_cannot_have_is_refused() -> None:
    q = torch.randn(1, 64, 2, 64)
    out, lse = fmc.flash_attn_func(q, q, q, return_lse=True)
    with pytest.raises(ValueError, match="group_splits must be one of"):
        _flash_attn_bwd(q, q, q, out, out, lse, config={"group_splits": 2})
