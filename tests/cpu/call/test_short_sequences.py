"""Which backwards the kernel of short sequences computes, and what is told of them."""

from __future__ import annotations

from typing import Any

import cutlass
import pytest
import torch
from cases import Case
from planned import planned
from trained_mods import TRAINED_MODS

from flash_mask_cute import explain
from flash_mask_cute.call.arguments import Direction
from flash_mask_cute.call.batch_sums import LEAST_SHORT, build_shared_sums, traits_of
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.target import Target
from flash_mask_cute.sm90.flash_bwd_short_traits import QUERY_TILES, ShortTraits

SMS = 2
HOPPER, BLACKWELL = Target("sm_90a", SMS), Target("sm_100a", SMS)


def short_case(**more: Any) -> Case:
    fields: dict[str, Any] = {"batch": 4, "seqlen_q": 49, "seqlen_k": 49, "head_dim": 32}
    return Case("short", **fields | {"heads_q": 2, "heads_kv": 2} | more)


def plan_of(target: Target = HOPPER, **more: Any) -> ExecutionPlan:
    names = "config", "deterministic", "q_start"
    keywords = {x: more.pop(x) for x in names if x in more}
    return planned(short_case(**more), target, direction=Direction.BACKWARD, **keywords)


def test_which_calls() -> None:
    """Of other calls: plan rows of the shapes `windows`, `windows-343` and `pairs`."""
    assert plan_of().is_short and not plan_of(BLACKWELL).is_short
    assert not plan_of(batch=3).is_short and LEAST_SHORT * SMS == 8


def test_every_tile_has_its_statistics() -> None:
    """64 queries a row block, or 128: those of a tile end with the last block that has queries."""
    for rows in range(1, QUERY_TILES[-1][0] + 1):
        tile_m = next(x for x, _ in QUERY_TILES if x >= rows)
        assert -(-tile_m // 64) == -(-rows // 64)


def test_products_read_what_is_there() -> None:
    """Of dS and, behind it, of what is added to scores."""
    for tile_m, _ in QUERY_TILES:
        for tile_n in range(16, 193, 16):
            for adds in (False, True):
                fields = adds, adds, False, False, False
                traits = ShortTraits(cutlass.BFloat16, 32, 32, tile_m, tile_n, 64, *fields)
                behind = (traits.stats_rows - traits.rows_ds) * 64 * 2
                assert 0 <= behind <= traits.cached_bias_words * 4


@pytest.mark.usefixtures("explained_without_compiling")
def test_explanation_and_scratch() -> None:
    q = torch.empty(4 * 132, 49, 8, 32, dtype=torch.bfloat16)
    told = explain(q, q, q, target="sm_90a").backward
    assert told is not None and told.kernel == "ShortBackwardSm90"
    assert (told.tiles.tile_m, told.tile_n) == (64, 64)
    # LSE and delta, of row blocks of 128 queries
    assert told.scratch_bytes == 2 * 4 * 128 * 4 * 132 * 8
    assert "all queries and keys of a batch entry" in str(explain(q, q, q, target="sm_90a"))


@pytest.mark.usefixtures("explained_without_compiling")
def test_costs_of_gradients() -> None:
    """Those of the kernel that makes them, also where nothing requires grad."""
    for length, parts in ((49, "in each of 132 parts"), (343, "of a part")):
        q = torch.empty(264, length, 2, 32, dtype=torch.bfloat16)
        for is_wanted in (True, False):
            table = torch.zeros(2, 23**2 + 1000, requires_grad=is_wanted)
            keywords = {"score_mod": TRAINED_MODS["swin"].cute, "aux_tensors": [table]}
            told = explain(q, q, q, **keywords, target="sm_90a").backward
            assert told is not None and "walks over" in told.reason
            expected = f"an addition to memory for each query and key {parts} of the batch"
            assert told.aux_gradients[0].cost == expected


@pytest.mark.shares(5)
@pytest.mark.parametrize("fields", [
    {"seqlen_q": 64, "seqlen_k": 64, "head_dim": 64},
    {"seqlen_q": 128, "seqlen_k": 128, "head_dim": 128},
    {"seqlen_q": 144, "seqlen_k": 144, "head_dim": 32, "causal": True},
    {"seqlen_q": 192, "seqlen_k": 64, "head_dim": 64},
    {"seqlen_q": 96, "seqlen_k": 64, "head_dim": 96},
], ids=["one", "two", "three", "groups", "wide groups"])  # fmt: skip
def test_nothing_is_spilled(fields: dict[str, Any]) -> None:
    found = plan_of(**fields)
    assert found.shared is not None and found.shared.short is not None
    traits = traits_of(found.problem, found.bwd_choice, found.shared, found.target)
    assert isinstance(traits, ShortTraits) and traits.num_warpgroups == -(-fields["seqlen_k"] // 64)
    arguments = found.problem, found.bwd_choice, found.shared, found.target
    with compile_lock():
        compiled = build_shared_sums(None, *arguments)
    assert compiled.meta["spill_bytes"] == 0 and not compiled.meta["warnings"]
