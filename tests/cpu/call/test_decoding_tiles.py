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
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.target import Target

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

HOPPER = Target("sm_90a", num_sms=132)


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


def test_a_single_last_query_needs_no_causal_mask() -> None:
    assert not plan_of(causal=True).problem.is_causal
    assert plan_of(causal=True, queries=2).problem.is_causal
    assert plan_of(causal=True, records=True).problem.is_causal
    assert plan_of(causal=True, q_start=7).problem.is_causal


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
