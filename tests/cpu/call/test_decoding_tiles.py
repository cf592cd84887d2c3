"""Few rows that share keys take a tile of decoding, in one pass too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planned import forward_call, planned

import flash_mask_cute
from flash_mask_cute import explain
from flash_mask_cute.call.arguments import Options
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.tiles.config import FwdTiles
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.target import Target

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

HOPPER, BLACKWELL = Target("sm_90a", num_sms=132), Target("sm_100a", num_sms=148)
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def plan_of(
    batch: int = 64,
    queries: int = 1,
    keys: int = 4096,
    heads: tuple[int, int] = (64, 8),
    dims: tuple[int, int] = (128, 128),
    target: Target = HOPPER,
    records: bool = False,
    **keywords: Any,
) -> ExecutionPlan:
    # of extents only, and no memory
    q, k, v = (
        torch.empty(1, dtype=torch.bfloat16).expand(batch, rows, of, d)
        for rows, of, d in ((queries, heads[0], dims[0]), *((keys, heads[1], d) for d in dims))
    )
    call = forward_call(q, k, v, **keywords)
    if records:
        call = replaced(call, options=call.options.recorded())
    return planned(call, target)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_the_tile_is_that_of_splits_and_pages(dims: tuple[int, int]) -> None:
    """64 sequences of 8 heads fill the GPU, so they are one pass."""
    whole = plan_of(dims=dims)
    assert whole.splits is None and whole.problem.packed_heads == 8
    tiles = whole.fwd_choice.tiles
    assert tiles.tile_m == 64
    few = plan_of(batch=1, keys=131072, dims=dims)
    assert few.splits is not None and few.fwd_choice.tiles == tiles
    assert plan_of(num_splits=1, dims=dims, batch=1, keys=131072).fwd_choice.tiles == tiles
    assert plan_of(dims=dims, config={"skip_blocks": False}).fwd_choice.tiles.tile_m == 64


def test_a_single_last_query_needs_no_causal_mask() -> None:
    assert not plan_of(causal=True).problem.is_causal
    assert plan_of(causal=True, queries=2).problem.is_causal
    assert plan_of(causal=True, records=True).problem.is_causal
    assert plan_of(causal=True, q_start=7).problem.is_causal


@pytest.mark.parametrize(("queries", "tile_m"), [(1, 64), (8, 64), (9, 128)])
def test_rows_that_share_keys_are_counted(queries: int, tile_m: int) -> None:
    assert plan_of(queries=queries).fwd_choice.tiles.tile_m == tile_m


def test_a_group_that_is_no_power_of_two_shares_tiles() -> None:
    found = plan_of(heads=(24, 2), batch=264, dims=(256, 256))
    assert found.splits is None and found.problem.packed_heads == 12
    assert found.fwd_choice.tiles.tile_m == 64


def test_training_and_chosen_tiles_stay() -> None:
    # as of the commit before, for which no tile of decoding was in one pass
    assert plan_of(records=True).fwd_choice.tiles == FwdTiles(128, 128, 2, 2, False)
    of_64 = plan_of(records=True, dims=(64, 64), causal=True).fwd_choice.tiles
    assert of_64 == FwdTiles(128, 128, 3, 2, False)
    assert plan_of(config={"num_stages": 2}).fwd_choice.tiles == FwdTiles(128, 128, 2, 2, False)
    assert plan_of(queries=600, keys=600).fwd_choice.tiles.tile_m > 64
    plain, recorded = (
        plan_of(target=BLACKWELL, records=x, num_splits=1).choice for x in (False, True)
    )
    assert plain == recorded


def test_recorded_options() -> None:
    assert not Options().is_recorded
    assert Options(config=3).recorded() == Options(num_splits=1, config=3, is_recorded=True)


def test_explain_knows_what_autograd_records() -> None:
    q, k, v = (torch.zeros(264, n, 8, 64, dtype=torch.bfloat16) for n in (1, 600, 600))
    assert explain(q, k, v, target="sm_90a").tiles.tile_m == 64
    q.requires_grad_()
    assert explain(q, k, v, target="sm_90a").tiles.tile_m == 128
    with torch.no_grad():
        assert explain(q, k, v, target="sm_90a").tiles.tile_m == 64


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("compiles", [False, True])
def test_what_reaches_the_host_call(
    monkeypatch: pytest.MonkeyPatch, records: bool, compiles: bool
) -> None:
    from flash_mask_cute import interface

    found, forward = [], interface.forward

    def recording(call: Any) -> Any:
        found.append(call.options.is_recorded)
        return forward(call)

    monkeypatch.setattr(interface, "forward", recording)
    attend: Any = flash_mask_cute.flash_attn_func
    if compiles:
        torch._dynamo.reset()
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    q, k, v = (torch.randn(1, n, 2, 16) for n in (1, 30, 30))
    attend(q.requires_grad_(records), k, v)
    assert found == [records]
